"""Keys of any type as bytes that sort as MongoDB sorts them. Pure.

Two values have the same bytes just when MongoDB takes them as equal, and the bytes are ordered as it orders the values,
with the simple collation: numbers by value whatever their type (``1``, ``1.0`` and ``NumberDecimal("1.00")`` are one
key), texts by their bytes, objects field by field. They cannot be turned back into the value.

==================  ====================================================================================================
first byte          what follows
==================  ====================================================================================================
``01`` MinKey       nothing. So for ``02`` undefined, ``05`` null, ``7f`` MaxKey
``0a`` number       ``01`` NaN, ``02`` -Infinity, ``04`` zero, ``06`` Infinity; ``05`` above zero: the number is
                    0.d₁d₂… · 10ᵉ: e + 16384 in two bytes, high first, then two digits in a byte, plus 1, and ``00``;
                    ``03`` below zero: the same of its amount with every bit turned
``0f`` string       the bytes, ``00`` in it as ``00 ff``, and ``00 00``; a symbol is a string
``14`` object       for each field: the first byte of its value, its name and ``00``, the rest of the value; then ``00``
``19`` array        for each element its bytes; then ``00``
``1e`` binary       length in four bytes, subtype, bytes
``23`` ObjectId     12 bytes
``28`` bool         ``00`` or ``01``
``2d`` date         milliseconds in 8 bytes, high first, the sign bit turned
``2f`` timestamp    seconds and ordinal, 4 bytes each, high first
``32`` regex        pattern and ``00``, options and ``00``
``37`` DBPointer    as a string its length in four bytes, its bytes; 12 bytes
``3c`` code         as a string
``41`` with scope   as a string, then as an object without its first byte
==================  ====================================================================================================
"""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Final

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mongodb.documents import elements as bson
from headwater.sources.mongodb.documents.decimals import Decimal128

_CLASSES: Final = {
    bson.MIN_KEY: 0x01,
    bson.UNDEFINED: 0x02,
    bson.NULL: 0x05,
    bson.DOUBLE: 0x0A,
    bson.INT: 0x0A,
    bson.LONG: 0x0A,
    bson.DECIMAL: 0x0A,
    bson.STRING: 0x0F,
    bson.SYMBOL: 0x0F,
    bson.OBJECT: 0x14,
    bson.ARRAY: 0x19,
    bson.BINARY: 0x1E,
    bson.OBJECT_ID: 0x23,
    bson.BOOL: 0x28,
    bson.DATE: 0x2D,
    bson.TIMESTAMP: 0x2F,
    bson.REGEX: 0x32,
    bson.DB_POINTER: 0x37,
    bson.CODE: 0x3C,
    bson.CODE_WITH_SCOPE: 0x41,
    bson.MAX_KEY: 0x7F,
}
_NAN, _LOWEST, _BELOW, _ZERO, _ABOVE, _HIGHEST = b"\1", b"\2", b"\3", b"\4", b"\5", b"\6"
_MIDDLE: Final = 0x4000
_TURNED: Final = bytes(255 - byte for byte in range(256))


def id_key(document: bytes) -> bytes:
    """The key of the ``_id`` of a raw document such as ``{_id: …}``.

    :raises SourceProtocolError: it is no document, or has no ``_id``.
    """
    reason = "it has no _id"
    try:
        end = bson.document_end(document, 0, len(document))
        for kind, name, start, stop in bson.elements(document, 0, end, 0):
            if name == b"_id":
                return value_key(document, kind, start, stop, 0)
    except ValueError as error:
        reason = str(error)
    raise SourceProtocolError(
        f"A document of MongoDB cannot be read: {reason}.",
        next_step="Check the collection with db.runCommand({validate: …, full: true}).",
    )


def value_key(data: bytes, kind: int, start: int, stop: int, depth: int) -> bytes:
    """One value. :raises ValueError: it is none."""
    return bytes((_CLASSES[kind],)) + _rest(data, kind, start, stop, depth)


def _rest(data: bytes, kind: int, start: int, stop: int, depth: int) -> bytes:
    content = data[start:stop]
    if kind in (bson.INT, bson.LONG):
        return _number(int.from_bytes(content, "little", signed=True), 0)
    if kind == bson.DOUBLE:
        return _double(struct.unpack("<d", content)[0])
    if kind == bson.DECIMAL:
        return _decimal(Decimal128.read(content))
    if kind in (bson.STRING, bson.SYMBOL, bson.CODE):
        return _string(content[4:-1])
    if kind == bson.OBJECT:
        return _object(data, start, stop, depth + 1)
    if kind == bson.ARRAY:
        inner = bson.elements(data, start, stop, depth + 1)
        return b"".join(value_key(data, one, at, to, depth + 1) for one, _, at, to in inner) + b"\0"
    if kind == bson.BINARY:
        return struct.pack(">I", len(content) - 5) + content[4:]
    if kind == bson.DATE:
        return struct.pack(">Q", int.from_bytes(content, "little") ^ 1 << 63)
    if kind == bson.TIMESTAMP:
        return content[::-1]
    if kind == bson.DB_POINTER:
        return struct.pack(">I", len(content) - 17) + content[4:-13] + content[-12:]
    if kind == bson.CODE_WITH_SCOPE:
        middle = bson.string_end(data, start + 4, stop)
        return _string(data[start + 8 : middle - 1]) + _object(data, middle, stop, depth + 1)
    return content  # ObjectId, bool, and regex as it stands; nothing of the others


def _object(data: bytes, start: int, stop: int, depth: int) -> bytes:
    parts = [
        bytes((_CLASSES[kind],)) + name + b"\0" + _rest(data, kind, at, to, depth)
        for kind, name, at, to in bson.elements(data, start, stop, depth)
    ]
    return b"".join(parts) + b"\0"


def _string(text: bytes) -> bytes:
    return text.replace(b"\0", b"\0\xff") + b"\0\0"


def _double(number: float) -> bytes:
    if number != number:
        return _NAN
    if number in (float("inf"), float("-inf")):
        return _HIGHEST if number > 0 else _LOWEST
    sign, digits, exponent = Decimal(number).as_tuple()
    assert isinstance(exponent, int)
    found = int("".join(map(str, digits)))
    return _number(-found if sign else found, exponent)


def _decimal(number: Decimal128) -> bytes:
    if number.special == "NaN":
        return _NAN
    if number.special:
        return _LOWEST if number.negative else _HIGHEST
    return _number(-number.coefficient if number.negative else number.coefficient, number.exponent)


def _number(number: int, exponent: int) -> bytes:
    """Of ``number * 10 ** exponent``."""
    if not number:
        return _ZERO
    digits = str(abs(number))
    magnitude = struct.pack(">H", exponent + len(digits) + _MIDDLE)
    digits = digits.rstrip("0")
    digits += "0" * (len(digits) % 2)
    magnitude += bytes(int(digits[at : at + 2]) + 1 for at in range(0, len(digits), 2)) + b"\0"
    return _ABOVE + magnitude if number > 0 else _BELOW + magnitude.translate(_TURNED)
