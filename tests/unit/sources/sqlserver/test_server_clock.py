"""Local times of a server as instants, with the rules of real time zones as the oracle."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from zoneinfo import ZoneInfo

import pytest

from headwater.sources.sqlserver.server_clock import Offsets, Shift, find_offsets

ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Kolkata", "UTC")
MINUTE = 60_000_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def instant_of(year: int, *rest: int) -> int:
    return (dt.datetime(year, *rest, tzinfo=dt.UTC) - EPOCH) // dt.timedelta(microseconds=1)  # type: ignore[misc,arg-type]


def offset_at(zone: ZoneInfo, instant_us: int) -> int:
    offset = (EPOCH + dt.timedelta(microseconds=instant_us)).astimezone(zone).utcoffset()
    assert offset is not None
    return round(offset.total_seconds() / 60)


def found(name: str, begin: int, end: int) -> tuple[Offsets, list[int]]:
    """The offsets of a zone, and how many instants each question had."""
    zone, asked = ZoneInfo(name), []

    def ask(instants: Sequence[int]) -> list[int]:
        asked.append(len(instants))
        return [offset_at(zone, instant) for instant in instants]

    return find_offsets(begin, end, ask), asked


@pytest.mark.parametrize("name", ZONES)
def test_every_local_time_of_a_year_is_its_instant(name: str) -> None:
    begin, end = instant_of(2026, 1, 1), instant_of(2027, 1, 1)
    offsets, asked = found(name, begin - 900 * MINUTE, end + 900 * MINUTE)
    assert max(asked) <= 502
    assert len(asked) <= 1 + 4 * len(offsets.shifts)
    zone = ZoneInfo(name)
    for instant in range(begin, end, 17 * MINUTE):
        local = instant + offset_at(zone, instant) * MINUTE

        def has_fallen(shift: Shift, instant: int = instant) -> bool:
            return instant >= shift.at_us

        assert offsets.instant(local, has_fallen) == instant


def test_a_shift_is_known_to_the_millisecond() -> None:
    offsets, _ = found("Europe/Berlin", instant_of(2026, 10, 1), instant_of(2026, 11, 1))
    assert offsets.shifts == (Shift(instant_of(2026, 10, 25, 1), 120, 60),)
    begin, end = offsets.shifts[0].twice
    assert (begin, end) == (instant_of(2026, 10, 25, 2), instant_of(2026, 10, 25, 3))


def test_times_that_come_twice_are_the_first_unless_the_clocks_are_known_to_have_been_put_back() -> None:
    offsets, _ = found("Europe/Berlin", instant_of(2026, 10, 20), instant_of(2026, 10, 30))
    local = instant_of(2026, 10, 25, 2, 30)
    assert offsets.instant(local, lambda _: False) == instant_of(2026, 10, 25, 0, 30)
    assert offsets.instant(local, lambda _: True) == instant_of(2026, 10, 25, 1, 30)


def test_times_that_never_were_go_by_the_offset_from_before() -> None:
    offsets, _ = found("Europe/Berlin", instant_of(2026, 3, 20), instant_of(2026, 4, 10))
    assert offsets.instant(instant_of(2026, 3, 29, 2, 30), lambda _: True) == instant_of(2026, 3, 29, 1, 30)


def test_what_was_asked_for_covers_what_lies_in_it() -> None:
    offsets = Offsets(10, 20, 60)
    assert offsets.covers(10, 20)
    assert not offsets.covers(9, 20)
    assert not offsets.covers(10, 21)
