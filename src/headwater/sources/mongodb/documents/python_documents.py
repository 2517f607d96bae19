"""Documents into columns without the compiled code: the functions of ``_documents.c``, the same values, slower."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from headwater.sources.mongodb.documents import elements as bson
from headwater.sources.mongodb.documents.decimals import Decimal128, units
from headwater.sources.mongodb.documents.extended_json import NoText, document_json, field_json, value_json
from headwater.sources.mongodb.documents.key_order import value_key
from headwater.sources.mongodb.documents.layout import (
    FIRST_MS,
    FOUND_INEXACT,
    FOUND_MISSING,
    FOUND_NO_TEXT,
    FOUND_SUBTYPE,
    IN_AN_ARRAY,
    LAST_MS,
    Described,
    Made,
    found_bit,
)
from headwater.sources.mongodb.documents.types import Kind

_STORED: Final = {
    Kind.INT: pa.int32(),
    Kind.LONG: pa.int64(),
    Kind.DOUBLE: pa.float64(),
    Kind.BOOL: pa.bool_(),
    Kind.DATE: pa.int64(),
    Kind.TIMESTAMP: pa.uint64(),
}


class _Conflict(Exception):
    """A value that the column does not take; its argument is what was found."""


class _Node:
    """A column, or a part of one, while it grows."""

    def __init__(self, described: Described) -> None:
        self.name, kind, self.digits, self.scale, self.required, children = described
        self.kind = Kind(kind)
        self.children = [_Node(child) for child in children]
        self.by_name: dict[bytes, list[_Node]] = {}
        for child in self.children:
            self.by_name.setdefault(child.name, []).append(child)
        self.clear()

    def clear(self) -> None:
        self.values: list[Any] = []  # of an array: how many elements; of a struct: True
        self.conflicts = self.found = 0
        for child in self.children:
            child.clear()

    def add(self, value: Any) -> None:
        self.values.append(value)
        if value is None and self.kind is Kind.STRUCT:
            for child in self.children:
                child.add(None)

    def refuse(self, found: int) -> None:
        self.conflicts += 1
        self.found |= found
        self.add(None)

    def take(self, data: bytes, kind: int, start: int, stop: int, depth: int) -> None:
        """Add a value."""
        if self.kind is Kind.KEY:
            self.add(value_key(data, kind, start, stop, depth))
        elif kind == bson.NULL:
            if self.required:
                self.refuse(found_bit(kind))
            else:
                self.add(None)
        elif self.kind is Kind.STRUCT and kind == bson.OBJECT:
            self.take_fields(data, start, stop, depth + 1)
            self.values.append(True)
        elif self.kind is Kind.LIST and kind == bson.ARRAY:
            self.values.append(self._take_list(data, start, stop, depth + 1))
        else:
            try:
                self.add(_value(self, data, kind, start, stop, depth))
            except _Conflict as conflict:
                self.refuse(conflict.args[0])
            except NoText:
                self.refuse(FOUND_NO_TEXT)

    def take_fields(self, data: bytes, at: int, end: int, depth: int) -> None:
        row = len(self.values)
        for kind, name, start, stop in bson.elements(data, at, end, depth):
            for child in self.by_name.get(name, ()):
                if len(child.values) == row:
                    child.take(data, kind, start, stop, depth)
        for child in self.children:
            if len(child.values) == row:
                child.add(None)

    def _take_list(self, data: bytes, at: int, end: int, depth: int) -> int:
        count = 0
        for kind, _, start, stop in bson.elements(data, at, end, depth):
            self.children[0].take(data, kind, start, stop, depth)
            count += 1
        return count

    def made(self) -> Made:
        children = [child.made() for child in self.children]
        flags = pa.array([None if value is None else True for value in self.values], pa.bool_())
        values = data = None
        if self.kind is Kind.LIST:
            ends = [0]
            for value in self.values:
                ends.append(ends[-1] + (value or 0))
            values = pa.array(ends, pa.int32()).buffers()[1]
        elif self.kind is not Kind.STRUCT:
            stored = _STORED.get(self.kind)
            if self.kind is Kind.DECIMAL:
                stored = pa.binary(16 if self.digits <= 38 else 32)
            buffers = pa.array(self.values, stored or pa.binary()).buffers()
            values = buffers[1]
            data = None if stored else buffers[2] or pa.py_buffer(b"")
        return (
            len(self.values),
            flags.null_count,
            self.conflicts,
            self.found,
            flags.buffers()[0],
            values,
            data,
            children,
        )


class Plan:
    """What a batch is decoded into."""

    def __init__(self, described: Sequence[Described]) -> None:
        self.root = _Node((b"", Kind.STRUCT, 0, 0, False, tuple(described)))
        self.whole = [node for node in self.root.children if node.kind is Kind.DOCUMENT]
        self.rest = [node for node in self.root.children if node.kind is Kind.REST]
        for node in (*self.whole, *self.rest):
            self.root.by_name[node.name].remove(node)
            if not self.root.by_name[node.name]:
                del self.root.by_name[node.name]


def plan(described: Sequence[Described]) -> Plan:
    """See ``plan`` of ``_documents.c``."""
    return Plan(described)


def decode(
    made: Plan, data: Any, offsets: Any | None, validity: Any | None, first: int, rows: int
) -> tuple[int, list[Made]]:
    """See ``decode`` of ``_documents.c``."""
    raw = bytes(data)
    made.root.clear()
    number = 0
    try:
        if offsets is None and first == IN_AN_ARRAY:
            if bson.document_end(raw, 0, len(raw)) != len(raw):
                raise ValueError("a document does not end where it says")
            for kind, _, start, stop in bson.elements(raw, 0, len(raw), 0):
                if kind != bson.OBJECT:
                    raise ValueError("an array holds what is no document")
                _take_document(made, raw, start, stop)
                number += 1
        elif offsets is None:
            at = 0
            while at < len(raw):
                end = bson.document_end(raw, at, len(raw))
                _take_document(made, raw, at, end)
                at, number = end, number + 1
        else:
            starts = struct.unpack_from(f"={rows + 1}i", offsets, 4 * first)
            valid = None if validity is None else bytes(validity)
            for number in range(rows):
                place = first + number
                if valid is not None and not valid[place >> 3] >> (place & 7) & 1:
                    made.root.add(None)
                    continue
                if not 0 <= starts[number] <= starts[number + 1] <= len(raw):
                    raise ValueError("a document is cut")
                if bson.document_end(raw, starts[number], starts[number + 1]) != starts[number + 1]:
                    raise ValueError("a document does not end where it says")
                _take_document(made, raw, starts[number], starts[number + 1])
        return len(made.root.values), [child.made() for child in made.root.children]
    except ValueError as error:
        raise ValueError(f"document {number}: {error}") from None
    finally:
        made.root.clear()


def _take_document(made: Plan, data: bytes, at: int, end: int) -> None:
    row = len(made.root.values)
    for node in made.whole:
        try:
            node.add(document_json(data, at, end))
        except NoText:
            node.refuse(FOUND_NO_TEXT)
    if made.rest:
        _take_rest(made, data, at, end)
    for node in made.root.children:
        if node.required and len(node.values) == row and not _has(data, at, end, node.name):
            node.refuse(FOUND_MISSING)
    made.root.take_fields(data, at, end, 0)
    made.root.values.append(True)


def _take_rest(made: Plan, data: bytes, at: int, end: int) -> None:
    parts, no_text = list[bytes](), False
    for kind, name, start, stop in bson.elements(data, at, end, 0):
        if name not in made.root.by_name:
            try:
                parts.append(field_json(data, kind, name, start, stop, 0))
            except NoText:
                no_text = True
    for node in made.rest:
        if no_text:
            node.refuse(FOUND_NO_TEXT)
        else:
            node.add(b"{" + b",".join(parts) + b"}" if parts else None)


def _has(data: bytes, at: int, end: int, wanted: bytes) -> bool:
    return any(name == wanted for _, name, _, _ in bson.elements(data, at, end, 0))


def _value(node: _Node, data: bytes, kind: int, start: int, stop: int, depth: int) -> Any:
    wanted = node.kind
    if wanted is Kind.JSON:
        return value_json(data, kind, start, stop, depth)
    if wanted in (Kind.INT, Kind.LONG):
        return _whole(data, kind, start, stop, 31 if wanted is Kind.INT else 63)
    if wanted is Kind.DOUBLE:
        return _double(data, kind, start, stop)
    if wanted is Kind.BOOL and kind == bson.BOOL:
        return bool(data[start])
    if wanted is Kind.STRING and kind == bson.STRING:
        return _utf8(data[start + 4 : stop - 1])
    if wanted is Kind.OBJECT_ID and kind == bson.OBJECT_ID:
        return data[start:stop].hex().encode()
    if wanted is Kind.DATE and kind == bson.DATE:
        ms = int.from_bytes(data[start:stop], "little", signed=True)
        if not FIRST_MS <= ms <= LAST_MS:
            raise _Conflict(FOUND_INEXACT)
        return ms
    if wanted is Kind.TIMESTAMP and kind == bson.TIMESTAMP:
        return int.from_bytes(data[start:stop], "little")
    if wanted in (Kind.DECIMAL_TEXT, Kind.DECIMAL):
        return _decimal(node, data, kind, start, stop)
    if wanted in (Kind.BINARY, Kind.UUID) and kind == bson.BINARY:
        return _bytes(node, data, start, stop)
    if wanted is Kind.RAW and kind == bson.OBJECT:
        return data[start:stop]
    raise _Conflict(found_bit(kind))


def _whole(data: bytes, kind: int, start: int, stop: int, bits: int) -> int:
    if kind == bson.DOUBLE:
        (real,) = struct.unpack_from("<d", data, start)
        zero_below = real == 0 and data[stop - 1] >> 7
        if not -(2.0**63) <= real < 2.0**63 or real != int(real) or zero_below:
            raise _Conflict(FOUND_INEXACT)
        number = int(real)
    elif kind in (bson.INT, bson.LONG):
        number = int.from_bytes(data[start:stop], "little", signed=True)
    else:
        raise _Conflict(found_bit(kind))
    if not -(1 << bits) <= number < 1 << bits:
        raise _Conflict(FOUND_INEXACT)
    return number


def _double(data: bytes, kind: int, start: int, stop: int) -> float:
    if kind == bson.DOUBLE:
        return float(struct.unpack_from("<d", data, start)[0])
    if kind not in (bson.INT, bson.LONG):
        raise _Conflict(found_bit(kind))
    number = int.from_bytes(data[start:stop], "little", signed=True)
    if int(float(number)) != number:
        raise _Conflict(FOUND_INEXACT)
    return float(number)


def _decimal(node: _Node, data: bytes, kind: int, start: int, stop: int) -> bytes:
    if kind == bson.DECIMAL:
        found = Decimal128.read(data[start:stop])
        if node.kind is Kind.DECIMAL_TEXT:
            return found.text.encode()
        number = found.unscaled(node.digits, node.scale)
    elif kind in (bson.INT, bson.LONG):
        whole = int.from_bytes(data[start:stop], "little", signed=True)
        if node.kind is Kind.DECIMAL_TEXT:
            return str(whole).encode()
        number = units(whole, 0, node.digits, node.scale)
    else:
        raise _Conflict(found_bit(kind))
    if number is None:
        raise _Conflict(FOUND_INEXACT)
    return number.to_bytes(16 if node.digits <= 38 else 32, "little", signed=True)


def _bytes(node: _Node, data: bytes, start: int, stop: int) -> bytes:
    subtype, content = bson.binary_content(data, start, stop)
    if node.kind is Kind.BINARY and subtype == node.scale:
        return content
    if node.kind is Kind.UUID and subtype == 4 and len(content) == 16:
        return str(UUID(bytes=content)).encode()
    raise _Conflict(FOUND_SUBTYPE)


def _utf8(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        raise NoText from None
    return text
