"""Which Spark type an Arrow type takes, and batches that have exactly the columns that Spark was told.

=====================================  =======================================================================
Arrow                                  Spark
=====================================  =======================================================================
bool                                   boolean
int8, int16, int32, int64              tinyint, smallint, int, bigint
uint8, uint16, uint32                  smallint, int, bigint
uint64                                 decimal(20,0)
float16, float, double                 float, float, double
decimal up to 38 digits                decimal of the same digits
decimal above 38 digits                string: all digits, never an exponent
string, binary                         string, binary
date                                   date
time                                   string: ``HH:MM:SS.ffffff``, so that its order is that of the times
timestamp with a time zone             timestamp
timestamp without                      timestamp_ntz
timestamp in nanoseconds               string: Spark has microseconds
list, struct, map                      array, struct, map of these
=====================================  =======================================================================

All columns are nullable: a delete may know the key alone. Every value is exactly what the source has, or the type is
refused; :class:`Shape` makes the batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from inspect import signature
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyspark.sql import types as st

from headwater.sources.table import SourceTable
from headwater.spark.errors import UnsupportedSchema

MOST_DIGITS: Final = 38
ROWS_AT_LEAST: Final = 8192
ROWS_AT_MOST: Final = 32768
"""Of a batch for Spark: smaller ones cost, larger ones bring nothing."""
BYTES_AT_LEAST: Final = 8 << 20
"""A batch of so many bytes has rows enough: rows of megabytes would fill the memory before they are many."""

_SCALARS: Final[dict[pa.DataType, st.DataType]] = {
    pa.bool_(): st.BooleanType(),
    pa.int8(): st.ByteType(),
    pa.int16(): st.ShortType(),
    pa.int32(): st.IntegerType(),
    pa.int64(): st.LongType(),
    pa.uint8(): st.ShortType(),
    pa.uint16(): st.IntegerType(),
    pa.uint32(): st.LongType(),
    pa.uint64(): st.DecimalType(20, 0),
    pa.float16(): st.FloatType(),
    pa.float32(): st.FloatType(),
    pa.float64(): st.DoubleType(),
    pa.string(): st.StringType(),
    pa.large_string(): st.StringType(),
    pa.binary(): st.BinaryType(),
    pa.large_binary(): st.BinaryType(),
    pa.date32(): st.DateType(),
    pa.date64(): st.DateType(),
    pa.null(): st.StringType(),
}
_WIDTHS: Final[dict[type[st.DataType], int]] = {st.ByteType: 3, st.ShortType: 5, st.IntegerType: 10, st.LongType: 19}
"""Digits of the whole numbers of Spark, narrow to wide."""


def spark_type(kind: pa.DataType) -> st.DataType:
    """The Spark type of *kind*. :raises UnsupportedSchema: Spark has none that is exact."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if pt.is_decimal(kind):
        digits, scale = _digits(kind)
        return st.DecimalType(digits, scale) if digits <= MOST_DIGITS else st.StringType()
    if pt.is_timestamp(kind):
        if kind.unit == "ns":
            return st.StringType()
        return st.TimestampNTZType() if kind.tz is None else st.TimestampType()
    if pt.is_time(kind):
        return st.StringType()
    if pt.is_fixed_size_binary(kind):
        return st.BinaryType()
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return st.ArrayType(spark_type(kind.value_type))
    if pt.is_map(kind):
        return st.MapType(spark_type(kind.key_type), spark_type(kind.item_type))
    if pt.is_struct(kind):
        return st.StructType([st.StructField(field.name, spark_type(field.type)) for field in kind])
    raise UnsupportedSchema(f"Spark has no type for {kind}.", next_step="Leave the column out with option 'columns'.")


def spark_schema(table: SourceTable, columns: Sequence[str] | None = None) -> st.StructType:
    """The table's own columns as Spark has them; *columns*: only these, in this order.

    :raises UnsupportedSchema: one has a type that Spark has not; or there is no such column.
    """
    names = [column.name for column in table.columns] if columns is None else list(columns)
    fields = []
    for name in names:
        if name not in table.schema.names:
            raise UnsupportedSchema(
                f"Table {table.full_name} has no column {name!r}.",
                next_step=f"It has {', '.join(table.schema.names)}.",
            )
        fields.append(st.StructField(name, spark_type(table.column(name).type)))
    return st.StructType(fields)


def is_exact(natural: st.DataType, wanted: st.DataType) -> bool:
    """Whether each value of *natural* is a value of *wanted*, too."""
    if isinstance(natural, st.ArrayType) and isinstance(wanted, st.ArrayType):
        return wanted.containsNull and is_exact(natural.elementType, wanted.elementType)
    if natural == wanted:
        return True
    if type(natural) in _WIDTHS:
        digits = _WIDTHS[type(natural)]
        if type(wanted) in _WIDTHS:
            return _WIDTHS[type(wanted)] >= digits
        if isinstance(wanted, st.DecimalType):
            return wanted.precision - wanted.scale >= digits
        return isinstance(wanted, st.StringType)
    if isinstance(natural, st.DecimalType):
        if isinstance(wanted, st.DecimalType):
            whole = natural.precision - natural.scale
            return wanted.scale >= natural.scale and wanted.precision - wanted.scale >= whole
        return isinstance(wanted, st.StringType)
    if isinstance(natural, st.FloatType):
        return isinstance(wanted, st.DoubleType)
    return isinstance(natural, st.DateType) and isinstance(wanted, st.StringType)


def arrow_schema(schema: st.StructType) -> pa.Schema:
    """The Arrow schema that Spark wants batches of *schema* to have, to the letter."""
    from pyspark.sql.pandas.types import to_arrow_schema

    # before 4.2 there is no such argument, and time stamps are in UTC
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    return to_arrow_schema(schema, **zone)


class Shape:
    """Turns columns into batches of one Spark schema. It can be pickled."""

    def __init__(self, schema: st.StructType) -> None:
        self.schema = arrow_schema(schema)

    def batch(self, columns: Sequence[pa.Array | None], rows: int) -> pa.RecordBatch:
        """The columns in the order of the schema, cast; ``None``: a column of nulls."""
        made = [
            pa.nulls(rows, field.type) if column is None else converted(column, field.type)
            for column, field in zip(columns, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(made, schema=self.schema)


def converted(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """*column* with the Arrow type that Spark wants; the values stay what they are."""
    kind = column.type
    if kind.equals(wanted):
        return column
    if pt.is_string(wanted) and pt.is_decimal(kind):
        return _plain(pc.cast(column, wanted))
    if pt.is_list(wanted) and (pt.is_list(kind) or pt.is_large_list(kind)):
        return _converted_list(column, wanted)
    if pt.is_decimal(wanted) and pt.is_integer(kind):  # Arrow wants room for every digit of the type
        return pc.cast(pc.cast(column, pa.decimal128(MOST_DIGITS, 0)), wanted)
    return pc.cast(column, wanted)


def rebatched(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that Spark likes: small ones are joined, large ones cut. Empty ones are left out."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= ROWS_AT_LEAST or size >= BYTES_AT_LEAST:
            yield from _cut(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield from _cut(waiting)


def _cut(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    pieces = -(-whole.num_rows // ROWS_AT_MOST)
    size = -(-whole.num_rows // pieces)
    for start in range(0, whole.num_rows, size):
        yield whole.slice(start, size)


def _digits(kind: pa.DataType) -> tuple[int, int]:
    """Digits and scale as Spark counts them: no scale below zero."""
    return (kind.precision - kind.scale, 0) if kind.scale < 0 else (kind.precision, kind.scale)


def _plain(texts: pa.Array) -> pa.Array:
    """Numbers without exponents, which Arrow writes for small ones."""
    marked = pc.match_substring(texts, "E")
    if not pc.any(marked).as_py():
        return texts
    plain = [format(Decimal(text), "f") for text in texts.filter(marked).to_pylist()]
    return pc.replace_with_mask(texts, pc.fill_null(marked, False), pa.array(plain, texts.type))


def _converted_list(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    values = converted(column.flatten(), wanted.value_type)
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    mask = column.is_null() if column.null_count else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=wanted, mask=mask)
