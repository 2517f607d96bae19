"""Delays that grow, up to a maximum, and an error that is raised after enough attempts."""

from __future__ import annotations

import pytest

from headwater.errors import TransientError
from headwater.system.retry import READ, Backoff, Retries

pytestmark = pytest.mark.unit


class Broken(TransientError):
    """An error that passes."""


def test_delays_grow_up_to_the_maximum() -> None:
    backoff = Backoff(base=1, factor=2, maximum=60)
    assert [backoff.ceiling(failures) for failures in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.ceiling(100_000) == 60


def test_full_jitter_takes_any_share_of_the_delay() -> None:
    backoff = Backoff(base=1, factor=2, maximum=60)
    assert backoff.delay(3, lambda: 0.0) == 0
    assert backoff.delay(3, lambda: 0.25) == 1
    assert 0 <= backoff.delay(3) < 4


def test_half_jitter_waits_at_least_half() -> None:
    backoff = Backoff(base=1, factor=2, maximum=60, jitter=0.5)
    assert [backoff.delay(3, lambda: 0.0), backoff.delay(3, lambda: 0.5)] == [2, 3]


def test_no_jitter_is_exact() -> None:
    assert [round(READ.delay(failures), 3) for failures in range(1, 6)] == [0.05, 0.2, 0.8, 3.0, 3.0]


def test_the_error_is_raised_after_enough_retries() -> None:
    waited: list[float] = []
    retries = Retries(Backoff(1, 2, 60, 0), most=2, sleep=waited.append)
    error = Broken("the connection broke")
    retries.wait_after(error)
    retries.wait_after(error)
    with pytest.raises(Broken):
        retries.wait_after(error)
    assert waited == [1, 2]


def test_progress_gives_all_retries_again() -> None:
    waited: list[float] = []
    retries = Retries(Backoff(1, 2, 60, 0), most=2, sleep=waited.append)
    for _ in range(3):
        retries.wait_after(Broken("the connection broke"))
        retries.progressed()
    assert waited == [1, 1, 1]
