"""What a writer and its reader tell each other beside the items: where it began, whose vnodes, what is done.

The reader also leaves its figures here, for metrics: constant work per item.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from headwater.log_store.buffer import LogStoreBuffer
from headwater.log_store.errors import LogClosed
from headwater.log_store.item import Done
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.stream import Epoch, VnodeBitmap


@dataclass(frozen=True, slots=True)
class Start:
    """From where on a writer writes.

    :ivar epoch: its first epoch: the live end.
    :ivar after_seal: what is before it can be read once this epoch is sealed.
    """

    epoch: Epoch
    vnodes: VnodeBitmap
    after_seal: Epoch


DELAY_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Upper bounds, in seconds, of the buckets in which delays before a rewind are counted; one more is for the rest."""


@dataclass(slots=True)
class ReaderFigures:
    """What a reader did.

    :ivar busy_ns: time from an item that was handed out to the next call: how long deliveries kept the reader waiting.
    :ivar delays: how many rewinds waited up to each of :data:`DELAY_BUCKETS`, without those of the buckets before.
    """

    latest_epoch: Epoch = field(default_factory=lambda: Epoch(0))
    busy_ns: int = 0
    delays: list[int] = field(default_factory=lambda: [0] * (len(DELAY_BUCKETS) + 1))
    delay_seconds: float = 0.0


class ReaderLink:
    """Shared by one writer and one reader."""

    def __init__(self, consumer: str, buffer: LogStoreBuffer) -> None:
        self.consumer = consumer
        self._buffer = buffer
        self._starts: deque[Start] = deque()
        self._done: deque[Done] = deque()
        self._paused = False
        self._changed = threading.Condition()
        self._handed_out_at: int | None = None
        self.figures = ReaderFigures()

    # -- writer ------------------------------------------------------------------------------------------------

    def started(self, start: Start, *, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._starts.append(start)
            self._changed.notify_all()

    def moved(self, start: Start) -> None:
        """Other vnodes from here on: the reader gives nothing more until it begins anew."""
        with self._changed:
            self._starts.append(start)
            self._changed.notify_all()
        self._buffer.wake()

    def set_paused(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
        self._buffer.wake()

    def hand_over(self, before: Epoch, apply: Callable[[list[Done]], None]) -> None:
        """Give *apply* what was truncated before epoch *before*: the epoch being closed waits for the next barrier."""
        with self._changed:
            taken = list(takewhile(lambda done: done.epoch < before, self._done))
            apply(taken)
            for _ in taken:
                self._done.popleft()

    # -- reader ------------------------------------------------------------------------------------------------

    def wait_for_start(self, timeout: float | None) -> Start:
        """:raises LogClosed: the writer did not begin in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._starts), timeout):
                raise LogClosed("The writer of this log has not begun.")
            return self._starts.popleft()

    def has_moved(self) -> bool:
        """Whether the writer has other vnodes than the reader knows of."""
        return bool(self._starts)

    def is_running(self) -> bool:
        return not self._paused

    def delivered(self, durable: Callable[[], LogStoreVnodeProgress], more: Iterable[Done]) -> LogStoreVnodeProgress:
        """What is *durable*, what was truncated since, and *more*."""
        with self._changed:
            found = durable()
            made = LogStoreVnodeProgress(found.vnode_count, dict(found.places()))
            for step in (*self._done, *more):
                step.apply_to(made, None)
            return made

    def add_done(self, done: list[Done]) -> None:
        with self._changed:
            self._done.extend(done)

    def asked(self) -> None:
        """The reader is asked for an item."""
        if self._handed_out_at is not None:
            self.figures.busy_ns += time.monotonic_ns() - self._handed_out_at
            self._handed_out_at = None

    def handed_out(self, epoch: Epoch) -> None:
        """The reader gives an item of *epoch*."""
        self.figures.latest_epoch = epoch
        self._handed_out_at = time.monotonic_ns()

    def rewound(self, delay: float) -> None:
        """The reader waited *delay* seconds before it tries again."""
        self.figures.delays[bisect_left(DELAY_BUCKETS, delay)] += 1
        self.figures.delay_seconds += delay
