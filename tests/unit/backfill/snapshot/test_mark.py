"""A change is delivered when the part of its key is, and its epoch is after that of the part."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.unit.backfill.snapshot.memory_table import LOG_SCHEMA, position

from headwater.backfill.cdc.mark import kept_rows
from headwater.backfill.snapshot.mark import apply_mark, mark_chunk
from headwater.backfill.snapshot.parts import VnodeFilter, VnodePart
from headwater.log_store.columns import EPOCH, VNODE
from headwater.stream import OP_COLUMN, Op, vnodes_of

VNODES = 4


def changes(*rows: tuple[int, Op, int]) -> pa.RecordBatch:
    named = [{"id": key, "v": key, OP_COLUMN: int(op), EPOCH: epoch} for key, op, epoch in rows]
    return pa.RecordBatch.from_pylist(named, schema=LOG_SCHEMA)


def inserts(*keys: int, epoch: int = 9) -> pa.RecordBatch:
    return changes(*((key, Op.INSERT, epoch) for key in keys))


def mark(batch: pa.RecordBatch, *parts: tuple[VnodePart, int]) -> list[int]:
    vnodes = np.array([key % VNODES for key in batch.column("id").to_pylist()], np.uint16)
    keep = mark_chunk(batch, VnodeFilter(parts), vnodes, ("id",))
    found: list[int] = batch.filter(pa.array(keep)).column("id").to_pylist()
    return found


@pytest.mark.parametrize(
    ("keep", "ops"),
    [
        ((True, True), [Op.UPDATE_DELETE, Op.UPDATE_INSERT]),
        ((False, False), []),
        ((True, False), [Op.DELETE]),
        ((False, True), [Op.INSERT]),
    ],
)
def test_s16_an_update_of_which_one_half_is_left_out_is_a_delete_or_an_insert(
    keep: tuple[bool, bool], ops: list[Op]
) -> None:
    pair = changes((1, Op.UPDATE_DELETE, 9), (1, Op.UPDATE_INSERT, 9))
    assert kept_rows(pair, np.array(keep)).column(OP_COLUMN).to_pylist() == ops


def test_changes_of_vnodes_that_are_not_handed_out_are_left_out() -> None:
    assert mark(inserts(0, 1, 2, 3, 5)) == []
    assert mark(inserts(0, 1, 2, 3, 5), (VnodePart(1, 3, 0), 0)) == [1, 2, 5]


def test_changes_count_after_the_epoch_of_their_part() -> None:
    batch = changes((1, Op.INSERT, 4), (1, Op.DELETE, 5), (2, Op.INSERT, 5), (3, Op.INSERT, 6))
    assert mark(batch, (VnodePart(1, 2, 0), 4), (VnodePart(2, 4, 0), 5)) == [1, 3]


def test_m9_keys_outside_the_part_of_their_vnode_are_left_out() -> None:
    batch = inserts(1, 5, 9, 13)
    assert mark(batch, (VnodePart(1, 2, 0, position(5), position(13)), 0)) == [5, 9]
    assert mark(batch, (VnodePart(1, 2, 0, None, position(5)), 0), (VnodePart(1, 2, 0, position(9)), 8)) == [1, 9, 13]
    assert mark(batch, (VnodePart(1, 2, 0, None, position(5)), 0), (VnodePart(1, 2, 0, position(9)), 9)) == [1]


def test_a_log_with_other_vnodes_than_versioned_tables_is_hashed_again() -> None:
    batch = inserts(*range(50))
    own = vnodes_of(batch, ("id",), 256)
    low = VnodeFilter(((VnodePart(0, 100, 0), 0),))
    wanted = [key for key, vnode in enumerate(own.to_pylist()) if vnode < 100]
    named = batch.append_column(pa.field(VNODE, pa.uint16(), False), own)
    assert apply_mark(named, low, 256, ("id",)).column("id").to_pylist() == wanted
    others = batch.append_column(pa.field(VNODE, pa.uint16(), False), vnodes_of(batch, ("id",), 7))
    assert apply_mark(others, low, 7, ("id",)).column("id").to_pylist() == wanted
