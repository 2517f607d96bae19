"""RowFormat: rows of a prepared statement's result, as the server sends them, to Arrow batches.

The binary protocol sends numbers and times as they are, so nothing is lost on the way: the text of a ``float`` has six
digits. Compiled code writes values into Arrow's buffers (``_rows.c``); without it :mod:`.python_rows` does the same.
Values are those that the decoder of the log gives for the same bytes of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from headwater import compiled
from headwater.sources.errors import InvalidKey, SourceProtocolError, SpecialValue, UndecodableValue
from headwater.sources.mysql.names import quoted
from headwater.sources.mysql.types import BINARIES, GEOMETRIES, TEXTS, MySqlType
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues


class Wire(IntEnum):
    """How a value is sent; the numbers are those of the compiled code."""

    INT1 = 0
    INT2 = 1
    INT4 = 2
    INT8 = 3
    REAL4 = 4
    REAL8 = 5
    DATETIME = 6
    TIME = 7
    COUNTED = 8


class Kind(IntEnum):
    """What a value becomes; the numbers are those of the compiled code."""

    SIGNED = 0
    UNSIGNED = 1
    REAL = 2
    DATE = 3
    TIMESTAMP = 4
    DAYTIME = 5
    DURATION = 6
    DECIMAL = 7
    BOOL = 8
    BYTES = 9


SEEN_ZERO: Final = 1
SEEN_FAR: Final = 2
SEEN_UNFIT: Final = 4
SEEN_ODD: Final = 8

ROWS_MORE: Final = 0
ROWS_LAST: Final = 1
ROWS_LONG: Final = 2
"""Why a block ended: it did; a packet that is no row follows; a row of several packets follows."""

_WIRES: Final = {
    1: Wire.INT1,
    2: Wire.INT2,
    3: Wire.INT4,
    4: Wire.REAL4,
    5: Wire.REAL8,
    7: Wire.DATETIME,
    8: Wire.INT8,
    9: Wire.INT4,
    10: Wire.DATETIME,
    11: Wire.TIME,
    12: Wire.DATETIME,
    13: Wire.INT2,
}
"""By the type in the description of a column; all others come with their length."""
_UNSIGNED: Final = 32
_NUMBERS: Final = (Wire.INT1, Wire.INT2, Wire.INT4, Wire.INT8)
_SRID_BYTES: Final = 4

Column = tuple[Any, Any, Any, int, int]


class Decoder(Protocol):
    """The compiled code, or what stands in for it."""

    def decode(
        self, block: bytes | bytearray | memoryview, size: int, columns: bytes, allocate: Callable[[int], Any], /
    ) -> tuple[int, int, int, list[Column]]: ...

    def walk(self, block: bytes | bytearray | memoryview, start: int, size: int, /) -> tuple[int, int]: ...


def decoder() -> Decoder:
    """The compiled code, where it was built and is wanted."""
    if compiled.is_wanted():
        try:
            from headwater.sources.mysql import _rows

            return _rows
        except ImportError:
            pass
    from headwater.sources.mysql import python_rows

    return python_rows


class RowFormat:
    """Rows of *columns* of *table*.

    :param sent: type and flags of each column of the result, as its description has them.
    :raises SourceProtocolError: a column is sent as something that its type does not have.
    """

    def __init__(self, table: SourceTable, columns: Sequence[SourceColumn], sent: Sequence[tuple[int, int]]) -> None:
        self._table, self._columns = table, tuple(columns)
        self._schema = pa.schema([column.field for column in columns])
        self.decoder = decoder()
        self._described = b"".join(self._describe(column, *one) for column, one in zip(columns, sent, strict=True))

    @staticmethod
    def selected(columns: Sequence[SourceColumn]) -> str:
        """What is selected."""
        return ", ".join(_selected(column) for column in columns) or "NULL"

    def batch(self, block: bytes | bytearray | memoryview, size: int) -> pa.RecordBatch | None:
        """The whole rows at the beginning of *block*; ``None``: there is none.

        :param size: how many bytes of *block* are filled; -1: it is one row without a packet.
        :raises SpecialValue: a value that the column's Arrow type does not have.
        :raises SourceProtocolError: these are no rows of these columns.
        """
        try:
            _, rows, _, made = self.decoder.decode(block, size, self._described, pa.allocate_buffer)
        except ValueError as error:
            raise SourceProtocolError(
                f"The rows of table {self._table.full_name} are none of its {len(self._columns)} columns: {error}.",
                next_step="Look whether the table was changed meanwhile, and take the snapshot again.",
            ) from None
        if not rows:
            return None
        arrays = [self._array(column, rows, *one) for column, one in zip(self._columns, made, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(
        self, column: SourceColumn, rows: int, validity: Any, values: Any, data: Any, nulls: int, seen: int
    ) -> pa.Array:
        if column.dropped:
            return pa.nulls(rows, column.type)
        if seen:
            _judge(self._table, column, seen)
        if nulls and column.name in self._table.key_columns:
            raise InvalidKey(self._table.full_name, column.name, column.source_type, "a key is null.")
        buffers = [validity, values] if data is None else [validity, values, data]
        made = pa.Array.from_buffers(column.type, rows, buffers, nulls)
        if MySqlType.parse(column.source_type).name in GEOMETRIES:
            # not binary_slice: it fails where all values are null
            made = pc.binary_replace_slice(made, start=0, stop=_SRID_BYTES, replacement=b"")
        return made

    def _describe(self, column: SourceColumn, sent: int, flags: int) -> bytes:
        wire = _WIRES.get(sent, Wire.COUNTED)
        if column.dropped:
            return bytes((wire, Kind.BYTES, 0, 0))
        made = _made(column.type, wire, bool(flags & _UNSIGNED))
        if made is None:
            raise SourceProtocolError(
                f"Column {column.name!r} of table {self._table.full_name} is sent as type {sent}, which"
                f" {column.source_type} is not.",
                next_step="Look whether the table was changed meanwhile, and take the snapshot again.",
            )
        return bytes((wire, *made))


def _selected(column: SourceColumn) -> str:
    if column.dropped:
        return "NULL"
    name = quoted(column.name)
    kind = MySqlType.parse(column.source_type).name
    if column.special_values is SpecialValues.TEXT and kind not in TEXTS | BINARIES | GEOMETRIES:
        # zeros that only fill a number are no part of it
        return f"CAST({name} + 0 AS CHAR)" if kind.endswith("int") else f"CAST({name} AS CHAR)"
    return name


def _made(kind: pa.DataType, wire: Wire, unsigned: bool) -> tuple[int, int, int] | None:
    """Kind, width and scale of what a value becomes; ``None``: it cannot."""
    if pa.types.is_integer(kind) and wire in _NUMBERS:
        return (Kind.UNSIGNED if unsigned else Kind.SIGNED, kind.bit_width // 8, 0)
    if pa.types.is_floating(kind) and wire in (Wire.REAL4, Wire.REAL8):
        return (Kind.REAL, kind.bit_width // 8, 0) if (wire is Wire.REAL4) == (kind == pa.float32()) else None
    if pa.types.is_boolean(kind) and wire in (Wire.INT1, Wire.COUNTED):
        return (Kind.BOOL, 0, 0)
    if pa.types.is_decimal(kind) and wire is Wire.COUNTED:
        return (Kind.DECIMAL, kind.bit_width // 8, kind.scale)
    if wire is Wire.DATETIME and pa.types.is_date32(kind):
        return (Kind.DATE, 4, 0)
    if wire is Wire.DATETIME and pa.types.is_timestamp(kind):
        return (Kind.TIMESTAMP, 8, 0)
    if wire is Wire.TIME and pa.types.is_time64(kind):
        return (Kind.DAYTIME, 8, 0)
    if wire is Wire.TIME and pa.types.is_duration(kind):
        return (Kind.DURATION, 8, 0)
    if wire is Wire.COUNTED and (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return (Kind.BYTES, 0, 0)
    return None


def _judge(table: SourceTable, column: SourceColumn, seen: int) -> None:
    """Values became null that the type does not have: whether that was wanted.

    :raises SpecialValue: it was not. :raises UndecodableValue: a value is none of its type.
    """
    if seen & SEEN_UNFIT:
        raise UndecodableValue(table.full_name, column.name, column.source_type, "a value is none of the type.")
    if column.special_values.makes_null:
        return
    found = "zero or partial dates" if seen & SEEN_ZERO else "times below 0 or from 24 hours on"
    if seen & SEEN_ODD:
        found = "other numbers than 0 and 1"
    raise SpecialValue(table.full_name, column.name, column.source_type, found)
