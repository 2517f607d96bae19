"""The demo: a real Postgres from a wheel, a shop that writes to it, and the proof that the capture lost nothing."""
