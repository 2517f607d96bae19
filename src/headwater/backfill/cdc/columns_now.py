"""A planned table as its log calls its columns by now. Pure.

Servers that know a column by its name alone cannot tell whether it is the one that was planned: it may have been
renamed, or dropped, and another one made under its name. The log knows columns by a number of their own. So what was
planned is read under the names, and in the types, that the log has last, and given as it was planned. Who reads checks
afterwards, at the place that he reads at, that the log has called the columns so up to there (:func:`check_columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from headwater.sources.errors import SnapshotExpired
from headwater.sources.table import FIELD_ID, SourceColumn, SourceTable


def columns_now(table: SourceTable, schema: pa.Schema) -> SourceTable:
    """*table* with the names and types that *schema*, that of its log, has for its columns."""
    now = _by_number(schema)
    columns = tuple(
        column if column.dropped else now.get(column.field_id, replace(column, dropped=True))
        for column in table.columns
    )
    names = {was.name: column.name for was, column in zip(table.columns, columns, strict=True)}
    return replace(table, columns=columns, key_columns=tuple(names[name] for name in table.key_columns))


def names_now(table: SourceTable, now: SourceTable, columns: Sequence[str] | None) -> list[str] | None:
    """*columns* of *table* as *now* calls them."""
    if columns is None:
        return None
    names = {was.name: column.name for was, column in zip(table.columns, now.columns, strict=True)}
    return [names[name] for name in columns]


def as_planned(rows: pa.RecordBatch, table: SourceTable, columns: Sequence[str] | None) -> pa.RecordBatch:
    """*rows*, read as :func:`columns_now` told, as rows of *table*."""
    wanted = table.schema if columns is None else pa.schema([table.schema.field(name) for name in columns])
    arrays = [column.cast(field.type) for column, field in zip(rows.columns, wanted, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def check_columns(table: SourceTable, schema: pa.Schema) -> None:
    """Whether *schema*, that of the log at the place where rows are read, has the columns of *table* by their names.

    :raises SnapshotExpired: one was dropped or renamed meanwhile.
    """
    now = _by_number(schema)
    for column in table.columns:
        found = now.get(column.field_id)
        if not column.dropped and (found is None or found.name != column.name or found.type != column.type):
            raise SnapshotExpired(
                f"Column {column.name!r} of table {table.full_name} was dropped or changed since it was planned.",
                next_step="Take a new snapshot.",
            )


def _by_number(schema: pa.Schema) -> dict[int, SourceColumn]:
    fields = [field for field in schema if field.metadata and FIELD_ID in field.metadata]
    columns = [SourceColumn.of_field(field) for field in fields]
    return {column.field_id: column for column in columns if not column.dropped}
