"""Rows of a log to keys and values of the store and back, in either format, behind one interface. Pure.

Version 1 is one row per key (:mod:`~headwater.log_store.row_codec`), version 2 one columnar chunk per key
(:mod:`~headwater.log_store.chunk_codec`). Both hold a *stored batch*: the payload, then ``_op``, ``_vnode`` and
``_seq``; within a vnode the seq ids rise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.log_store import chunk_codec, layout, row_codec
from headwater.log_store.chunk_codec import ChunkHeader, Compression, check_ops
from headwater.log_store.columns import OP, RESERVED, SEQ, VNODE, sorted_batch, stored_schema
from headwater.log_store.errors import LogCorrupt, UnknownVersion
from headwater.log_store.log import FORMATS, Log
from headwater.stream import Chunk, VnodeBitmap

_ROW_KEY = len(layout.row_key(0, 0, 0, 0))
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
        return [(layout.chunk_key(self.log.number, epoch, writer, first), data)]

    def _row_keys(self, epoch: int, vnodes: NDArray[np.uint16], seqs: NDArray[np.uint32]) -> list[bytes]:
        count = len(vnodes)
        keys = np.empty((count, _ROW_KEY), np.uint8)
        keys[:] = np.frombuffer(layout.row_key(self.log.number, 0, epoch, 0), np.uint8)
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
        if len(whole) != count * _ROW_KEY or any(key[4] != layout.ROWS for key, _ in items[:1]):
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
