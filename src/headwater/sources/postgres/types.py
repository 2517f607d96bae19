"""Which Arrow type a Postgres type takes: exact, or the server's own text, never something near it.

=============================  ===============================================================================
Postgres                       Arrow
=============================  ===============================================================================
boolean                        bool
smallint, integer, bigint      int16, int32, int64
oid                            int64
real, double precision         float, double, with NaN and infinities
numeric(p,s)                   decimal128 up to 38 digits, decimal256 up to 76, else text
numeric                        text: any number of digits
bytea                          binary
date                           date32
time                           time64[us]
timestamp                      timestamp[us]
timestamp with time zone       timestamp[us, UTC]
domain                         as its base type
array                          list of its element, where elements are parted by commas
everything else                text
=============================  ===============================================================================

The special-value policy ``text`` makes any of them text.
"""

from __future__ import annotations

from typing import Final, Protocol

import pyarrow as pa

from headwater.sources.table import SourceColumn, SpecialValues

_TYPES: Final = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    26: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1083: pa.time64("us"),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", tz="UTC"),
}
"""By oid; what is not here is text."""

_NUMERIC: Final = 1700
_NO_TYPMOD: Final = -1
_VECTORS: Final = frozenset((22, 30))  # int2vector and oidvector: arrays to the catalog, but not in their text


class PgType(Protocol):
    """What must be known of a type.

    :ivar delimiter: what parts elements of this type in an array's text.
    :ivar element: of an array.
    :ivar base: of a domain, and what it says beside the type (*base_typmod*).
    """

    @property
    def oid(self) -> int: ...
    @property
    def delimiter(self) -> str: ...
    @property
    def element(self) -> PgType | None: ...
    @property
    def base(self) -> PgType | None: ...
    @property
    def base_typmod(self) -> int: ...


def arrow_type(pg_type: PgType, typmod: int) -> pa.DataType:
    """The Arrow type of a column of *pg_type* with *typmod*, which the catalog and the stream give beside the type."""
    if pg_type.base is not None:
        return arrow_type(pg_type.base, pg_type.base_typmod)
    if pg_type.element is not None and pg_type.oid not in _VECTORS:
        return pa.list_(arrow_type(pg_type.element, typmod)) if pg_type.element.delimiter == "," else pa.string()
    if pg_type.oid == _NUMERIC:
        return _numeric(typmod)
    return _TYPES.get(pg_type.oid, pa.string())


def source_column(
    name: str,
    pg_type: PgType,
    typmod: int,
    source_type: str,
    field_id: int,
    *,
    nullable: bool = True,
    special_values: SpecialValues = SpecialValues.STOP,
) -> SourceColumn:
    """The description of a column.

    :param source_type: what ``format_type`` gives.
    """
    kind = pa.string() if special_values is SpecialValues.TEXT else arrow_type(pg_type, typmod)
    return SourceColumn(name, kind, source_type, field_id, nullable=nullable, special_values=special_values)


def has_special_values(kind: pa.DataType) -> bool:
    """Whether a type of the server with this Arrow type has values that Arrow does not have."""
    return bool(pa.types.is_decimal(kind) or pa.types.is_temporal(kind) or pa.types.is_list(kind))


def _numeric(typmod: int) -> pa.DataType:
    if typmod == _NO_TYPMOD:
        return pa.string()
    packed = typmod - 4
    digits, scale = packed >> 16 & 0xFFFF, ((packed & 0x7FF) ^ 0x400) - 0x400
    if scale < 0:  # rounded to tens, hundreds, …: whole numbers with more digits
        digits, scale = digits - scale, 0
    digits = max(digits, scale)
    if digits <= 38:
        return pa.decimal128(digits, scale)
    return pa.decimal256(digits, scale) if digits <= 76 else pa.string()
