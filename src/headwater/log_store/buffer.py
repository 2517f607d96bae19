"""The live end of a log, shared by a writer and a reader of one process: bounded in rows and in bytes.

Items stay until they are truncated, so that a rewind can hand them out again: what was consumed but not truncated
counts against the bound. A chunk that finds the buffer full is not kept; a reference to its place in the store stands
for it (:class:`SpilledRef`), and writing goes on. So a slow reader never holds up the writer and never makes it grow:
a chunk is taken in while there is room, and the bound is passed by at most that one chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from headwater.log_store.errors import LogClosed
from headwater.log_store.item import BarrierItem
from headwater.log_store.log import Log
from headwater.log_store.offset import LogOffset
from headwater.stream import Chunk, Epoch, VnodeBitmap

MAX_ROWS = 65_536
MAX_BYTES = 64 << 20
CHUNK_ROWS = 1024
"""References to small spilled chunks are joined up to this many rows."""


@dataclass(frozen=True, slots=True, eq=False)
class BufferedChunk:
    """A chunk in memory."""

    epoch: Epoch
    chunk_id: int
    first_seq: int
    chunk: Chunk

    @property
    def offset(self) -> LogOffset:
        return LogOffset(self.epoch, self.chunk_id)


@dataclass(frozen=True, slots=True)
class SpilledRef:
    """Rows that are only in the store."""

    epoch: Epoch
    chunk_id: int
    first_seq: int
    last_seq: int
    log: Log
    vnodes: VnodeBitmap

    @property
    def offset(self) -> LogOffset:
        return LogOffset(self.epoch, self.chunk_id)


Buffered: TypeAlias = BufferedChunk | SpilledRef | BarrierItem


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """Figures for metrics."""

    rows: int
    bytes_held: int
    unconsumed_items: int
    unconsumed_rows: int
    unconsumed_epochs: int
    consumed_items: int
    spilled_rows: int
    oldest_unconsumed_epoch: Epoch | None
    max_rows: int
    max_bytes: int


class LogStoreBuffer:
    """Items in write order; the writer adds, the reader takes, truncates and rewinds."""

    def __init__(self, max_rows: int = MAX_ROWS, max_bytes: int = MAX_BYTES, chunk_rows: int = CHUNK_ROWS) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._chunk_rows = chunk_rows
        self._unconsumed: deque[Buffered] = deque()
        self._consumed: deque[Buffered] = deque()
        self._rows = 0
        self._bytes = 0
        self._spilled_rows = 0
        self._unconsumed_rows = 0
        self._unconsumed_barriers = 0
        self._next_chunk_id = 0
        self._last_barrier = Epoch(0)
        self._closed = False
        self._changed = threading.Condition()

    # -- writer ------------------------------------------------------------------------------------------------

    def add_chunk(self, epoch: Epoch, first_seq: int, chunk: Chunk) -> bool:
        """Keep *chunk* in memory; ``False`` when there is no room: spill it."""
        with self._changed:
            if self._rows >= self._max_rows or self._bytes >= self._max_bytes:
                return False
            self._unconsumed.append(BufferedChunk(epoch, self._next_chunk_id, first_seq, chunk))
            self._next_chunk_id += 1
            self._count(chunk, 1)
            self._unconsumed_rows += chunk.num_rows
            self._changed.notify_all()
            return True

    def add_spilled(self, epoch: Epoch, first_seq: int, last_seq: int, log: Log, vnodes: VnodeBitmap) -> None:
        """Stand for rows that were written to the store; small neighbours become one item."""
        with self._changed:
            last = self._unconsumed[-1] if self._unconsumed else None
            rows = last_seq - first_seq + 1
            self._spilled_rows += rows
            self._unconsumed_rows += rows
            joins = (
                isinstance(last, SpilledRef)
                and last.epoch == epoch
                and last.last_seq + 1 == first_seq
                and last.log == log
                and last.last_seq - last.first_seq + 1 + rows <= self._chunk_rows
            )
            if joins and isinstance(last, SpilledRef):
                self._unconsumed[-1] = replace(last, last_seq=last_seq)
            else:
                self._unconsumed.append(SpilledRef(epoch, self._next_chunk_id, first_seq, last_seq, log, vnodes))
                self._next_chunk_id += 1
            self._changed.notify_all()

    def add_barrier(self, barrier: BarrierItem) -> None:
        with self._changed:
            self._unconsumed.append(barrier)
            self._unconsumed_barriers += 1
            self._next_chunk_id = 0
            self._last_barrier = barrier.epoch
            self._changed.notify_all()

    def wait_until_truncated(self, epoch: Epoch, timeout: float | None) -> bool:
        """Wait until the barrier of *epoch* was truncated; ``False`` after *timeout* seconds."""

        def gone() -> bool:
            held = (*self._consumed, *self._unconsumed)
            return self._closed or not any(isinstance(item, BarrierItem) and item.epoch == epoch for item in held)

        with self._changed:
            return self._changed.wait_for(gone, timeout)

    def clear(self) -> None:
        """Forget everything: it can be read from the store."""
        with self._changed:
            self._unconsumed.clear()
            self._consumed.clear()
            self._rows = self._bytes = self._spilled_rows = self._next_chunk_id = 0
            self._unconsumed_rows = self._unconsumed_barriers = 0
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- reader ------------------------------------------------------------------------------------------------

    @property
    def last_barrier(self) -> Epoch:
        """The newest epoch that the writer ended."""
        return self._last_barrier

    def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for *ready*, or the end of the writer; ``False`` after *timeout* seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or ready(), timeout)

    def take(
        self,
        timeout: float | None,
        ready: Callable[[], bool] = lambda: True,
        over: Callable[[], bool] = lambda: False,
    ) -> Buffered | None:
        """The oldest item that was not taken yet; ``None`` after *timeout* seconds, or when it is *over*.

        :raises LogClosed: the writer ended and nothing is left.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or over() or (ready() and self._unconsumed), timeout):
                return None
            if over():
                return None
            if not self._unconsumed:
                raise LogClosed("The writer of this log has ended.")
            item = self._unconsumed.popleft()
            self._waits(item, -1)
            self._consumed.append(item)
            return item

    def truncate(self, offset: LogOffset) -> None:
        """Forget the taken items up to *offset*."""
        with self._changed:
            while self._consumed and self._consumed[0].offset <= offset:
                self._forget(self._consumed.popleft())
            self._changed.notify_all()

    def rewind(self, after: Epoch) -> None:
        """Hand out the taken items again, without those of epochs up to *after*: they were delivered."""
        with self._changed:
            for item in self._consumed:
                self._waits(item, 1)
            self._unconsumed.extendleft(reversed(self._consumed))
            self._consumed.clear()
            while self._unconsumed and self._unconsumed[0].epoch <= after:
                self._waits(self._unconsumed[0], -1)
                self._forget(self._unconsumed.popleft())
            self._changed.notify_all()

    def wake(self) -> None:
        """Let a waiting reader look again."""
        with self._changed:
            self._changed.notify_all()

    def statistics(self) -> BufferStatistics:
        with self._changed:
            oldest = self._unconsumed[0].epoch if self._unconsumed else None
            open_end = bool(self._unconsumed) and not isinstance(self._unconsumed[-1], BarrierItem)
            return BufferStatistics(
                self._rows,
                self._bytes,
                len(self._unconsumed),
                self._unconsumed_rows,
                self._unconsumed_barriers + open_end,
                len(self._consumed),
                self._spilled_rows,
                oldest,
                self._max_rows,
                self._max_bytes,
            )

    def _count(self, chunk: Chunk, sign: int) -> None:
        self._rows += sign * chunk.num_rows
        self._bytes += sign * chunk.nbytes

    def _waits(self, item: Buffered, sign: int) -> None:
        """*item* is among those that were not taken, or no longer."""
        if isinstance(item, BufferedChunk):
            self._unconsumed_rows += sign * item.chunk.num_rows
        elif isinstance(item, SpilledRef):
            self._unconsumed_rows += sign * (item.last_seq - item.first_seq + 1)
        else:
            self._unconsumed_barriers += sign

    def _forget(self, item: Buffered) -> None:
        if isinstance(item, BufferedChunk):
            self._count(item.chunk, -1)
        elif isinstance(item, SpilledRef):
            self._spilled_rows -= item.last_seq - item.first_seq + 1
