"""Which changes a downstream takes; half an update is a delete or an insert."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.unit.backfill.snapshot.memory_table import SCHEMA, position

from headwater.backfill.snapshot.mark import KeySpan, apply_mark, mark_chunk
from headwater.stream import Chunk, Op, VnodeBitmap


def _chunk(*rows: tuple[int, Op]) -> Chunk:
    batch = pa.RecordBatch.from_pylist([{"id": key, "v": key} for key, _ in rows], schema=SCHEMA)
    vnodes = pa.array([key % 4 for key, _ in rows], pa.uint16())
    return Chunk(batch, pa.array([int(op) for _, op in rows], pa.int8()), vnodes)


def _keys(chunk: Chunk) -> pa.BinaryArray:
    return pa.array([position(key) for key in chunk.rows.column("id").to_pylist()], pa.binary())


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
    chunk = _chunk((1, Op.UPDATE_DELETE), (1, Op.UPDATE_INSERT))
    assert apply_mark(chunk, np.array(keep)).ops.to_pylist() == ops


def test_m9_keys_outside_the_range_are_left_out_and_its_end_is_open() -> None:
    chunk = _chunk((1, Op.INSERT), (2, Op.DELETE), (3, Op.UPDATE_DELETE), (3, Op.UPDATE_INSERT), (4, Op.INSERT))
    assert mark_chunk(chunk, _keys(chunk), KeySpan(position(2), position(4))).tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert mark_chunk(chunk, _keys(chunk), KeySpan(None, position(2))).tolist() == [True, False, False, False, False]
    assert mark_chunk(chunk, _keys(chunk)).all()


def test_vnodes_of_others_are_left_out() -> None:
    chunk = _chunk((1, Op.INSERT), (2, Op.INSERT), (5, Op.INSERT))
    assert mark_chunk(chunk, _keys(chunk), vnodes=VnodeBitmap.of([1], 4)).tolist() == [True, False, True]
    taken = apply_mark(chunk, mark_chunk(chunk, _keys(chunk), vnodes=VnodeBitmap.of([1], 4)))
    assert taken.rows.column("id").to_pylist() == [1, 5]
