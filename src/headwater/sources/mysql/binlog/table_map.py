"""TableMap: which table row events are of, and how its columns are laid out.

With ``binlog_row_metadata=FULL`` a table map also tells names, signedness, collations, labels of enums and sets, the
primary key and visibility. What the server does not tell is ``None``; who knows it from elsewhere puts it in with
:func:`dataclasses.replace` before the rows are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final

from headwater.sources.mysql.binlog.cursor import Cursor, protocol_error, text_of


class ColumnType(IntEnum):
    """How a value is laid out; numbers are those of the binlog."""

    TINY = 1
    SHORT = 2
    LONG = 3
    FLOAT = 4
    DOUBLE = 5
    TIMESTAMP = 7
    LONGLONG = 8
    INT24 = 9
    DATE = 10
    TIME = 11
    DATETIME = 12
    YEAR = 13
    VARCHAR = 15
    BIT = 16
    TIMESTAMP2 = 17
    DATETIME2 = 18
    TIME2 = 19
    BLOB_COMPRESSED = 140
    VARCHAR_COMPRESSED = 141
    VECTOR = 242
    JSON = 245
    NEWDECIMAL = 246
    ENUM = 247
    SET = 248
    BLOB = 252
    STRING = 254
    GEOMETRY = 255


_TINY_BLOB, _MEDIUM_BLOB, _LONG_BLOB, _VAR_STRING = 249, 250, 251, 253
_BLOBS: Final = frozenset((_TINY_BLOB, _MEDIUM_BLOB, _LONG_BLOB, ColumnType.BLOB))
_ONE_BYTE: Final = frozenset(
    (
        *(ColumnType.FLOAT, ColumnType.DOUBLE, ColumnType.BLOB_COMPRESSED, ColumnType.VECTOR, ColumnType.JSON),
        *(ColumnType.GEOMETRY, ColumnType.TIME2, ColumnType.DATETIME2, ColumnType.TIMESTAMP2, *_BLOBS),
    )
)
_TWO_BYTES: Final = frozenset(
    (
        *(ColumnType.VARCHAR, ColumnType.VARCHAR_COMPRESSED, _VAR_STRING, ColumnType.STRING, ColumnType.BIT),
        *(ColumnType.NEWDECIMAL, ColumnType.ENUM, ColumnType.SET),
    )
)
_NUMERIC: Final = frozenset(
    (
        *(ColumnType.TINY, ColumnType.SHORT, ColumnType.INT24, ColumnType.LONG, ColumnType.LONGLONG),
        *(ColumnType.NEWDECIMAL, ColumnType.FLOAT, ColumnType.DOUBLE, ColumnType.YEAR),
    )
)
_CHARACTER: Final = frozenset(
    (
        *(ColumnType.STRING, ColumnType.VARCHAR, ColumnType.BLOB),
        *(ColumnType.BLOB_COMPRESSED, ColumnType.VARCHAR_COMPRESSED),
    )
)
_FAMILY_CHARACTER: Final = {True: _CHARACTER | {ColumnType.GEOMETRY}, False: _CHARACTER | {ColumnType.VECTOR}}
"""The families tell the collation of different columns that are no text; by whether it is MariaDB."""
_LABELLED: Final = frozenset((ColumnType.ENUM, ColumnType.SET))
_KNOWN: Final = frozenset((*ColumnType, _TINY_BLOB, _MEDIUM_BLOB, _LONG_BLOB, _VAR_STRING))
MAX_COLUMNS: Final = 4096
"""No server allows more columns in a table."""


@dataclass(frozen=True, slots=True)
class BinlogColumn:
    """A column as row events have it.

    :ivar size: of FLOAT and DOUBLE the bytes; of blobs and the like the bytes of the length; of strings the most bytes
        that a value can have; of BIT the bits; of DECIMAL the digits; of ENUM and SET the bytes; of times the digits
        of the fraction of a second; else 0.
    :ivar scale: of DECIMAL.
    :ivar collation: number of the collation of text, of an enum or of a set; 63 is binary.
    :ivar labels: of an enum or a set, in :attr:`collation`'s character set.
    :ivar geometry: number of the kind of geometry.
    """

    type: ColumnType
    size: int
    scale: int
    nullable: bool
    name: str | None = None
    unsigned: bool | None = None
    collation: int | None = None
    labels: tuple[bytes, ...] | None = None
    geometry: int | None = None
    visible: bool | None = None


@dataclass(frozen=True, slots=True)
class TableMap:
    """One table.

    :ivar table_id: the server's number for it while it is open: other definitions have other numbers, until the
        server restarts.
    :ivar primary_key: places of the columns of the primary key, in key order; ``None`` where it is not told (or there
        is none, with full metadata).
    :ivar unknown_type: a type of one of its columns that is not known here: the columns are not told then. Tables that
        nobody captures may have what they like.
    """

    table_id: int
    database: str
    name: str
    columns: tuple[BinlogColumn, ...]
    primary_key: tuple[int, ...] | None
    unknown_type: int | None = None

    @property
    def has_names(self) -> bool:
        """Whether the server tells names: ``binlog_row_metadata=FULL``."""
        return bool(self.columns) and self.columns[0].name is not None


def parse_table_map(read: Cursor, id_size: int, *, is_mariadb: bool) -> TableMap:
    """The table of the body of a table map event.

    :raises SourceProtocolError: it is malformed.
    """
    table_id = read.number(id_size)
    read.skip(2)
    database = text_of(read.counted())
    read.skip(1)
    name = text_of(read.counted())
    read.skip(1)
    count = read.packed()
    if count > MAX_COLUMNS:
        raise protocol_error("a table has more columns than a server allows.")
    types = read.take(count)
    unknown = next((kind for kind in types if kind not in _KNOWN), None)
    if unknown is not None:
        return TableMap(table_id, database, name, (), None, unknown)
    layout = Cursor(read.take(read.packed()))
    shapes = [_shape(kind, layout) for kind in types]
    nulls = read.take((count + 7) // 8)
    columns = [
        BinlogColumn(kind, size, scale, bool(nulls[place >> 3] >> (place & 7) & 1))
        for place, (kind, size, scale) in enumerate(shapes)
    ]
    primary_key = None
    while read.left:
        field, value = read.number(1), Cursor(read.take(read.packed()))
        if field in (8, 9):
            primary_key = _primary_key(value, count, has_prefixes=field == 9)
        elif field == 2:
            _default_collation(columns, value, _FAMILY_CHARACTER[is_mariadb])
        elif field == 3:
            _collations(columns, value, _FAMILY_CHARACTER[is_mariadb])
        elif field == 10:
            _default_collation(columns, value, _LABELLED)
        elif field == 11:
            _collations(columns, value, _LABELLED)
        elif field in _FIELDS:
            _FIELDS[field](columns, value)
    return TableMap(table_id, database, name, tuple(columns), primary_key)


def _shape(kind: int, layout: Cursor) -> tuple[ColumnType, int, int]:
    """Type, size and scale of the next column."""
    size = scale = 0
    if kind in _ONE_BYTE:
        size = layout.number(1)
    elif kind in (ColumnType.VARCHAR, ColumnType.VARCHAR_COMPRESSED):
        size = layout.number(2)
    elif kind in _TWO_BYTES:
        first, second = layout.number(1), layout.number(1)
        if kind in (ColumnType.STRING, _VAR_STRING):
            # Two bits of a long CHAR's size hide, inverted, in the byte of its type.
            kind, size = first | 0x30, second | ((first & 0x30) ^ 0x30) << 4
        elif kind == ColumnType.NEWDECIMAL:
            size, scale = first, second
        elif kind == ColumnType.BIT:
            size = second * 8 + first
        else:
            size = second
    if kind in _BLOBS:
        kind = ColumnType.BLOB
    if kind == _VAR_STRING:
        kind = ColumnType.STRING
    if kind not in _KNOWN:
        raise protocol_error("a column has a type that is not known.")
    known = ColumnType(kind)
    _check_shape(known, size, scale)
    return known, size, scale


def _check_shape(kind: ColumnType, size: int, scale: int) -> None:
    allowed = {
        ColumnType.FLOAT: (4, 4),
        ColumnType.DOUBLE: (8, 8),
        ColumnType.NEWDECIMAL: (1, 65),
        ColumnType.BIT: (1, 64),
        ColumnType.ENUM: (1, 2),
        ColumnType.SET: (1, 8),
        ColumnType.TIME2: (0, 6),
        ColumnType.DATETIME2: (0, 6),
        ColumnType.TIMESTAMP2: (0, 6),
    }.get(kind, (1, 4) if kind in (ColumnType.JSON, ColumnType.GEOMETRY, ColumnType.VECTOR) else None)
    if kind in (ColumnType.BLOB, ColumnType.BLOB_COMPRESSED):
        allowed = 1, 4
    if allowed is not None and not allowed[0] <= size <= allowed[1]:
        raise protocol_error(f"a column of type {kind.name} has a size that the type cannot have.")
    if kind is ColumnType.NEWDECIMAL and scale > min(size, 38):
        raise protocol_error("a DECIMAL has more digits after the point than in all.")


# -- what follows the layout -------------------------------------------------------------------------------------------

_Columns = list[BinlogColumn]


def _places(columns: Sequence[BinlogColumn], types: frozenset[ColumnType]) -> list[int]:
    return [place for place, column in enumerate(columns) if column.type in types]


def _put(columns: _Columns, place: int, **told: Any) -> None:
    columns[place] = replace(columns[place], **told)


def _signedness(columns: _Columns, read: Cursor) -> None:
    places = _places(columns, _NUMERIC)
    bits = read.rest()
    if len(bits) < (len(places) + 7) // 8:
        raise protocol_error("the signs of a table's columns are cut off.")
    for order, place in enumerate(places):
        _put(columns, place, unsigned=bool(bits[order >> 3] << (order & 7) & 0x80))


def _default_collation(columns: _Columns, read: Cursor, types: frozenset[ColumnType]) -> None:
    places, default = _places(columns, types), read.packed()
    collations = [default] * len(places)
    while read.left:
        order, collation = read.packed(), read.packed()
        if order >= len(places):
            raise protocol_error("a collation is of a column that is none.")
        collations[order] = collation
    for place, collation in zip(places, collations, strict=True):
        _put(columns, place, collation=collation)


def _collations(columns: _Columns, read: Cursor, types: frozenset[ColumnType]) -> None:
    for place in _places(columns, types):
        _put(columns, place, collation=read.packed())


def _names(columns: _Columns, read: Cursor) -> None:
    for place in range(len(columns)):
        _put(columns, place, name=text_of(read.take(read.packed())))


def _labels(kind: ColumnType) -> Callable[[_Columns, Cursor], None]:
    def parse(columns: _Columns, read: Cursor) -> None:
        for place in _places(columns, frozenset((kind,))):
            count = read.packed()
            if count > read.left:
                raise protocol_error("an enum has more labels than it tells.")
            _put(columns, place, labels=tuple(read.take(read.packed()) for _ in range(count)))

    return parse


def _geometries(columns: _Columns, read: Cursor) -> None:
    for place in _places(columns, frozenset((ColumnType.GEOMETRY,))):
        _put(columns, place, geometry=read.packed())


def _visibility(columns: _Columns, read: Cursor) -> None:
    bits = read.rest()
    if len(bits) < (len(columns) + 7) // 8:
        raise protocol_error("the visibility of a table's columns is cut off.")
    for place in range(len(columns)):
        _put(columns, place, visible=bool(bits[place >> 3] << (place & 7) & 0x80))


def _primary_key(read: Cursor, count: int, *, has_prefixes: bool) -> tuple[int, ...]:
    def places() -> Iterator[int]:
        while read.left:
            yield read.packed()
            if has_prefixes:
                read.packed()

    found = tuple(places())
    if any(place >= count for place in found):
        raise protocol_error("a primary key has a column that is none.")
    return found


_FIELDS: Final[dict[int, Callable[[_Columns, Cursor], None]]] = {
    1: _signedness,
    4: _names,
    5: _labels(ColumnType.SET),
    6: _labels(ColumnType.ENUM),
    7: _geometries,
    12: _visibility,
}
