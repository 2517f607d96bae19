"""The log store in memory: a bounded channel between a writer and a sink. Nothing is durable, nothing can be rewound.

For a sink that shall be no further behind than one checkpoint. The writer waits for the reader: for room in the
channel, and at a checkpoint until the reader has truncated its barrier. So what a checkpoint covers is delivered, and
after a crash the source sends again what came after it. A failed delivery cannot be tried again from here: it must end
the writer, too.

==========  ==========================================  ===================
writer      what may be called                          goes to
==========  ==========================================  ===================
new         ``init``                                    running
running     ``write_chunk``, ``flush_current_epoch``    running, flushing
flushing    ``finish`` of what the flush returned       running, stopped
stopped     nothing
==========  ==========================================  ===================
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from headwater.log_store.errors import DrainTimeout, ForeignSchema, ForeignVnode, InvalidOffset, LogClosed, WrongCall
from headwater.log_store.item import BarrierItem, ChunkItem, LogItem
from headwater.log_store.log import DEFAULT_FORMAT, Log, check_schema
from headwater.log_store.offset import LogOffset
from headwater.log_store.reader import ReaderState
from headwater.log_store.state import owns
from headwater.log_store.writer import FlushOptions, WriterState
from headwater.stream import DEFAULT_VNODE_COUNT, Chunk, Epoch, EpochPair, VnodeBitmap, check_vnode_count

CHANNEL_ITEMS = 1


class InMemLogStoreFactory:
    """Logs in memory.

    :param items: how many chunks and barriers a channel holds, at least 1.
    :param wait_seconds: how long a writer waits for room in the channel, and at a checkpoint for its delivery where
        the flush says nothing else; by default as long as it takes.
    """

    ALLOW_REWIND: ClassVar = False
    REBUILD_SINK_ON_UPDATE_VNODE_BITMAP: ClassVar = False

    def __init__(self, *, items: int = CHANNEL_ITEMS, wait_seconds: float | None = None) -> None:
        if items < 1:
            raise WrongCall(f"Received items={items}.", next_step="Let a channel hold 1 item or more.")
        self._items = items
        self._wait_seconds = wait_seconds
        self._logs: dict[str, Log] = {}

    def log(
        self,
        name: str,
        schema: pa.Schema,
        key_columns: tuple[str, ...],
        log_format: int = DEFAULT_FORMAT,
        vnode_count: int = DEFAULT_VNODE_COUNT,
    ) -> Log:
        """The log *name*. :raises ForeignSchema: it exists with other columns, or these cannot be held."""
        check_schema(log_format, schema, key_columns)
        check_vnode_count(vnode_count)
        made = Log(name, len(self._logs) + 1, log_format, vnode_count, key_columns, (schema,))
        known = self._logs.setdefault(name, made)
        if not schema.equals(known.schema) or (key_columns, vnode_count) != (known.key_columns, known.vnode_count):
            raise ForeignSchema(
                f"Log {name!r} exists with other columns, keys or vnodes.", next_step="Choose another name."
            )
        return known

    def pair(
        self, log: Log, consumer: str, vnodes: VnodeBitmap | None = None
    ) -> tuple[InMemLogStoreReader, InMemLogStoreWriter]:
        """A reader and a writer with a channel between them."""
        channel = _Channel(f"{log.name}/{consumer}", self._items)
        owned = VnodeBitmap.full(log.vnode_count) if vnodes is None else vnodes
        return InMemLogStoreReader(channel), InMemLogStoreWriter(channel, log, owned, self._wait_seconds)


class _Channel:
    """The items between a writer and a reader, and how far both are."""

    def __init__(self, name: str, items: int) -> None:
        self.name = name
        self.changed = threading.Condition()
        self.items: deque[LogItem] = deque()
        self.limit = items
        self.first_epoch: Epoch | None = None
        self.truncated: LogOffset | None = None
        self.writer_ended = False
        self.reader_ended = False

    def put(self, item: LogItem, seconds: float | None) -> None:
        """:raises LogClosed: the reader was closed. :raises DrainTimeout: there was no room in time."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.reader_ended or len(self.items) < self.limit, seconds):
                raise DrainTimeout(
                    f"The reader of log {self.name!r} made no room in {seconds:g} s.",
                    next_step="Look at its last error, then write again.",
                )
            self._check_reader()
            self.items.append(item)
            self.changed.notify_all()

    def wait_until_truncated(self, epoch: Epoch, seconds: float | None) -> bool:
        """:raises LogClosed: the reader was closed before."""
        barrier = LogOffset(epoch)

        def done() -> bool:
            return self.truncated is not None and self.truncated >= barrier

        with self.changed:
            if not self.changed.wait_for(lambda: self.reader_ended or done(), seconds):
                return False
            if not done():
                self._check_reader()
            return True

    def _check_reader(self) -> None:
        if self.reader_ended:
            raise LogClosed(
                f"The reader of log {self.name!r} was closed.",
                next_step="Begin again after the last checkpoint that was delivered.",
            )


class InMemLogStoreWriter:
    """The writing end of a log in memory."""

    def __init__(self, channel: _Channel, log: Log, vnodes: VnodeBitmap, wait_seconds: float | None) -> None:
        self._channel = channel
        self._log = log
        self._vnodes = vnodes
        self._wait_seconds = wait_seconds
        self._state = WriterState.NEW
        self._epoch = Epoch(0)
        self._next_chunk_id = 0

    @property
    def state(self) -> WriterState:
        return self._state

    @property
    def epoch(self) -> Epoch:
        """The epoch that is being written."""
        return self._epoch

    def init(self, epochs: EpochPair, *, pause_read_on_bootstrap: bool = False) -> None:
        """Begin to write at ``epochs.curr``. A log in memory has no history to pause."""
        self._expect(WriterState.NEW)
        self._epoch = epochs.curr
        self._state = WriterState.RUNNING
        with self._channel.changed:
            self._channel.first_epoch = epochs.curr
            self._channel.changed.notify_all()

    def write_chunk(self, chunk: Chunk) -> None:
        """Add rows to the current epoch; waits for room.

        :raises ForeignSchema: other columns than the log has. :raises ForeignVnode: rows that this writer does not own.
        :raises DrainTimeout: no room in time; nothing was added. :raises LogClosed: the reader was closed.
        """
        self._expect(WriterState.RUNNING)
        if not chunk.num_rows:
            return
        if not chunk.rows.schema.equals(self._log.schema):
            raise ForeignSchema(
                f"A chunk for log {self._log.name!r} has other columns than the log.",
                next_step="Pass the new schema with the barrier before it.",
            )
        if not owns(self._vnodes, chunk):
            raise ForeignVnode(f"A chunk for log {self._log.name!r} has rows of vnodes that this writer does not own.")
        self._channel.put(ChunkItem(self._epoch, self._next_chunk_id, chunk), self._wait_seconds)
        self._next_chunk_id += 1

    def flush_current_epoch(self, next_epoch: Epoch, options: FlushOptions | None = None) -> InMemFlush:
        """End the current epoch; a checkpoint, or a drain that was asked for, waits until its barrier is truncated.

        :raises InvalidOffset: *next_epoch* is not after the current one.
        :raises ForeignSchema: columns that the log cannot have. :raises ForeignVnode: no vnodes of this log.
        :raises DrainTimeout: there was no room for the barrier, and nothing was done; or the reader did not truncate
            it in time: the epoch is ended all the same, and the next checkpoint waits for both.
        :raises LogClosed: the reader was closed.
        """
        chosen = options or FlushOptions()
        self._expect(WriterState.RUNNING)
        if next_epoch <= self._epoch:
            raise InvalidOffset(f"Epoch {next_epoch} cannot follow epoch {self._epoch}.")
        if chosen.schema_change is not None:
            self._log.with_schema(chosen.schema_change)
        moved = chosen.new_vnode_bitmap
        if moved is not None and (moved.count != self._log.vnode_count or not moved):
            raise ForeignVnode(f"A writer of log {self._log.name!r} owns some of its {self._log.vnode_count} vnodes.")
        seconds = self._wait_seconds if chosen.drain_seconds is None else chosen.drain_seconds
        begun = time.monotonic()
        ended = self._epoch
        self._channel.put(chosen.barrier(ended), seconds)
        self._epoch, self._next_chunk_id = next_epoch, 0
        if chosen.is_checkpoint or chosen.drain_seconds is not None:
            left = None if seconds is None else max(0.0, seconds - (time.monotonic() - begun))
            if not self._channel.wait_until_truncated(ended, left):
                raise DrainTimeout(
                    f"The reader of log {self._channel.name!r} did not deliver epoch {ended} in {seconds:g} s.",
                    next_step="Look at its last error, then end the next epoch.",
                )
        self._state = WriterState.FLUSHING
        return InMemFlush(self, chosen)

    def pause(self) -> None:
        """Nothing to do: nobody writes while the source is paused."""

    def resume(self) -> None:
        """Nothing to do."""

    def _finish(self, options: FlushOptions) -> None:
        self._expect(WriterState.FLUSHING)
        if options.schema_change is not None:
            self._log = self._log.with_schema(options.schema_change)
        if options.new_vnode_bitmap is not None:
            self._vnodes = options.new_vnode_bitmap
        self._state = WriterState.RUNNING
        if options.is_stop:
            self._state = WriterState.STOPPED
            with self._channel.changed:
                self._channel.writer_ended = True
                self._channel.changed.notify_all()

    def _expect(self, allowed: WriterState) -> None:
        if self._state is not allowed:
            raise WrongCall(f"This needs a writer that is {allowed.value}; it is {self._state.value}.")


@dataclass(frozen=True, slots=True)
class InMemFlush:
    """An ended epoch whose barrier is on its way."""

    writer: InMemLogStoreWriter
    options: FlushOptions

    def finish(self) -> None:
        """The barrier was passed on: take over new vnodes or a new schema, and go on."""
        self.writer._finish(self.options)


class InMemLogStoreReader:
    """The reading end of a log in memory."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._state = ReaderState.NEW
        self._latest: LogOffset | None = None
        self._checkpoint: LogOffset | None = None

    @property
    def state(self) -> ReaderState:
        return self._state

    def init(self, timeout: float | None = None) -> None:
        """Wait until the writer begins; then :meth:`start_from`. :raises LogClosed: it did not begin in time."""
        self._expect(ReaderState.NEW)
        with self._channel.changed:
            if not self._channel.changed.wait_for(lambda: self._channel.first_epoch is not None, timeout):
                raise LogClosed("The writer of this log has not begun.")
        self._state = ReaderState.RESET

    def start_from(self, after: Epoch | None = None) -> None:
        """Begin: there is nothing before the writer's first epoch.

        :raises WrongCall: :meth:`init` did not come before, or it has begun.
        :raises InvalidOffset: epoch *after* has not ended yet.
        """
        self._expect(ReaderState.RESET)
        first = self._channel.first_epoch
        if after is not None and first is not None and after >= first:
            raise InvalidOffset(f"Epoch {after} has not ended: it cannot have been delivered.")
        self._state = ReaderState.LIVE

    def next_item(self, timeout: float | None = None) -> LogItem | None:
        """The next item; ``None`` after *timeout* seconds. Nothing comes after a checkpoint until it is truncated.

        :raises LogClosed: the writer stopped, and everything was read.
        """
        self._expect(ReaderState.LIVE)
        channel = self._channel

        def ready() -> bool:
            checkpoint = self._checkpoint
            if checkpoint is not None and (channel.truncated is None or channel.truncated < checkpoint):
                return False
            return bool(channel.items) or channel.writer_ended

        with channel.changed:
            if not channel.changed.wait_for(ready, timeout):
                return None
            if not channel.items:
                raise LogClosed("The writer of this log has ended.")
            item = channel.items[0]
            if self._latest is not None:
                self._latest.check_next_epoch(item.epoch)
            channel.items.popleft()
            self._latest = item.offset
            self._checkpoint = item.offset if isinstance(item, BarrierItem) and item.is_checkpoint else None
            channel.changed.notify_all()
            return item

    def truncate(self, offset: LogOffset) -> None:
        """Everything up to *offset* was delivered.

        :raises InvalidOffset: beyond what was read, or not after the last truncation.
        """
        with self._channel.changed:
            if self._latest is None or offset > self._latest:
                raise InvalidOffset("Only what was read can be truncated.")
            if self._channel.truncated is not None and offset <= self._channel.truncated:
                raise InvalidOffset("Truncations go forward.")
            self._channel.truncated = offset
            self._channel.changed.notify_all()

    def rewind(self) -> float:
        """:raises WrongCall: always; what was read is gone."""
        raise WrongCall(
            f"Log {self._channel.name!r} is in memory only: it cannot be rewound.",
            next_step="Stop its writer and begin again after the last checkpoint, or keep this log in a state store.",
        )

    def close(self) -> None:
        """No more items: a writer that waits is told; closing twice is no error."""
        with self._channel.changed:
            self._state = ReaderState.CLOSED
            self._channel.reader_ended = True
            self._channel.items.clear()
            self._channel.changed.notify_all()

    def _expect(self, allowed: ReaderState) -> None:
        if self._state is not allowed:
            raise WrongCall(f"This needs a reader that is {allowed.value}; it is {self._state.value}.")
