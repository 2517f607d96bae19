"""Reads units of upstream tables, in any process: what a unit gives depends on the unit and its table alone.

Changes come as those of a log: ``_position`` is the version as the table calls it (8 bytes), the number of the row in
its unit (4) and 0 (4), big endian; ``_epoch`` is that of the plan, by which sinks know what they have.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.backfill.snapshot.consume_upstream.query import UpstreamUnit
from headwater.backfill.snapshot.consume_upstream.upstream_table import PartKind, UpstreamTable
from headwater.log_store.columns import EPOCH, OP, SEQ, VNODE
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN
from headwater.sources.written import POSITION_DTYPE, POSITION_TYPE
from headwater.stream import Op

_TIME = pa.timestamp("us", tz="UTC")


def read_unit(upstream: UpstreamTable, unit: UpstreamUnit) -> Iterator[pa.RecordBatch]:
    """The rows of *unit*: the columns of its table, then those that a log adds.

    Rows of a snapshot are inserts. :raises RetentionMiss: they went after the unit was planned.
    """
    part, seq = unit.part, 0
    if part.kind is PartKind.SNAPSHOT:
        rows = upstream.snapshot(part.epoch, part.vnodes, start=part.start, end=part.end)
    else:
        rows = upstream.change_log(part.after, part.epoch, part.vnodes, start=part.start, end=part.end)
    known: dict[int, tuple[int, int]] = {part.epoch: (unit.commit_version, unit.commit_time_us)}
    for batch in rows:
        yield _as_log(upstream, unit, batch, seq, known)
        seq += batch.num_rows


def _as_log(
    upstream: UpstreamTable, unit: UpstreamUnit, batch: pa.RecordBatch, seq: int, known: dict[int, tuple[int, int]]
) -> pa.RecordBatch:
    count = batch.num_rows
    names = batch.schema.names
    if EPOCH in names:
        epochs = batch.column(EPOCH).to_numpy()
        ops = batch.column(OP)
    else:
        epochs = np.full(count, unit.part.epoch, np.uint64)
        ops = pa.array(np.full(count, Op.INSERT, np.int8))
    versions, times = np.zeros(count, np.uint64), np.zeros(count, np.int64)
    for epoch in np.unique(epochs).tolist():
        if epoch not in known:
            known[epoch] = (upstream.commit_version(epoch), upstream.commit_time_us(epoch))
        mask = epochs == epoch
        versions[mask], times[mask] = known[epoch]
    places = np.zeros(count, POSITION_DTYPE)
    places["epoch"], places["row"] = versions, np.arange(seq + 1, seq + count + 1)
    own = [_own(batch, field, names) for field in unit.table.schema]
    added = {
        POSITION_COLUMN: pa.Array.from_buffers(POSITION_TYPE, count, [None, pa.py_buffer(places)]),
        COMMIT_TIMESTAMP_COLUMN: pa.array(times, pa.int64()).cast(_TIME),
        UNAVAILABLE_COLUMN: pa.nulls(count, pa.string()),
        OP: ops,
        VNODE: batch.column(VNODE),
        SEQ: pa.array(np.arange(seq, seq + count, dtype=np.uint32)),
        EPOCH: pa.array(np.full(count, unit.epoch, np.uint64)),
    }
    fields = [pa.field(name, column.type) for name, column in added.items()]
    return pa.RecordBatch.from_arrays([*own, *added.values()], schema=pa.schema([*unit.table.schema, *fields]))


def _own(batch: pa.RecordBatch, field: pa.Field, names: list[str]) -> pa.Array:
    if field.name not in names:
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(field.name)
    return column if column.type == field.type else pc.cast(column, field.type)
