"""Format 2: one columnar chunk per key, rows ordered by vnode, in blocks that can be read one by one. Pure.

    u8   2                      format
    u8   compression            0 none, 1 lz4, 2 zstd
    u16  schema version
    u32  rows
    u32  first seq
    u16  blocks
    u16  0 without checksums, 1 with them
    per block: u16 first vnode | u16 last vnode | u32 rows | u64 offset | u64 length
    u32 per block: checksum of its bytes; u32: CRC-32 of everything before it
    zeros up to a multiple of 64
    an Arrow IPC stream without its end: the schema, then the blocks, each one record batch message

Little-endian, as Arrow is. A block ends where a vnode ends, so a reader of some vnodes touches only their blocks, and
a whole quarter of the vnodes is read without looking at another row. Blocks are cut at equal ranges of vnodes, as many
(a power of two) as the rows are worth: a message costs the same for ten rows as for a thousand.

Values of earlier releases have no checksums; their blocks are validated by Arrow instead, which is slower.
"""

from __future__ import annotations

import struct
import zlib
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.log_store.columns import OP, VNODE
from headwater.log_store.errors import LogCorrupt, UnknownVersion
from headwater.stream import Op, VnodeBitmap

FORMAT = 2
MAX_BLOCKS = 32
BLOCK_ROWS = 2048
"""A chunk is cut into as many blocks as have at least this many rows on average: 1, 2, 4 … 32."""

_HEADER = struct.Struct("<BBHIIHH")
_BLOCK = struct.Struct("<HHIQQ")
_CHECKSUM = struct.Struct("<I")
_CHECKED = 1
_WORDS = 509
_ROW = 8 * _WORDS
_FIRST_OP, _OPS = np.uint8(Op.INSERT), np.uint8(Op.UPDATE_DELETE - Op.INSERT)


def checksum(data: Any) -> int:
    """The checksum of a buffer, for a tenth of what a CRC of all its bytes costs.

    The bytes are a table of 64-bit little-endian words, 509 in a row; what is left over at the end is no row. The
    checksum is the CRC-32 of the sum of each column (modulo 2⁶⁴, u64 each) and of the bytes left over. A word that
    changed changes its column's sum; as 509 is a prime, pages that were lost, exchanged or moved have their words in
    other columns.
    """
    size = len(data) // _ROW * _ROW
    found = 0
    if size:
        found = zlib.crc32(np.add.reduce(np.frombuffer(data, "<u8", size // 8).reshape(-1, _WORDS), axis=0))
    return zlib.crc32(memoryview(data)[size:], found)


class Compression(Enum):
    """How the buffers of a block are compressed."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2

    @property
    def options(self) -> Any:
        name = None if self is Compression.NONE else self.name.lower()
        return pa.ipc.IpcWriteOptions(compression=name, use_threads=False)


class Block(NamedTuple):
    """Where the rows of a range of vnodes are inside a chunk.

    :ivar checksum: of its bytes; ``None`` in values of earlier releases.
    """

    first_vnode: int
    last_vnode: int
    rows: int
    offset: int
    length: int
    checksum: int | None


class ChunkHeader(NamedTuple):
    """What a chunk says of itself."""

    compression: Compression
    schema_version: int
    rows: int
    first_seq: int
    blocks: tuple[Block, ...]


def encode_batch(
    batch: pa.RecordBatch,
    vnodes: NDArray[np.uint16],
    first_seq: int,
    schema_version: int,
    vnode_count: int,
    compression: Compression,
) -> bytes:
    """The stored bytes of a stored batch: ordered by vnode and in a vnode by seq, which may have gaps."""
    cuts = _cuts(vnodes, vnode_count)
    blocks = [batch.slice(low, high - low) for low, high in pairwise(cuts)]
    head = _HEADER.size + (_BLOCK.size + _CHECKSUM.size) * len(blocks) + _CHECKSUM.size
    start = -(-head // 64) * 64
    schema = batch.schema.serialize().size
    out = None
    if compression is Compression.NONE:  # the size is known: no buffer that grows and is copied
        out = pa.allocate_buffer(start + schema + sum(map(pa.ipc.get_record_batch_size, blocks)) + 8)
    sink: Any = pa.BufferOutputStream() if out is None else pa.FixedSizeBufferWriter(out)
    sink.write(bytes(start))
    places = [start + schema]
    with pa.ipc.new_stream(sink, batch.schema, options=compression.options) as stream:
        for block in blocks:
            stream.write_batch(block)
            places.append(sink.tell())
    whole = memoryview(sink.getvalue() if out is None else out)
    count = len(blocks)
    parts = [_HEADER.pack(FORMAT, compression.value, schema_version, batch.num_rows, first_seq, count, _CHECKED)]
    for (low, high), (place, end) in zip(pairwise(cuts), pairwise(places), strict=True):
        parts.append(_BLOCK.pack(int(vnodes[low]), int(vnodes[high - 1]), high - low, place, end - place))
    parts += (_CHECKSUM.pack(checksum(whole[place:end])) for place, end in pairwise(places))
    parts.append(_CHECKSUM.pack(zlib.crc32(b"".join(parts))))
    return b"".join([*parts, bytes(start - head), whole[start : places[-1]]])


def _cuts(vnodes: Any, vnode_count: int) -> list[int]:
    """Row numbers between which the blocks are."""
    count = 1
    while count * 2 <= min(MAX_BLOCKS, vnode_count) and len(vnodes) >= count * 2 * BLOCK_ROWS:
        count *= 2
    edges = np.arange(1, count) * vnode_count // count
    cuts = np.unique([0, *np.searchsorted(vnodes, edges), len(vnodes)])
    return [int(cut) for cut in cuts]


def decode_header(data: Any) -> ChunkHeader:
    """:raises UnknownVersion: another format. :raises LogCorrupt: cut short or damaged."""
    try:
        version, compression, schema_version, rows, first_seq, count, checks = _HEADER.unpack_from(data)
        if version != FORMAT or checks > _CHECKED:
            raise UnknownVersion(
                f"A stored chunk has format {version}.{checks}; this release reads format {FORMAT}.{_CHECKED}.",
                next_step="Upgrade headwater.",
            )
        end = _HEADER.size + _BLOCK.size * count
        entries = memoryview(data)[_HEADER.size : end]
        if len(entries) < _BLOCK.size * count:
            raise ValueError("directory")
        checksums: Any = (None,) * count
        if checks == _CHECKED:
            end, checksums = _checksums(data, end, count)
        blocks = tuple(
            Block._make((*entry, check)) for entry, check in zip(_BLOCK.iter_unpack(entries), checksums, strict=True)
        )
        header = ChunkHeader(Compression(compression), schema_version, rows, first_seq, blocks)
    except (struct.error, ValueError) as error:
        if isinstance(error, UnknownVersion):
            raise
        raise LogCorrupt("A stored chunk is cut short or damaged.") from error
    for block in blocks:
        if block.offset < end or block.offset + block.length > len(data):
            raise LogCorrupt("A stored chunk is cut short.")
        end = block.offset + block.length
    if sum(block.rows for block in blocks) != rows:
        raise LogCorrupt("A stored chunk does not have the rows that it names.")
    return header


def _checksums(data: Any, place: int, count: int) -> tuple[int, tuple[int, ...]]:
    """Where the head ends, and the checksums of the blocks."""
    *found, own = struct.unpack_from(f"<{count + 1}I", data, place)
    end = place + _CHECKSUM.size * count
    if zlib.crc32(memoryview(data)[:end]) != own:
        raise ValueError("checksum")
    return end + _CHECKSUM.size, tuple(found)


def wanted_blocks(header: ChunkHeader, wanted: VnodeBitmap | None) -> list[tuple[Block, VnodeBitmap | None]]:
    """The blocks that may have rows of *wanted* vnodes, each with the vnodes to filter it by."""
    if wanted is None:
        return [(block, None) for block in header.blocks]
    found: list[tuple[Block, VnodeBitmap | None]] = []
    for block in header.blocks:
        count = block.last_vnode + 1 - block.first_vnode
        inside = (wanted.bits >> block.first_vnode & (1 << count) - 1).bit_count()
        if inside:
            found.append((block, None if inside == count else wanted))
    return found


def copy_block(data: Any, block: Block) -> pa.Buffer:
    """The message of a block in memory of its own; no other byte of the chunk is touched.

    :raises LogCorrupt: its checksum is another one.
    """
    message = pa.allocate_buffer(block.length)  # of Arrow's pool, which keeps its pages
    memoryview(message).cast("B")[:] = memoryview(data)[block.offset : block.offset + block.length]
    if block.checksum is not None and checksum(message) != block.checksum:
        raise LogCorrupt("A block of a stored chunk is not what was written: its checksum is another one.")
    return message


def decode_block(message: pa.Buffer, block: Block, schema: pa.Schema, wanted: VnodeBitmap | None) -> pa.RecordBatch:
    """The stored batch of a block, over the memory of its message.

    :param schema: the stored schema of the chunk's version.
    :param wanted: only the rows of these vnodes; there may be none.
    :raises LogCorrupt: the block is not what was written.
    """
    try:
        batch = pa.ipc.read_record_batch(message, schema)
        if block.checksum is None:
            batch.validate(full=True)
            check_ops(batch.column(OP).to_numpy())
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, LogCorrupt):
            raise
        raise LogCorrupt("A block of a stored chunk cannot be read.") from error
    if batch.num_rows != block.rows:
        raise LogCorrupt("A block of a stored chunk does not have the rows that it names.")
    if wanted is None:
        return batch
    return batch.filter(pa.array(wanted.mask_of(batch.column(VNODE).to_numpy())))


def check_ops(codes: NDArray[np.int8]) -> None:
    """:raises LogCorrupt: one of them is no op."""
    if len(codes) and np.maximum.reduce(codes.view(np.uint8) - _FIRST_OP) > _OPS:
        raise LogCorrupt("A stored row has an op that is none.")
