"""Values: the columns of an answer (:mod:`.answer`) as columns of a table. Pure.

What is asked for (:func:`~headwater.sources.sqlserver.types.selected`) comes as whole numbers, doubles, texts and
bytes; here they become what the column is, or are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.sources.errors import BrokenText, InvalidKey, SpecialValue, UndecodableValue
from headwater.sources.sqlserver.answer import HalfPair
from headwater.sources.sqlserver.types import TIMES, SqlType, Ticks
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues


def column_of(table: SourceTable, column: SourceColumn, values: pa.Array, ticks: Ticks) -> pa.Array:
    """The values of *column* of *table*.

    :raises SpecialValue: by policy. :raises InvalidKey: a key is null. :raises UndecodableValue: no value of its type.
    """
    kind = SqlType.parse(column.source_type)
    try:
        if kind.name in TIMES and not pa.types.is_string(column.type):
            made = _times(table, column, kind, values.cast(pa.int64()), ticks)
        elif pa.types.is_floating(column.type):  # a number of the server's narrower type is told in the wider one
            made = values.cast(column.type, safe=False)
        elif values.type != column.type:
            made = values.cast(column.type)
        else:
            made = values
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # whose text shows the value
        raise UndecodableValue(
            table.full_name, column.name, column.source_type, "a value is none of its type."
        ) from None
    if made.null_count and column.name in table.key_columns:
        raise InvalidKey(table.full_name, column.name, column.source_type, "a key is null.")
    return made


def forgiven_texts(table: SourceTable, asked: Sequence[SourceColumn | None]) -> frozenset[int]:
    """The places of the columns of an answer whose texts are null where they are no Unicode, by policy."""
    return frozenset(
        place
        for place, column in enumerate(asked)
        if column is not None and column.special_values is SpecialValues.NULL and column.name not in table.key_columns
    )


@contextmanager
def broken_texts_named(table: SourceTable, asked: Sequence[SourceColumn | None]) -> Iterator[None]:
    """Who reads columns of *table* is told which one has texts that are no Unicode.

    :param asked: the columns of the answer. :raises BrokenText: instead of :class:`HalfPair`.
    """
    try:
        yield
    except HalfPair as error:
        column = asked[error.place] if error.place < len(asked) else None
        if column is None:
            raise
        is_key = column.name in table.key_columns
        raise BrokenText(table.full_name, column.name, column.source_type, is_key=is_key) from None


def _times(table: SourceTable, column: SourceColumn, kind: SqlType, numbers: pa.Int64Array, ticks: Ticks) -> pa.Array:
    """Days, microseconds, or ticks of 100 ns as a date or time."""
    if kind.name == "date":
        return numbers.cast(pa.int32()).cast(column.type)
    if not kind.has_ticks:
        return numbers.cast(column.type)
    if column.type.unit == "ns":
        return _checked(table, column, kind, numbers, (1 << 63) // 100).cast(column.type)
    flat = numbers.fill_null(0).to_numpy()
    whole, rest = np.divmod(flat, 10)
    if ticks is not Ticks.TRUNCATE and rest.any():
        is_special = pa.array(rest != 0)
        numbers = _without(table, column, numbers, is_special, "digits below the microsecond")
    return pa.array(whole, pa.int64(), mask=numbers.is_null().to_numpy(zero_copy_only=False)).cast(column.type)


def _checked(table: SourceTable, column: SourceColumn, kind: SqlType, numbers: pa.Int64Array, limit: int) -> pa.Array:
    """Ticks as nanoseconds, where they fit."""
    outside = pc.or_(pc.greater_equal(numbers, limit), pc.less(numbers, -limit)).fill_null(False)
    if pc.any(outside).as_py():
        numbers = _without(table, column, numbers, outside, "times before 1677 or after 2262")
    return pc.multiply_checked(numbers, 100)


def _without(
    table: SourceTable, column: SourceColumn, numbers: pa.Int64Array, special: pa.BooleanArray, what: str
) -> pa.Int64Array:
    if not column.special_values.makes_null or column.name in table.key_columns:
        raise SpecialValue(table.full_name, column.name, column.source_type, what)
    return pc.if_else(special, pa.scalar(None, pa.int64()), numbers)


def texts_of(values: pa.Array) -> pa.StringArray:
    """The values of a key column as cuts have their texts (:mod:`.key_columns`)."""
    kind = values.type
    if pa.types.is_string(kind):
        return values
    if pa.types.is_binary(kind):
        return pa.array([value.hex().upper() for value in values.to_pylist()], pa.string())
    if pa.types.is_floating(kind):
        return pa.array([repr(value) for value in values.cast(pa.float64()).to_pylist()], pa.string())
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        plain = texts_of(values.cast(pa.timestamp(kind.unit)))
        return pc.binary_join_element_wise(plain, "+00:00", " ")
    texts = values.cast(pa.string())
    if (pa.types.is_timestamp(kind) or pa.types.is_time64(kind)) and kind.unit == "ns":
        return pc.utf8_slice_codeunits(texts, 0, -2)  # the server has seven digits, nanoseconds are nine
    return texts
