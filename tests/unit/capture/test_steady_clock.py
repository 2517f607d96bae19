"""A wall clock that jumps: epochs go on, close to the time that passes, and nothing ages at once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headwater.capture.capture import SteadyClock
from headwater.stream import EpochClock

START = 1_800_000_000_000
YEAR = 365 * 86_400_000
HOUR = 3_600_000


@dataclass
class Time:
    """The time that passes, and how far the wall clock is off."""

    passed: float = 0.0
    off: int = 0

    def steady(self) -> SteadyClock:
        return SteadyClock(lambda: START + int(self.passed) + self.off, lambda: self.passed)


def test_it_is_the_wall_clock_where_that_does_not_jump() -> None:
    time = Time()
    clock = time.steady()
    for _ in range(1000):
        time.passed += 37.3
        assert abs(clock() - (START + time.passed)) <= 1


@pytest.mark.parametrize("off", [10 * YEAR, 2 * HOUR, -2 * HOUR, -5 * YEAR])
def test_a_jump_moves_it_by_no_more_than_the_time_that_passes(off: int) -> None:
    time = Time()
    clock = time.steady()
    epochs = EpochClock(clock)
    before = epochs.next()
    time.off = off
    for _ in range(60):
        time.passed += 1000
        following = epochs.next()
        assert following > before
        before = following
    assert abs(before.unix_ms - (START + time.passed)) <= 60_000
    time.off = 0
    for _ in range(120):
        time.passed += 1000
        following = epochs.next()
        assert following > before
        before = following
    assert abs(before.unix_ms - (START + time.passed)) <= 1


def test_a_clock_that_stays_set_is_caught_up_with() -> None:
    time = Time()
    clock = time.steady()
    time.off = 2 * HOUR
    time.passed += 2 * HOUR
    clock()
    time.passed += 1000
    assert clock() == START + time.passed + 2 * HOUR
