"""RowLayout: how the values of a column lie in row events, and into which buffers they are decoded.

The Python decoder and the compiled one read the same layouts; the numbers here are those of ``_row_decoder.c``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.errors import SourceMisconfigured
from headwater.sources.mysql.binlog.table_map import BinlogColumn, ColumnType
from headwater.sources.mysql.charsets import BINARY, charset_of, is_utf8, single_byte_table
from headwater.sources.table import SpecialValues


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """What becomes of a column.

    :ivar column: its layout, with what is needed of sign, collation and labels filled in.
    :ivar type: the Arrow type; ``None``: skip it, it is not captured.
    :ivar source_type: its type as the server writes it (``int(10) unsigned``); MariaDB's ``uuid``, ``inet4`` and
        ``inet6`` are known by it alone.
    :ivar special_values: what becomes of values that :attr:`type` does not have.
    :ivar name: for errors.
    """

    column: BinlogColumn
    type: pa.DataType | None
    source_type: str
    special_values: SpecialValues = SpecialValues.STOP
    name: str = ""


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The columns of a table in the order of its row events. :ivar full_name: for errors."""

    full_name: str
    columns: tuple[ColumnPlan, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DecodedColumn:
    """The values of one column.

    :ivar values: of the type that the plan asks for.
    :ivar missing: which values the images did not have; ``None`` where none is.
    """

    values: pa.Array
    missing: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRows:
    """Rows in the order of the stream.

    :ivar ops: int8, :class:`~headwater.stream.Op` codes.
    :ivar transaction: uint64, what :meth:`RowsDecoder.add` was given.
    :ivar seq: uint32, number in the transaction.
    :ivar columns: by place in the table; ``None`` where the plan skips it.
    """

    ops: NDArray[np.int8]
    transaction: NDArray[np.uint64]
    seq: NDArray[np.uint32]
    columns: list[DecodedColumn | None]

    def __len__(self) -> int:
        return len(self.ops)


class Wire(IntEnum):
    """How a value lies in the event."""

    FIXED = 0  # a number, low byte first
    DECIMAL = 1
    BITS = 2  # a number, high byte first
    DATE = 3
    TIME = 4
    DATETIME = 5
    TIMESTAMP = 6
    TIME2 = 7
    DATETIME2 = 8
    TIMESTAMP2 = 9
    COUNTED = 10  # bytes with their number before them


class Output(IntEnum):
    """What becomes of it."""

    SKIP = 0
    NUMBER = 1
    YEAR = 2
    DECIMAL128 = 3
    DECIMAL256 = 4
    DECIMAL_TEXT = 5
    DAYS = 6
    DAYTIME = 7
    DURATION = 8
    MOMENT = 9
    TIME_TEXT = 10
    BYTES = 11
    PADDED = 12  # with zeros, which the server cuts off, up to the size of the type
    TRANSCODED = 13  # from a set of one byte per character to UTF-8
    JSON = 14
    WKB = 15


class RowLayout(NamedTuple):
    """One column.

    :ivar size: in bytes; of DECIMAL the digits, of times the digits of the fraction, of COUNTED the bytes of the count.
    :ivar width: bytes of a value in its buffer; 0: offsets and data.
    :ivar padded: to how many bytes.
    :ivar table: for TRANSCODED: per byte the number of its bytes in UTF-8, then three bytes.
    """

    wire: Wire
    size: int
    scale: int
    output: Output
    width: int
    signed: bool = False
    padded: int = 0
    table: bytes | None = None


_INTEGERS: Final = {
    ColumnType.TINY: (1, 1),
    ColumnType.SHORT: (2, 2),
    ColumnType.INT24: (3, 4),
    ColumnType.LONG: (4, 4),
    ColumnType.LONGLONG: (8, 8),
    ColumnType.FLOAT: (4, 4),
    ColumnType.DOUBLE: (8, 8),
}
_TEMPORAL: Final = {
    ColumnType.DATE: Wire.DATE,
    ColumnType.TIME: Wire.TIME,
    ColumnType.DATETIME: Wire.DATETIME,
    ColumnType.TIMESTAMP: Wire.TIMESTAMP,
    ColumnType.TIME2: Wire.TIME2,
    ColumnType.DATETIME2: Wire.DATETIME2,
    ColumnType.TIMESTAMP2: Wire.TIMESTAMP2,
}
_FRACTION: Final = re.compile(r"\([1-6]\)")
COUNTED_TEXT: Final = frozenset((ColumnType.VARCHAR, ColumnType.VARCHAR_COMPRESSED, ColumnType.STRING))


def wire_of(column: BinlogColumn) -> tuple[Wire, int, int]:
    """Wire, size and scale of a column."""
    kind = column.type
    if kind in _INTEGERS:
        return Wire.FIXED, _INTEGERS[kind][0], 0
    if kind in _TEMPORAL:
        return _TEMPORAL[kind], column.size, 0
    if kind is ColumnType.YEAR:
        return Wire.FIXED, 1, 0
    if kind in (ColumnType.ENUM, ColumnType.SET):
        return Wire.FIXED, column.size, 0
    if kind is ColumnType.NEWDECIMAL:
        return Wire.DECIMAL, column.size, column.scale
    if kind is ColumnType.BIT:
        return Wire.BITS, (column.size + 7) // 8, 0
    if kind in COUNTED_TEXT:
        return Wire.COUNTED, 1 if column.size < 256 else 2, 0
    return Wire.COUNTED, column.size, 0


def layout_of(plan: ColumnPlan) -> RowLayout:
    """The layout for a plan.

    :raises SourceMisconfigured: the table map does not tell enough of the column.
    """
    wire, size, scale = wire_of(plan.column)
    if wire in (Wire.TIME, Wire.DATETIME, Wire.TIMESTAMP) and _FRACTION.search(plan.source_type):
        raise SourceMisconfigured(
            f"Column {plan.name!r} ({plan.source_type}) is kept in a layout of old servers that its log does not tell.",
            next_step="Run SET GLOBAL mysql56_temporal_format = ON, then ALTER TABLE … FORCE, on the server.",
        )
    if plan.type is None:
        return RowLayout(wire, size, scale, Output.SKIP, 0)
    is_text = pa.types.is_string(plan.type)
    match wire:
        case Wire.FIXED:
            return _fixed(plan, size)
        case Wire.DECIMAL:
            if is_text:
                return RowLayout(wire, size, scale, Output.DECIMAL_TEXT, 0)
            is_short = size <= 38
            return RowLayout(
                wire, size, scale, Output.DECIMAL128 if is_short else Output.DECIMAL256, 16 << (not is_short)
            )
        case Wire.BITS:
            if pa.types.is_boolean(plan.type) or pa.types.is_integer(plan.type):
                return RowLayout(wire, size, 0, Output.NUMBER, 8)
            return RowLayout(wire, size, 0, Output.BYTES, 0)
        case Wire.COUNTED:
            return _counted(plan, size)
    if is_text:
        return RowLayout(wire, size, 0, Output.TIME_TEXT, 0)
    if wire is Wire.DATE:
        return RowLayout(wire, size, 0, Output.DAYS, 4)
    if wire in (Wire.TIME, Wire.TIME2):
        output = Output.DURATION if pa.types.is_duration(plan.type) else Output.DAYTIME
        return RowLayout(wire, size, 0, output, 8)
    return RowLayout(wire, size, 0, Output.MOMENT, 8)


def _fixed(plan: ColumnPlan, size: int) -> RowLayout:
    column = plan.column
    if column.type is ColumnType.YEAR:
        return RowLayout(Wire.FIXED, 1, 0, Output.YEAR, 2, signed=True)
    if column.type in (ColumnType.ENUM, ColumnType.SET):
        if column.labels is None or column.collation is None:
            raise _untold(plan, "the labels of its values")
        return RowLayout(Wire.FIXED, size, 0, Output.NUMBER, 8)
    if column.type in (ColumnType.FLOAT, ColumnType.DOUBLE):
        return RowLayout(Wire.FIXED, size, 0, Output.NUMBER, size)
    return RowLayout(Wire.FIXED, size, 0, Output.NUMBER, _INTEGERS[column.type][1], signed=not is_unsigned(plan))


def _counted(plan: ColumnPlan, size: int) -> RowLayout:
    column = plan.column
    if column.type is ColumnType.JSON:
        return RowLayout(Wire.COUNTED, size, 0, Output.JSON, 0)
    if column.type is ColumnType.GEOMETRY:
        return RowLayout(Wire.COUNTED, size, 0, Output.WKB, 0)
    if column.type is ColumnType.VECTOR or column.type in (ColumnType.BLOB_COMPRESSED, ColumnType.VARCHAR_COMPRESSED):
        return RowLayout(Wire.COUNTED, size, 0, Output.BYTES, 0)
    charset = charset_name(plan)
    if charset == "binary":
        if column.type is ColumnType.STRING:
            return RowLayout(Wire.COUNTED, size, 0, Output.PADDED, 0, padded=column.size)
        return RowLayout(Wire.COUNTED, size, 0, Output.BYTES, 0)
    table = None if is_utf8(charset) else single_byte_table(charset)
    if table is None:
        return RowLayout(Wire.COUNTED, size, 0, Output.BYTES, 0)
    return RowLayout(Wire.COUNTED, size, 0, Output.TRANSCODED, 0, table=_packed_table(table))


def is_unsigned(plan: ColumnPlan) -> bool:
    """Whether a number has no sign: as the table map tells, or else its type."""
    told = plan.column.unsigned
    return "unsigned" in plan.source_type.lower() if told is None else told


def charset_name(plan: ColumnPlan) -> str:
    """The character set of a column of text.

    :raises SourceMisconfigured: it is not known.
    """
    collation = plan.column.collation
    if collation is None and pa.types.is_binary(plan.type):
        collation = BINARY
    charset = None if collation is None else charset_of(collation)
    if charset is None:
        raise _untold(plan, "its character set")
    return charset


def _packed_table(table: str) -> bytes:
    encoded = [character.encode() for character in table]
    return b"".join(bytes([len(one)]) + one.ljust(3, b"\0") for one in encoded)


def _untold(plan: ColumnPlan, what: str) -> SourceMisconfigured:
    return SourceMisconfigured(
        f"The binlog does not tell {what}: column {plan.name!r} ({plan.source_type}).",
        next_step="Run SET GLOBAL binlog_row_metadata = FULL on the server and set it in its configuration.",
    )
