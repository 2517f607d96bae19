"""Binary JSON of MySQL: its objects and arrays, and its text as the server prints it.

A container has its count and size, then for an object the places of its keys, then its values: small ones in their
entries, others at a place after them. A document never holds more than its own bytes: what it says of sizes and places
is paid for from a budget, so that bytes that point at each other can neither run forever nor grow.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from typing import Final

from headwater.sources.mysql.binlog.cursor import Cursor, protocol_error
from headwater.sources.mysql.binlog.numbers import Parts, decimal_size, decimal_text, temporal_text

SIZES: Final = {4: 1, 5: 2, 6: 2, 7: 4, 8: 4, 9: 8, 10: 8, 11: 8}
"""Of values that always take the same bytes, by their kind."""
_MAX_DEPTH: Final = 100


class Budget:
    """The bytes that a document has: places in it may not point to the same ones again and again."""

    def __init__(self, document: bytes) -> None:
        self._left = len(document) + 16

    def pay(self, size: int) -> None:
        """:raises SourceProtocolError: it had fewer."""
        self._left -= size
        if self._left < 0:
            raise protocol_error("a JSON document holds more than its bytes.")


def cut_off() -> Exception:
    """The error of a document that is shorter than it says."""
    return protocol_error("a JSON document is cut off.")


def length_of(read: Cursor) -> int:
    """A length of up to five bytes with seven bits in each."""
    length = 0
    for shift in range(0, 35, 7):
        byte = read.number(1)
        length |= (byte & 0x7F) << shift
        if not byte & 0x80:
            if length > 0xFFFF_FFFF:
                break
            return length
    raise cut_off()


def is_inline(kind: int, width: int) -> bool:
    """Whether the value lies in its entry."""
    return kind in (4, 5, 6) or (width == 4 and kind in (7, 8))


def entries(
    data: bytes, width: int, depth: int, budget: Budget, *, is_object: bool
) -> Iterator[tuple[bytes, int, bytes]]:
    """Of each entry its key (empty in an array), the kind of its value, and the bytes that begin with the value.

    :param width: of counts and places: 2 in small documents, 4 in large ones.
    :raises SourceProtocolError: it is malformed.
    """
    if depth >= _MAX_DEPTH:
        raise protocol_error("a JSON document is nested too deep.")
    if len(data) < 2 * width:
        raise cut_off()
    count, whole = (int.from_bytes(data[at : at + width], "little") for at in (0, width))
    key_entry, value_entry = width + 2 if is_object else 0, width + 1
    values = 2 * width + count * key_entry
    if whole > len(data) or values + count * value_entry > whole:
        raise cut_off()
    budget.pay(2 * width + count * (key_entry + value_entry))
    for place in range(count):
        key = b""
        if is_object:
            entry = 2 * width + place * key_entry
            begin = int.from_bytes(data[entry : entry + width], "little")
            size = int.from_bytes(data[entry + width : entry + width + 2], "little")
            if begin + size > whole:
                raise cut_off()
            budget.pay(size)
            key = data[begin : begin + size]
        entry = values + place * value_entry
        kind, value = data[entry], data[entry + 1 : entry + 1 + width]
        if not is_inline(kind, width):
            begin = int.from_bytes(value, "little")
            if begin >= whole:
                raise cut_off()
            value = data[begin:whole]
        yield key, kind, value


_LITERALS: Final = (b"null", b"true", b"false")
_ESCAPES: Final = {
    **{code: f"\\u{code:04x}" for code in range(0x20)},
    0x22: '\\"',
    0x5C: "\\\\",
    0x08: "\\b",
    0x0C: "\\f",
    0x0A: "\\n",
    0x0D: "\\r",
    0x09: "\\t",
}
_LINE: Final = 76
DECIMAL, TIMESTAMP, DATE, TIME, DATETIME = 246, 7, 10, 11, 12


def json_text(document: bytes) -> bytes:
    """The text of a document.

    :raises SourceProtocolError: it is malformed.
    """
    if not document:
        return b"null"
    parts: list[bytes] = []
    _Printer(parts, Budget(document)).value(document[0], document[1:], 0)
    return b"".join(parts)


class _Printer:
    def __init__(self, parts: list[bytes], budget: Budget) -> None:
        self._parts, self._budget = parts, budget

    def value(self, kind: int, data: bytes, depth: int) -> None:
        if len(data) < SIZES.get(kind, 0):
            raise cut_off()
        if kind in (0, 1, 2, 3):
            self._container(data, 4 if kind & 1 else 2, depth, is_object=kind < 2)
        elif kind == 4:
            if data[0] > 2:
                raise protocol_error("a JSON document has a literal that is none.")
            self._parts.append(_LITERALS[data[0]])
        elif kind in (5, 7, 9):
            self._parts.append(b"%d" % int.from_bytes(data[: SIZES[kind]], "little", signed=True))
        elif kind in (6, 8, 10):
            self._parts.append(b"%d" % int.from_bytes(data[: SIZES[kind]], "little"))
        elif kind == 11:
            self._budget.pay(8)
            self._parts.append(double_text(data[:8]))
        elif kind == 12:
            read = Cursor(data)
            self._string(read.take(length_of(read)))
        elif kind == 15:
            self._opaque(data)
        else:
            raise protocol_error("a JSON document has a value of a type that is not known.")

    def _container(self, data: bytes, width: int, depth: int, *, is_object: bool) -> None:
        self._parts.append(b"{" if is_object else b"[")
        for place, (key, kind, value) in enumerate(entries(data, width, depth, self._budget, is_object=is_object)):
            if place:
                self._parts.append(b", ")
            if is_object:
                self._parts += (quoted(key), b": ")
            self.value(kind, value, depth + 1)
        self._parts.append(b"}" if is_object else b"]")

    def _string(self, text: bytes) -> None:
        self._budget.pay(len(text))
        self._parts.append(quoted(text))

    def _opaque(self, data: bytes) -> None:
        if len(data) < 2:
            raise cut_off()
        read = Cursor(data, 1)
        content = read.take(length_of(read))
        self._budget.pay(len(content) + 2)
        self._parts.append(opaque_text(data[0], content))


def quoted(text: bytes) -> bytes:
    """A string with what the server escapes. Bytes that are no UTF-8 pass."""
    return b'"' + text.decode(errors="surrogateescape").translate(_ESCAPES).encode(errors="surrogateescape") + b'"'


def opaque_text(kind: int, content: bytes) -> bytes:
    """A value of an SQL type."""
    if kind == DECIMAL:
        if len(content) < 2 or not 1 <= content[0] <= 65 or content[1] > content[0]:
            raise protocol_error("a JSON document has a DECIMAL that is none.")
        size = decimal_size(content[0], content[1])
        if len(content) < 2 + size:
            raise protocol_error("a JSON document has a DECIMAL that is none.")
        return decimal_text(content[2 : 2 + size], content[0], content[1])
    if kind in (TIMESTAMP, DATE, TIME, DATETIME):
        if len(content) != 8:
            raise protocol_error("a JSON document has a date or time that is none.")
        return b'"' + _moment(kind, int.from_bytes(content, "little", signed=True)) + b'"'
    letters = base64.b64encode(content)
    lines = b"\\n".join(letters[at : at + _LINE] for at in range(0, len(letters), _LINE))
    return b'"base64:type%d:%s"' % (kind, lines)


def _moment(kind: int, packed: int) -> bytes:
    negative, packed = packed < 0, 0 if packed == -(1 << 63) else abs(packed)
    us, value = (packed & 0xFFFFFF) % 1_000_000, packed >> 24
    minute, second = value >> 6 & 63, value & 63
    if kind == TIME:
        parts = Parts(0, 0, 0, (value >> 12 & 1023) % 1000, minute, second, us, negative=negative)
        return temporal_text(parts, 6, has_date=False)
    date, hour = value >> 17, value >> 12 & 31
    months = date >> 5
    parts = Parts(months // 13 % 10000, months % 13, date & 31, hour, minute, second, us, negative=negative)
    return temporal_text(parts, 6, has_time=kind != DATE)


def double_text(data: bytes) -> bytes:
    """A double with the fewest digits that name it; the server takes an exponent for large and small ones."""
    (value,) = struct.unpack("<d", data)
    if not math.isfinite(value):
        raise protocol_error("a JSON document has a number that is none.")
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0") or "0"
    if digits == "0":
        point = 1
    sign = "-" if math.copysign(1, value) < 0 else ""
    if point < -14 or (point > 15 and len(digits) <= point):
        tail = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{tail}e{point - 1}".encode()
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}".encode()
    return f"{sign}{digits[:point].ljust(point, '0')}.{digits[point:] or '0'}".encode()
