"""What the compiled code and its stand-in in Python are given, and what they give. Pure.

A column is described by a tuple: name of the field, kind, digits, scale (of bytes: the subtype), whether a document
must have it, and the columns inside of it. What is made of it is a tuple: length, nulls, conflicts (values that it did
not take, and which are null), what these were, one bit each, then the buffers of an Arrow array and what is inside.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeAlias

from headwater import compiled
from headwater.sources.mongodb.documents import elements as bson
from headwater.sources.mongodb.documents.types import DocumentType

Described: TypeAlias = tuple[bytes, int, int, int, bool, tuple["Described", ...]]
Made: TypeAlias = tuple[int, int, int, int, Any | None, Any | None, Any | None, list["Made"]]

FOUND_MIN_KEY: Final = 1 << 20
FOUND_MAX_KEY: Final = 1 << 21
FOUND_MISSING: Final = 1 << 22
FOUND_NO_TEXT: Final = 1 << 23
FOUND_INEXACT: Final = 1 << 24
FOUND_SUBTYPE: Final = 1 << 25
"""Bits of what was found beside those of the types, of which each has its own number."""

IN_A_ROW: Final = 0
IN_AN_ARRAY: Final = 1
"""How documents stand that are no Arrow array."""

FIRST_MS: Final = -62_135_596_800_000
LAST_MS: Final = 253_402_300_799_999
"""The years 1 to 9999: Python, SQL and most readers of tables have no others."""

_FOUND: Final = {
    bson.DOUBLE: "double",
    bson.STRING: "string",
    bson.OBJECT: "object",
    bson.ARRAY: "array",
    bson.BINARY: "binData",
    bson.UNDEFINED: "undefined",
    bson.OBJECT_ID: "objectId",
    bson.BOOL: "bool",
    bson.DATE: "date",
    bson.NULL: "null",
    bson.REGEX: "regex",
    bson.DB_POINTER: "dbPointer",
    bson.CODE: "javascript",
    bson.SYMBOL: "symbol",
    bson.CODE_WITH_SCOPE: "javascriptWithScope",
    bson.INT: "int",
    bson.TIMESTAMP: "timestamp",
    bson.LONG: "long",
    bson.DECIMAL: "decimal",
    20: "minKey",
    21: "maxKey",
    22: "no value",
    23: "text that is not UTF-8",
    24: "numbers or dates that it does not hold exactly",
    25: "binData of another subtype",
}

NO_TEXT: Final = (_FOUND[23],)
"""What is found where a text has no characters."""


class Codec(Protocol):
    """The compiled code, or what stands in for it."""

    def plan(self, described: tuple[Described, ...], /) -> Any:
        """What :meth:`decode` is given: columns that were taken apart."""
        ...

    def decode(
        self, plan: Any, data: Any, offsets: Any | None, validity: Any | None, first: int, rows: int, /
    ) -> tuple[int, list[Made]]:
        """The columns of documents that stand one after another (*first* is :data:`IN_A_ROW`) or in a BSON array
        (:data:`IN_AN_ARRAY`), or, with *offsets*, of the elements of an Arrow array from *first* on.

        :raises ValueError: these are no documents.
        """
        ...


def codec() -> Codec:
    """The compiled code, where it was built and is wanted."""
    if compiled.is_wanted():
        try:
            from headwater.sources.mongodb.documents import _documents

            return _documents
        except ImportError:
            pass
    from headwater.sources.mongodb.documents import python_documents

    return python_documents


def described(name: str, kind: DocumentType, *, required: bool = False) -> Described:
    """A column of *kind* that takes the field *name*."""
    children = tuple(described(field, inner) for field, inner in kind.fields)
    return (name.encode(), int(kind.kind), kind.digits, kind.scale, required, children)


def found_bit(kind: int) -> int:
    """The bit of a type of BSON."""
    if kind == bson.MIN_KEY:
        return FOUND_MIN_KEY
    return FOUND_MAX_KEY if kind == bson.MAX_KEY else 1 << kind


def found_names(found: int) -> tuple[str, ...]:
    """What the bits stand for, as MongoDB names types."""
    return tuple(name for bit, name in _FOUND.items() if found >> bit & 1)
