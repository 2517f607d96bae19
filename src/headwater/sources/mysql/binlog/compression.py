"""What the servers compress: whole transactions (MySQL, zstd) and single events (MariaDB, zlib).

A size that bytes claim is never believed before so much was inflated, and nothing inflates beyond what an event may be.
"""

from __future__ import annotations

import zlib
from typing import Final

import pyarrow as pa

from headwater.sources.mysql.binlog.cursor import Cursor, protocol_error
from headwater.sources.mysql.binlog.events import HEADER_SIZE

MAX_INFLATED: Final = 4 << 30
_ZSTD, _NONE = 0, 255
_PIECE: Final = 1 << 20


def inflate(data: bytes) -> bytes:
    """The content of a compressed part of an event of MariaDB.

    :raises SourceProtocolError: it is malformed.
    """
    read = Cursor(data)
    first = read.number(1)
    if first & 0xF0 != 0x80:
        raise protocol_error("an event is compressed in a way that is not known.")
    size = int.from_bytes(read.take(first & 0x07), "big")
    if size > MAX_INFLATED:
        raise protocol_error("a compressed event is too large.")
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(read.rest(), size + 1)
    except zlib.error as error:
        raise protocol_error("a compressed event cannot be inflated.") from error
    if len(content) != size or not inflater.eof:
        raise protocol_error("a compressed event has another size than it says.")
    return content


def payload_packets(read: Cursor) -> tuple[bytes, ...]:
    """The event packets of a compressed transaction.

    :raises SourceProtocolError: it is malformed.
    """
    algorithm, size, compressed = _ZSTD, None, b""
    while True:
        field = read.packed()
        if field == 0:
            compressed = read.rest()
            break
        value = Cursor(read.take(read.packed()))
        if field == 1:
            if value.packed() > read.left:
                raise protocol_error("a compressed transaction is cut off.")
        elif field == 2:
            algorithm = value.packed()
        elif field == 3:
            size = value.packed()
    if size is not None and size > MAX_INFLATED:
        raise protocol_error("a compressed transaction is too large.")
    if algorithm == _ZSTD:
        content = _unzstd(compressed, MAX_INFLATED if size is None else size)
    elif algorithm == _NONE:
        content = compressed
    else:
        raise protocol_error("a transaction is compressed in a way that is not known.")
    if size is not None and len(content) != size:
        raise protocol_error("a compressed transaction has another size than it says.")
    return _packets(content)


def _unzstd(compressed: bytes, limit: int) -> bytes:
    pieces, total = [], 0
    try:
        with pa.CompressedInputStream(pa.BufferReader(compressed), "zstd") as stream:
            while piece := stream.read(_PIECE):
                total += len(piece)
                if total > limit:
                    raise protocol_error("a compressed transaction has another size than it says.")
                pieces.append(piece)
    except (OSError, pa.ArrowException) as error:
        raise protocol_error("a compressed transaction cannot be inflated.") from error
    return b"".join(pieces)


def _packets(content: bytes) -> tuple[bytes, ...]:
    packets, place = [], 0
    while place < len(content):
        size = int.from_bytes(content[place + 9 : place + 13], "little")
        if size < HEADER_SIZE or place + size > len(content):
            raise protocol_error("a compressed transaction has an event that is cut off.")
        packets.append(content[place : place + size])
        place += size
    return tuple(packets)
