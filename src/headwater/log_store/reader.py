"""The reader of a log: what is persisted first, then the live end, with no gap and no overlap.

======================  ====================================================  ==========================
state                   what may be called                                    goes to
======================  ====================================================  ==========================
new                     ``init``                                              reset
reset                   ``start_from``, ``init``                              history
history                 ``next_item``, ``truncate``, ``rewind``, ``init``     history, live, reset
live                    ``next_item``, ``truncate``, ``rewind``, ``init``     live, reset
closed                  nothing; ``close`` closes a reader in any state
======================  ====================================================  ==========================

History is what was sealed before the writer began: epochs in ``(progress, first_write_epoch)``; the live end begins at
``first_write_epoch``. An item that was taken is either returned or comes again: a call that is given up (a timeout, an
exception in the caller's thread) loses nothing. Once the writer has taken over other vnodes nothing more comes until
``init``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum

import numpy as np

from headwater.log_store.buffer import BufferedChunk, LogStoreBuffer, SpilledRef
from headwater.log_store.consumers import Consumer
from headwater.log_store.errors import InvalidOffset, VnodesMoved, WrongCall
from headwater.log_store.history import (
    HISTORY_ROWS,
    HISTORY_VIEW_SECONDS,
    read_history,
    steps_to_end,
)
from headwater.log_store.item import BarrierItem, ChunkItem, Done, LogItem, last_seqs
from headwater.log_store.link import ReaderLink
from headwater.log_store.offset import LogOffset
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.log_store.rewind import RewindDelay
from headwater.log_store.state import LogStoreState
from headwater.state import StateReader
from headwater.stream import Epoch


class ReaderState(Enum):
    NEW = "new"
    RESET = "reset"
    HISTORY = "history"
    LIVE = "live"
    CLOSED = "closed"


class KvLogStoreReader:
    """The reading end of one instance of a log, in the writer's process."""

    def __init__(
        self,
        store: StateReader,
        state: LogStoreState,
        buffer: LogStoreBuffer,
        link: ReaderLink,
        consumer: Consumer,
        delays: RewindDelay | None = None,
        sleep: Callable[[float], None] = time.sleep,
        history_rows: int = HISTORY_ROWS,
    ) -> None:
        self._store = store
        self._store_state = state
        self._buffer = buffer
        self._link = link
        self._consumer = consumer
        self._delays = delays or RewindDelay()
        self._sleep = sleep
        self._history_rows = history_rows
        self._state = ReaderState.NEW
        self._first_write_epoch = Epoch(0)
        self._vnodes = state.vnodes
        self._after_seal = Epoch(0)
        self._history: Iterator[tuple[LogItem, Done]] | None = None
        self._pending: BufferedChunk | SpilledRef | BarrierItem | None = None
        self._latest: LogOffset | None = None
        self._truncated: LogOffset | None = None
        self._yielded: deque[tuple[LogOffset, Done]] = deque()

    @property
    def state(self) -> ReaderState:
        return self._state

    def init(self, timeout: float | None = None) -> None:
        """Wait until the writer begins, or has taken over other vnodes; then :meth:`start_from`."""
        self._expect(*(state for state in ReaderState if state is not ReaderState.CLOSED))
        start = self._link.wait_for_start(timeout)
        self._first_write_epoch, self._vnodes, self._after_seal = start.epoch, start.vnodes, start.after_seal
        self._latest = self._truncated = None
        self._delays.reset()
        self._reset()

    def start_from(self, after: Epoch | None = None) -> None:
        """Begin after epoch *after*, by default after what was truncated. What was truncated never comes again.

        :raises WrongCall: neither :meth:`init` nor :meth:`rewind` came before.
        :raises InvalidOffset: epoch *after* has not ended yet.
        """
        self._expect(ReaderState.RESET)
        if after is not None:
            if after >= self._first_write_epoch and after > self._buffer.last_barrier:
                raise InvalidOffset(f"Epoch {after} has not ended: it cannot have been delivered.")
            self._link.add_done(steps_to_end(self._delivered(), self._vnodes, after))
        self._buffer.rewind(Epoch(0) if after is None else after)
        self._state = ReaderState.HISTORY

    def _delivered(self) -> LogStoreVnodeProgress:
        """How far each vnode is done: the durable places, what was truncated since, and what was handed out."""
        return self._link.delivered(lambda: self._consumer.progress, [done for _, done in self._yielded])

    def next_item(self, timeout: float | None = None) -> LogItem | None:
        """The next item; ``None`` after *timeout* seconds, with nothing lost.

        :raises LogClosed: the writer stopped, and everything was read.
        :raises VnodesMoved: the writer has other vnodes by now. :meth:`init`, then what was not truncated comes again.
        """
        self._expect(ReaderState.HISTORY, ReaderState.LIVE)
        self._check_not_moved()
        self._link.asked()
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._state is ReaderState.HISTORY:
            if not self._history_is_ready(deadline):
                return None
            self._check_not_moved()
            found = self._next_of_history()
            if found is not None:
                return self._yield(*found)
            self._history = None
            self._state = ReaderState.LIVE
        if self._pending is None:
            self._pending = self._buffer.take(_left(deadline), self._link.is_running, self._link.has_moved)
        if self._pending is None:
            self._check_not_moved()
            return None
        item, done = self._of_buffer(self._pending)  # may fail or be interrupted: the taken item stays pending
        self._pending = None
        return self._yield(item, done)

    def _check_not_moved(self) -> None:
        if self._link.has_moved():
            raise VnodesMoved(
                f"The vnodes of a reader of log {self._store_state.log.name!r} changed.",
                next_step="Begin anew: init(), then start_from().",
            )

    def _history_is_ready(self, deadline: float | None) -> bool:
        """Wait until the writer is not paused, and everything before its first epoch is sealed."""
        if not self._buffer.wait(lambda: self._link.is_running() or self._link.has_moved(), _left(deadline)):
            return False
        while self._after_seal:
            left = _left(deadline)
            if self._store.wait_for_epoch(self._after_seal - 1, 60.0 if left is None else left) is not None:
                self._after_seal = Epoch(0)
            elif left is not None:
                return False
        return True

    def _next_of_history(self) -> tuple[LogItem, Done] | None:
        if self._history is None:
            places = [place for place in (self._latest, self._truncated) if place is not None]
            self._history = read_history(
                self._store,
                self._store_state,
                self._vnodes,
                self._delivered(),
                self._first_write_epoch,
                consumer=self._consumer.name,
                read_before=max(places, default=None),
                rows=self._history_rows,
                view_seconds=HISTORY_VIEW_SECONDS,
            )
        try:
            return next(self._history, None)
        except BaseException:
            self._history = None  # read on after what was handed out, not at the live end
            raise

    def _of_buffer(self, taken: BufferedChunk | SpilledRef | BarrierItem) -> tuple[LogItem, Done]:
        if isinstance(taken, BarrierItem):
            return taken, Done(taken.epoch, self._vnodes, None)
        if isinstance(taken, BufferedChunk):
            chunk = taken.chunk
        else:
            chunk = self._store_state.read_spilled(
                taken.epoch, taken.first_seq, taken.last_seq, taken.log, taken.vnodes
            )
        seqs = np.arange(taken.first_seq, taken.first_seq + chunk.num_rows, dtype=np.uint32)
        done = Done(taken.epoch, self._vnodes, last_seqs(chunk.vnodes.to_numpy(), seqs))
        return ChunkItem(taken.epoch, taken.chunk_id, chunk), done

    def _yield(self, item: LogItem, done: Done) -> LogItem:
        if self._latest is not None:
            self._latest.check_next_epoch(item.epoch)
        self._latest = item.offset
        self._link.handed_out(item.epoch)
        self._yielded.append((item.offset, done))
        if isinstance(item, ChunkItem):
            self._store_state.counters.read_rows += item.chunk.num_rows
        return item

    def truncate(self, offset: LogOffset) -> None:
        """Everything up to *offset* was delivered: it need not come again.

        :raises InvalidOffset: beyond what was read, or not after the last truncation.
        """
        if self._latest is None or offset > self._latest:
            raise InvalidOffset("Only what was read can be truncated.")
        if self._truncated is not None and offset <= self._truncated:
            raise InvalidOffset("Truncations go forward.")
        done: list[Done] = []
        while self._yielded and self._yielded[0][0] <= offset:
            done.append(self._yielded.popleft()[1])
        self._truncated = offset
        self._link.add_done(done)
        self._buffer.truncate(offset)

    def rewind(self) -> float:
        """After a failed delivery: wait, then :meth:`start_from` hands out again what was not truncated.

        Returns the seconds that it waited: 1, 2, 4 … 180 with full jitter; progress resets them.
        """
        self._expect(ReaderState.HISTORY, ReaderState.LIVE)
        delay = self._delays.next(self._truncated)
        self._sleep(delay)
        self._link.rewound(delay)
        self._latest = None
        self._reset()
        return delay

    def close(self) -> None:
        """Let go of what the reader holds; closing twice is no error."""
        self._reset()
        self._latest = None
        self._state = ReaderState.CLOSED

    def _reset(self) -> None:
        self._history = None
        self._pending = None
        self._yielded.clear()
        self._state = ReaderState.RESET

    def _expect(self, *allowed: ReaderState) -> None:
        if self._state not in allowed:
            names = " or ".join(state.value for state in allowed)
            raise WrongCall(f"This needs a reader that is {names}; it is {self._state.value}.")


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
