"""The value of a state-table row as bytes. Pure.

    encoding version u8 = 1 | schema version u16 | null bitmap, a bit per field | the fields that are not null

INT, UINT, FLOAT, DATE, TIME and timestamps are 8 bytes big-endian (dates and timestamps as days and microseconds since
1970), BOOL is one byte, UUID 16; TEXT, BYTES, DECIMAL (as text, exact) and JSON are a u32 length and their bytes. The
schema version says which fields to expect, so old rows stay readable after the table has changed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from headwater.state import temporal
from headwater.state.errors import InvalidValue, StoreCorrupt
from headwater.state.types import Field, FieldType

ENCODING = 1

_HEADER = struct.Struct(">BH")
_I64 = struct.Struct(">q")
_U64 = struct.Struct(">Q")
_F64 = struct.Struct(">d")
_U32 = struct.Struct(">I")


def encode_row(schema_version: int, fields: Sequence[Field], values: Sequence[Any]) -> bytes:
    """:raises InvalidValue: a value does not fit its field. The text names the field, never the value."""
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
