"""From the server's text to typed Arrow columns: exact or refused, column by column.

The stream (:mod:`~headwater.sources.postgres.decoder`) and the snapshot (:mod:`~headwater.sources.postgres.csv`) give
the same text, and both come through here, so a value is the same whichever way it came.

A column is first cast as a whole. Only where that fails are *special values* looked for: values that are legal in
Postgres and have no equal in the Arrow type. The column's policy says what becomes of them. What is left then is no
value of the type at all, and always an error.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.sources.errors import InvalidKey, SpecialValue, UndecodableValue
from headwater.sources.postgres.array_text import ArrayState, split_arrays
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues

_INFINITE_OR_FAR: Final = (
    (r"^-?infinity$", "infinite dates or times"),
    (r" BC$|^\d{5,}-", "dates outside the years 1 to 9999"),
)
_NOT_A_NUMBER: Final = ((r"^(NaN|-?Infinity)$", "NaN or infinite numbers"),)
_END_OF_DAY: Final = ((r"^24:00:00$", "the time 24:00"),)
_DIMENSIONS: Final = re.compile(r"(?:.*\.)?\"?(?:vector|halfvec)\"?\((\d+)\)")


def convert_columns(table: SourceTable, texts: Sequence[pa.StringArray]) -> list[pa.Array]:
    """The typed columns of *table*, from its columns as text.

    :raises SpecialValue: see :func:`convert_column`.
    :raises UndecodableValue: see :func:`convert_column`.
    """
    return [convert_column(table, column, text) for column, text in zip(table.columns, texts, strict=True)]


def convert_column(table: SourceTable, column: SourceColumn, text: pa.StringArray) -> pa.Array:
    """One typed column, from text.

    :raises SpecialValue: the policy is ``stop`` and there is a value that the Arrow type does not have.
    :raises InvalidKey: a key column has a value that is none, or a null although it has none in the source.
    :raises UndecodableValue: a value is none of the type.
    """
    typed = _typed(_Place(table, column), column.type, text)
    if typed.null_count and not column.nullable and column.name in table.key_columns:
        raise InvalidKey(table.full_name, column.name, column.source_type, "a key is null.")
    return typed


@dataclass(frozen=True, slots=True)
class _Place:
    """Whose values these are, for errors and for the policy."""

    table: SourceTable
    column: SourceColumn

    def undecodable(self, reason: str) -> UndecodableValue:
        is_key = self.column.name in self.table.key_columns
        error = InvalidKey if is_key else UndecodableValue
        return error(self.table.full_name, self.column.name, self.column.source_type, reason)

    def without(self, text: pa.StringArray, special: Any, values: str) -> pa.StringArray:
        """*text* with nulls where *special* is true.

        :raises SpecialValue: the policy does not want that.
        """
        if not self.column.special_values.makes_null:
            raise SpecialValue(self.table.full_name, self.column.name, self.column.source_type, values)
        return pc.if_else(special, pa.scalar(None, pa.string()), text)


def _typed(place: _Place, kind: pa.DataType, text: pa.StringArray) -> pa.Array:
    if pa.types.is_string(kind):
        _check_dimensions(place, text)
        return text
    if pa.types.is_list(kind):
        return _lists(place, kind, text)
    parsed = _parsed(kind, text)
    if parsed is not None:
        return parsed
    for pattern, values in _special_values_of(kind):
        special = pc.fill_null(pc.match_substring_regex(text, pattern), False)
        if pc.any(special).as_py():
            text = place.without(text, special, values)
    parsed = _parsed(kind, text)
    if parsed is None:
        raise place.undecodable("a value is none of its type.")
    return parsed


def _parsed(kind: pa.DataType, text: pa.StringArray) -> pa.Array | None:
    """The values, or ``None`` where one is none of *kind*. Arrow's own error would show it."""
    try:
        if pa.types.is_boolean(kind):
            return _booleans(text)
        if pa.types.is_binary(kind):
            return _bytes(text)
        if pa.types.is_time64(kind):
            moments = pc.binary_join_element_wise(pa.scalar("1970-01-01"), text, pa.scalar(" "))
            return moments.cast(pa.timestamp("us")).view(kind)
        return text.cast(kind)
    except (pa.ArrowInvalid, binascii.Error):
        return None


def _special_values_of(kind: pa.DataType) -> tuple[tuple[str, str], ...]:
    if pa.types.is_decimal(kind):
        return _NOT_A_NUMBER
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return _INFINITE_OR_FAR
    return _END_OF_DAY if pa.types.is_time(kind) else ()


def _booleans(text: pa.StringArray) -> pa.BooleanArray:
    true, false = pc.equal(text, "t"), pc.equal(text, "f")
    if true.true_count + false.true_count != len(text) - text.null_count:
        raise pa.ArrowInvalid("neither t nor f")
    return true


def _bytes(text: pa.StringArray) -> pa.BinaryArray:
    """The bytes of ``\\x0123…``, all values in one go."""
    if not pc.all(pc.starts_with(text, "\\x")).as_py() and text.null_count < len(text):
        raise pa.ArrowInvalid("not in hex format")
    digits = pc.binary_replace_slice(text.cast(pa.binary()), start=0, stop=2, replacement=b"")
    offsets = np.frombuffer(digits.buffers()[1], np.int32)[digits.offset : digits.offset + len(digits) + 1]
    if (offsets & 1).any():
        raise pa.ArrowInvalid("half a byte")
    data = digits.buffers()[2]
    whole = binascii.unhexlify(b"" if data is None else memoryview(data)[offsets[0] : offsets[-1]])
    places = (offsets - offsets[0]) // 2
    validity = pc.is_valid(digits).buffers()[1] if digits.null_count else None
    return pa.Array.from_buffers(
        pa.binary(), len(digits), [validity, pa.py_buffer(places.astype(np.int32)), pa.py_buffer(whole)]
    )


def _lists(place: _Place, kind: pa.DataType, text: pa.StringArray) -> pa.ListArray:
    offsets, states, elements = split_arrays(text)
    if (states == ArrayState.SPECIAL).any():
        text = place.without(
            text, pa.array(states == ArrayState.SPECIAL), "arrays of several dimensions or with bounds"
        )
    if (states == ArrayState.MALFORMED).any():
        raise place.undecodable("a value is no array.")
    values = _typed(place, kind.value_type, elements)
    if place.column.special_values is SpecialValues.PARK and values.null_count > elements.null_count:
        text = pc.if_else(_with_one(offsets, pc.and_(values.is_null(), elements.is_valid())), None, text)
    nulls = pc.is_null(text) if text.null_count else None
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=nulls)


def _with_one(offsets: pa.Int32Array, elements: pa.BooleanArray) -> pa.BooleanArray:
    """Which arrays have an element for which *elements* is true."""
    counts = np.concatenate(([0], np.cumsum(elements.to_numpy(zero_copy_only=False))))
    ends = offsets.to_numpy(zero_copy_only=False)
    return pa.array(counts[ends[1:]] > counts[ends[:-1]])


def _check_dimensions(place: _Place, text: pa.StringArray) -> None:
    """A vector column with a dimension has that many numbers in each value."""
    declared = _DIMENSIONS.fullmatch(place.column.source_type)
    if declared is None:
        return
    commas = pc.count_substring(text, ",")
    if pc.any(pc.not_equal(commas, int(declared[1]) - 1)).as_py():
        raise place.undecodable("a vector has another number of dimensions than its type.")
