"""Shards that are gone: their table stops unless all of them was told."""

from __future__ import annotations

import pytest

from headwater.sources.citus.shard_numbers import (
    SPLIT_SECONDS,
    LastSeen,
    numbers_of,
    ranges_of,
    tables_with_gone,
    was_all_told,
)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((7,), "7"),
        ((8, 7, 9), "7-9"),
        ((102008, 102009, 102012, 102014, 102015), "102008-102009,102012,102014-102015"),
    ],
)
def test_numbers_are_kept_as_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert ranges_of(numbers) == text
    assert numbers_of(text) == frozenset(numbers)


@pytest.mark.parametrize("text", ["a", "1-b", "1,,2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        numbers_of(text)


def test_a_table_is_looked_at_when_a_shard_is_gone_and_not_when_some_are_new_or_all_are_gone() -> None:
    before = {"split": frozenset({1, 2}), "grown": frozenset({3}), "dropped": frozenset({4})}
    now = {
        "split": frozenset({1, 5, 6}),
        "grown": frozenset({3, 7}),
        "dropped": frozenset[int](),
        "new": frozenset({8}),
    }
    assert tables_with_gone(before, now) == ["split"]


LAST = LastSeen(100.0, {0: 50, 1: 50})
LATER = 100.0 + SPLIT_SECONDS


@pytest.mark.parametrize(
    ("last", "moment", "sent", "told", "whole"),
    [
        (LAST, 101.0, {0: 50, 1: 51}, {0: 40, 1: 40}, True),  # just seen, and sent: told or not
        (LAST, 101.0, {0: 50, 1: 49}, {0: 50, 1: 49}, None),
        (LAST, LATER, {0: 90, 1: 90}, {0: 90, 1: 49}, False),
        (LAST, LATER, {0: 90, 1: 90}, {0: 90, 1: 90}, True),
        (None, 101.0, {0: 0, 1: 0}, {0: 90, 1: 89}, False),  # of an earlier stream
        (None, 101.0, {0: 0, 1: 0}, {0: 90, 1: 90}, True),
        (LAST, 101.0, {1: 50}, {1: 50}, True),  # a node that is not followed any more has nothing to send
    ],
)  # fmt: skip
def test_what_a_shard_told_last_is_whole_or_waited_for_or_missed(
    last: LastSeen | None, moment: float, sent: dict[int, int], told: dict[int, int], whole: bool | None
) -> None:
    assert was_all_told(last, moment, sent, told, {0: 90, 1: 90}) is whole
