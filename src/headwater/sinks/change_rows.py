"""Change rows: the rows of a log or of history as a sink in ``CHANGES`` mode has them. Pure.

The table's columns, then ``_change_type``, ``_commit_version`` (the source's number of the commit: the first eight
bytes of the position), ``_commit_timestamp`` and ``_unavailable``. A row of history is an insert with the position of
its snapshot. One that is read again, of a table that was delivered before, is a ``reread``; where it tells some columns
only, the others are unavailable.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from headwater.log_store.columns import OP
from headwater.sinks.sink import HistoryPart
from headwater.sinks.types import array_of, conform
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN
from headwater.stream.op import REREAD, Op, change_types_of

CHANGE_TYPE: Final = "_change_type"
COMMIT_VERSION: Final = "_commit_version"

_TIME = pa.timestamp("us", tz="UTC")
_ADDED = (
    pa.field(CHANGE_TYPE, pa.string()),
    pa.field(COMMIT_VERSION, pa.int64()),
    pa.field(COMMIT_TIMESTAMP_COLUMN, _TIME),
    pa.field(UNAVAILABLE_COLUMN, pa.string()),
)


def changes_schema(own: pa.Schema) -> pa.Schema:
    """The columns of change rows of a table with the columns *own*."""
    return pa.schema([*own, *_ADDED])


def change_rows(batch: pa.RecordBatch, own: pa.Schema) -> pa.Table:
    """Rows of a log as change rows."""
    added = [
        change_types_of(batch.column(OP)).dictionary_decode(),
        versions_of(batch.column(POSITION_COLUMN)),
        batch.column(COMMIT_TIMESTAMP_COLUMN).cast(_TIME),
        batch.column(UNAVAILABLE_COLUMN),
    ]
    return _with(conform(pa.Table.from_batches([batch]), own), added)


def history_rows(batch: pa.RecordBatch, own: pa.Schema, part: HistoryPart) -> pa.Table:
    """Rows of history as change rows."""
    rows = batch.num_rows
    version = int.from_bytes(part.position[:8], "big", signed=True)
    is_reread = part.rereads or part.replaces or part.columns is not None
    others = None if part.columns is None else ",".join(name for name in own.names if name not in batch.schema.names)
    added = [
        pa.repeat(pa.scalar(REREAD if is_reread else Op.INSERT.change_type), rows),
        pa.repeat(pa.scalar(version, pa.int64()), rows),
        pa.repeat(pa.scalar(part.commit_time_us, _TIME), rows),
        pa.repeat(pa.scalar(others or None, pa.string()), rows),
    ]
    return _with(conform(pa.Table.from_batches([batch]), own), added)


def _with(rows: pa.Table, added: list[Any]) -> pa.Table:
    for field, values in zip(_ADDED, added, strict=True):
        rows = rows.append_column(field, values)
    return rows


def versions_of(positions: Any) -> Any:
    """The number of the commit of each position: its first eight bytes."""
    positions = array_of(positions)
    width = positions.type.byte_width
    data = positions.buffers()[1]
    start = positions.offset * width
    raw = np.frombuffer(data, np.uint8, len(positions) * width, start).reshape(-1, width)
    return pa.array(np.ascontiguousarray(raw[:, :8]).view(">i8").reshape(-1).astype(np.int64))
