"""Sink types: the Arrow types that tables of files hold, and how values get there and back. Pure.

===================================  =======================================================
a source's column                    in Delta and Parquet
===================================  =======================================================
bool, int8 … int64, float32/64       the same
uint8, uint16, uint32                int16, int32, int64
uint64                               decimal(20, 0)
float16                              float32
decimal up to 38 digits              the same, as decimal128
decimal of more digits               exact text
string, large string, views          string
binary, large, fixed size, uuid      binary
date32, date64                       date32
timestamp s, ms, us                  timestamp us; with a zone it is UTC, without one the wall clock
timestamp ns, time                   exact text
duration                             int64, the number of its units
list, struct, map                    the same, of these types
null                                 string
===================================  =======================================================

What has no row here is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.types as pt

from headwater.sinks.errors import SinkSchemaError
from headwater.sources.table import SourceTable
from headwater.versioned.fitting import cast

T = TypeVar("T", pa.Table, pa.RecordBatch)

MAX_DIGITS: Final = 38
FORBIDDEN: Final = frozenset(" ,;{}()\n\t=")
"""Characters that a column name may not have in Delta tables without column mapping."""

_UNSIGNED = {8: pa.int16(), 16: pa.int32(), 32: pa.int64(), 64: pa.decimal128(20, 0)}


def sink_type(kind: pa.DataType) -> pa.DataType | None:
    """The type of the table above; ``None`` where there is none."""
    if pt.is_dictionary(kind):
        return sink_type(kind.value_type)
    if pt.is_unsigned_integer(kind):
        return _UNSIGNED[kind.bit_width]
    if pt.is_boolean(kind) or pt.is_integer(kind) or pt.is_float32(kind) or pt.is_float64(kind):
        return kind
    if pt.is_float16(kind):
        return pa.float32()
    if pt.is_decimal(kind):
        fits = kind.precision <= MAX_DIGITS and 0 <= kind.scale <= kind.precision
        return pa.decimal128(kind.precision, kind.scale) if fits else pa.string()
    if pt.is_string(kind) or pt.is_large_string(kind) or kind == pa.string_view() or pt.is_null(kind):
        return pa.string()
    if pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind) or kind == pa.binary_view():
        return pa.binary()
    if getattr(kind, "extension_name", None) == "arrow.uuid":
        return pa.binary()
    return _time_type(kind) or _nested_type(kind)


def _time_type(kind: pa.DataType) -> pa.DataType | None:
    if pt.is_date(kind):
        return pa.date32()
    if pt.is_timestamp(kind):
        return pa.string() if kind.unit == "ns" else pa.timestamp("us", tz="UTC" if kind.tz else None)
    if pt.is_time(kind):
        return pa.string()
    return pa.int64() if pt.is_duration(kind) else None


def _nested_type(kind: pa.DataType) -> pa.DataType | None:
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        inner = sink_type(kind.value_type)
        return inner and pa.list_(pa.field("element", inner))
    if pt.is_map(kind):
        key, item = sink_type(kind.key_type), sink_type(kind.item_type)
        return pa.map_(key, item) if key and item else None
    if pt.is_struct(kind):
        inner_types = [(field, sink_type(field.type)) for field in kind]
        if all(found is not None for _, found in inner_types):
            return pa.struct([pa.field(field.name, found) for field, found in inner_types])
    return None


def sink_schema(table: SourceTable) -> pa.Schema:
    """The columns that *table* has in a sink of files; all of them nullable, with their metadata.

    :raises SinkSchemaError: a type that has no such type, a name that it cannot have, or two that differ in case only.
    """
    fields: list[pa.Field] = []
    names: set[str] = set()
    for column in table.columns:
        kind = sink_type(column.type)
        if kind is None:
            raise SinkSchemaError(
                table.full_name,
                f"column {column.name!r} has type {column.type}, which files of this sink cannot hold.",
                next_step="Leave the column out of the capture.",
            )
        if FORBIDDEN.intersection(column.name) or not column.name:
            raise SinkSchemaError(
                table.full_name,
                f"column {column.name!r} has a character in its name that no column can have there.",
                next_step="Rename the column, or leave it out of the capture.",
            )
        if column.name.lower() in names:
            raise SinkSchemaError(
                table.full_name,
                f"column {column.name!r} differs from another one in upper and lower case only.",
                next_step="Rename the column, or leave it out of the capture.",
            )
        names.add(column.name.lower())
        metadata = {name.decode(): value.decode() for name, value in (column.field.metadata or {}).items()}
        fields.append(pa.field(column.name, kind, metadata=metadata))
    return pa.schema(fields)


def conform(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """*rows* with exactly the columns and types of *schema*; columns that they lack are null, others are left out."""
    columns = [
        cast(rows.column(field.name), field.type)
        if field.name in rows.schema.names
        else pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def array_of(values: Any) -> Any:
    """*values*, a column of a table or an array, as one array."""
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def by_bytes(rows: Iterable[T], most: int) -> Iterator[list[T]]:
    """*rows* (tables or batches) that are not empty, in groups of about *most* bytes."""
    group: list[T] = []
    size = 0
    for one in rows:
        if one.num_rows:
            group.append(one)
            size += one.nbytes
        if size >= most:
            yield group
            group, size = [], 0
    if group:
        yield group
