"""Large values of the object-store engine: bytes in immutable objects, a pointer in the key.

SlateDB is made for small values; Arrow chunks are not. All values of one seal that are larger than
:data:`INLINE_BYTES` go into one object, written before the seal with put-if-absent. A stored cell is

    0x00 | value                                     small: the value itself
    0x01 | offset u64 | length u64 | crc32 u32 | object name (UTF-8)     large: where it is (big-endian)

An object is deleted when none of its values is referenced any more and no pin can see it.
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.state.batch import Value
from headwater.state.engines.slate import Place, map_errors, obstore
from headwater.state.errors import InvalidValue, StoreCorrupt

INLINE_BYTES = 4096
OBJECTS = "values/"
GROUP_BYTES = 16 << 20
"""How many bytes of large values a scan reads at once."""

_SMALL = b"\x00"
_LARGE = 0x01
_POINTER = struct.Struct(">BQQI")


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where a large value is."""

    name: str
    offset: int
    length: int
    crc: int

    def to_bytes(self) -> bytes:
        return _POINTER.pack(_LARGE, self.offset, self.length, self.crc) + self.name.encode()


def pointer_of(cell: bytes) -> Pointer | None:
    """The pointer in *cell*; ``None`` when the value itself is there."""
    if cell[0] != _LARGE:
        return None
    _, offset, length, crc = _POINTER.unpack_from(cell)
    return Pointer(cell[_POINTER.size :].decode(), offset, length, crc)


def flat(value: Value) -> Value:
    """*value* as plain bytes, so that its length is its number of bytes.

    :raises InvalidValue: the memory behind it is no longer there.
    """
    if not isinstance(value, memoryview):
        return value
    try:
        return value.cast("B") if value.c_contiguous and value.nbytes else value.tobytes()
    except ValueError as error:
        raise InvalidValue("A value is a memoryview that was released.") from error


def write_cells(place: Place, name: str, values: Sequence[Value]) -> list[bytes]:
    """The cells of *values* (made :func:`flat`); the large ones are written to the object *name* first."""
    cells: list[bytes] = []
    parts: list[Value] = []
    offset = 0
    for value in values:
        if len(value) <= INLINE_BYTES:
            cells.append(_SMALL + value)
        else:
            cells.append(Pointer(name, offset, len(value), zlib.crc32(value)).to_bytes())
            parts.append(value)
            offset += len(value)
    if parts and not place.create(name, b"".join(parts)):
        raise StoreCorrupt(f"The object {name} of {place.location} exists already.")
    return cells


def groups(cells: Sequence[bytes]) -> Iterator[slice]:
    """Cut *cells* so that the values of each part can be held in memory together."""
    begin, held = 0, 0
    for index, cell in enumerate(cells):
        pointer = pointer_of(cell)
        size = len(cell) if pointer is None else pointer.length
        if held + size > GROUP_BYTES and index > begin:
            yield slice(begin, index)
            begin, held = index, 0
        held += size
    yield slice(begin, len(cells))


def read_values(place: Place, cells: Sequence[bytes]) -> list[bytes]:
    """The values of *cells*; neighbours in one object come in one request.

    :raises StoreCorrupt: an object is missing or its bytes are not those that were written.
    """
    values: list[Any] = [None] * len(cells)
    wanted: dict[str, list[tuple[int, Pointer]]] = defaultdict(list)
    for index, cell in enumerate(cells):
        pointer = pointer_of(cell)
        if pointer is None:
            values[index] = cell[1:]
        else:
            wanted[pointer.name].append((index, pointer))
    for name, pointers in wanted.items():
        starts = [pointer.offset for _, pointer in pointers]
        lengths = [pointer.length for _, pointer in pointers]
        with map_errors(place.location):
            try:
                found = obstore.get_ranges(place.objects, name, starts=starts, lengths=lengths)
            except FileNotFoundError as error:
                raise StoreCorrupt(f"The object {name} of {place.location} is missing.") from error
        for (index, pointer), data in zip(pointers, found, strict=True):
            value = bytes(data)
            if len(value) != pointer.length or zlib.crc32(value) != pointer.crc:
                raise StoreCorrupt(f"The object {name} of {place.location} is damaged at byte {pointer.offset}.")
            values[index] = value
    return values
