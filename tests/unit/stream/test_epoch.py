"""Epochs: bits, times, pairs, and a clock that never goes back."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest

from headwater.errors import InputError
from headwater.stream import INVALID, ORIGIN, Epoch, EpochClock, EpochError, EpochPair
from headwater.stream.epoch import MAX_MS, ORIGIN_UNIX_MS


def clock_of(*times: int) -> Iterator[int]:
    return iter([ORIGIN_UNIX_MS + ms for ms in times])


def test_milliseconds_are_the_high_48_bits() -> None:
    assert Epoch.from_ms(1) == 65536
    assert Epoch.from_ms(MAX_MS) == 0xFFFFFFFFFFFF0000
    assert Epoch(65536 * 7).ms == 7
    assert Epoch.from_unix_ms(ORIGIN_UNIX_MS).ms == 0


def test_the_origin_is_2021_april_first_utc() -> None:
    assert int(ORIGIN.timestamp() * 1000) == ORIGIN_UNIX_MS
    assert Epoch.from_ms(5).to_datetime() == datetime(2021, 4, 1, 0, 0, 0, 5000, tzinfo=UTC)


def test_a_datetime_of_any_zone_is_rounded_down_to_the_millisecond() -> None:
    instant = datetime(2026, 1, 2, 3, 4, 5, 678_999, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    epoch = Epoch.from_datetime(instant)
    assert epoch.to_datetime() == instant.replace(microsecond=678_000)
    assert epoch.unix_ms == int(instant.timestamp() * 1000)


@pytest.mark.parametrize("value", [-65536, 1 << 64, 1, 65537, 1617235200000 + 1])
def test_numbers_that_are_no_epoch_are_refused(value: int) -> None:
    with pytest.raises(EpochError) as caught:
        Epoch(value)
    assert caught.value.value == value
    assert isinstance(caught.value, InputError)


def test_times_before_the_origin_or_without_a_zone_are_refused() -> None:
    with pytest.raises(EpochError, match="valid values are 0"):
        Epoch.from_datetime(datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(EpochError, match="time zone"):
        Epoch.from_datetime(datetime(2024, 1, 1))  # noqa: DTZ001
    with pytest.raises(EpochError):
        Epoch.from_ms(MAX_MS + 1)
    with pytest.raises(EpochError, match="9999"):
        Epoch.from_ms(MAX_MS).to_datetime()


def test_an_epoch_is_an_int_for_json_pickle_and_text() -> None:
    epoch = Epoch.from_ms(3)
    assert json.dumps({"e": epoch}) == '{"e": 196608}'
    assert f"{epoch} {epoch!r}" == "196608 Epoch(196608)"
    copied = pickle.loads(pickle.dumps(epoch))
    assert copied == epoch
    assert type(copied) is Epoch
    assert float(Epoch.from_ms(MAX_MS)) == int(Epoch.from_ms(MAX_MS))


def test_next_follows_the_clock_or_steps_one_millisecond() -> None:
    epoch = Epoch.from_ms(100)
    assert epoch.next(ORIGIN_UNIX_MS + 250).ms == 250
    assert epoch.next(ORIGIN_UNIX_MS + 100).ms == 101
    assert epoch.next(ORIGIN_UNIX_MS - 9).ms == 101
    assert epoch.next().ms == 101
    assert epoch.prev().next() == epoch
    with pytest.raises(EpochError):
        INVALID.prev()
    with pytest.raises(EpochError):
        Epoch.from_ms(MAX_MS).next()


def test_lag_is_in_milliseconds() -> None:
    assert Epoch.from_ms(1500).ms_since(Epoch.from_ms(1000)) == 500
    assert Epoch.from_ms(1000).ms_since(Epoch.from_ms(1500)) == -500


def test_a_pair_goes_forward_and_chains() -> None:
    first = EpochPair(curr=Epoch.from_ms(2), prev=Epoch.from_ms(1))
    second = first.next(Epoch.from_ms(9))
    assert second.follows(first)
    assert not first.follows(second)
    assert second.ms == 7
    assert type(EpochPair(curr=131072, prev=65536).curr) is Epoch  # type: ignore[arg-type]
    for curr in (1, 2):
        with pytest.raises(EpochError, match="curr must be after prev"):
            EpochPair(curr=Epoch.from_ms(curr), prev=Epoch.from_ms(2))


def test_a_clock_that_goes_back_does_not_take_the_epochs_back() -> None:
    times = clock_of(10, 10, 5, 5, 40)
    clock = EpochClock(lambda: next(times))
    assert [clock.next().ms for _ in range(4)] == [10, 11, 12, 13]
    assert clock.next().ms == 40


def test_a_clock_goes_on_after_the_last_used_epoch() -> None:
    times = clock_of(3, 3)
    clock = EpochClock(lambda: next(times), last=Epoch.from_ms(8))
    pair = clock.next_pair()
    assert (pair.prev.ms, pair.curr.ms) == (8, 9)
    assert clock.last == pair.curr


def test_a_new_clock_before_the_origin_is_refused() -> None:
    clock = EpochClock(lambda: 0)
    with pytest.raises(EpochError, match="Check the clock"):
        clock.next()
    assert clock.last is INVALID
    assert not INVALID.is_valid
