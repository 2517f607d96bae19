"""The tasks of a batch: large tables are cut, small ones share a task, and tasks cost about the same."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.backfill.cdc.executor import HandedOut
from headwater.backfill.tasks import groups, packed, tasks_of
from headwater.sources.splits import KeyRange

MIB = 1 << 20
COSTS = st.lists(st.floats(0.05, 30), max_size=60)


@pytest.mark.parametrize(
    ("rows", "size", "slots", "tasks"),
    [
        (0, 0, 8, 1),
        (20_000, 8 * MIB, 8, 1),
        (20_001, 0, 8, 2),
        (100, 8 * MIB + 1, 8, 2),
        (100, 80 * MIB, 8, 8),
        (1_000_000, 10, 16, 16),
        (1_000_000, 10, 1, 1),
    ],
)
def test_a_table_has_a_task_for_20_000_rows_or_8_mib_up_to_the_slots(
    rows: int, size: int, slots: int, tasks: int
) -> None:
    assert tasks_of(rows, size, lambda: slots) == tasks


def test_the_slots_are_not_asked_for_where_one_task_is_enough() -> None:
    def unknown() -> int:
        raise AssertionError("Spark does not run yet")

    assert tasks_of(20_000, MIB, unknown) == 1
    assert packed("abc", [0.05, 0.1, 0.2], unknown) == [["c", "b", "a"]]
    assert packed("a", [7.0], unknown) == [["a"]]


def test_500_small_tables_share_a_few_tasks_and_a_large_one_keeps_its_own() -> None:
    costs = [0.05] * 500 + [10.0, 10.0]
    tasks = packed(range(502), costs, lambda: 2)
    assert len(tasks) == 8
    assert tasks[:2] == [[500], [501]]
    assert {len(task) for task in tasks[2:]} == {83, 84}


@given(COSTS, st.integers(1, 8))
def test_each_claim_is_in_one_task_and_the_tasks_are_few(costs: list[float], slots: int) -> None:
    tasks = packed(range(len(costs)), costs, lambda: slots)
    assert sorted(claim for task in tasks for claim in task) == list(range(len(costs)))
    assert all(tasks)
    assert len(tasks) <= min(len(costs), 4 * slots, math.ceil(sum(costs)))


@given(COSTS, st.integers(1, 8))
def test_no_task_waits_for_one_that_could_be_smaller(costs: list[float], slots: int) -> None:
    """The bound of greedy packing: the largest task is at most the mean and one claim; the largest comes first."""
    loads = [sum(costs[claim] for claim in task) for task in packed(range(len(costs)), costs, lambda: slots)]
    assert all(before >= after - 1e-9 for before, after in pairwise(loads))
    if loads:
        assert loads[0] <= sum(costs) / len(loads) + max(costs) + 1e-9
        assert loads[0] - loads[-1] <= max(costs) + 1e-9


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
