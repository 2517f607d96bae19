"""Format 2: one columnar chunk per key, rows ordered by vnode, in blocks that can be read one by one. Pure.

    u8   2                      format
    u8   compression            0 none, 1 lz4, 2 zstd
    u16  schema version
    u32  rows
    u32  first seq
    u16  blocks
    u16  0
    per block: u16 first vnode | u16 last vnode | u32 rows | u64 offset | u64 length
    zeros up to a multiple of 64
    blocks: each one Arrow IPC record batch message, without schema

Little-endian, as Arrow is. A block ends where a vnode ends, so a reader of some vnodes touches only their blocks, and
a whole quarter of the vnodes is read without looking at another row. Blocks are cut at equal ranges of vnodes, but
small ones are joined: a message costs the same for ten rows as for a thousand.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.log_store.columns import VNODE, sorted_batch
from headwater.log_store.errors import LogCorrupt, UnknownVersion
from headwater.stream import Chunk, VnodeBitmap

FORMAT = 2
BLOCKS = 16
BLOCK_ROWS = 256
"""Blocks with fewer rows than this are joined with the next."""

_HEADER = struct.Struct("<BBHIIHH")
_BLOCK = struct.Struct("<HHIQQ")


class Compression(Enum):
    """How the buffers of a block are compressed."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2

    @property
    def options(self) -> Any:
        name = None if self is Compression.NONE else self.name.lower()
        return pa.ipc.IpcWriteOptions(compression=name, use_threads=False)


@dataclass(frozen=True, slots=True)
class Block:
    """Where the rows of a range of vnodes are inside a chunk."""

    first_vnode: int
    last_vnode: int
    rows: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk says of itself."""

    compression: Compression
    schema_version: int
    rows: int
    first_seq: int
    blocks: tuple[Block, ...]


def encode_chunk(
    chunk: Chunk, first_seq: int, schema_version: int, vnode_count: int, compression: Compression
) -> bytes:
    """The stored bytes of *chunk*."""
    batch, vnodes = sorted_batch(chunk, first_seq)
    cuts = _cuts(vnodes, vnode_count)
    head = _HEADER.size + _BLOCK.size * (len(cuts) - 1)
    start = -(-head // 64) * 64
    sink = pa.BufferOutputStream()
    skip = batch.schema.serialize().size  # the stream begins with a schema message: the log keeps schemas once
    places = [skip]
    with pa.ipc.new_stream(sink, batch.schema, options=compression.options) as stream:
        for low, high in pairwise(cuts):
            stream.write_batch(batch.slice(low, high - low))
            places.append(sink.tell())
    body = sink.getvalue()
    parts = [_HEADER.pack(FORMAT, compression.value, schema_version, chunk.num_rows, first_seq, len(cuts) - 1, 0)]
    for index, (low, high) in enumerate(pairwise(cuts)):
        offset, length = start + places[index] - skip, places[index + 1] - places[index]
        parts.append(_BLOCK.pack(int(vnodes[low]), int(vnodes[high - 1]), high - low, offset, length))
    parts.append(bytes(start - head))
    return b"".join([*parts, memoryview(body)[skip : places[-1]]] if len(places) > 1 else parts)


def _cuts(vnodes: Any, vnode_count: int) -> list[int]:
    """Row numbers between which the blocks are."""
    if not len(vnodes):
        return [0]
    edges = np.searchsorted(vnodes, np.linspace(0, vnode_count, min(BLOCKS, vnode_count) + 1)[1:-1].astype(np.int64))
    cuts = [0]
    for edge in edges.tolist():
        if edge - cuts[-1] >= BLOCK_ROWS:
            cuts.append(edge)
    if len(cuts) > 1 and len(vnodes) - cuts[-1] < BLOCK_ROWS:
        cuts.pop()
    return [*cuts, len(vnodes)]


def decode_header(data: Any) -> ChunkHeader:
    """:raises UnknownVersion: another format. :raises LogCorrupt: cut short or damaged."""
    try:
        version, compression, schema_version, rows, first_seq, count, _ = _HEADER.unpack_from(data)
        if version != FORMAT:
            raise UnknownVersion(
                f"A stored chunk has format {version}; this release reads format {FORMAT}.",
                next_step="Upgrade headwater.",
            )
        blocks = tuple(Block(*_BLOCK.unpack_from(data, _HEADER.size + _BLOCK.size * index)) for index in range(count))
        header = ChunkHeader(Compression(compression), schema_version, rows, first_seq, blocks)
    except (struct.error, ValueError) as error:
        if isinstance(error, UnknownVersion):
            raise
        raise LogCorrupt("A stored chunk is cut short.") from error
    end = _HEADER.size + _BLOCK.size * count
    for block in blocks:
        if block.offset < end or block.offset + block.length > len(data):
            raise LogCorrupt("A stored chunk is cut short.")
        end = block.offset + block.length
    if sum(block.rows for block in blocks) != rows:
        raise LogCorrupt("A stored chunk does not have the rows that it names.")
    return header


def decode_blocks(
    data: Any, header: ChunkHeader, schema: pa.Schema, wanted: VnodeBitmap | None
) -> Iterator[pa.RecordBatch]:
    """The stored batches of the wanted vnodes, block by block; only their bytes are touched and copied.

    :param schema: the stored schema of the chunk's version.
    :raises LogCorrupt: a block is not what was written.
    """
    view = memoryview(data)
    for block in header.blocks:
        whole = wanted is None
        if wanted is not None:
            inside = wanted & VnodeBitmap.from_ranges([range(block.first_vnode, block.last_vnode + 1)], wanted.count)
            if not inside:
                continue
            whole = len(inside) == block.last_vnode + 1 - block.first_vnode
        try:
            message = pa.py_buffer(bytes(view[block.offset : block.offset + block.length]))
            batch = pa.ipc.read_record_batch(message, schema)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise LogCorrupt("A block of a stored chunk cannot be read.") from error
        if batch.num_rows != block.rows:
            raise LogCorrupt("A block of a stored chunk does not have the rows that it names.")
        if not whole and wanted is not None:
            batch = batch.filter(pa.array(wanted.mask_of(batch.column(VNODE).to_numpy())))
        if batch.num_rows:
            yield batch
