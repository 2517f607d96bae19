"""The part of a log that one instance writes: its vnodes, its pending records, its spilled chunks."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from headwater import failpoints
from headwater.log_store import layout, row_codec
from headwater.log_store.barrier_record import BarrierRecord
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.columns import SEQ, chunk_of
from headwater.log_store.counters import LogCounters
from headwater.log_store.errors import ForeignSchema, ForeignVnode, LogCorrupt, WrongCall
from headwater.log_store.log import Log
from headwater.log_store.log_view import LogView
from headwater.log_store.sealer import Sealer
from headwater.log_store.serde import LogStoreRowSerde
from headwater.state import WriteBatch
from headwater.stream import Chunk, Epoch, VnodeBitmap

BEFORE_DISCARD = failpoints.register("log_store.before_discard")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class LogStoreState:
    """Writes of one instance of a log, into the seal that all logs of the store share.

    :param vnodes: what this instance owns.
    """

    def __init__(
        self,
        sealer: Sealer,
        log: Log,
        vnodes: VnodeBitmap,
        compression: Compression = Compression.NONE,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._sealer = sealer
        self._compression = compression
        self._clock = clock
        self.log = log
        self.counters = LogCounters()
        self.next_format: int | None = None  # of the epochs after the one that is being written
        self._first_schema: int | None = None  # of the rows of this epoch, when there is another one by now
        self.own(vnodes)

    def own(self, vnodes: VnodeBitmap) -> None:
        """Take over other vnodes. :raises ForeignVnode: none, or of another vnode count."""
        self.check_vnodes(vnodes)
        self.vnodes = vnodes
        self._writer = _writer_of(vnodes)

    def change_schema(self, log: Log, *, has_rows: bool) -> None:
        """Take over other columns inside an epoch, which *has_rows* already or not."""
        if has_rows and self._first_schema is None and log.schema_version != self.log.schema_version:
            self._first_schema = self.log.schema_version
        self.log = log

    def check_vnodes(self, vnodes: VnodeBitmap) -> None:
        """:raises ForeignVnode: none, or of another vnode count."""
        if vnodes.count != self.log.vnode_count or not vnodes:
            raise ForeignVnode(f"A writer of log {self.log.name!r} owns some of its {self.log.vnode_count} vnodes.")

    def check_schema_change(self, schema: pa.Schema) -> None:
        """:raises ForeignSchema: columns that the log cannot have after the barrier."""
        log = self.log if self.next_format is None else self.log.in_format(self.next_format)
        log.with_schema(schema)

    def discard_unsealed(self) -> None:
        """Remove what a writer that died had staged for an epoch that it never sealed.

        Once for all instances of a log: what the first of them has staged since is not of a dead one.
        """
        number, after = self.log.number, self._sealer.store.committed_epoch() + 1
        if number in self._sealer.begun:
            return
        batch = WriteBatch()
        batch.delete_range(layout.chunks_from(number, after), layout.space_end(number, layout.CHUNKS))
        if self.log.may_hold_rows:
            for vnode in range(self.log.vnode_count):
                batch.delete_range(layout.rows_from(number, vnode, after), layout.rows_end(number, vnode))
        failpoints.hit(BEFORE_DISCARD)
        self._sealer.store.stage(batch)
        self._sealer.begun.add(number)

    def check(self, chunk: Chunk) -> None:
        """:raises ForeignSchema: other columns. :raises ForeignVnode: a row that this instance does not own."""
        if not chunk.rows.schema.equals(self.log.schema):
            raise ForeignSchema(
                f"A chunk for log {self.log.name!r} has other columns than the log.",
                next_step="Pass the new schema with the barrier before it.",
            )
        if not owns(self.vnodes, chunk):
            raise ForeignVnode(f"A chunk for log {self.log.name!r} has rows of vnodes that this writer does not own.")

    def write_chunk(self, epoch: Epoch, first_seq: int, chunk: Chunk) -> int:
        """Add *chunk* to the next seal; returns its bytes."""
        if first_seq + chunk.num_rows - 1 > layout.MAX_SEQ:
            raise WrongCall(f"Epoch {epoch} has more than {layout.MAX_SEQ} rows.", next_step="Seal epochs more often.")
        items = LogStoreRowSerde(self.log, compression=self._compression).encode(epoch, self._writer, first_seq, chunk)
        self._sealer.put_many(items)
        return self.counters.stored(chunk.num_rows, sum(len(value) for _, value in items))

    def write_barrier(
        self, epoch: Epoch, *, is_checkpoint: bool, is_stop: bool, rows: int, size: int, chunks: int
    ) -> None:
        """End *epoch*: with the next seal it can be read."""
        record = BarrierRecord(
            is_checkpoint,
            rows,
            size,
            chunks,
            self.log.schema_version,
            self.vnodes,
            self._clock(),
            self.log.format,
            is_stop,
            first_schema_version=self._first_schema,
        )
        self._first_schema = None
        key = layout.barrier_key(self.log.number, epoch, self._writer)
        self._sealer.batch.put(key, record.to_bytes())
        if self.next_format is not None:
            self.log, self.next_format = self.log.in_format(self.next_format), None

    def read_spilled(self, epoch: Epoch, first_seq: int, last_seq: int, log: Log, vnodes: VnodeBitmap) -> Chunk:
        """A spilled chunk again, from memory or from the store, in the order in which it was written.

        It is found by the log and the vnodes of the time when it was written: both may have changed since.

        :raises LogCorrupt: it is not there.
        """
        read = self._spilled_rows if log.format == row_codec.FORMAT else self._spilled_chunks
        batch = read(epoch, first_seq, last_seq, log, vnodes)
        if batch is None or batch.num_rows != last_seq - first_seq + 1:
            with self._sealer.store.snapshot() as view:  # an epoch that was migrated since is as its barrier says
                shown = LogView(view, self.log, self.counters.flushed_buffer)
                shown.check_not_dropped(epoch.prev())
                batch = shown.rewritten(epoch, _writer_of(vnodes), log.format, first_seq, last_seq, vnodes)
        if batch is None or batch.num_rows != last_seq - first_seq + 1:
            raise LogCorrupt(f"A spilled chunk of epoch {epoch} is not whole.")
        order = np.argsort(batch.column(SEQ).to_numpy(), kind="stable")
        return chunk_of(batch.take(pa.array(order)))

    def _spilled_chunks(
        self, epoch: Epoch, first_seq: int, last_seq: int, log: Log, vnodes: VnodeBitmap
    ) -> pa.RecordBatch | None:
        serde = LogStoreRowSerde(log, reads=self.counters.flushed_buffer)
        found: list[pa.RecordBatch] = []
        seq = first_seq
        while seq <= last_seq:
            key = layout.chunk_key(log.number, epoch, _writer_of(vnodes), seq)
            data = self._sealer.pending(key)
            if data is None:  # then it is in the store by now
                with self._sealer.store.snapshot() as view:
                    data = view.get(key)
            if data is None:
                return None
            batches = serde.decode_chunk(data)
            found += batches
            seq += sum(batch.num_rows for batch in batches)
        return pa.Table.from_batches(found).combine_chunks().to_batches()[0]

    def _spilled_rows(
        self, epoch: Epoch, first_seq: int, last_seq: int, log: Log, vnodes: VnodeBitmap
    ) -> pa.RecordBatch | None:
        front = layout.prefix(log.number) + bytes((layout.ROWS,))
        low, high = (layout.row_key(log.number, 0, epoch, seq)[7:] for seq in (first_seq, last_seq))
        cells: dict[bytes, bytes] = {}
        for key, value in self._sealer.pending_items():
            if key.startswith(front) and low <= key[7:] <= high and int.from_bytes(key[5:7], "big") in vnodes:
                cells[key] = value
        if len(cells) <= last_seq - first_seq:  # the rest is in the store by now
            with self._sealer.store.snapshot() as view:
                for vnode in vnodes:
                    first, last = (layout.row_key(log.number, vnode, epoch, seq) for seq in (first_seq, last_seq))
                    cells.update((key, bytes(value)) for key, value in view.scan(first, last + b"\0"))
        serde = LogStoreRowSerde(log, reads=self.counters.flushed_buffer)
        return next(serde.decode_rows(list(cells.items())), None)


def owns(vnodes: VnodeBitmap, chunk: Chunk) -> bool:
    """Whether all rows of *chunk* are of *vnodes*."""
    found = chunk.vnodes.to_numpy()
    if not len(found):
        return True
    return int(found.max()) < vnodes.count and (vnodes.is_full or bool(vnodes.mask_of(found).all()))


def _writer_of(vnodes: VnodeBitmap) -> int:
    """The number under which the instance that owns *vnodes* writes."""
    return next(iter(vnodes))
