"""The state table: typed rows under ``table | vnode | key`` in a state store.

    table number u32 | vnode u16 | encoded key  →  encoded row

A table does no I/O of its own: it writes into the caller's batch and reads from the caller's snapshot, so the rows of
many tables are sealed in one epoch and read from one. Rows of older schema versions are brought up to date when they
are read, by the migrations that the table was opened with; :meth:`StateTable.rewrite` does so for good.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from headwater.state import temporal
from headwater.state.batch import MAX_KEY_BYTES, WriteBatch, prefix_end
from headwater.state.errors import InvalidKey, InvalidValue, StoreCorrupt
from headwater.state.key_encoding import decode_key, encode_key
from headwater.state.store import Snapshot
from headwater.state.types import Field, FieldType, TableSchema

ENCODING = 1

_HEADER = struct.Struct(">BH")
_I64 = struct.Struct(">q")
_U64 = struct.Struct(">Q")
_F64 = struct.Struct(">d")
_U32 = struct.Struct(">I")


def encode_row(schema_version: int, fields: Sequence[Field], values: Sequence[Any]) -> bytes:
    """The value of a row as bytes::

        encoding version u8 = 1 | schema version u16 | null bitmap, a bit per field | the fields that are not null

    INT, UINT, FLOAT, DATE, TIME and timestamps are 8 bytes big-endian (dates and timestamps as days and microseconds
    since 1970), BOOL is one byte, UUID 16; TEXT, BYTES, DECIMAL (as text, exact) and JSON are a u32 length and their
    bytes. The schema version says which fields to expect, so old rows stay readable after the table has changed.

    :raises InvalidValue: a value does not fit its field. The text names the field, never the value.
    """
    if len(values) != len(fields):
        raise InvalidValue(f"Received {len(values)} values for {len(fields)} fields.")
    nulls = 0
    parts: list[bytes] = []
    for index, (field, value) in enumerate(zip(fields, values, strict=True)):
        if value is None:
            if not field.nullable:
                raise InvalidValue(f"Field {field.name!r} is null.")
            nulls |= 1 << index
            continue
        try:
            parts.append(_encode(field.type, value))
        except (TypeError, ValueError, AttributeError, OverflowError, struct.error, RecursionError) as error:
            raise InvalidValue(
                f"Field {field.name!r} is {field.type.value}; a value of type {type(value).__name__} does not fit."
            ) from error
    bitmap = nulls.to_bytes((len(fields) + 7) // 8, "little")
    return b"".join((_HEADER.pack(ENCODING, schema_version), bitmap, *parts))


def schema_version_of(data: bytes) -> int:
    """The schema version of an encoded row. :raises StoreCorrupt: not an encoded row."""
    try:
        encoding, version = _HEADER.unpack_from(data)
    except struct.error as error:
        raise StoreCorrupt("A stored row is cut short.") from error
    if encoding != ENCODING:
        raise StoreCorrupt(
            f"A stored row has encoding {encoding}; this release reads {ENCODING}.", next_step="Upgrade headwater."
        )
    return int(version)


def decode_row(fields: Sequence[Field], data: bytes) -> tuple[Any, ...]:
    """:raises StoreCorrupt: the bytes do not fit *fields*."""
    schema_version_of(data)
    place = _HEADER.size
    size = (len(fields) + 7) // 8
    nulls = int.from_bytes(data[place : place + size], "little")
    place += size
    values: list[Any] = []
    try:
        for index, field in enumerate(fields):
            if nulls >> index & 1:
                values.append(None)
            else:
                value, place = _decode(field.type, data, place)
                values.append(value)
        if place != len(data):
            raise ValueError("length")
    except (ValueError, IndexError, struct.error, OverflowError, InvalidOperation) as error:
        raise StoreCorrupt("A stored row does not fit its table's fields.") from error
    return tuple(values)


def _only(value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise TypeError


def _sized(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _encode(kind: FieldType, value: Any) -> bytes:
    match kind:
        case FieldType.INT:
            _only(value, int)
            return _I64.pack(value)
        case FieldType.UINT:
            _only(value, int)
            return _U64.pack(value)
        case FieldType.BOOL:
            _only(value, bool)
            return b"\x01" if value else b"\x00"
        case FieldType.FLOAT:
            _only(value, float)
            return _F64.pack(value)
        case FieldType.DECIMAL:
            _only(value, Decimal)
            return _sized(str(value).encode())
        case FieldType.TEXT:
            _only(value, str)
            return _sized(value.encode())
        case FieldType.BYTES:
            return _sized(bytes(memoryview(value)))
        case FieldType.UUID:
            _only(value, UUID)
            raw: bytes = value.bytes
            return raw
        case FieldType.DATE:
            _only(value, date)
            return _I64.pack(temporal.days(value))
        case FieldType.TIME:
            _only(value, time)
            return _I64.pack(temporal.micros_of_day(value))
        case FieldType.TIMESTAMP:
            _only(value, datetime)
            return _I64.pack(temporal.micros_naive(value))
        case FieldType.TIMESTAMPTZ:
            _only(value, datetime)
            return _I64.pack(temporal.micros_aware(value))
        case FieldType.JSON:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
            return _sized(text.encode())


def _decode(kind: FieldType, data: bytes, place: int) -> tuple[Any, int]:
    match kind:
        case FieldType.INT:
            return _I64.unpack_from(data, place)[0], place + 8
        case FieldType.UINT:
            return _U64.unpack_from(data, place)[0], place + 8
        case FieldType.FLOAT:
            return _F64.unpack_from(data, place)[0], place + 8
        case FieldType.BOOL:
            if data[place] > 1:
                raise ValueError
            return data[place] == 1, place + 1
        case FieldType.UUID:
            return UUID(bytes=data[place : place + 16]), place + 16
        case FieldType.DATE:
            return temporal.date_of(_I64.unpack_from(data, place)[0]), place + 8
        case FieldType.TIME:
            return temporal.time_of(_I64.unpack_from(data, place)[0]), place + 8
        case FieldType.TIMESTAMP:
            return temporal.naive(_I64.unpack_from(data, place)[0]), place + 8
        case FieldType.TIMESTAMPTZ:
            return temporal.aware(_I64.unpack_from(data, place)[0]), place + 8
        case FieldType.TEXT | FieldType.BYTES | FieldType.DECIMAL | FieldType.JSON:
            (size,) = _U32.unpack_from(data, place)
            place += 4
            raw = data[place : place + size]
            if len(raw) != size:
                raise ValueError
            if kind is FieldType.BYTES:
                return raw, place + size
            text = raw.decode()
            if kind is FieldType.DECIMAL:
                return Decimal(text), place + size
            return (json.loads(text) if kind is FieldType.JSON else text), place + size


_PLACE = struct.Struct(">IH")
MAX_VNODE = (1 << 15) - 1


class StateTable:
    """One table, as :class:`~headwater.state.catalog.Catalog` opens it."""

    def __init__(
        self,
        number: int,
        schema: TableSchema,
        versions: Mapping[int, tuple[Field, ...]],
        migrations: Mapping[int, Callable[[tuple[Any, ...]], tuple[Any, ...]]],
        announcement: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._number = number
        self._schema = schema
        self._versions = dict(versions)
        self._migrations = dict(migrations)
        self._announcement = announcement
        self._announced_in: weakref.ref[WriteBatch] | None = None

    @property
    def schema(self) -> TableSchema:
        return self._schema

    def put(self, batch: WriteBatch, vnode: int, key: Sequence[Any], value: Sequence[Any]) -> None:
        """Insert or replace a row.

        :raises InvalidKey: the key does not fit, or is too long when encoded.
        :raises InvalidValue: the value does not fit.
        """
        place, row = self._whole_key(vnode, key), encode_row(self._schema.version, self._schema.value, value)
        self._announce(batch)
        batch.put(place, row)

    def _announce(self, batch: WriteBatch) -> None:
        if self._announcement is not None and (self._announced_in is None or self._announced_in() is not batch):
            self._announced_in = weakref.ref(batch)
            batch.put(*self._announcement)

    def delete(self, batch: WriteBatch, vnode: int, key: Sequence[Any]) -> None:
        """Forget a row."""
        batch.delete(self._whole_key(vnode, key))

    def delete_range(
        self, batch: WriteBatch, vnode: int, start: Sequence[Any] | None = None, end: Sequence[Any] | None = None
    ) -> None:
        """Forget the rows of *vnode* in ``[start, end)``; the bounds may be prefixes of a key."""
        batch.delete_range(*self._bounds(vnode, start, end))

    def get(self, view: Snapshot, vnode: int, key: Sequence[Any]) -> tuple[Any, ...] | None:
        """The values of a row, or ``None``."""
        data = view.get(self._whole_key(vnode, key))
        return None if data is None else self._values(data)

    def scan(
        self,
        view: Snapshot,
        vnode: int,
        start: Sequence[Any] | None = None,
        end: Sequence[Any] | None = None,
        *,
        reverse: bool = False,
    ) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Keys and values of *vnode* in ``[start, end)``, in key order; the bounds may be prefixes of a key."""
        low, high = self._bounds(vnode, start, end)
        for key, data in view.scan(low, high, reverse=reverse):
            yield decode_key(self._schema.key, key[_PLACE.size :]), self._values(data)

    def scan_prefix(
        self, view: Snapshot, vnode: int, prefix: Sequence[Any], *, reverse: bool = False
    ) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Keys and values of *vnode* whose key begins with *prefix*."""
        for key, data in view.scan_prefix(self._key(vnode, prefix), reverse=reverse):
            yield decode_key(self._schema.key, key[_PLACE.size :]), self._values(data)

    def rewrite(self, view: Snapshot, batch: WriteBatch, limit: int | None = None) -> int:
        """Add to *batch* the rows that are stored in an older version, brought up to date; returns how many."""
        found = 0
        for key, data in view.scan_prefix(self._number.to_bytes(4, "big")):
            if limit is not None and found >= limit:
                break
            if schema_version_of(data) != self._schema.version:
                self._announce(batch)
                batch.put(key, encode_row(self._schema.version, self._schema.value, self._values(data)))
                found += 1
        return found

    def _values(self, stored: bytes) -> tuple[Any, ...]:
        data = bytes(stored)  # a mapped snapshot gives views
        version = schema_version_of(data)
        fields = self._versions.get(version)
        if fields is None or version > self._schema.version:
            raise StoreCorrupt(f"A row of state table {self._schema.name!r} has the unknown version {version}.")
        values = decode_row(fields, data)
        for step in range(version, self._schema.version):
            values = self._migrations[step](values)
        return values

    def _key(self, vnode: int, key: Sequence[Any]) -> bytes:
        if type(vnode) is not int or not 0 <= vnode <= MAX_VNODE:
            raise InvalidKey(f"Received vnode {vnode}; valid values are 0 to {MAX_VNODE}.")
        encoded = _PLACE.pack(self._number, vnode) + encode_key(self._schema.key, key)
        if len(encoded) > MAX_KEY_BYTES:
            raise InvalidKey(
                f"A key of state table {self._schema.name!r} has {len(encoded)} bytes when encoded; "
                f"at most {MAX_KEY_BYTES} can be held."
            )
        return encoded

    def _whole_key(self, vnode: int, key: Sequence[Any]) -> bytes:
        if len(key) != len(self._schema.key):
            raise InvalidKey(
                f"State table {self._schema.name!r} has {len(self._schema.key)} key fields; received {len(key)} values."
            )
        return self._key(vnode, key)

    def _bounds(self, vnode: int, start: Sequence[Any] | None, end: Sequence[Any] | None) -> tuple[bytes, bytes | None]:
        low = self._key(vnode, start or ())
        return low, prefix_end(self._key(vnode, ())) if end is None else self._key(vnode, end)
