"""LogStoreState: what the writer of one log puts into the seal that all logs of a store share."""

from __future__ import annotations

import time
from collections.abc import Callable

from headwater import failpoints
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.errors import ForeignSchema, ForeignVnode, WrongCall
from headwater.log_store.log import Log
from headwater.log_store.sealer import Sealer
from headwater.log_store.serde import (
    CHUNKS,
    MAX_SEQ,
    BarrierRecord,
    LogStoreRowSerde,
    barrier_key,
    chunks_from,
    rows_end,
    rows_from,
    space_end,
)
from headwater.state import WriteBatch
from headwater.stream import Chunk, Epoch, VnodeBitmap

BEFORE_DISCARD = failpoints.register("log_store.before_discard")

WRITER = 0
"""The number in the keys of chunks and barriers: one writer has all vnodes. Earlier releases wrote others, too."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class LogStoreState:
    """The pending writes of one log.

    :ivar log: as the rows that are written now have it.
    :ivar next_format: of the epochs after the one that is being written, where that changes.
    """

    def __init__(
        self, sealer: Sealer, log: Log, compression: Compression = Compression.NONE, clock: Callable[[], int] = now_ms
    ) -> None:
        self._sealer = sealer
        self._compression = compression
        self._clock = clock
        self.log = log
        self.next_format: int | None = None
        self._first_schema: int | None = None  # of the rows of this epoch, when there is another one by now

    def change_schema(self, log: Log, *, has_rows: bool) -> None:
        """Take over other columns inside an epoch, which *has_rows* already or not."""
        if has_rows and self._first_schema is None and log.schema_version != self.log.schema_version:
            self._first_schema = self.log.schema_version
        self.log = log

    def discard_unsealed(self) -> None:
        """Remove what a writer that died had spilled for an epoch that it never sealed; once for each log."""
        number, after = self.log.number, self._sealer.store.committed_epoch() + 1
        if number in self._sealer.begun:
            return
        batch = WriteBatch()
        batch.delete_range(chunks_from(number, after), space_end(number, CHUNKS))
        if self.log.may_hold_rows:
            for vnode in range(self.log.vnode_count):
                batch.delete_range(rows_from(number, vnode, after), rows_end(number, vnode))
        failpoints.hit(BEFORE_DISCARD)
        self._sealer.store.stage(batch)
        self._sealer.begun.add(number)

    def check(self, chunk: Chunk) -> None:
        """:raises ForeignSchema: other columns. :raises ForeignVnode: a vnode that the log does not have."""
        if not chunk.rows.schema.equals(self.log.schema):
            raise ForeignSchema(
                f"A chunk for log {self.log.name!r} has other columns than the log.",
                next_step="Change the schema of the log before it.",
            )
        if chunk.num_rows and int(chunk.vnodes.to_numpy().max()) >= self.log.vnode_count:
            raise ForeignVnode(f"A chunk for log {self.log.name!r} has rows of vnodes that the log does not have.")

    def write_chunk(self, epoch: Epoch, first_seq: int, chunk: Chunk) -> int:
        """Add *chunk* to the next seal; returns its bytes."""
        if first_seq + chunk.num_rows - 1 > MAX_SEQ:
            raise WrongCall(f"Epoch {epoch} has more than {MAX_SEQ} rows.", next_step="Seal epochs more often.")
        items = LogStoreRowSerde(self.log, compression=self._compression).encode(epoch, WRITER, first_seq, chunk)
        self._sealer.buffer.put(items, chunk.num_rows)
        return sum(len(value) for _, value in items)

    def write_barrier(self, epoch: Epoch, *, rows: int, size: int, chunks: int) -> None:
        """End *epoch*: with the next seal it can be read."""
        log = self.log
        record = BarrierRecord(
            is_checkpoint=True,
            rows=rows,
            size=size,
            chunks=chunks,
            schema_version=log.schema_version,
            vnodes=VnodeBitmap.full(log.vnode_count),
            sealed_ms=self._clock(),
            format=log.format,
            first_schema_version=self._first_schema,
        )
        self._first_schema = None
        self._sealer.batch.put(barrier_key(log.number, epoch, WRITER), record.to_bytes())
        if self.next_format is not None:
            self.log, self.next_format = log.in_format(self.next_format), None
