"""Mirrors: how the tables of each kind of sink are read again, as they are shown to anybody.

A table that is mirrored is read as it is. Of one that has every change, the changes are replayed first: in memory, and
in the order of their commits. What a TRUNCATE removed is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.errors import InputError
from headwater.log_store.columns import OP
from headwater.pipeline.verify.check import Mirror
from headwater.sinks.change_rows import CHANGE_TYPE, COMMIT_VERSION
from headwater.sinks.delta import DeltaSink
from headwater.sinks.fold import DELETED, fold
from headwater.sinks.parquet import ParquetSink, committed_files, read
from headwater.sinks.sink import Mode, Sink
from headwater.sinks.storage import Storage, directory_of
from headwater.sinks.types import cast, conform, sink_schema
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.stream.op import ops_of


class _FileMirror:
    """What all sinks of files share: their types."""

    def sent(self, table: SourceTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the source in the types in which the sink writes them."""
        return _cast(rows, sink_schema(table))

    def received(self, table: SourceTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the sink in the types of the source."""
        return _cast(_with_times(rows, table.schema), table.schema)


@dataclass(frozen=True)
class DeltaMirror(_FileMirror):
    """The tables of a Delta sink in mode mirror."""

    storage: Storage

    def read(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of the newest version; none where nothing was delivered yet."""
        for batch in _delta_rows(self.storage, table, columns):
            yield _in_columns(batch, columns, table)


@dataclass(frozen=True)
class DeltaChanges(_FileMirror):
    """The tables of a Delta sink in mode changes."""

    storage: Storage

    def read(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows that the changes come to."""
        names = [*table.schema.names, CHANGE_TYPE, COMMIT_VERSION, UNAVAILABLE_COLUMN]
        yield from replayed(table, list(_delta_rows(self.storage, table, names)), columns)


@dataclass(frozen=True)
class ParquetChanges(_FileMirror):
    """The tables of a Parquet sink."""

    storage: Storage

    def read(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows that the changes of committed batches come to."""
        path = Path(self.storage.within(directory_of(table)).address)
        if committed_files(path):
            yield from replayed(table, read(path).to_batches(), columns)


def mirror_of(sink: Sink) -> Mirror:
    """How the tables of *sink* are read. :raises InputError: they cannot be."""
    if isinstance(sink, ParquetSink):
        return ParquetChanges(Storage(sink.path))
    if isinstance(sink, DeltaSink):
        storage = Storage(sink.path, sink.storage_options)
        return DeltaMirror(storage) if sink.mode is Mode.MIRROR else DeltaChanges(storage)
    raise InputError(f"The tables of {sink.name} cannot be compared with their source.")


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


def _delta_rows(storage: Storage, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    place = storage.within(directory_of(table))
    try:
        found = DeltaTable(place.address, storage_options=dict(place.options))
    except TableNotFoundError:
        return
    dataset = found.to_pyarrow_dataset()
    yield from dataset.to_batches(columns=[name for name in columns if name in dataset.schema.names])


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


def _in_columns(batch: pa.RecordBatch, columns: Sequence[str], table: SourceTable) -> pa.RecordBatch:
    """*batch* with exactly *columns*; null where it does not have one."""
    arrays: list[Any] = []
    for name in columns:
        place = batch.schema.get_field_index(name)
        arrays.append(pa.nulls(batch.num_rows, table.column(name).type) if place < 0 else batch.column(place))
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
