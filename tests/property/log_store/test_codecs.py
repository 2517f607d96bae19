"""Both formats give back what was written, whatever the rows are. Scenario numbers are those of the catalogue."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.log_store.chunk_codec import (
    Compression,
    copy_block,
    decode_block,
    decode_header,
    encode_batch,
    wanted_blocks,
)
from headwater.log_store.columns import SEQ, VNODE, check_payload, sorted_batch, stored_schema
from headwater.log_store.errors import ForeignSchema, LogCorrupt, UnknownVersion
from headwater.log_store.row_codec import check_flat, decode_rows, encode_rows
from headwater.log_store.serde import (
    BARRIERS,
    barrier_key,
    chunk_key,
    chunks_from,
    parse_barrier_key,
    row_key,
    rows_end,
    rows_from,
    space_end,
)
from headwater.stream import Chunk, Epoch, VnodeBitmap

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("flag", pa.bool_()),
        pa.field("small", pa.int8()),
        pa.field("name", pa.string()),
        pa.field("body", pa.binary()),
        pa.field("amount", pa.decimal128(20, 4)),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("rate", pa.float64()),
        pa.field("uuid", pa.binary(16)),
        pa.field("long", pa.large_string()),
    ]
)
ROW = st.tuples(
    st.integers(-(2**63), 2**63 - 1),
    st.none() | st.booleans(),
    st.none() | st.integers(-128, 127),
    st.none() | st.text(max_size=12),
    st.none() | st.binary(max_size=12),
    st.none() | st.integers(-(10**19), 10**19).map(lambda number: Decimal(number).scaleb(-4)),
    st.none() | st.integers(-(2**53), 2**53),
    st.none() | st.floats(allow_nan=False),
    st.none() | st.binary(min_size=16, max_size=16),
    st.none() | st.text(max_size=12),
)


def batch_of(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def chunk(rows: list[tuple[Any, ...]], ops: list[int] | None = None, count: int = 256) -> Chunk:
    codes = ops if ops is not None else [1] * len(rows)
    return Chunk.build(batch_of(rows), pa.array(codes, pa.int8()), ["id"], count)


def encoded(made: Chunk, first_seq: int, version: int, count: int, how: Compression) -> bytes:
    batch, vnodes = sorted_batch(made, first_seq)
    return encode_batch(batch, vnodes, first_seq, version, count, how)


def decoded(data: bytes, payload: pa.Schema, wanted: VnodeBitmap | None = None) -> list[pa.RecordBatch]:
    blocks = wanted_blocks(decode_header(data), wanted)
    return [decode_block(copy_block(data, block), block, stored_schema(payload), left) for block, left in blocks]


@given(st.lists(ROW, max_size=12), st.integers(0, 3))
def test_15_rows_of_format_1_come_back_equal(rows: list[tuple[Any, ...]], skip: int) -> None:
    batch = batch_of(rows).slice(min(skip, len(rows)))
    ops = pa.array([1 + place % 2 for place in range(batch.num_rows)], pa.int8())
    values = encode_rows(batch, ops, 7)
    assert len(values) == batch.num_rows
    back, codes = decode_rows(values, SCHEMA)
    assert back.equals(batch)
    assert codes.equals(ops)


@given(st.lists(ROW, max_size=12), st.sampled_from(list(Compression)), st.sampled_from([1, 7, 256, 32768]))
def test_15_chunks_of_format_2_come_back_equal(rows: list[tuple[Any, ...]], how: Compression, count: int) -> None:
    made = chunk(rows, count=count)
    data = encoded(made, 100, 3, count, how)
    header = decode_header(data)
    assert (header.rows, header.first_seq, header.schema_version) == (len(rows), 100, 3)
    blocks = decoded(data, SCHEMA)
    if rows:
        stored = pa.Table.from_batches(blocks).combine_chunks().to_batches()[0]
        keys = list(zip(stored.column(VNODE).to_pylist(), stored.column(SEQ).to_pylist(), strict=True))
        assert keys == sorted(keys)
        order = np.argsort(stored.column(SEQ).to_numpy())
        assert stored.take(pa.array(order)).select(SCHEMA.names).equals(made.rows)
        assert sorted(stored.column(SEQ).to_pylist()) == list(range(100, 100 + len(rows)))
        assert Chunk(stored.select(SCHEMA.names), stored["_op"], stored["_vnode"]).num_rows == len(rows)


def test_a_reader_of_some_vnodes_gets_exactly_their_rows_and_touches_only_their_blocks() -> None:
    rows = pa.record_batch({"id": pa.array(range(20_000)), "text": pa.array([f"row {n}" for n in range(20_000)])})
    made = Chunk.inserts(rows, ["id"])
    data = encoded(made, 0, 1, 256, Compression.NONE)
    header = decode_header(data)
    assert len(header.blocks) == 8
    quarter = VnodeBitmap.from_ranges([range(64, 128)], 256)
    odd = VnodeBitmap.of(range(1, 256, 2), 256)
    for wanted in (quarter, odd, VnodeBitmap.of([0], 256), VnodeBitmap.full(256), VnodeBitmap.empty(256)):
        found = decoded(data, rows.schema, wanted)
        got = [number for batch in found for number in batch.column("id").to_pylist()]
        mask = wanted.mask_of(made.vnodes.to_numpy())
        assert sorted(got) == np.flatnonzero(mask).tolist()
    # bytes outside the quarter's blocks may be anything
    used = [block for block in header.blocks if 64 <= block.first_vnode < 128]
    damaged = bytearray(data)
    for block in header.blocks:
        if block not in used:
            damaged[block.offset : block.offset + block.length] = b"\xff" * block.length
    found = decoded(bytes(damaged), rows.schema, quarter)
    assert sum(batch.num_rows for batch in found) == sum(block.rows for block in used)


def test_damage_is_called_corrupt_in_both_formats() -> None:
    row = (1, True, 1, "name", b"body", Decimal("1.5"), 0, 0.5, b"u" * 16, "long")
    (value,) = encode_rows(batch_of([row]), pa.array([1], pa.int8()), 1)
    for cut in range(len(value)):
        with pytest.raises(LogCorrupt):
            decode_rows([value[:cut]], SCHEMA)
    with pytest.raises(LogCorrupt):
        decode_rows([value + b"x"], SCHEMA)
    with pytest.raises(UnknownVersion, match="format 9"):
        decode_rows([b"\x09" + value[1:]], SCHEMA)
    data = encoded(chunk([row] * 3), 0, 1, 256, Compression.LZ4)
    for cut in range(len(data)):
        with pytest.raises(LogCorrupt):
            decoded(data[:cut], SCHEMA)
    with pytest.raises(UnknownVersion, match="format 9"):
        decode_header(b"\x09" + data[1:])


def test_columns_that_a_log_cannot_hold_are_refused_by_name() -> None:
    check_payload(SCHEMA)
    check_flat(SCHEMA)
    for bad in (pa.schema([("_op", pa.int8())]), pa.schema([("a", pa.int8()), ("a", pa.int8())])):
        with pytest.raises(ForeignSchema):
            check_payload(bad)
    encoded_by = pa.dictionary(pa.int32(), pa.string())
    for kind in (encoded_by, pa.list_(encoded_by), pa.struct([("x", pa.map_(pa.string(), encoded_by))])):
        with pytest.raises(ForeignSchema, match=r"'coded'.*Cast"):
            check_payload(pa.schema([("coded", kind)]))
    for kind in (pa.list_(pa.int64()), pa.struct([("x", pa.int64())]), pa.map_(pa.string(), pa.string())):
        with pytest.raises(ForeignSchema, match=r"'nested'.*format 1"):
            check_flat(pa.schema([("nested", kind)]))


PLACE = st.tuples(st.integers(0, 2**47), st.integers(0, 32767), st.integers(0, 2**32 - 1))


@given(st.lists(PLACE, min_size=2, max_size=9))
def test_13_keys_sort_by_epoch_then_seq_and_barriers_stand_after_their_data(
    places: list[tuple[int, int, int]],
) -> None:
    epochs = [(Epoch.from_ms(ms), vnode, seq) for ms, vnode, seq in places]
    chunks = sorted(epochs)
    keys = [chunk_key(5, epoch, writer, seq) for epoch, writer, seq in chunks]
    assert keys == sorted(keys)
    for epoch, vnode, seq in epochs:
        row = row_key(5, vnode, epoch, seq)
        assert rows_from(5, vnode, epoch) <= row < rows_end(5, vnode)
        assert chunks_from(5, epoch) <= chunk_key(5, epoch, vnode, seq) < chunks_from(5, epoch + 1)
        barrier = barrier_key(5, epoch, vnode)
        assert parse_barrier_key(barrier) == (epoch, vnode)
        assert row < chunk_key(5, epoch, vnode, seq) < barrier < space_end(5, BARRIERS)
        with pytest.raises(LogCorrupt):
            parse_barrier_key(row)
        with pytest.raises(LogCorrupt):
            parse_barrier_key(b"x")
