"""A reader that hands out so many rows per second, which can be changed while it runs.

A chunk of more rows than a second has is handed out in pieces (update pairs stay whole), each with a chunk id of its
own; the ids go on over epochs, rewinds and moves, so an offset never stands for two pieces. The inner reader is told of
a truncation once all pieces of its chunk are truncated. Barriers cost nothing. After a piece the next waits until the
piece is paid for, so in any time the rows are at most what the rate allows and one piece more. At 0 nothing comes, no
barrier either, until the rate is changed.

The mapping from pieces to chunks is forgotten whenever the inner reader begins anew: by ``rewind`` and by ``init``. One
thread reads; any may change the rate.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from headwater.log_store.errors import InvalidOffset
from headwater.log_store.item import BarrierItem, ChunkItem, LogItem
from headwater.log_store.offset import LogOffset
from headwater.log_store.protocols import LogReader
from headwater.stream import Chunk, Epoch, Op, Throttle


class RowRate:
    """How many rows may pass now. Pure: the time is given.

    :param rows_per_second: ``None`` is no limit, 0 stands still.
    :raises BarrierError: a negative rate.
    """

    def __init__(self, rows_per_second: int | None = None) -> None:
        self._rate = Throttle(rows_per_second).rows_per_second
        self._owed = 0.0
        self._at = 0.0

    @property
    def rows_per_second(self) -> int | None:
        return self._rate

    def change(self, rows_per_second: int | None, now: float) -> None:
        """Another rate from *now* on; what is owed is owed still. :raises BarrierError: a negative rate."""
        rate = Throttle(rows_per_second).rows_per_second
        self._settle(now)
        self._rate = rate

    def wait(self, now: float) -> float | None:
        """Seconds until rows may pass; ``None`` is until the rate is changed."""
        self._settle(now)
        if self._rate == 0:
            return None
        return self._owed / self._rate if self._rate else 0.0

    def take(self, rows: int, now: float) -> None:
        """Rows passed."""
        self._settle(now)
        self._owed += rows if self._rate else 0

    def _settle(self, now: float) -> None:
        if self._rate is None:
            self._owed = 0.0
        else:
            self._owed = max(0.0, self._owed - self._rate * max(0.0, now - self._at))
        if self._owed < 1e-6:
            self._owed = 0.0
        self._at = max(now, self._at)


class RateLimitedReader:
    """Another reader's items at a limited rate.

    :param wait: waits for so many seconds (``None``: for ever), or less; by default until the rate is changed.
    """

    def __init__(
        self,
        inner: LogReader,
        rows_per_second: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float | None], None] | None = None,
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._wait = wait
        self._changed = threading.Condition()
        self._changes = 0
        self._rate = RowRate(rows_per_second)
        self._rest: tuple[LogOffset, Chunk] | None = None
        self._next_id = 0
        self._yielded: deque[tuple[LogOffset, LogOffset | None]] = deque()

    @property
    def rows_per_second(self) -> int | None:
        return self._rate.rows_per_second

    def set_rate(self, rows_per_second: int | None) -> None:
        """Another rate at once, also for the rest of a chunk. :raises BarrierError: a negative rate."""
        with self._changed:
            self._rate.change(rows_per_second, self._clock())
            self._changes += 1
            self._changed.notify_all()

    def init(self, timeout: float | None = None) -> None:
        """As the inner reader's; the pieces of other vnodes are forgotten."""
        self._inner.init(timeout)
        self._forget()

    def start_from(self, after: Epoch | None = None) -> None:
        """As the inner reader's."""
        self._inner.start_from(after)

    def next_item(self, timeout: float | None = None) -> LogItem | None:
        """The next piece or barrier; ``None`` after *timeout* seconds, with nothing lost."""
        deadline = None if timeout is None else self._clock() + timeout
        while self._may_pass(deadline):
            if self._rest is not None:
                piece = self._next_piece(*self._rest)
                if piece is not None:
                    return piece
                continue
            item = self._inner.next_item(None if deadline is None else max(0.0, deadline - self._clock()))
            if item is None:
                return None
            if isinstance(item, BarrierItem):
                self._yielded.append((item.offset, item.offset))
                return item
            self._rest = (item.offset, item.chunk)
        return None

    def _next_piece(self, whole: LogOffset, chunk: Chunk) -> ChunkItem | None:
        with self._changed:
            now = self._clock()
            if self._rate.wait(now) != 0:
                return None  # the rate was changed since we looked
            stop = min(self._rate.rows_per_second or chunk.num_rows, chunk.num_rows)
            if stop < chunk.num_rows and chunk.ops[stop - 1].as_py() == Op.UPDATE_DELETE:
                stop += 1
            self._rate.take(stop, now)
        piece = ChunkItem(whole.epoch, self._next_id, chunk.slice(0, stop))
        is_last = stop == chunk.num_rows
        self._yielded.append((piece.offset, whole if is_last else None))
        self._next_id += 1
        self._rest = None if is_last else (whole, chunk.slice(stop))
        return piece

    def truncate(self, offset: LogOffset) -> None:
        """Everything up to *offset* was delivered: what it completes need not come again.

        :raises InvalidOffset: beyond what was read, or not after the last truncation.
        """
        if not self._yielded or offset > self._yielded[-1][0]:
            raise InvalidOffset("Only what was read can be truncated.")
        if offset < self._yielded[0][0]:
            raise InvalidOffset("Truncations go forward.")
        whole: LogOffset | None = None
        while self._yielded and self._yielded[0][0] <= offset:
            whole = self._yielded.popleft()[1] or whole
        if whole is not None:
            self._inner.truncate(whole)

    def rewind(self) -> float:
        """As the inner reader's: chunks that were not truncated come again, whole."""
        waited = self._inner.rewind()
        self._forget()
        return waited

    def close(self) -> None:
        """As the inner reader's."""
        self._forget()
        self._inner.close()

    def _forget(self) -> None:
        self._rest = None
        self._yielded.clear()

    def _may_pass(self, deadline: float | None) -> bool:
        """Wait until the rate is not 0 and lets the rows pass that wait; ``False`` at *deadline*."""
        while True:
            with self._changed:
                now, changes = self._clock(), self._changes
                seconds = self._rate.wait(now)
            if seconds is not None and (seconds == 0 or self._rest is None):
                return True
            left = None if deadline is None else deadline - now
            if left is not None and left <= 0:
                return False
            self._wait_for(min((limit for limit in (seconds, left) if limit is not None), default=None), changes)

    def _wait_for(self, seconds: float | None, changes: int) -> None:
        if self._wait is not None:
            self._wait(seconds)
            return
        with self._changed:
            self._changed.wait_for(lambda: self._changes != changes, seconds)
