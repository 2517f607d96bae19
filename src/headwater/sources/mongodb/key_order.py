"""MongoKeyOrder: where keys lie between cuts, in the order that MongoDB has for values of any type. Pure.

A key column is bytes in that order, or of one type whose order is known. A cut may be of any type: types have an order
among them, so that one of another type lies before all keys or after all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from numpy.typing import NDArray

from headwater.sources.errors import UnsupportedTable
from headwater.sources.key_places import Digits, byte_ranks, key_places
from headwater.sources.mongodb.documents.key_order import id_key
from headwater.sources.mongodb.documents.types import Kind, column_type
from headwater.sources.mongodb.key_values import order_key, raw_id, value_of
from headwater.sources.splits import Cut
from headwater.sources.table import SourceTable

_CLASSES: Final = {
    Kind.INT: 0x0A,
    Kind.LONG: 0x0A,
    Kind.STRING: 0x0F,
    Kind.UUID: 0x1E,
    Kind.OBJECT_ID: 0x23,
    Kind.BOOL: 0x28,
    Kind.DATE: 0x2D,
    Kind.TIMESTAMP: 0x2F,
}
"""The first byte of the keys of each type, see :mod:`.documents.key_order`."""
_BEFORE, _AMONG, _AFTER = -1, 0, 1
_INT64: Final = (-(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class MongoKeyOrder:
    """The order of the keys of one table. :param kind: of its key column."""

    kind: Kind

    @classmethod
    def of(cls, table: SourceTable) -> MongoKeyOrder:
        """:raises UnsupportedTable: its keys are of a type whose order is not known."""
        column = table.column(table.key_columns[0])
        kind = column_type(column).kind
        if kind is not Kind.KEY and kind not in _CLASSES:
            raise UnsupportedTable(
                table.full_name,
                f"the order of keys of type {column.source_type} is not known.",
                next_step='Declare _id = "key" for it, or leave _id out of its columns.',
            )
        return cls(kind)

    def places(self, keys: pa.RecordBatch, cuts: Sequence[Cut]) -> NDArray[np.int64]:
        """For each row of key columns: how many of the ascending *cuts* lie before it."""
        return key_places(keys, cuts, self._digits)

    def _digits(self, _place: int, keys: pa.Array, texts: list[str]) -> Digits:
        if self.kind is Kind.KEY:
            return byte_ranks(keys, pa.array([order_key(text) for text in texts], pa.binary()))
        own = _CLASSES[self.kind]
        sides: list[int] = []
        values: list[Any] = []
        for text in texts:
            found = id_key(raw_id(text))[0]
            side, value = (_AMONG, value_of(text)) if found == own else (_BEFORE if found < own else _AFTER, None)
            if side == _AMONG:
                side, value = _READ[self.kind](value)
            sides.append(side)
            values.append(value)
        digits: Digits = [(np.zeros(len(keys), np.int64), np.array(sides, np.int64))]
        return digits + self._inner(keys, values)

    def _inner(self, keys: pa.Array, values: list[Any]) -> Digits:
        if self.kind in (Kind.STRING, Kind.UUID, Kind.OBJECT_ID):
            return byte_ranks(keys, pa.array([value or "" for value in values], pa.string()))
        if self.kind in (Kind.INT, Kind.LONG):
            whole = np.array([0 if value is None else value[0] for value in values], np.int64)
            part = np.array([0 if value is None else value[1] for value in values], np.int64)
            numbers = keys.cast(pa.int64()).to_numpy(zero_copy_only=False)
            return [(numbers, whole), (np.zeros(len(keys), np.int64), part)]
        kind = np.uint64 if self.kind is Kind.TIMESTAMP else np.int64
        of_cuts = np.array([value or 0 for value in values], kind)
        return [(keys.cast(pa.from_numpy_dtype(kind)).to_numpy(zero_copy_only=False).astype(kind), of_cuts)]


def _number(value: Any) -> tuple[int, Any]:
    """The whole number at or below a value of any number type, and whether there is more to it."""
    number = value.to_decimal() if isinstance(value, Decimal128) else value
    if number != number:
        return _BEFORE, None
    if number in (math.inf, -math.inf, Decimal("Infinity"), Decimal("-Infinity")):
        return (_AFTER if number > 0 else _BEFORE), None
    whole = math.floor(number)
    if not _INT64[0] <= whole <= _INT64[1]:
        return (_AFTER if whole > 0 else _BEFORE), None
    return _AMONG, (whole, int(whole != number))


def _uuid(value: Any) -> tuple[int, Any]:
    """Bytes are ordered by their length, then by their subtype."""
    subtype = value.subtype if isinstance(value, Binary) else 0
    if (len(value), subtype) != (16, 4):
        return (_BEFORE if (len(value), subtype) < (16, 4) else _AFTER), None
    text = bytes(value).hex()
    return _AMONG, "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _date(value: Any) -> tuple[int, Any]:
    return _AMONG, int(value) if isinstance(value, DatetimeMS) else int(DatetimeMS(value))


_READ: Final[dict[Kind, Callable[[Any], tuple[int, Any]]]] = {
    Kind.INT: _number,
    Kind.LONG: _number,
    Kind.STRING: lambda value: (_AMONG, str(value)),
    Kind.UUID: _uuid,
    Kind.OBJECT_ID: lambda value: (_AMONG, str(value)),
    Kind.BOOL: lambda value: (_AMONG, int(value)),
    Kind.DATE: _date,
    Kind.TIMESTAMP: lambda value: (_AMONG, value.time << 32 | value.inc),
}
