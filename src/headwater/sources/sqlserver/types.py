"""Which Arrow type a type of SQL Server takes: exact, or the server's own text, never something near it.

=========================================  ========================================================================
SQL Server                                 Arrow
=========================================  ========================================================================
tinyint, smallint, int, bigint             uint8, int16, int32, int64
bit                                        bool
decimal(p,s), numeric(p,s)                 decimal128(p, s)
money, smallmoney                          decimal128(19, 4), decimal128(10, 4)
real, float                                float, double
char, varchar, text, nchar, nvarchar,      string
ntext, xml, uniqueidentifier, sql_variant
hierarchyid, geography, geometry, others   string: what ``ToString()`` or the conversion to text gives
binary, varbinary, image, rowversion       binary
date                                       date32
time(0..6), datetime2(0..6)                time64[us], timestamp[us]
time(7), datetime2(7), datetimeoffset(7)   the same, or nanoseconds: :class:`~.ticks.Ticks`
datetime, smalldatetime                    timestamp[us], with the milliseconds that the server prints
datetimeoffset                             timestamp[us, UTC]: the instant, without its offset
=========================================  ========================================================================

The special-value policy ``text`` makes a column the server's text: of a ``datetimeoffset`` with its offset, of times
with all their digits. Floats, bits and bytes stay what they are.

Values travel as whole numbers wherever there is one: a time is asked for as microseconds or as ticks of 100 ns since
1970, so that neither the library nor a text in between can round it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

import pyarrow as pa

from headwater.sources.sqlserver.names import quoted
from headwater.sources.table import SourceColumn, SpecialValues


class Ticks(Enum):
    """SQL Server counts 100 ns in ``time(7)``, ``datetime2(7)`` and ``datetimeoffset(7)``; Spark counts microseconds.

    ``REFUSE``: microseconds, and a value whose seventh digit is not 0 is a special value. ``TRUNCATE``: microseconds,
    the digit is left out. ``NS``: Arrow nanoseconds, which Spark cannot read, from 1677 to 2262.
    """

    REFUSE = "refuse"
    TRUNCATE = "truncate"
    NS = "ns"


_TYPE: Final = re.compile(r"([a-z_0-9]+)(?:\((max|\d+)(?:,(\d+))?\))?")
_NUMBERS: Final = {
    "tinyint": pa.uint8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "bit": pa.bool_(),
    "real": pa.float32(),
    "float": pa.float64(),
}
_MONEY: Final = {"money": (19, 4), "smallmoney": (10, 4)}
TEXTS: Final = frozenset(("char", "varchar", "nchar", "nvarchar", "sysname"))
BINARIES: Final = frozenset(("binary", "varbinary", "image", "timestamp", "rowversion"))
_SPOKEN: Final = frozenset(("hierarchyid", "geography", "geometry"))
TIMES: Final = frozenset(("date", "time", "datetime", "smalldatetime", "datetime2", "datetimeoffset"))
_EPOCH: Final = "CONVERT(datetime2(7), '1970-01-01')"
_MIDNIGHT: Final = "CONVERT(time(7), '00:00:00')"
_VARIANT: Final = """CASE WHEN CONVERT(nvarchar(128), SQL_VARIANT_PROPERTY({0}, 'BaseType')) IN (N'date', N'time',
 N'datetime', N'smalldatetime', N'datetime2', N'datetimeoffset') THEN CONVERT(nvarchar(max), {0}, 121)
 WHEN CONVERT(nvarchar(128), SQL_VARIANT_PROPERTY({0}, 'BaseType')) IN (N'binary', N'varbinary', N'timestamp')
 THEN CONVERT(nvarchar(max), CONVERT(varbinary(8000), {0}), 1)
 WHEN CONVERT(nvarchar(128), SQL_VARIANT_PROPERTY({0}, 'BaseType')) IN (N'money', N'smallmoney')
 THEN CONVERT(nvarchar(max), CONVERT(money, {0}), 2)
 WHEN CONVERT(nvarchar(128), SQL_VARIANT_PROPERTY({0}, 'BaseType')) IN (N'float', N'real')
 THEN CONVERT(nvarchar(max), CONVERT(float, {0}), 3) ELSE CONVERT(nvarchar(max), {0}) END"""


@dataclass(frozen=True, slots=True)
class SqlType:
    """A type, taken apart.

    :ivar size: of a text or of bytes; -1: ``max``. Of a decimal: its digits. Of a time: digits of the second.
    """

    name: str
    size: int = 0
    scale: int = 0

    @classmethod
    def parse(cls, text: str) -> SqlType:
        """:param text: as :meth:`__str__` writes it."""
        found = _TYPE.fullmatch(text)
        if found is None:
            return cls(text)
        size = -1 if found[2] == "max" else int(found[2] or 0)
        return cls(found[1], size, int(found[3] or 0))

    @classmethod
    def of_catalog(cls, name: str, max_length: int, precision: int, scale: int) -> SqlType:
        """From ``sys.columns``, whose lengths are bytes."""
        if name in ("decimal", "numeric"):
            return cls(name, precision, scale)
        if name in ("time", "datetime2", "datetimeoffset"):
            return cls(name, scale)
        if name in ("nchar", "nvarchar"):
            return cls(name, -1 if max_length < 0 else max_length // 2)
        if name in ("char", "varchar", "binary", "varbinary"):
            return cls(name, max_length)
        return cls(name)

    def __str__(self) -> str:
        if self.name in ("decimal", "numeric"):
            return f"{self.name}({self.size},{self.scale})"
        if self.name in ("time", "datetime2", "datetimeoffset"):
            return f"{self.name}({self.size})"
        if self.name in TEXTS or self.name in ("binary", "varbinary"):
            return f"{self.name}({'max' if self.size < 0 else self.size})" if self.size else self.name
        return self.name

    @property
    def has_ticks(self) -> bool:
        """Whether it counts 100 ns."""
        return self.name in ("time", "datetime2", "datetimeoffset") and self.size == 7

    def arrow(self, ticks: Ticks) -> pa.DataType:
        """The Arrow type; text where it is not known."""
        if self.name in _NUMBERS:
            return _NUMBERS[self.name]
        if self.name in ("decimal", "numeric"):
            return pa.decimal128(self.size, self.scale)
        if self.name in _MONEY:
            return pa.decimal128(*_MONEY[self.name])
        if self.name in BINARIES:
            return pa.binary()
        if self.name == "date":
            return pa.date32()
        unit = "ns" if self.has_ticks and ticks is Ticks.NS else "us"
        if self.name == "time":
            return pa.time64(unit)
        if self.name in TIMES:
            return pa.timestamp(unit, tz="UTC" if self.name == "datetimeoffset" else None)
        return pa.string()


_WHOLE: Final = ("tinyint", "smallint", "int", "bigint")
_VARYING: Final = ("varchar", "nvarchar", "varbinary")


def keeps_values(old: SqlType, new: SqlType) -> bool:
    """Whether ``ALTER COLUMN`` from *old* to *new* leaves all stored values as they are, or is refused by the server.

    >>> [keeps_values(SqlType(name, 9), SqlType(name, 90)) for name in ("varchar", "char")]
    [True, False]
    """
    if old == new:
        return True
    if old.name in _WHOLE and new.name in _WHOLE:
        return _WHOLE.index(old.name) <= _WHOLE.index(new.name)
    if {old.name, new.name} <= {"decimal", "numeric"}:
        return new.scale >= old.scale and new.size - new.scale >= old.size - old.scale
    if old.name != new.name:
        return (old.name, new.name) == ("varchar", "nvarchar")
    return old.name in _VARYING or (old.name in TIMES and new.size >= old.size)


def source_column(
    name: str,
    kind: SqlType,
    field_id: int,
    *,
    nullable: bool = True,
    special_values: SpecialValues = SpecialValues.STOP,
    ticks: Ticks = Ticks.REFUSE,
) -> SourceColumn:
    """The description of a column."""
    arrow = kind.arrow(ticks)
    if special_values is SpecialValues.TEXT:
        if pa.types.is_floating(arrow) or pa.types.is_boolean(arrow) or pa.types.is_binary(arrow):
            special_values = SpecialValues.STOP
        else:
            arrow = pa.string()
    return SourceColumn(name, arrow, str(kind), field_id, nullable=nullable, special_values=special_values)


def has_special_values(kind: pa.DataType) -> bool:
    """Whether a type of the server with this Arrow type has values that Arrow does not have."""
    return bool(pa.types.is_temporal(kind))


def selected(column: SourceColumn) -> str:
    """What asks the server for the values of *column*, as :func:`~.values.column_of` takes them."""
    name, kind = quoted(column.name), SqlType.parse(column.source_type)
    if kind.name in _NUMBERS or kind.name in ("binary", "varbinary"):
        return name
    if kind.name in ("timestamp", "rowversion"):
        return f"CONVERT(binary(8), {name})"
    if kind.name == "image":
        return f"CONVERT(varbinary(max), {name})"
    if kind.name in ("decimal", "numeric"):
        return f"CONVERT(varchar(41), {name})"
    if kind.name in _MONEY:
        return f"CONVERT(varchar(30), {name}, 2)"
    if kind.name in TIMES:
        return _text_of_time(name, kind) if pa.types.is_string(column.type) else _number_of_time(name, kind)
    if kind.name in TEXTS:
        size = kind.size if 0 < kind.size <= 4000 else "max"
        return name if kind.name in ("nchar", "nvarchar") else f"CONVERT(nvarchar({size}), {name})"
    if kind.name == "uniqueidentifier":
        return f"CONVERT(varchar(36), {name})"
    if kind.name == "sql_variant":
        return _VARIANT.format(name)
    if kind.name in _SPOKEN:
        return f"{name}.ToString()"
    return f"CONVERT(nvarchar(max), {name})"


def _text_of_time(name: str, kind: SqlType) -> str:
    # the styles in which a time has all its digits, whatever the type
    return f"CONVERT(varchar(40), {name}, {23 if kind.name == 'date' else 121})"


def _number_of_time(name: str, kind: SqlType) -> str:
    if kind.name == "date":
        return f"DATEDIFF(day, CONVERT(date, '1970-01-01'), {name})"
    if kind.name == "datetime":
        name = f"CONVERT(datetime2(3), {name})"  # as the server prints it, whose unit is a 300th of a second
    elif kind.name == "smalldatetime":
        name = f"CONVERT(datetime2(0), {name})"
    elif kind.name == "datetimeoffset":
        name = f"CONVERT(datetime2(7), SWITCHOFFSET({name}, '+00:00'))"
    whole = f"DATEDIFF_BIG(microsecond, {_MIDNIGHT if kind.name == 'time' else _EPOCH}, {name})"
    return f"{whole} * 10 + DATEPART(nanosecond, {name}) % 1000 / 100" if kind.has_ticks else whole
