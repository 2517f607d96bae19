"""The delays before a request is sent again."""

from __future__ import annotations

from headwater.sinks.backoff import SinkBackoff


def test_delays_are_bounded_and_start_again_after_a_long_life() -> None:
    backoff = SinkBackoff(jitter=lambda: 1.0)
    assert [backoff.next(0.5) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.next(59.9) == 30
    assert [backoff.next(60.0), backoff.next(0.0)] == [1, 2]
    assert SinkBackoff(jitter=lambda: 0.25).next(0.0) == 0.25
    patient = SinkBackoff(jitter=lambda: 1.0)
    assert max(patient.next(0.0) for _ in range(2000)) == 30
