"""Rows for sinks, in memory: as history has them, and as inserts of a log."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log_store.columns import read_schema
from headwater.sinks.sink import HistoryPart, Sink, Staged, Token
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream.op import Op

BATCH_ROWS = 65_536
_POSITION = pa.binary(16)
_COLUMNS = (
    ("id", pa.int64(), "bigint"),
    ("quantity", pa.int32(), "integer"),
    ("price", pa.decimal128(18, 4), "numeric(18,4)"),
    ("customer", pa.string(), "text"),
    ("note", pa.string(), "text"),
    ("created", pa.timestamp("us", tz="UTC"), "timestamp with time zone"),
    ("changed", pa.timestamp("us", tz="UTC"), "timestamp with time zone"),
    ("details", pa.string(), "jsonb"),
    ("open", pa.bool_(), "boolean"),
    ("token", pa.string(), "uuid"),
)
TABLE = SourceTable(
    "public",
    "orders",
    tuple(SourceColumn(name, kind, text, place) for place, (name, kind, text) in enumerate(_COLUMNS, 1)),
    ("id",),
)


def orders(rows: int) -> pa.Table:
    """*rows* of the ten columns that the other benchmarks have, too."""
    numbers = np.arange(rows)
    texts = pa.array(numbers).cast(pa.string())
    moments = (numbers * 1_234_567 + 1_767_225_600_000_000).astype("datetime64[us]")
    kinds = pa.array(numbers % 7).cast(pa.string())
    details = pc.binary_join_element_wise('{"kind": ', kinds, ', "tags": "a b", "text": "hello ', texts, '"}', "")
    padded = pc.utf8_lpad(texts, 12, "0")
    token = pc.binary_join_element_wise("6ec0bd7f-11c0-43da-975e-", padded, "")
    columns = [
        pa.array(numbers),
        pa.array((numbers % 1000).astype(np.int32)),
        pa.array((numbers % 1_000_000).astype(np.int32)).cast(pa.decimal128(18, 4)),
        pc.binary_join_element_wise("customer ", pa.array(numbers % 977).cast(pa.string()), ""),
        pc.binary_join_element_wise("a note of usual length for row ", texts, ""),
        pa.array(moments).cast(pa.timestamp("us", tz="UTC")),
        pa.array(moments).cast(pa.timestamp("us", tz="UTC")),
        details,
        pa.array(numbers % 3 > 0),
        token,
    ]
    return pa.Table.from_arrays(columns, schema=TABLE.schema).combine_chunks()


def as_inserts(rows: pa.Table, epoch: int = 1) -> Iterator[pa.RecordBatch]:
    """The same as inserts of a log, each a commit of its own."""
    schema = read_schema(TABLE.log_schema(_POSITION))
    for start in range(0, rows.num_rows, BATCH_ROWS):
        piece = rows.slice(start, BATCH_ROWS).combine_chunks().to_batches()[0]
        count = piece.num_rows
        raw = np.zeros((count, 2), ">u8")
        raw[:, 0] = np.arange(start + 1, start + count + 1)
        columns = {name: piece.column(name) for name in piece.schema.names}
        columns["_position"] = pa.FixedSizeBinaryArray.from_buffers(_POSITION, count, [None, pa.py_buffer(raw)])
        columns["_commit_timestamp"] = piece.column("changed")
        columns["_unavailable"] = pa.nulls(count, pa.string())
        columns["_op"] = pa.array(np.full(count, int(Op.INSERT), np.int8))
        columns["_vnode"] = pa.array(np.zeros(count, np.uint16))
        columns["_seq"] = pa.array(np.arange(start, start + count, dtype=np.uint32))
        columns["_epoch"] = pa.array(np.full(count, epoch, np.uint64))
        yield pa.RecordBatch.from_pydict(columns, schema=schema)


def deliver_inserts(sink: Sink, batches: list[pa.RecordBatch]) -> None:
    """One batch of changes, staged by one task."""
    token = Token("bench", "b", 0, 1, 0)
    _commit(sink, token, sink.stage_changes(TABLE, token, iter(batches), None))


def deliver_history(sink: Sink, batches: list[pa.RecordBatch]) -> None:
    """One batch of history, staged by one task."""
    token = Token("bench", "b", 0, 0, 1)
    part = HistoryPart(SplitKind.KEY, (KeyRange(),), bytes(16), 0)
    _commit(sink, token, sink.stage_history(TABLE, token, part, iter(batches)))


def _commit(sink: Sink, token: Token, staged: Staged) -> None:
    if not sink.commit(TABLE, token, [staged]):
        raise RuntimeError(f"{sink.name} had the batch already.")
