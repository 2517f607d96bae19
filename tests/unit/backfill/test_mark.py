"""Which changes are emitted while a table is backfilled: by key, by snapshot, and what becomes of half an update."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.unit.backfill.fake_database import FakeMark, FakeOrder, LogRow, log_batch, position, table_of

from headwater.backfill.cdc.mark import apply_filter, mark_cdc_chunk, without_broken_pairs
from headwater.backfill.units import DROP_ALL, ChangeFilter, Rule, Run
from headwater.sources.splits import Cut, SplitKind
from headwater.stream import Op

TABLE = table_of()
AFTER_5 = Cut(("5",), after=True)
MARK = FakeMark(xmax=10, xip=(7,), lsn=100)


def row(key: int, xid: int, op: Op = Op.INSERT, seq: int = 0, epoch: int = 1) -> LogRow:
    return (key,), (xid, 0), position(xid, xid, seq), op, seq, epoch


def kept(rows: list[LogRow], kept_by: ChangeFilter, truncated: tuple[int, int] | None = None) -> list[tuple[int, int]]:
    made = apply_filter(log_batch(TABLE, rows), kept_by, FakeOrder(), TABLE.key_columns, truncated)
    return [(one["k0"], one["_op"]) for one in made.to_pylist()]


def pages(*runs: Run) -> ChangeFilter:
    return ChangeFilter(SplitKind.KEY, runs, (MARK,))


def test_c3_a_change_of_a_key_that_was_not_read_yet_is_dropped() -> None:
    by = pages(Run(AFTER_5, Rule.SINCE, 0), Run(None, Rule.DROP))
    assert kept([row(1, 11), row(6, 12)], by) == [(1, Op.INSERT)]


def test_c5_c6_a_dropped_change_holds_back_no_later_one_also_in_another_chunk() -> None:
    by = pages(Run(AFTER_5, Rule.SINCE, 0), Run(None, Rule.DROP))
    rows = [row(1, 11), row(6, 12), row(2, 13)]
    assert kept(rows, by) == [(1, Op.INSERT), (2, Op.INSERT)]
    assert kept(rows[:1], by) + kept(rows[1:], by) == kept(rows, by)


def test_c7_all_changes_up_to_the_cursor_are_emitted() -> None:
    by = pages(Run(Cut(("6",), after=True), Rule.SINCE, 0), Run(None, Rule.DROP))
    assert kept([row(6, 11), row(2, 12)], by) == [(6, Op.INSERT), (2, Op.INSERT)]


def test_c4_keys_are_compared_as_the_order_of_the_source_has_it() -> None:
    class Unsigned(FakeOrder):
        def places(self, keys: pa.RecordBatch, cuts: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            unsigned = np.asarray(keys.column(0).to_numpy()).astype(np.uint64)
            return np.where(unsigned > 5, 1, 0)

    by = pages(Run(AFTER_5, Rule.EMIT), Run(None, Rule.DROP))
    batch = log_batch(TABLE, [row(-1, 11), row(3, 12)])
    assert mark_cdc_chunk(batch, by, Unsigned(), TABLE.key_columns).tolist() == [False, True]


def test_m15_m24_a_change_is_contained_by_its_transaction_not_by_its_place() -> None:
    """Transaction 7 was open when the snapshot was taken and committed later than 9, which was over."""
    by = pages(Run(None, Rule.SINCE, 0))
    rows = [row(1, 9), row(2, 7), row(3, 10), row(3, 10, seq=1)]
    assert kept(rows, by) == [(2, Op.INSERT), (3, Op.INSERT), (3, Op.INSERT)]


def test_c10_c11_each_run_has_its_rule_and_cuts_lie_before_or_after_a_key() -> None:
    later = FakeMark(xmax=20, xip=(), lsn=200)
    runs = (
        Run(Cut(("2",)), Rule.EMIT),
        Run(Cut(("5",)), Rule.SINCE, 0),
        Run(Cut(("7",), after=True), Rule.SINCE, 1),
        Run(None, Rule.DROP),
    )
    by = ChangeFilter(SplitKind.KEY, runs, (MARK, later))
    rows = [row(1, 3), row(2, 3), row(2, 12), row(4, 7), row(5, 12), row(5, 21), row(7, 21), row(8, 21)]
    assert kept(rows, by) == [(1, 1), (2, 1), (4, 1), (5, 1), (7, 1)]
    assert kept([], by) == []


@pytest.mark.parametrize("rows", [[], [row(1, 50)]])
def test_nothing_passes_before_the_first_hand_out(rows: list[LogRow]) -> None:
    assert kept(rows, DROP_ALL) == []


def test_heap_changes_do_not_tell_their_split_so_that_one_rule_is_for_all() -> None:
    by = ChangeFilter(SplitKind.HEAP, (Run(None, Rule.SINCE, 0),), (MARK,))
    assert kept([row(1, 3), row(99, 11)], by) == [(99, Op.INSERT)]


def test_m16_a_key_that_moves_into_a_split_that_was_not_read_leaves_a_delete() -> None:
    by = pages(Run(AFTER_5, Rule.SINCE, 0), Run(None, Rule.DROP))
    assert kept([row(3, 11, Op.DELETE), row(8, 11, Op.INSERT, 1)], by) == [(3, Op.DELETE)]
    assert kept([row(8, 11, Op.DELETE), row(3, 11, Op.INSERT, 1)], by) == [(3, Op.INSERT)]


def test_m16_half_an_update_is_a_delete_or_an_insert_and_a_whole_one_stays() -> None:
    by = pages(Run(AFTER_5, Rule.SINCE, 0), Run(None, Rule.DROP))
    gone = [row(3, 11, Op.UPDATE_DELETE), row(8, 11, Op.UPDATE_INSERT, 1)]
    come = [row(8, 11, Op.UPDATE_DELETE), row(3, 11, Op.UPDATE_INSERT, 1)]
    whole = [row(3, 11, Op.UPDATE_DELETE), row(3, 11, Op.UPDATE_INSERT, 1)]
    assert kept(gone, by) == [(3, Op.DELETE)]
    assert kept(come, by) == [(3, Op.INSERT)]
    assert kept(whole, by) == [(3, Op.UPDATE_DELETE), (3, Op.UPDATE_INSERT)]
    assert kept([*gone, *come, *whole], by) == [(3, 2), (3, 1), (3, 4), (3, 3)]


def test_an_update_that_told_no_old_row_stays_an_update() -> None:
    by = pages(Run(AFTER_5, Rule.SINCE, 0), Run(None, Rule.DROP))
    assert kept([row(8, 11, Op.UPDATE_INSERT), row(3, 11, Op.UPDATE_INSERT)], by) == [(3, Op.UPDATE_INSERT)]
    assert kept([row(8, 11, Op.DELETE), row(3, 12, Op.UPDATE_INSERT)], by) == [(3, Op.UPDATE_INSERT)]


def test_pairs_are_looked_at_for_all_rows_at_once() -> None:
    ops = np.array([4, 3, 4, 3, 3, 4], np.int8)
    keep = np.array([True, False, False, True, True, True])
    assert without_broken_pairs(ops, keep).tolist() == [2, 3, 4, 1, 3, 2]
    same = np.array([1, 2, 3], np.int8)
    assert without_broken_pairs(same, np.ones(3, np.bool_)) is same


def test_m32_after_a_truncate_everything_is_emitted_whatever_was_read_before() -> None:
    """The snapshot has the truncate and the insert after it; the sink throws away what it had: the insert must come."""
    by = pages(Run(AFTER_5, Rule.SINCE, 0), Run(None, Rule.DROP))
    rows = [row(1, 3, seq=0, epoch=4), row(2, 5, seq=1, epoch=4), row(8, 6, seq=2, epoch=4), row(9, 6, epoch=5)]
    assert kept(rows, by) == []
    assert kept(rows, by, (4, 1)) == [(2, 1), (8, 1), (9, 1)]


def test_a_filter_is_the_same_after_json() -> None:
    by = pages(Run(AFTER_5, Rule.SINCE, 0), Run(None, Rule.DROP))
    assert ChangeFilter.from_json(by.to_json()) == by
