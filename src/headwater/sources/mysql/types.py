"""Which Arrow type a MySQL or MariaDB type takes: exact, or the server's own text, never something near it.

=======================================  ==========================================================================
MySQL, MariaDB                           Arrow
=======================================  ==========================================================================
tinyint, smallint, int, bigint           int8, int16, int32, int64; unsigned: uint8, uint16, uint32, uint64
mediumint                                int32; unsigned: uint32
tinyint(1)                               int8; bool with ``tinyint1=boolean`` in the address
decimal(p,s)                             decimal128 up to 38 digits, else decimal256
float, double                            float, double
bit(1), bit(n)                           bool; binary of (n + 7) / 8 bytes, high byte first
year                                     int16, with 0
date                                     date32
time                                     time64[us]
datetime                                 timestamp[us]
timestamp                                timestamp[us, UTC]
char, varchar, text, enum, set, json     string
uuid, inet4, inet6                       string
binary, varbinary, blob                  binary
geometry and its kinds                   binary: WKB without the SRID
vector                                   binary: floats of 4 bytes, low byte first
=======================================  ==========================================================================

Special values, which these types do not have: zero and partial dates (``0000-00-00``, ``2020-00-01``), times below 0 or
from 24 hours on, other numbers than 0 and 1 in a boolean. The special-value policy ``text`` makes a column text;
floats, bits and bytes, which have no special values and whose text would not be exact, stay what they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from headwater.sources.table import SourceColumn, SpecialValues

_TYPE: Final = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(?:\(([^)]*)\))?([^)]*)", re.IGNORECASE | re.DOTALL)
_DISPLAYED: Final = frozenset(("smallint", "mediumint", "int", "bigint", "year"))

_TYPES: Final = {
    "float": pa.float32(),
    "double": pa.float64(),
    "year": pa.int16(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "datetime": pa.timestamp("us"),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
_INTEGERS: Final = {
    "tinyint": (pa.int8(), pa.uint8()),
    "smallint": (pa.int16(), pa.uint16()),
    "mediumint": (pa.int32(), pa.uint32()),
    "int": (pa.int32(), pa.uint32()),
    "bigint": (pa.int64(), pa.uint64()),
}
TEXTS: Final = frozenset(
    ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "json", "uuid", "inet4", "inet6")
)
BINARIES: Final = frozenset(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob", "vector"))
GEOMETRIES: Final = frozenset(
    (
        *("geometry", "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon"),
        *("geometrycollection", "geomcollection"),
    )
)
ADDRESSES: Final = frozenset(("uuid", "inet4", "inet6"))
"""Types of MariaDB that its log tells as bytes."""


@dataclass(frozen=True, slots=True)
class MySqlType:
    """A type as the catalog writes it, taken apart.

    :ivar name: in lower case, without what stands behind it.
    :ivar numbers: what stands in parentheses, where it is numbers.
    """

    name: str
    numbers: tuple[int, ...] = ()
    unsigned: bool = False

    @classmethod
    def parse(cls, text: str) -> MySqlType:
        """:param text: such as ``int(11) unsigned``, ``decimal(18,4)`` or ``enum('a','b')``."""
        found = _TYPE.match(text)
        name = found[1].lower() if found else text.lower()
        inside = "" if found is None or found[2] is None else found[2]
        numbers = tuple(int(part) for part in inside.split(",")) if re.fullmatch(r"[\d,\s]+", inside) else ()
        unsigned = found is not None and ("unsigned" in found[3].lower() or "zerofill" in found[3].lower())
        return cls(name, numbers, unsigned)

    @property
    def is_tinyint1(self) -> bool:
        return self.name == "tinyint" and self.numbers == (1,) and not self.unsigned


def source_type(column_type: str) -> str:
    """The type as we keep it: without the display width, which says nothing, except that of ``tinyint(1)``."""
    parsed = MySqlType.parse(column_type)
    if parsed.name in _DISPLAYED or (parsed.name == "tinyint" and not parsed.is_tinyint1):
        return f"{parsed.name} unsigned" if parsed.unsigned else parsed.name
    return column_type


def arrow_type(kind: MySqlType, *, tinyint1_is_boolean: bool = False) -> pa.DataType:
    """The Arrow type of a type; text where it is not known."""
    if kind.is_tinyint1 and tinyint1_is_boolean:
        return pa.bool_()
    if kind.name in _INTEGERS:
        return _INTEGERS[kind.name][kind.unsigned]
    if kind.name in ("decimal", "numeric"):
        digits, scale = (*kind.numbers, 10, 0)[:2] if len(kind.numbers) != 1 else (kind.numbers[0], 0)
        return pa.decimal128(digits, scale) if digits <= 38 else pa.decimal256(digits, scale)
    if kind.name == "bit":
        return pa.bool_() if kind.numbers in ((), (1,)) else pa.binary()
    if kind.name in BINARIES or kind.name in GEOMETRIES:
        return pa.binary()
    return _TYPES.get(kind.name, pa.string())


def source_column(
    name: str,
    column_type: str,
    field_id: int,
    *,
    nullable: bool = True,
    special_values: SpecialValues = SpecialValues.STOP,
    tinyint1_is_boolean: bool = False,
) -> SourceColumn:
    """The description of a column. :param column_type: as the catalog or a table map writes it."""
    text = source_type(column_type)
    kind = arrow_type(MySqlType.parse(text), tinyint1_is_boolean=tinyint1_is_boolean)
    if special_values is SpecialValues.TEXT:
        if _has_text(text, kind):
            kind = pa.string()
        else:
            special_values = SpecialValues.STOP
    return SourceColumn(name, kind, text, field_id, nullable=nullable, special_values=special_values)


def has_special_values(kind: pa.DataType) -> bool:
    """Whether a type of the server with this Arrow type has values that Arrow does not have."""
    return bool(pa.types.is_temporal(kind) or pa.types.is_boolean(kind))


def _has_text(source_type: str, kind: pa.DataType) -> bool:
    """Whether the server's text says all of a value."""
    is_bits = MySqlType.parse(source_type).name == "bit"
    return not (is_bits or pa.types.is_floating(kind) or pa.types.is_binary(kind))
