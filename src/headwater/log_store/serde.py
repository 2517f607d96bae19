"""A log in the state store: the keys of its records, the barrier that ends an epoch, and rows in either format. Pure.

Version 1 is one row per key (:mod:`~headwater.log_store.row_codec`), version 2 one columnar chunk per key
(:mod:`~headwater.log_store.chunk_codec`). Both hold a *stored batch*: the payload, then ``_op``, ``_vnode`` and
``_seq``; within a vnode the seq ids rise.

A key::

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

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.log_store import chunk_codec, row_codec
from headwater.log_store.chunk_codec import ChunkHeader, Compression, check_ops
from headwater.log_store.columns import OP, RESERVED, SEQ, VNODE, sorted_batch, stored_schema
from headwater.log_store.errors import LogCorrupt, UnknownVersion
from headwater.log_store.log import FORMATS, Log
from headwater.stream import Chunk, Epoch, VnodeBitmap

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


_CRC = b',"crc":'


@dataclass(frozen=True, slots=True)
class BarrierRecord:
    """One instance's end of one epoch: what the epoch holds, for readers that were not there.

    :ivar format: of the rows of this epoch: the one place where a reader looks for it.
    :ivar schema_version: of its last rows, and of all unless there is a *first_schema_version*, of the first ones.
    :ivar compacted: rows that a newer row of their key made needless were left out later.
    """

    is_checkpoint: bool
    rows: int
    size: int
    chunks: int
    schema_version: int
    vnodes: VnodeBitmap
    sealed_ms: int
    format: int
    is_stop: bool = False
    compacted: bool = False
    first_schema_version: int | None = None

    def to_bytes(self) -> bytes:
        fields = {
            "v": 1,
            "checkpoint": self.is_checkpoint,
            "rows": self.rows,
            "bytes": self.size,
            "chunks": self.chunks,
            "schema": self.schema_version,
            "vnodes": self.vnodes.to_json(),
            "ms": self.sealed_ms,
            "format": self.format,
            "stop": self.is_stop,
        }
        if self.compacted:
            fields["compacted"] = True
        if self.first_schema_version is not None:
            fields["first_schema"] = self.first_schema_version
        data = json.dumps(fields, separators=(",", ":")).encode()
        return b"%b%b%d}" % (data[:-1], _CRC, zlib.crc32(data))

    @classmethod
    def from_bytes(cls, data: bytes) -> BarrierRecord:
        """:raises UnknownVersion: of a later release. :raises LogCorrupt: not a barrier record."""
        return next(cls.from_many((data,)))

    @classmethod
    def from_many(cls, stored: Sequence[bytes]) -> Iterator[BarrierRecord]:
        """As :meth:`from_bytes`, for less: records are parsed together, and neighbours mostly own the same vnodes."""
        owned, vnodes = None, VnodeBitmap.empty()
        for data, fields in zip(stored, _parsed(stored), strict=True):
            try:
                if fields["v"] != 1:
                    raise UnknownVersion(f"A barrier record has version {fields['v']}.", next_step="Upgrade headwater.")
                if "crc" in fields and zlib.crc32(data[: data.rindex(_CRC)] + b"}") != fields["crc"]:
                    raise ValueError("crc")
                if fields["vnodes"] != owned:
                    owned, vnodes = fields["vnodes"], VnodeBitmap.from_json(fields["vnodes"])
                record = cls(
                    fields["checkpoint"],
                    fields["rows"],
                    fields["bytes"],
                    fields["chunks"],
                    fields["schema"],
                    vnodes,
                    fields["ms"],
                    fields["format"],
                    fields["stop"],
                    fields.get("compacted", False),
                    fields.get("first_schema"),
                )
            except UnknownVersion:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise LogCorrupt("A barrier record cannot be read.") from error
            yield record


def _parsed(stored: Sequence[bytes]) -> Iterator[Any]:
    """The fields of all records; when one of them is damaged, those before it come first."""
    try:
        together = json.loads(b"[%b]" % b",".join(stored))
    except ValueError:
        together = []
    if len(together) == len(stored):
        yield from together
        return
    for data in stored:
        try:
            yield json.loads(data)
        except ValueError as error:
            raise LogCorrupt("A barrier record cannot be read.") from error


_ROW_KEY = len(row_key(0, 0, 0, 0))
_VNODE_AT, _SEQ_AT = 5, 15


class LogStoreRowSerde:
    """The encoding of one log.

    :param version: the format to write, by default the log's own. Both are read, whatever this is.
    :raises UnknownVersion: no such format.
    """

    def __init__(
        self,
        log: Log,
        version: int | None = None,
        compression: Compression = Compression.NONE,
    ) -> None:
        self.log = log
        self.version = log.format if version is None else version
        self._compression = compression
        self._stored_schemas: dict[int, pa.Schema] = {}
        if self.version not in FORMATS:
            raise UnknownVersion(
                f"Received log format {self.version}; valid are {' and '.join(map(str, FORMATS))}.",
                next_step="Upgrade headwater.",
            )

    @staticmethod
    def version_of(value: bytes) -> int:
        """The format of a stored value. :raises UnknownVersion: none that this release knows."""
        if not len(value):
            raise LogCorrupt("A stored value of a log is empty.")
        if value[0] not in FORMATS:
            raise UnknownVersion(
                f"A stored value has format {value[0]}; this release reads {' and '.join(map(str, FORMATS))}.",
                next_step="Upgrade headwater.",
            )
        return int(value[0])

    def encode(self, epoch: int, writer: int, first_seq: int, chunk: Chunk) -> list[tuple[bytes, bytes]]:
        """Keys and values of *chunk*, whose rows have the seq ids from *first_seq* on."""
        batch, _ = sorted_batch(chunk, first_seq)
        return self.encode_batch(epoch, writer, batch, self.log.schema_version)

    def encode_batch(
        self, epoch: int, writer: int, batch: pa.RecordBatch, schema_version: int
    ) -> list[tuple[bytes, bytes]]:
        """Keys and values of a stored batch, ordered by vnode and in a vnode by seq; there may be gaps."""
        if not batch.num_rows:
            return []
        vnodes: NDArray[np.uint16] = batch.column(VNODE).to_numpy()
        seqs: NDArray[np.uint32] = batch.column(SEQ).to_numpy()
        if self.version == row_codec.FORMAT:
            payload = batch.select([name for name in batch.schema.names if name not in RESERVED])
            values = row_codec.encode_rows(payload, batch.column(OP), schema_version)
            return list(zip(self._row_keys(epoch, vnodes, seqs), values, strict=True))
        first = int(seqs.min())
        data = chunk_codec.encode_batch(batch, vnodes, first, schema_version, self.log.vnode_count, self._compression)
        return [(chunk_key(self.log.number, epoch, writer, first), data)]

    def _row_keys(self, epoch: int, vnodes: NDArray[np.uint16], seqs: NDArray[np.uint32]) -> list[bytes]:
        count = len(vnodes)
        keys = np.empty((count, _ROW_KEY), np.uint8)
        keys[:] = np.frombuffer(row_key(self.log.number, 0, epoch, 0), np.uint8)
        keys[:, _VNODE_AT : _VNODE_AT + 2] = vnodes.astype(">u2").view(np.uint8).reshape(count, 2)
        keys[:, _SEQ_AT:] = seqs.astype(">u4").view(np.uint8).reshape(count, 4)
        whole = keys.tobytes()
        return [whole[_ROW_KEY * place : _ROW_KEY * (place + 1)] for place in range(count)]

    def decode_chunks(
        self, values: Sequence[tuple[int, Any, ChunkHeader]], wanted: VnodeBitmap | None
    ) -> list[tuple[int, pa.RecordBatch]]:
        """The stored batches of values of version 2, each value with its epoch and header, of the *wanted* vnodes only.

        One step for all of them, then the next: a copy empties the caches, and code that runs between two of them
        takes three times as long.

        :raises UnknownVersion: a schema that the log does not know. :raises LogCorrupt: damaged.
        """
        blocks = []
        for epoch, value, header in values:
            schema = self._stored_schema(header.schema_version)
            blocks += [(epoch, value, block, schema, left) for block, left in chunk_codec.wanted_blocks(header, wanted)]
        messages = [chunk_codec.copy_block(value, block) for _, value, block, _, _ in blocks]
        found = []
        for (epoch, _, block, schema, left), message in zip(blocks, messages, strict=True):
            batch = chunk_codec.decode_block(message, block, schema, left)
            if batch.num_rows:
                found.append((epoch, batch))
        return found

    def decode_rows(self, items: Sequence[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
        """The stored batches of keys and values of version 1, which are of one epoch: in their order, one per schema.

        :raises UnknownVersion: another format, or a schema that the log does not know. :raises LogCorrupt: damaged.
        """
        if not items:
            return
        count = len(items)
        whole = b"".join(key for key, _ in items)
        if len(whole) != count * _ROW_KEY or any(key[4] != ROWS for key, _ in items[:1]):
            raise LogCorrupt("A key in the rows of a log is not the key of a row.")
        keys = np.frombuffer(whole, np.uint8).reshape(count, _ROW_KEY)
        vnodes = keys[:, _VNODE_AT : _VNODE_AT + 2].copy().view(">u2").reshape(count).astype(np.uint16)
        seqs = keys[:, _SEQ_AT:].copy().view(">u4").reshape(count).astype(np.uint32)
        values = [value for _, value in items]
        versions = row_codec.schema_versions_of(values)
        for version in np.unique(versions).tolist():  # in an epoch they only rise: a vnode's rows stay in order
            places = np.flatnonzero(versions == version)
            some = values if len(places) == count else [values[place] for place in places.tolist()]
            rows, ops = row_codec.decode_rows(some, self.log.schema_of(version))
            check_ops(ops.to_numpy())
            columns: list[Any] = [*rows.columns, ops, pa.array(vnodes[places]), pa.array(seqs[places])]
            yield pa.RecordBatch.from_arrays(columns, schema=self._stored_schema(version))

    def _stored_schema(self, version: int) -> pa.Schema:
        known = self._stored_schemas.get(version)
        if known is None:
            known = self._stored_schemas[version] = stored_schema(self.log.schema_of(version))
        return known
