"""Objects and arrays in the binary JSON of MySQL: what each of their entries is, checked against the bytes there are.

A container has its count and size, then for an object the places of its keys, then its values: small ones in their
entries, others at a place after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headwater.sources.mysql.binlog.cursor import Cursor, protocol_error

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
