"""The units of a batch: the tasks that read history end at about the same time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.backfill.batch_units import groups
from headwater.backfill.cdc.executor import HandedOut
from headwater.sources.splits import KeyRange


def _parts(rows: list[int]) -> list[HandedOut]:
    return [HandedOut(KeyRange(), count) for count in rows]


def _sizes(rows: list[int], parallelism: int) -> list[int]:
    return [sum(part.rows for part in group) for group in groups(_parts(rows), parallelism)]


def test_two_splits_are_read_side_by_side() -> None:
    assert _sizes([100, 100], 2) == [100, 100]


def test_the_groups_become_smaller_towards_the_end() -> None:
    sizes = _sizes([10] * 140, 2)
    assert sizes == [400, 400, 200, 200, 100, 100]


def test_one_task_at_a_time_reads_three_groups() -> None:
    assert _sizes([10] * 7, 1) == [40, 20, 10]


def test_a_giant_split_is_in_one_group_and_what_follows_in_another() -> None:
    assert _sizes([1, 1000, 1, 1], 2) == [1001, 2]


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 8))
def test_every_part_is_in_one_group_in_its_place(rows: list[int], parallelism: int) -> None:
    parts = _parts(rows)
    made = groups(parts, parallelism)
    assert [part for group in made for part in group] == parts
    assert all(made)
    assert len(made) <= 3 * parallelism
