"""Keys as bytes whose order is the order of the values, nulls last. Pure.

Each field is one presence byte (``0x01`` a value follows, ``0x02`` null) and, for a value:

=============  ==============================================================================================
INT            8 bytes big-endian, sign bit flipped (-2^63 … 2^63-1)
UINT           8 bytes big-endian (0 … 2^64-1)
BOOL           0x00 or 0x01
FLOAT          8 bytes IEEE 754, all bits flipped when negative, else the sign bit; -0.0 is 0.0, NaN is last
DECIMAL        class byte (-inf, negative, zero, positive, +inf, NaN), exponent, digit pairs; any size; 1.0 is 1.00
TEXT, BYTES    UTF-8 or raw; 0x00 becomes 0x00 0xFF; ended by 0x00 0x00 (byte order, as in collation "C")
UUID           16 bytes
DATE           4 bytes: days since 1970-01-01, sign bit flipped
TIME           8 bytes: microseconds of the day
TIMESTAMP      8 bytes: microseconds since 1970-01-01, sign bit flipped; TIMESTAMPTZ: the same, in UTC
=============  ==============================================================================================

So an encoded key with fewer fields is a prefix of every longer key that begins with the same values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from headwater.state import temporal
from headwater.state.errors import InvalidKey, StoreCorrupt
from headwater.state.types import Field, FieldType

PRESENT = b"\x01"
NULL = b"\x02"

_U64 = struct.Struct(">Q")
_U32 = struct.Struct(">I")
_F64 = struct.Struct(">d")
_SIGN64 = 1 << 63
_SIGN32 = 1 << 31
_CLASSES = ("-inf", "negative", "zero", "positive", "+inf", "nan")
_EXPONENT_BIAS = 1 << 31
_INVERT = bytes(255 - byte for byte in range(256))


def encode_key(fields: Sequence[Field], values: Sequence[Any]) -> bytes:
    """*values* as bytes; fewer values than fields make a prefix.

    :raises InvalidKey: a value does not fit its field. The text names the field, never the value.
    """
    if len(values) > len(fields):
        raise InvalidKey(f"Received {len(values)} key values for {len(fields)} key fields.")
    parts: list[bytes] = []
    for field, value in zip(fields, values, strict=False):
        if value is None:
            if not field.nullable:
                raise InvalidKey(f"Key field {field.name!r} is null.")
            parts.append(NULL)
            continue
        try:
            parts += (PRESENT, _ENCODERS[field.type](value))
        except (TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
            raise InvalidKey(
                f"Key field {field.name!r} is {field.type.value}; a value of type {type(value).__name__} does not fit."
            ) from error
    return b"".join(parts)


def decode_key(fields: Sequence[Field], data: bytes) -> tuple[Any, ...]:
    """The values of a whole encoded key. :raises StoreCorrupt: it is not one."""
    values: list[Any] = []
    place = 0
    try:
        for field in fields:
            flag = data[place : place + 1]
            place += 1
            if flag == NULL:
                values.append(None)
            elif flag == PRESENT:
                value, place = _DECODERS[field.type](data, place)
                values.append(value)
            else:
                raise ValueError("presence byte")
        if place != len(data):
            raise ValueError("length")
    except (ValueError, IndexError, struct.error, OverflowError) as error:
        raise StoreCorrupt("A stored key does not fit its table's key fields.") from error
    return tuple(values)


def _only(value: Any, *kinds: type) -> None:
    if type(value) not in kinds:
        raise TypeError


def _encode_int(value: Any) -> bytes:
    _only(value, int)
    if not -_SIGN64 <= value < _SIGN64:
        raise OverflowError
    return _U64.pack(value + _SIGN64)


def _encode_uint(value: Any) -> bytes:
    _only(value, int)
    return _U64.pack(value)


def _encode_bool(value: Any) -> bytes:
    _only(value, bool)
    return b"\x01" if value else b"\x00"


def _encode_float(value: Any) -> bytes:
    _only(value, float)
    if value != value:
        return b"\xff" * 8
    (bits,) = _U64.unpack(_F64.pack(value + 0.0))
    return _U64.pack(bits ^ (0xFFFFFFFFFFFFFFFF if bits & _SIGN64 else _SIGN64))


def _encode_decimal(value: Any) -> bytes:
    _only(value, Decimal)
    if value.is_nan():
        return b"\x05"
    if value.is_infinite():
        return b"\x04" if value > 0 else b"\x00"
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return b"\x02"
    # value = 0.d1d2d3… × 10^point, without trailing zeros: one spelling per number
    point = len(text) + exponent
    text = text.rstrip("0")
    pairs = bytes(int(text[i : i + 2].ljust(2, "0")) + 1 for i in range(0, len(text), 2))
    body = _U32.pack(point + _EXPONENT_BIAS) + pairs + b"\x00"
    return b"\x01" + body.translate(_INVERT) if sign else b"\x03" + body


def _encode_text(value: Any) -> bytes:
    _only(value, str)
    return _encode_bytes(value.encode())


def _encode_bytes(value: Any) -> bytes:
    _only(value, bytes)
    escaped: bytes = value.replace(b"\x00", b"\x00\xff")
    return escaped + b"\x00\x00"


def _encode_uuid(value: Any) -> bytes:
    _only(value, UUID)
    raw: bytes = value.bytes
    return raw


def _encode_date(value: Any) -> bytes:
    _only(value, date)
    return _U32.pack(temporal.days(value) + _SIGN32)


def _encode_time(value: Any) -> bytes:
    _only(value, time)
    return _U64.pack(temporal.micros_of_day(value))


def _encode_timestamp(value: Any) -> bytes:
    _only(value, datetime)
    return _U64.pack(temporal.micros_naive(value) + _SIGN64)


def _encode_timestamptz(value: Any) -> bytes:
    _only(value, datetime)
    return _U64.pack(temporal.micros_aware(value) + _SIGN64)


def _u64(data: bytes, place: int) -> tuple[int, int]:
    return _U64.unpack_from(data, place)[0], place + 8


def _decode_int(data: bytes, place: int) -> tuple[int, int]:
    bits, place = _u64(data, place)
    return bits - _SIGN64, place


def _decode_bool(data: bytes, place: int) -> tuple[bool, int]:
    if data[place] > 1:
        raise ValueError
    return bool(data[place]), place + 1


def _decode_float(data: bytes, place: int) -> tuple[float, int]:
    bits, place = _u64(data, place)
    bits ^= _SIGN64 if bits & _SIGN64 else 0xFFFFFFFFFFFFFFFF
    return _F64.unpack(_U64.pack(bits))[0], place


def _decode_decimal(data: bytes, place: int) -> tuple[Decimal, int]:
    kind = _CLASSES[data[place]]
    place += 1
    if kind not in ("negative", "positive"):
        return Decimal({"-inf": "-Infinity", "zero": "0", "+inf": "Infinity", "nan": "NaN"}[kind]), place
    end = data.index(b"\xff" if kind == "negative" else b"\x00", place + 4)
    body = data[place:end]
    if kind == "negative":
        body = body.translate(_INVERT)
    digits = "".join(f"{pair - 1:02}" for pair in body[4:]).rstrip("0")
    exponent = _U32.unpack(body[:4])[0] - _EXPONENT_BIAS - len(digits)
    return Decimal((int(kind == "negative"), tuple(map(int, digits)), exponent)), end + 1


def _decode_bytes(data: bytes, place: int) -> tuple[bytes, int]:
    start = place
    while True:
        zero = data.index(b"\x00", place)
        if data[zero + 1] == 0x00:
            return data[start:zero].replace(b"\x00\xff", b"\x00"), zero + 2
        if data[zero + 1] != 0xFF:
            raise ValueError
        place = zero + 2


def _decode_text(data: bytes, place: int) -> tuple[str, int]:
    raw, place = _decode_bytes(data, place)
    return raw.decode(), place


def _decode_uuid(data: bytes, place: int) -> tuple[UUID, int]:
    return UUID(bytes=data[place : place + 16]), place + 16


def _decode_date(data: bytes, place: int) -> tuple[date, int]:
    return temporal.date_of(_U32.unpack_from(data, place)[0] - _SIGN32), place + 4


def _decode_time(data: bytes, place: int) -> tuple[time, int]:
    micros, place = _u64(data, place)
    return temporal.time_of(micros), place


def _decode_timestamp(data: bytes, place: int) -> tuple[datetime, int]:
    instant, place = _decode_timestamptz(data, place)
    return instant.replace(tzinfo=None), place


def _decode_timestamptz(data: bytes, place: int) -> tuple[datetime, int]:
    bits, place = _u64(data, place)
    return temporal.aware(bits - _SIGN64), place


_ENCODERS: dict[FieldType, Callable[[Any], bytes]] = {
    FieldType.INT: _encode_int,
    FieldType.UINT: _encode_uint,
    FieldType.BOOL: _encode_bool,
    FieldType.FLOAT: _encode_float,
    FieldType.DECIMAL: _encode_decimal,
    FieldType.TEXT: _encode_text,
    FieldType.BYTES: _encode_bytes,
    FieldType.UUID: _encode_uuid,
    FieldType.DATE: _encode_date,
    FieldType.TIME: _encode_time,
    FieldType.TIMESTAMP: _encode_timestamp,
    FieldType.TIMESTAMPTZ: _encode_timestamptz,
}

_DECODERS: dict[FieldType, Callable[[bytes, int], tuple[Any, int]]] = {
    FieldType.INT: _decode_int,
    FieldType.UINT: _u64,
    FieldType.BOOL: _decode_bool,
    FieldType.FLOAT: _decode_float,
    FieldType.DECIMAL: _decode_decimal,
    FieldType.TEXT: _decode_text,
    FieldType.BYTES: _decode_bytes,
    FieldType.UUID: _decode_uuid,
    FieldType.DATE: _decode_date,
    FieldType.TIME: _decode_time,
    FieldType.TIMESTAMP: _decode_timestamp,
    FieldType.TIMESTAMPTZ: _decode_timestamptz,
}
