"""What a writer and its reader tell each other beside the items: where it began, whose vnodes, what is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


class ReaderLink:
    """Shared by one writer and one reader."""

    def __init__(self, consumer: str, buffer: LogStoreBuffer) -> None:
        self.consumer = consumer
        self._buffer = buffer
        self._starts: deque[Start] = deque()
        self._done: deque[Done] = deque()
        self._paused = False
        self._changed = threading.Condition()

    # -- writer ------------------------------------------------------------------------------------------------

    def started(self, start: Start, *, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._starts.append(start)
            self._changed.notify_all()

    def moved(self, start: Start) -> None:
        """Other vnodes from here on."""
        with self._changed:
            self._starts.append(start)
            self._changed.notify_all()

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
