"""Epochs keep the order of time, clocks only go forward, and barriers survive their JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.stream import (
    Barrier,
    BarrierKind,
    Epoch,
    EpochClock,
    EpochPair,
    Mutation,
    Pause,
    Resnapshot,
    Resume,
    Throttle,
)
from headwater.stream.epoch import MAX_MS, ORIGIN_UNIX_MS

MS = st.integers(0, MAX_MS)
NAMES = st.text(min_size=1, max_size=8)


@given(MS, MS)
def test_the_order_of_epochs_is_the_order_of_time(one: int, other: int) -> None:
    first, second = Epoch.from_ms(one), Epoch.from_ms(other)
    assert (first < second) == (one < other)
    assert second.ms_since(first) == other - one
    assert Epoch(int(first)) == first
    assert Epoch.from_unix_ms(first.unix_ms) == first


@given(st.datetimes(datetime(2021, 4, 1), datetime(9999, 12, 31), timezones=st.just(UTC)))  # noqa: DTZ001
def test_a_datetime_reads_back_to_the_millisecond(instant: datetime) -> None:
    back = Epoch.from_datetime(instant).to_datetime()
    assert back == instant.replace(microsecond=instant.microsecond // 1000 * 1000)


@given(st.lists(st.integers(-10_000, 10_000), min_size=1, max_size=30), st.integers(0, 2000))
def test_epochs_strictly_increase_whatever_the_clock_does(steps: list[int], last: int) -> None:
    now = [ORIGIN_UNIX_MS + 5000]

    def clock() -> int:
        now[0] += steps[len(given_out) % len(steps)]
        return now[0]

    given_out: list[Epoch] = [Epoch.from_ms(last + 1)]
    epochs = EpochClock(clock, last=given_out[0])
    for _ in steps:
        given_out.append(epochs.next())
        # Never behind the clock, and ahead of it only as far as it went back.
        assert given_out[-1].unix_ms >= now[0]
    assert all(later > earlier for earlier, later in pairwise(given_out))


MUTATIONS: st.SearchStrategy[Mutation | None] = st.one_of(
    st.none(),
    st.just(Pause()),
    st.just(Resume()),
    st.builds(Throttle, st.none() | st.integers(0, 10**9), NAMES),
    st.builds(Resnapshot, NAMES, *[st.lists(NAMES, max_size=3).map(tuple)] * 3),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, MAX_MS - 1), st.integers(1, 10**6), st.sampled_from(list(BarrierKind)), MUTATIONS)
def test_a_barrier_reads_back_from_its_json(prev: int, ms: int, kind: BarrierKind, mutation: Mutation | None) -> None:
    pair = EpochPair(curr=Epoch.from_ms(min(prev + ms, MAX_MS)), prev=Epoch.from_ms(prev))
    barrier = Barrier(pair, kind, mutation)
    assert Barrier.from_json(barrier.to_json()) == barrier
    assert barrier.to_json().isascii()
