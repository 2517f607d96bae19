"""Mirrors: how the tables of each kind of sink are read again, as they are shown to anybody.

A table that is mirrored is read as it is. Of one that has every change, the changes are replayed first: in memory, and
in the order of their commits. What a TRUNCATE removed is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.errors import InputError
from headwater.log_store.columns import OP
from headwater.pipeline.verify.check import Mirror
from headwater.sinks.change_rows import CHANGE_TYPE, COMMIT_VERSION
from headwater.sinks.fold import DELETED, fold
from headwater.sinks.sink import Mode, Sink
from headwater.sinks.types import conform, sink_schema
from headwater.sinks.versions import IS_CURRENT
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.stream.op import ops_of
from headwater.versioned.fitting import cast


@dataclass(frozen=True)
class SinkMirror:
    """The tables of a sink, whatever its kind."""

    sink: Sink

    def sent(self, table: SourceTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the source in the types in which the sink writes them."""
        return _cast(rows, sink_schema(table))

    def received(self, table: SourceTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the sink in the types of the source."""
        return _cast(_with_times(rows, table.schema), table.schema)

    def read(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows as they are now: those of a mirror, the current versions, or what the changes come to."""
        if self.sink.mode is Mode.MIRROR:
            yield from self.sink.shown(table, columns)
        elif self.sink.mode is Mode.HISTORY:
            for batch in self.sink.shown(table, [*columns, IS_CURRENT]):
                yield batch.filter(batch.column(IS_CURRENT)).select(list(columns))
        else:
            names = [*table.schema.names, CHANGE_TYPE, COMMIT_VERSION, UNAVAILABLE_COLUMN]
            yield from replayed(table, list(self.sink.shown(table, names)), columns)


def mirror_of(sink: Sink) -> Mirror:
    """How the tables of *sink* are read. :raises InputError: they cannot be."""
    if not sink.capabilities.readable:
        raise InputError(f"The tables of {sink.name} cannot be compared with their source.")
    return SinkMirror(sink)


def replayed(table: SourceTable, changes: Sequence[pa.RecordBatch], columns: Sequence[str]) -> list[pa.RecordBatch]:
    """What the rows of *changes*, as a sink in mode changes has them, come to."""
    if not changes:
        return []
    rows = pa.Table.from_batches(changes)
    rows = rows.take(pa.array(np.argsort(rows.column(COMMIT_VERSION).to_numpy(), kind="stable"))).combine_chunks()
    own = sink_schema(table)
    log = conform(rows, own)
    log = log.append_column(OP, ops_of(rows.column(CHANGE_TYPE).combine_chunks()))
    log = log.append_column(UNAVAILABLE_COLUMN, rows.column(UNAVAILABLE_COLUMN))
    there = replace(table, columns=tuple(replace(one, type=own.field(one.name).type) for one in table.columns))
    net = fold(there, log.to_batches())
    shown: list[pa.RecordBatch] = net.filter(pc.invert(net.column(DELETED))).select(list(columns)).to_batches()
    return shown


def _cast(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    names = rows.schema.names
    arrays = [cast(column, schema.field(name).type) for name, column in zip(names, rows.columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _with_times(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """*rows* with times of the day, which the sink has as texts and Arrow does not read."""
    for place, field in enumerate(rows.schema):
        wanted = schema.field(field.name).type
        if pt.is_time(wanted) and not pt.is_time(field.type):
            moments = pc.binary_join_element_wise("1970-01-01 ", rows.column(place).cast(pa.string()), "")
            times = moments.cast(pa.timestamp(wanted.unit)).cast(wanted)
            rows = rows.set_column(place, field.with_type(wanted), times)
    return rows
