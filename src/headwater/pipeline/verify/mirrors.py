"""Mirrors: how the tables of each kind of sink are read again, as they are shown to anybody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headwater.sinks.storage import Storage, directory_of
from headwater.sinks.types import cast, sink_schema
from headwater.sources.table import SourceTable


@dataclass(frozen=True, slots=True)
class DeltaMirror:
    """The tables of a Delta sink in mode mirror."""

    storage: Storage

    def sent(self, table: SourceTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the source in the types in which the sink writes them."""
        schema = sink_schema(table)
        names = rows.schema.names
        arrays = [cast(column, schema.field(name).type) for name, column in zip(names, rows.columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def read(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of the newest version; none where nothing was delivered yet."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        place = self.storage.within(directory_of(table))
        try:
            found = DeltaTable(place.address, storage_options=dict(place.options) or None)
        except TableNotFoundError:
            return
        dataset = found.to_pyarrow_dataset()
        known = [name for name in columns if name in dataset.schema.names]
        for batch in dataset.to_batches(columns=known):
            yield _in_columns(batch, columns, table)


def _in_columns(batch: pa.RecordBatch, columns: Sequence[str], table: SourceTable) -> pa.RecordBatch:
    """*batch* with exactly *columns*; null where it does not have one."""
    arrays: list[Any] = []
    for name in columns:
        place = batch.schema.get_field_index(name)
        arrays.append(pa.nulls(batch.num_rows, table.column(name).type) if place < 0 else batch.column(place))
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
