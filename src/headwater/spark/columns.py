"""The columns of a DataFrame: which they are, whether they can be had, and where a task finds each.

A column that was discovered carries the field id of the source in its metadata, so it is found again under another
name, and what came later is told from what was left out on purpose. The ids of one table mean nothing in another, nor
in one that was made anew under its name: there columns go by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql import types as st

from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN, SourceTable
from headwater.spark.errors import TableChanged, UnsupportedSchema
from headwater.spark.options import ALL_COLUMNS
from headwater.spark.types import is_exact, spark_type

CHANGE_TYPE_COLUMN: Final = "_change_type"
COMMIT_VERSION_COLUMN: Final = "_commit_version"

ADDED: Final[Mapping[str, st.DataType]] = {
    CHANGE_TYPE_COLUMN: st.StringType(),
    COMMIT_VERSION_COLUMN: st.LongType(),
    COMMIT_TIMESTAMP_COLUMN: st.TimestampType(),
    UNAVAILABLE_COLUMN: st.StringType(),
}
"""The columns that we add after the table's own."""

ON_DEMAND: Final[Mapping[str, st.DataType]] = {POSITION_COLUMN: st.BinaryType()}
"""Columns that are there when they are asked for by name: the place in the commit order, in bytes that sort as it."""

_OURS: Final = {**ADDED, **ON_DEMAND}
_FIELD_ID: Final = "headwater.field_id"
_TABLE: Final = "headwater.table"
_SOURCE_ID: Final = "headwater.source_id"


def discovered(table: SourceTable, wanted: tuple[str, ...] | None) -> st.StructType:
    """The columns of *table* and those that we add; or what was *wanted*.

    :raises UnsupportedSchema: there is no such column, one twice, or one of a type that Spark has not.
    """
    own = [column.name for column in table.columns]
    names = [*own, *ADDED] if wanted is None else []
    for name in wanted or ():
        names += own if name == ALL_COLUMNS else [name]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UnsupportedSchema(f"Column {twice!r} was asked for twice.", next_step="Name it once.")
    return st.StructType([_field(table, name) for name in names])


def _field(table: SourceTable, name: str) -> st.StructField:
    if name in _OURS:
        return st.StructField(name, _OURS[name])
    _require(table, name)
    column = table.column(name)
    try:
        kind = spark_type(column.type)
        told = {_FIELD_ID: column.field_id, _TABLE: table.full_name, _SOURCE_ID: table.source_id or 0}
        return st.StructField(name, kind, metadata=told)
    except UnsupportedSchema as error:
        message = f"Column {name!r} ({column.source_type}): {error.message}"
        raise UnsupportedSchema(message, next_step=error.next_step) from None


def _require(table: SourceTable, name: str) -> None:
    if name not in table.schema.names:
        raise UnsupportedSchema(
            f"Table {table.full_name} has no column {name!r}.",
            next_step=f"It has {', '.join(table.schema.names)}; we add {', '.join(_OURS)}.",
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of one DataFrame.

    :ivar ids: of each column, the field id; ``None`` for those that we add.
    :ivar source_id: of the table whose ids they are.
    :ivar follows: all columns of the table were taken as they were found: others that come matter.
    """

    schema: st.StructType
    ids: tuple[int | None, ...]
    source_id: int | None
    follows: bool

    @classmethod
    def of(cls, schema: st.StructType, table: SourceTable, wanted: tuple[str, ...] | None) -> Columns:
        """*schema* as Spark gives it to a reader: discovered, or declared by the user.

        :raises UnsupportedSchema: it names a column that *table* has not, or a type that does not have all its values.
        """
        own = [field for field in schema if field.name not in _OURS]
        is_discovered = bool(own) and all(field.metadata.get(_TABLE) == table.full_name for field in own)
        is_whole = ADDED.keys() <= set(schema.names) if wanted is None else ALL_COLUMNS in wanted
        ids = tuple(_checked(field, table) for field in schema)
        return cls(schema, ids, table.source_id, is_discovered and is_whole)

    def places(self, table: SourceTable, *, stops: bool) -> tuple[str | None, ...]:
        """For each column, under which name *table* has it; ``None`` where it has not, or we add it.

        :param table: the table at some epoch, which may have changed since the DataFrame was made.
        :param stops: a change is an error.
        :raises TableChanged: it changed, and *stops*; or a value would not fit.
        """
        known = {column.field_id: column for column in table.columns}
        ids = self.ids
        if table.source_id != self.source_id:
            by_name = {column.name: column.field_id for column in table.columns}
            ids = tuple(None if field.name in _OURS else by_name.get(field.name) for field in self.schema)
        found: list[str | None] = []
        for field, number in zip(self.schema, ids, strict=True):
            column = None if number is None else known.get(number)
            found.append(None if column is None else column.name)
            if column is None:
                continue
            if stops and self.follows and column.name != field.name:
                raise _changed(table, f"column {field.name!r} is called {column.name!r} now")
            if not is_exact(spark_type(column.type), field.dataType):
                raise _changed(table, f"column {field.name!r} has type {column.source_type} now")
        if stops and self.follows:
            new = [c.name for c in table.columns if c.field_id not in ids and not c.dropped]
            if new:
                raise _changed(table, f"it has a new column {new[0]!r}")
        return tuple(found)


def _checked(field: st.StructField, table: SourceTable) -> int | None:
    """The field id of a column, which can be given as it was declared."""
    wanted = _OURS.get(field.name)
    if wanted is not None:
        _require_exact(field, wanted)
        return None
    told = field.metadata
    if (told.get(_TABLE), told.get(_SOURCE_ID)) == (table.full_name, table.source_id or 0):
        return int(told[_FIELD_ID])  # found by ourselves: if it has changed since, the first batch says so
    _require(table, field.name)
    column = table.column(field.name)
    _require_exact(field, spark_type(column.type))
    if not field.nullable and field.name not in table.key_columns:
        raise UnsupportedSchema(
            f"Column {field.name!r} was declared NOT NULL; a deleted row may be known by its key alone.",
            next_step="Declare it nullable.",
        )
    return column.field_id


def _require_exact(field: st.StructField, natural: st.DataType) -> None:
    if not is_exact(natural, field.dataType):
        raise UnsupportedSchema(
            f"Column {field.name!r} was declared {field.dataType.simpleString()}, which does not have all its values.",
            next_step=f"Declare it {natural.simpleString()}, and cast it afterwards.",
        )


def _changed(table: SourceTable, what: str) -> TableChanged:
    return TableChanged(
        f"Table {table.full_name} changed since the DataFrame was made: {what}.",
        next_step="Load it again and start the query with the same checkpoint: it goes on with the new columns. "
        "To go on with the old ones, set option onSchemaChange=ignore, or name the columns.",
    )
