"""The synced log store: between two operators of one process, so that a slow one holds back nobody's barriers.

A step machine without threads: :meth:`SyncedLogStore.push` takes what comes from above, :meth:`SyncedLogStore.poll`
gives what goes on. Rows that were not polled yet wait in a small buffer, and in the store when it is full. Barriers do
not wait for them: the next poll gives the barrier, and the rows after it belong, for whoever polls, to the epoch that
is open then. Rows keep their order, and no row overtakes a barrier that came before it.

    store.push(message)
    while (item := store.poll()) is not None:
        if isinstance(item, Barrier) and item.is_durable:
            ...                        # your state, into factory.sealer.batch
            factory.sealer.seal(item.closes)
        else:
            ...                        # work on it

Rows that were polled before a durable barrier are done with its seal, exactly those (:mod:`~.synced_log`).

At a checkpoint what waits has to be written. While whoever polls keeps up (*clean*), the barrier is held for a moment
and rows come first, so that mostly nothing is written. Who falls behind (*dirty*) gets barriers at once.

=========  ===============================================================  =========
state      what happens                                                     goes to
=========  ===============================================================  =========
clean      a checkpoint barrier finds something: it is held for a moment    dirty
clean      a chunk does not fit into the buffer                             dirty
dirty      nothing is left to poll, in memory, in the store, in history     clean
=========  ===============================================================  =========

A ``SYNC_CHECKPOINT`` is held until all rows before it were polled. A ``Pause`` stops rows and watermarks, not barriers,
until ``Resume``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from headwater.log_store.buffer import BufferedChunk
from headwater.log_store.history import HISTORY_ROWS
from headwater.log_store.synced_buffer import HeldWatermark, SyncedBuffer, SyncedBufferStatistics
from headwater.log_store.synced_log import SyncedLog
from headwater.log_store.watermarks import Watermark
from headwater.stream import Barrier, BarrierKind, Chunk, Epoch, Pause, Resume

MAX_ROWS = 2048
MAX_BYTES = 16 << 20
PAUSE_SECONDS = 0.064

SyncedMessage: TypeAlias = Chunk | Barrier | Watermark


@dataclass(frozen=True, slots=True)
class SyncedOptions:
    """Limits of a synced log store.

    :ivar max_rows: in the buffer, with *max_bytes*; a chunk that does not fit goes into the store.
    :ivar pause_seconds: how long a checkpoint is held while whoever polls keeps up.
    :ivar history_rows: of one chunk of persisted rows, at most (one more for an update pair).
    """

    max_rows: int = MAX_ROWS
    max_bytes: int = MAX_BYTES
    pause_seconds: float = PAUSE_SECONDS
    history_rows: int = HISTORY_ROWS


class SyncedLogStore:
    """One instance; made by :class:`~headwater.log_store.synced_factory.SyncedLogStoreFactory`. For one thread."""

    def __init__(self, log: SyncedLog, options: SyncedOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.log = log
        self._options = options
        self._clock = clock
        self._buffer = SyncedBuffer(options.max_rows, options.max_bytes)
        self._barriers: deque[Barrier] = deque()
        self._next_seq = 0
        self._clean = True
        self._paused = False
        self._stopped = False
        self._held_since: float | None = None
        self._polled_at: float | None = None

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`push` may be called: always, up to the barrier that stops it."""
        return not self._stopped

    @property
    def is_clean(self) -> bool:
        """Whether whoever polls keeps up."""
        return self._clean

    def statistics(self) -> SyncedBufferStatistics:
        return self._buffer.statistics()

    def push(self, message: SyncedMessage) -> None:
        """Take in what comes from above; an error has taken in nothing.

        :raises MessageOrderError: it may not come now. :raises WrongCall: it cannot be followed.
        :raises ForeignSchema: rows or a watermark of other columns. :raises ForeignVnode: rows of other owners.
        """
        self.log.follow(message)
        if isinstance(message, Barrier):
            self._barriers.append(message)
            self._next_seq = 0
            if message.kind is BarrierKind.INITIAL:
                self._clean = not self.log.has_history()
        elif isinstance(message, Watermark):
            self._buffer.add_watermark(self.log.epoch, message)
        elif message.num_rows:
            self._add(message)

    def _add(self, chunk: Chunk) -> None:
        epoch, first = self.log.epoch, self._next_seq
        if not self._buffer.add_chunk(epoch, first, chunk):
            self.log.write(epoch, first, chunk)
            last = first + chunk.num_rows - 1
            self._buffer.add_spilled(epoch, first, last, self.log.state.log, self.log.state.vnodes)
            self._set_clean(False)
        self._next_seq += chunk.num_rows

    def poll(self) -> SyncedMessage | None:
        """The next barrier, rows or watermark; ``None`` when there is nothing to do until the next push.

        Seal the epoch that a durable barrier closes before the poll that gives the next one.

        :raises WrongCall: the checkpoint before this one was not sealed; nothing is lost.
        """
        if self._polled_at is not None:
            self.log.counters.wait_next_poll_ns += round((self._clock() - self._polled_at) * 1e9)
            self._polled_at = None
        item = self._next()
        if item is not None:
            self._polled_at = self._clock()
        return item

    def _next(self) -> SyncedMessage | None:
        if not self._barriers:
            return None if self._paused or self._stopped else self._read(None)
        barrier = self._barriers[0]
        if self._rows_come_first(barrier):
            item = self._read(barrier.closes)
            if item is not None:
                return item
        self._close(barrier)
        self._barriers.popleft()
        return barrier

    def _rows_come_first(self, barrier: Barrier) -> bool:
        if not self.log.has_history() and not self.log.recovered and self._buffer.oldest(barrier.closes) is None:
            self._caught_up()
            return False
        if barrier.drains:
            return True
        if self._held_since is None:
            if not self._clean or not barrier.is_durable or self._paused:
                return False
            self._held_since = self._clock()
            self._set_clean(False)
        return self._clock() < self._held_since + self._options.pause_seconds

    def _read(self, upto: Epoch | None) -> Chunk | Watermark | None:
        """The next rows or watermark, of epochs up to *upto*."""
        found = self.log.take_history() or self.log.take_recovered()
        while found is None:
            item = self._buffer.oldest(upto)
            if item is None:
                self._caught_up()
                return None
            if isinstance(item, HeldWatermark):
                found = item.watermark if self.log.passes(item.watermark) else None
            elif isinstance(item, BufferedChunk):
                found = item.chunk
                self.log.counters.buffer.add(found.num_rows, found.nbytes)
            else:
                found = self.log.read_spilled(item)  # may fail: it stays the oldest
            self._buffer.drop_oldest()
        return found

    def _close(self, barrier: Barrier) -> None:
        if barrier.is_durable:
            self.log.check_sealed()
            while (item := self._buffer.next_unwritten(barrier.closes)) is not None:
                self.log.write(item.epoch, item.first_seq, item.chunk)
                self._buffer.written()
            watermarks = self.log.recovered | self._buffer.watermarks(barrier.closes)
            self.log.commit(barrier, self._buffer.oldest_row(), watermarks)
        if self._held_since is not None:
            self.log.counters.write_pause_ns += round((self._clock() - self._held_since) * 1e9)
            self._held_since = None
        if isinstance(barrier.mutation, Pause | Resume):
            self._paused = isinstance(barrier.mutation, Pause)
        self._stopped = self.log.stops(barrier)

    def _caught_up(self) -> None:
        """Everything before the barrier, or all, was polled: it is clean unless rows wait in the store behind it."""
        if not self._buffer.spilled_rows and not self.log.has_history():
            self._set_clean(True)

    def _set_clean(self, clean: bool) -> None:
        if clean is not self._clean:
            self._clean = clean
            counters = self.log.counters
            counters.clean, counters.dirty = counters.clean + clean, counters.dirty + (not clean)
