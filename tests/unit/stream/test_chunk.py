"""Chunks: checks by row index, pairs that stay together, and what the log store needs."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.errors import InputError
from headwater.stream import (
    Chunk,
    ChunkError,
    KeyColumnError,
    Op,
    vnodes_of,
)

I, D, U, B = Op.INSERT, Op.DELETE, Op.UPDATE_INSERT, Op.UPDATE_DELETE  # noqa: E741


def rows_of(ids: list[int], **more: Any) -> Any:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "note": [f"n{n}" for n in range(len(ids))], **more})


def chunk_of(ids: list[int], ops: list[Op], vnodes: list[int] | None = None) -> Chunk:
    if vnodes is None:
        return Chunk.build(rows_of(ids), ops, ["id"])
    return Chunk(rows_of(ids), pa.array([int(op) for op in ops], pa.int8()), pa.array(vnodes, pa.uint16()))


def test_build_computes_the_vnode_of_each_key() -> None:
    chunk = chunk_of([5, 7, 7, 7], [I, B, U, D])
    assert chunk.vnodes.to_pylist() == vnodes_of(rows_of([5, 7, 7, 7]), ["id"]).to_pylist()
    assert chunk.ops.to_pylist() == [1, 4, 3, 2]
    assert (chunk.num_rows, repr(chunk)) == (4, "Chunk(4 rows, 2 columns)")


def test_a_new_row_may_stand_alone_and_is_no_pair() -> None:
    chunk = chunk_of([5, 7, 7, 7, 8], [U, B, U, U, U])
    assert chunk.ops.to_pylist() == [3, 4, 3, 3, 3]
    assert [part.num_rows for part in chunk.split(max_rows=1)] == [1, 2, 1, 1]
    assert chunk.slice(3).ops.to_pylist() == [3, 3]
    with pytest.raises(ChunkError, match="parts the update pair at row 1"):
        chunk.slice(2)


@pytest.mark.parametrize(
    ("ops", "row", "message"),
    [
        ([B], 0, "update_delete that no update_insert follows"),
        ([B, B, U], 0, "update_delete that no"),
        ([B, I, U], 0, "update_delete that no"),
        ([I, B, U, B], 3, "update_delete that no"),
        ([B, D], 0, "update_delete that no"),
    ],
)
def test_an_old_row_without_its_new_row_is_refused_by_its_row(ops: list[Op], row: int, message: str) -> None:
    ids = [1] * len(ops)
    for vnodes in (None, [3] * len(ops)):
        with pytest.raises(ChunkError, match=message) as caught:
            chunk_of(ids, ops, vnodes)
        assert caught.value.row == row
        assert isinstance(caught.value, InputError)


def test_the_halves_of_a_pair_share_their_vnode() -> None:
    with pytest.raises(ChunkError, match="Rows 1 and 2") as caught:
        chunk_of([0, 1, 2], [I, B, U], [0, 4, 5])
    assert caught.value.row == 1


@pytest.mark.parametrize("code", [0, 5, -1, 127])
def test_unknown_op_codes_are_refused_by_their_row(code: int) -> None:
    with pytest.raises(ChunkError, match=rf"Row 1 has op code {code}; valid values are 1 \(insert\)") as caught:
        Chunk.build(rows_of([1, 2]), pa.array([1, code], pa.int8()), ["id"])
    assert caught.value.row == 1


def test_parts_that_do_not_fit_are_refused() -> None:
    rows, ops, vnodes = rows_of([1, 2]), pa.array([1, 1], pa.int8()), pa.array([0, 1], pa.uint16())
    cases: list[tuple[Any, Any, Any, str]] = [
        (pa.Table.from_batches([rows]), ops, vnodes, "RecordBatch"),
        (rows, ops.cast(pa.int16()), vnodes, "ops of type int16"),
        (rows, [1, 1], vnodes, "ops of type list"),
        (rows, pa.chunked_array([ops]), vnodes, "ops of type int8"),
        (rows, ops, vnodes.cast(pa.int32()), "vnodes of type int32"),
        (rows, ops.slice(1), vnodes, "1 ops for 2 rows"),
        (rows, ops, vnodes.slice(1), "1 vnodes for 2 rows"),
        (rows, pa.array([1, None], pa.int8()), vnodes, "Row 1 is null in ops"),
        (rows, ops, pa.array([None, 1], pa.uint16()), "Row 0 is null in vnodes"),
        (rows, ops, pa.array([0, 32768], pa.uint16()), "Row 1 has vnode 32768"),
    ]
    for bad_rows, bad_ops, bad_vnodes, message in cases:
        with pytest.raises(ChunkError, match=message):
            Chunk(bad_rows, bad_ops, bad_vnodes)
    with pytest.raises(ChunkError, match="RecordBatch"):
        Chunk.build(pa.Table.from_batches([rows]), ops, ["id"])
    with pytest.raises(ChunkError, match="1 ops for 2 rows"):
        Chunk.build(rows, [I], ["id"])
    with pytest.raises(KeyColumnError):
        Chunk.build(rows, [I, I], ["nope"])


def test_an_update_of_the_key_becomes_a_delete_and_an_insert() -> None:
    chunk = chunk_of([1, 1, 1, 2, 3], [B, U, B, U, I])
    assert chunk.ops.to_pylist() == [B, U, D, I, I]


def test_a_key_change_inside_one_vnode_is_no_pair_either() -> None:
    chunk = Chunk.build(rows_of([1, 2]), [B, U], ["id"], vnode_count=1)
    assert chunk.ops.to_pylist() == [D, I]


def test_a_key_change_that_the_hash_does_not_see_is_no_pair() -> None:
    rows = pa.record_batch({"at": pa.array([1, 2, 5, 5], pa.timestamp("ns"))})
    chunk = Chunk.build(rows, [B, U, B, U], ["at"])
    assert len(set(chunk.vnodes.to_pylist())) == 1
    assert chunk.ops.to_pylist() == [D, I, B, U]


@pytest.mark.parametrize(
    "keys",
    [
        pa.array([None, None, None, 1]),
        pa.array([float("nan"), float("nan"), float("nan"), 1.0]),
        pa.array([0.0, -0.0, 0.0, None]),
        pa.array([np.float16(1), np.float16(1), np.float16(1), np.float16(2)]),
        pa.array(["a", "a", "a", "b"], pa.string_view()),
        pa.array(["a", "a", "a", None]).dictionary_encode(),
        pa.array([b"a" * 16, b"a" * 16, b"a" * 16, b"b" * 16], pa.uuid()),
    ],
    ids=lambda keys: str(keys.type),
)
def test_keys_compare_as_values_in_every_representation(keys: Any) -> None:
    chunk = Chunk.build(pa.record_batch({"k": keys}), [B, U, B, U], ["k"])
    assert chunk.ops.to_pylist() == [B, U, D, I]


def test_a_key_that_is_always_null_does_not_change() -> None:
    chunk = Chunk.build(pa.record_batch({"k": pa.nulls(2)}), [B, U], ["k"])
    assert chunk.ops.to_pylist() == [B, U]


def test_inserts_and_empty() -> None:
    chunk = Chunk.inserts(rows_of([1, 2]), ["id"])
    assert chunk == chunk_of([1, 2], [I, I])
    empty = Chunk.empty(chunk.schema)
    assert (empty.num_rows, empty.nbytes) == (0, 0)
    assert empty == Chunk.inserts(chunk.rows.slice(0, 0), ["id"])
    assert empty.split(1) == [empty]


def test_split_keeps_pairs_together_and_exceeds_by_one_row() -> None:
    chunk = chunk_of([1, 2, 2, 3, 4, 4], [I, B, U, I, B, U])
    assert [piece.num_rows for piece in chunk.split(max_rows=2)] == [3, 3]
    assert [piece.num_rows for piece in chunk.split(max_rows=1)] == [1, 2, 1, 2]
    assert chunk.split() == [chunk]
    for limits in ({"max_rows": 0}, {"max_bytes": 0}):
        with pytest.raises(ChunkError, match="=0"):
            chunk.split(**limits)


def test_split_by_bytes_counts_the_values() -> None:
    rows = pa.record_batch({"id": [1, 2, 3, 4], "text": ["x" * 100, "x" * 100, "x" * 1000, ""]})
    chunk = Chunk.inserts(rows, ["id"])
    assert [piece.num_rows for piece in chunk.split(max_bytes=300)] == [2, 1, 1]
    assert [piece.num_rows for piece in chunk.split(max_rows=1, max_bytes=300)] == [1, 1, 1, 1]
    assert [piece.num_rows for piece in chunk.split(max_bytes=1)] == [1, 1, 1, 1]
    exact = Chunk.inserts(pa.record_batch({"id": [1, 2, 3, 4]}), ["id"])
    assert [piece.num_rows for piece in exact.split(max_bytes=2 * (8 + 1 + 2))] == [2, 2]
    nested = Chunk.inserts(pa.record_batch({"id": [1, 2, 3, 4], "list": [[1] * 8] * 4}), ["id"])
    assert [piece.num_rows for piece in nested.split(max_bytes=200)] == [2, 2]


def test_slice_refuses_to_part_a_pair() -> None:
    chunk = chunk_of([1, 2, 2, 3], [I, B, U, I])
    assert chunk.slice(1, 2).ops.to_pylist() == [B, U]
    assert chunk.slice(3, 99).num_rows == 1
    assert chunk.slice(4).num_rows == 0
    for offset, length in ((0, 2), (2, 1), (2, None)):
        with pytest.raises(ChunkError, match="update pair at row 1") as caught:
            chunk.slice(offset, length)
        assert caught.value.row == 1
    for offset, length in ((-1, 1), (5, None), (1, -1)):
        with pytest.raises(ChunkError, match="inside the chunk"):
            chunk.slice(offset, length)


def test_chunks_compare_by_value_and_travel_by_pickle() -> None:
    chunk = chunk_of([1, 2, 2], [I, B, U])
    assert chunk == Chunk(chunk.rows, chunk.ops, chunk.vnodes)
    assert chunk != chunk_of([1, 2, 2], [D, B, U])
    assert chunk != "chunk"
    assert pickle.loads(pickle.dumps(chunk)) == chunk
    with pytest.raises(TypeError):
        hash(chunk)


def test_errors_never_hold_row_values() -> None:
    rows = pa.record_batch({"id": ["secret-1", "secret-2"]})
    for ops in ([B, I], [B, D], [I, B]):
        with pytest.raises(ChunkError) as caught:
            Chunk.build(rows, ops, ["id"])
        assert "secret" not in str(caught.value)
