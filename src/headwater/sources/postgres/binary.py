"""Snapshot bytes: rows of ``COPY … TO STDOUT (FORMAT binary)`` as the same values that csv gives, for less.

Common types are sent as the server has them, and compiled code writes them into Arrow's buffers. Every other column is
sent as the text that csv would have, and converted by :mod:`~headwater.sources.postgres.convert`. So are the rules:
where a column has nulls or values that its Arrow type does not have, one text of each such kind is converted, and what
that raises is raised.

The text is made by ``format('%s', …)``, which asks the type's own output, as csv does. A cast to text may be a function
that writes something else: ``boolean``, ``inet``, ``char(n)`` and ``xml`` have such ones. It costs the server more than
csv does, about what five other columns save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final

import pyarrow as pa
from psycopg import sql

from headwater import compiled
from headwater.sources.errors import SourceProtocolError
from headwater.sources.postgres.convert import convert_column
from headwater.sources.postgres.raw_rows import utf8_of
from headwater.sources.table import SourceColumn, SourceTable

Decode = Callable[[bytes, bytes, Callable[[int], Any]], tuple[int, list[tuple[Any, Any, Any, int, int]]]]


def compiled_decode() -> Decode | None:
    """The compiled code, where it was built and is wanted."""
    if not compiled.is_wanted():
        return None
    try:
        from headwater.sources.postgres._binary import decode
    except ImportError:
        return None
    return decode


class _Kind(IntEnum):
    """How a value is sent; the numbers are those of the compiled code."""

    BYTES = 0
    JSONB = 1
    UUID = 2
    NUMERIC = 3
    BOOL = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    OID = 8
    FLOAT32 = 9
    FLOAT64 = 10
    DATE = 11
    TIME = 12
    TIMESTAMP = 13
    DECIMAL = 14


MOST_TEXT: Final = 0.15
"""Where a greater share of the columns is sent as text, csv costs less."""
TEXT: Final = 25
_NUMERIC: Final = 1700
_NATIVE: Final = {
    16: (_Kind.BOOL, pa.bool_()),
    17: (_Kind.BYTES, pa.binary()),
    19: (_Kind.BYTES, pa.string()),
    20: (_Kind.INT64, pa.int64()),
    21: (_Kind.INT16, pa.int16()),
    23: (_Kind.INT32, pa.int32()),
    TEXT: (_Kind.BYTES, pa.string()),
    26: (_Kind.OID, pa.int64()),
    114: (_Kind.BYTES, pa.string()),
    700: (_Kind.FLOAT32, pa.float32()),
    701: (_Kind.FLOAT64, pa.float64()),
    1042: (_Kind.BYTES, pa.string()),
    1043: (_Kind.BYTES, pa.string()),
    1082: (_Kind.DATE, pa.date32()),
    1083: (_Kind.TIME, pa.time64("us")),
    1114: (_Kind.TIMESTAMP, pa.timestamp("us")),
    1184: (_Kind.TIMESTAMP, pa.timestamp("us", tz="UTC")),
    2950: (_Kind.UUID, pa.string()),
    3802: (_Kind.JSONB, pa.string()),
}
"""By oid: how it is sent, where the column has this Arrow type."""

_INFINITE: Final = 1
_FAR: Final = 2
_UNFIT: Final = 4


class BinaryRows:
    """Rows of *columns* of *table*; see :class:`~headwater.sources.postgres.snapshot.RowFormat`.

    :param oids: the types that the columns have now, domains as their base and enums as text, which is how they are
        sent; ``None`` where a column was dropped.
    """

    name = "binary"

    def __init__(
        self, decode: Decode, table: SourceTable, columns: Sequence[SourceColumn], oids: Sequence[int | None]
    ) -> None:
        self._decode, self._table, self._columns = decode, table, columns
        self._schema = pa.schema([column.field for column in columns])
        self._kinds = [_native(column, oid) for column, oid in zip(columns, oids, strict=True)]
        self._described = b"".join(map(_described, columns, self._kinds))

    @property
    def text_share(self) -> float:
        """Which share of the columns is sent as text because their types are sent in no other way."""
        texts = [kind is None and not column.dropped for column, kind in zip(self._columns, self._kinds, strict=True)]
        return sum(texts) / max(len(texts), 1)

    @property
    def selected(self) -> sql.Composable:
        return sql.SQL(", ").join(map(_selected, self._columns, self._kinds))

    def batches(self, data: bytes) -> list[pa.RecordBatch]:
        """The rows of whole messages.

        :raises SpecialValue: as :func:`~headwater.sources.postgres.convert.convert_column`, and so its other errors.
        :raises SourceProtocolError: these are no rows of these columns.
        """
        try:
            rows, made = self._decode(data, self._described, pa.allocate_buffer)
        except ValueError as error:
            raise SourceProtocolError(
                f"The snapshot of table {self._table.full_name} is no binary copy of its {len(self._columns)} columns:"
                f" {error}.",
                next_step="Look whether the table was changed meanwhile, and take the snapshot again.",
            ) from None
        if not rows:
            return []
        arrays = [self._array(place, rows, *column) for place, column in enumerate(made)]
        return [pa.RecordBatch.from_arrays(arrays, schema=self._schema)]

    def _array(self, place: int, rows: int, validity: Any, values: Any, data: Any, nulls: int, seen: int) -> pa.Array:
        column = self._columns[place]
        if data is None:
            typed = pa.Array.from_buffers(column.type, rows, [validity, values], nulls)
        else:
            typed = pa.Array.from_buffers(pa.binary(), rows, [validity, values, data], nulls)
            if self._kinds[place] is None or column.type != pa.binary():
                return convert_column(self._table, column, utf8_of(typed))
        if nulls:
            convert_column(self._table, column, pa.array(_examples(column.type, seen), pa.string()))
        return typed


def _native(column: SourceColumn, oid: int | None) -> _Kind | None:
    """How the values of *column* are sent; ``None``: as text that is converted."""
    if oid is None:
        return None
    if oid == _NUMERIC:
        return _Kind.DECIMAL if pa.types.is_decimal128(column.type) else _Kind.NUMERIC
    kind, arrow_type = _NATIVE.get(oid, (None, None))
    return kind if column.type == arrow_type else None


def _described(column: SourceColumn, kind: _Kind | None) -> bytes:
    if kind is _Kind.DECIMAL:
        return bytes((kind, column.type.precision, column.type.scale))
    return bytes((_Kind.BYTES if kind is None else kind, 0, 0))


def _selected(column: SourceColumn, kind: _Kind | None) -> sql.Composable:
    if column.dropped:
        return sql.SQL("NULL::pg_catalog.text")
    name = sql.Identifier(column.name)
    if kind is not None:
        return name
    # of a composite value, IS NOT NULL would ask whether its fields are
    return sql.SQL("CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.format('%s', {0}) END").format(name)


def _examples(kind: pa.DataType, seen: int) -> list[str | None]:
    """A null, and a text of each kind of values that *kind* does not have."""
    texts: list[str | None] = [None]
    if seen & _INFINITE:
        texts.append("NaN" if pa.types.is_decimal(kind) else "24:00:00" if pa.types.is_time(kind) else "infinity")
    if seen & _FAR:
        texts.append("10000-01-01")
    if seen & _UNFIT:
        texts.append("?")
    return texts
