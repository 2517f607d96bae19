"""Chunks: checks by row index, pairs that stay together, and what the log store needs."""

from __future__ import annotations

import pickle
from itertools import pairwise
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
    ReservedColumnError,
    VnodeBitmap,
    VnodeIndex,
    VnodeRangeError,
    vnode_of,
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
    assert chunk.vnodes.to_pylist() == [vnode_of([n], [pa.int64()]) for n in (5, 7, 7, 7)]
    assert chunk.ops.to_pylist() == [1, 4, 3, 2]
    assert (chunk.num_rows, repr(chunk)) == (4, "Chunk(4 rows, 2 columns)")
    assert not chunk.is_inserts_only


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
    assert chunk.is_inserts_only
    assert chunk == chunk_of([1, 2], [I, I])
    empty = Chunk.empty(chunk.schema)
    assert (empty.num_rows, empty.nbytes) == (0, 0)
    assert empty == Chunk.inserts(chunk.rows.slice(0, 0), ["id"])
    assert empty.split(1) == [empty]
    assert empty.sort_by_vnode()[1].num_rows == 0
    assert empty.filter_vnodes(VnodeBitmap.empty()) == empty


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


def test_concat_wants_chunks_of_one_schema() -> None:
    chunk = chunk_of([1, 2, 2], [I, B, U])
    both = Chunk.concat([chunk, chunk])
    assert both.num_rows == 6
    assert both.split(max_rows=3) == [chunk, chunk]
    with pytest.raises(ChunkError, match="number 1"):
        Chunk.concat([chunk, Chunk.inserts(pa.record_batch({"id": [1]}), ["id"])])
    with pytest.raises(ChunkError, match="no chunk"):
        Chunk.concat([])


def test_filter_keeps_the_owned_vnodes_in_order() -> None:
    chunk = chunk_of([1, 2, 2, 3], [I, B, U, D], [0, 5, 5, 0])
    kept = chunk.filter_vnodes(VnodeBitmap.of([5], 8))
    assert (kept.ops.to_pylist(), kept.vnodes.to_pylist()) == ([B, U], [5, 5])
    assert chunk.filter_vnodes(VnodeBitmap.full(8)) is chunk
    with pytest.raises(VnodeRangeError):
        chunk.filter_vnodes(VnodeBitmap.full(4))


def test_sort_by_vnode_is_stable_and_says_where_each_vnode_is() -> None:
    chunk = chunk_of([1, 2, 2, 3, 4], [I, B, U, D, I], [7, 2, 2, 7, 0])
    ordered, index = chunk.sort_by_vnode()
    assert ordered.vnodes.to_pylist() == [0, 2, 2, 7, 7]
    assert ordered.ops.to_pylist() == [I, B, U, I, D]
    assert (index.vnodes.tolist(), index.starts.tolist()) == ([0, 2, 7], [0, 1, 3, 5])
    again, same = ordered.sort_by_vnode()
    assert again is ordered
    assert same == index
    assert index.rows_of(range(3)) == range(3)
    assert index.rows_of(range(3, 7)) == range(3, 3)
    assert index.rows_of(range(7, 8)) == range(3, 5)
    assert index.rows_of(range(5, 5)) == range(3, 3)
    assert index.rows_in(VnodeBitmap.of([0, 2, 5], 8)) == (range(3),)
    assert index.rows_in(VnodeBitmap.of([0, 7], 8)) == (range(1), range(3, 5))
    assert index.rows_in(VnodeBitmap.empty(8)) == ()


def test_an_index_that_does_not_increase_is_refused() -> None:
    def index(vnodes: list[int], starts: list[int]) -> VnodeIndex:
        return VnodeIndex(np.array(vnodes, dtype=np.uint16), np.array(starts, dtype=np.int32))

    assert index([1, 2], [0, 1, 2]).num_rows == 2
    for vnodes, starts in (([2, 1], [0, 1, 2]), ([1, 2], [0, 1, 1]), ([1], [0]), ([1], [1, 2]), ([], [])):
        with pytest.raises(ChunkError):
            index(vnodes, starts)
    with pytest.raises(ChunkError):
        VnodeIndex.of(np.array([2, 1], dtype=np.uint16))
    with pytest.raises(ChunkError, match="step"):
        index([1, 2], [0, 1, 2]).rows_of(range(0, 4, 2))
    assert index([1], [0, 2]) != index([1], [0, 3])
    assert index([1], [0, 2]) != "index"


def test_views_uuids_and_nested_columns_can_be_sorted_and_filtered() -> None:
    rows = pa.record_batch(
        {
            "id": [3, 1, 2],
            "view": pa.array(["a", None, "c" * 20], pa.string_view()),
            "raw": pa.array([b"a", None, b"c" * 20], pa.binary_view()),
            "uuid": pa.array([b"a" * 16, None, b"c" * 16], pa.uuid()),
            "list": [[1], None, [2, 3]],
            "word": pa.array(["x", "y", "x"]).dictionary_encode(),
        }
    )
    chunk = Chunk(rows, pa.array([1, 1, 1], pa.int8()), pa.array([9, 4, 4], pa.uint16()))
    ordered, _ = chunk.sort_by_vnode()
    assert ordered.schema == rows.schema
    assert ordered.rows.column("id").to_pylist() == [1, 2, 3]
    assert ordered.rows.column("view").to_pylist() == [None, "c" * 20, "a"]
    both = Chunk.concat([chunk, ordered])
    assert both.filter_vnodes(VnodeBitmap.of([9], 16)).rows.column("raw").to_pylist() == [b"a", b"a"]


def test_a_batch_carries_ops_and_vnodes_and_back() -> None:
    chunk = chunk_of([1, 2, 2], [I, B, U])
    batch = chunk.to_batch()
    assert batch.schema.names == ["id", "note", "_op", "_vnode"]
    assert Chunk.from_batch(batch) == chunk
    assert Chunk.from_batch(batch.select(["_vnode", "id", "_op", "note"])) == chunk
    for name in ("_op", "_vnode"):
        others = [column for column in batch.schema.names if column != name]
        with pytest.raises(ChunkError, match=f"0 columns named '{name}'"):
            Chunk.from_batch(batch.select(others))
        clash = Chunk.inserts(rows_of([1], **{name: [1]}), ["id"])
        with pytest.raises(ReservedColumnError, match="Rename") as caught:
            clash.to_batch()
        assert caught.value.column == name


def test_metadata_of_the_schema_survives_the_batch() -> None:
    rows = rows_of([1]).replace_schema_metadata({"table": "orders"})
    assert Chunk.from_batch(Chunk.inserts(rows, ["id"]).to_batch()).schema.metadata == {b"table": b"orders"}


def test_chunks_compare_by_value_and_travel_by_pickle() -> None:
    chunk = chunk_of([1, 2, 2], [I, B, U])
    assert chunk == Chunk.concat([chunk.slice(0, 1), chunk.slice(1)])
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


def test_a_large_chunk_is_sorted_stably_too() -> None:
    places = np.arange(20_000, dtype=np.int64)
    rows = pa.record_batch({"id": places // 2 % 700, "place": places})
    chunk = Chunk.build(rows, np.tile(np.array([B, U], dtype=np.int8), 10_000), ["id"])
    ordered, index = chunk.sort_by_vnode()
    assert Chunk(ordered.rows, ordered.ops, ordered.vnodes) == ordered
    for start, stop in pairwise(index.starts.tolist()):
        assert (np.diff(ordered.rows.column("place").to_numpy()[start:stop]) > 0).all()
    pieces = ordered.split(max_rows=999)
    assert {piece.num_rows for piece in pieces[:-1]} == {1000}
    assert Chunk.concat(pieces) == ordered
