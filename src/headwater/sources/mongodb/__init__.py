"""MongoDB: its change streams, its collections, its documents."""
