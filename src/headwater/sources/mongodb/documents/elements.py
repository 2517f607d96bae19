"""The elements of a raw BSON document, without the compiled code: types, names and where values lie. Pure.

Every length is checked against the end of what holds it. Whatever is wrong raises ``ValueError`` with a reason that
holds no value; the compiled code gives the same reasons.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

DOUBLE, STRING, OBJECT, ARRAY, BINARY, UNDEFINED, OBJECT_ID, BOOL, DATE, NULL = range(1, 11)
REGEX, DB_POINTER, CODE, SYMBOL, CODE_WITH_SCOPE, INT, TIMESTAMP, LONG, DECIMAL = range(11, 20)
MIN_KEY, MAX_KEY = 255, 127

MOST_NESTED: Final = 220
"""Levels that are followed; a server stores no more than 200."""

_FIXED: Final = {
    DOUBLE: 8,
    UNDEFINED: 0,
    OBJECT_ID: 12,
    BOOL: 1,
    DATE: 8,
    NULL: 0,
    INT: 4,
    TIMESTAMP: 8,
    LONG: 8,
    DECIMAL: 16,
    MIN_KEY: 0,
    MAX_KEY: 0,
}
_INT: Final = struct.Struct("<i")

Element = tuple[int, bytes, int, int]
"""Type, name, and where the value begins and ends."""


def document_end(data: bytes, at: int, end: int) -> int:
    """Where the document ends that begins at *at*."""
    if end - at < 5:
        raise ValueError("a document is cut")
    size: int = _INT.unpack_from(data, at)[0]
    if size < 5 or size > end - at:
        raise ValueError("a document is cut")
    if data[at + size - 1]:
        raise ValueError("a document does not end where it says")
    return at + size


def elements(data: bytes, at: int, end: int, depth: int) -> Iterator[Element]:
    """The elements of the document between *at* and *end*, which :func:`document_end` gave."""
    if depth > MOST_NESTED:
        raise ValueError(f"a document is nested deeper than {MOST_NESTED} levels")
    at, end = at + 4, end - 1
    while at < end:
        kind = data[at]
        name_end = data.find(b"\0", at + 1, end)
        if name_end < 0:
            raise ValueError("the name of a field is cut")
        start = name_end + 1
        stop = _value_end(data, kind, start, end)
        yield kind, data[at + 1 : name_end], start, stop
        at = stop


def string_end(data: bytes, at: int, end: int) -> int:
    """Where the counted text at *at* ends, with its zero."""
    if end - at < 5:
        raise ValueError("a value is cut")
    size: int = _INT.unpack_from(data, at)[0]
    if size < 1 or size > end - at - 4 or data[at + 3 + size]:
        raise ValueError("a text is cut")
    return at + 4 + size


def cstring_end(data: bytes, at: int, end: int) -> int:
    """After the zero that ends the text at *at*."""
    found = data.find(b"\0", at, end)
    if found < 0:
        raise ValueError("a text is cut")
    return found + 1


def binary_content(data: bytes, start: int, stop: int) -> tuple[int, bytes]:
    """Subtype and bytes of a binary value; the old subtype 2 has its length twice."""
    subtype = data[start + 4]
    if subtype != 2:
        return subtype, data[start + 5 : stop]
    if stop - start < 9 or _INT.unpack_from(data, start + 5)[0] != stop - start - 9:
        raise ValueError("bytes of subtype 2 are cut")
    return subtype, data[start + 9 : stop]


def _value_end(data: bytes, kind: int, at: int, end: int) -> int:
    fixed = _FIXED.get(kind)
    if fixed is not None:
        if end - at < fixed:
            raise ValueError("a value is cut")
        if kind == BOOL and data[at] > 1:
            raise ValueError("a bool is neither 0 nor 1")
        return at + fixed
    if kind in (STRING, CODE, SYMBOL):
        return string_end(data, at, end)
    if kind in (OBJECT, ARRAY):
        return document_end(data, at, end)
    if kind == BINARY:
        if end - at < 5:
            raise ValueError("a value is cut")
        size: int = _INT.unpack_from(data, at)[0]
        if size < 0 or size > end - at - 5:
            raise ValueError("a value is cut")
        return at + 5 + size
    if kind == REGEX:
        return cstring_end(data, cstring_end(data, at, end), end)
    if kind == DB_POINTER:
        stop = string_end(data, at, end) + 12
        if stop > end:
            raise ValueError("a value is cut")
        return stop
    if kind == CODE_WITH_SCOPE:
        return _scoped_end(data, at, end)
    raise ValueError("a value has no type of BSON")


def _scoped_end(data: bytes, at: int, end: int) -> int:
    if end - at < 4:
        raise ValueError("a value is cut")
    size: int = _INT.unpack_from(data, at)[0]
    if size < 4 or size > end - at:
        raise ValueError("a value is cut")
    stop = at + size
    if document_end(data, string_end(data, at + 4, stop), stop) != stop:
        raise ValueError("a document does not end where it says")
    return stop
