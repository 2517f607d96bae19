"""Where a log's records are in the state store. Pure.

    u32 BE  0x80000000 + number of the log     (state tables have numbers below)
    u8      space
            0  rows, format 1:    vnode u16 | epoch u64 | seq u32
            1  chunks, format 2:  epoch u64 | writer u16 | first seq u32
            2  barriers:          epoch u64 | writer u16

All big-endian, so bytes sort as the numbers do. The writer is the lowest vnode that an instance owns: instances own
disjoint vnodes, so it tells them apart. A barrier is written in the seal that makes its epoch durable; chunks may be
staged before, so a record counts only when its epoch has a barrier.
"""

from __future__ import annotations

import struct

from headwater.log_store.errors import LogCorrupt
from headwater.stream import Epoch

LOG_SPACE = 0x8000_0000
MAX_SEQ = (1 << 32) - 1

_ROW = struct.Struct(">IBHQI")
_CHUNK = struct.Struct(">IBQHI")
_BARRIER = _WRITER = struct.Struct(">IBQH")
_VNODE = struct.Struct(">IBH")
_EPOCH = struct.Struct(">IBQ")

ROWS, CHUNKS, BARRIERS = 0, 1, 2
CHUNKS_OF = _WRITER.size
"""Length of what :func:`chunks_of` gives."""


def prefix(number: int) -> bytes:
    """The front of every key of a log."""
    return (LOG_SPACE + number).to_bytes(4, "big")


def row_key(number: int, vnode: int, epoch: int, seq: int) -> bytes:
    return _ROW.pack(LOG_SPACE + number, ROWS, vnode, epoch, seq)


def rows_from(number: int, vnode: int, epoch: int = 0) -> bytes:
    """The first key that a row of *vnode* can have from *epoch* on."""
    return _ROW.pack(LOG_SPACE + number, ROWS, vnode, epoch, 0)


def rows_end(number: int, vnode: int) -> bytes:
    """Above all rows of *vnode*."""
    return _VNODE.pack(LOG_SPACE + number, ROWS, vnode) + b"\xff" * 13


def chunk_key(number: int, epoch: int, writer: int, seq: int) -> bytes:
    return _CHUNK.pack(LOG_SPACE + number, CHUNKS, epoch, writer, seq)


def chunks_from(number: int, epoch: int = 0) -> bytes:
    """The first key that a chunk can have from *epoch* on."""
    return _EPOCH.pack(LOG_SPACE + number, CHUNKS, epoch)


def chunks_of(number: int, epoch: int, writer: int) -> bytes:
    """The front of every key of a chunk of *writer* in *epoch*."""
    return _WRITER.pack(LOG_SPACE + number, CHUNKS, epoch, writer)


def barrier_key(number: int, epoch: int, writer: int) -> bytes:
    return _BARRIER.pack(LOG_SPACE + number, BARRIERS, epoch, writer)


def barriers_from(number: int, epoch: int = 0) -> bytes:
    """The first key that a barrier can have from *epoch* on."""
    return _EPOCH.pack(LOG_SPACE + number, BARRIERS, epoch)


def space_end(number: int, space: int) -> bytes:
    """Above all keys of one space of a log."""
    return prefix(number) + bytes((space + 1,))


def parse_barrier_key(key: bytes) -> tuple[Epoch, int]:
    """Epoch and writer. :raises LogCorrupt: not the key of a barrier."""
    try:
        _, space, epoch, writer = _BARRIER.unpack(key)
        if space != BARRIERS:
            raise ValueError("space")
        return Epoch(epoch), writer
    except (struct.error, ValueError) as error:
        raise LogCorrupt("A key in the barriers of a log is not the key of a barrier.") from error
