"""What a writer and its reader tell each other beside the items: where it began, whose vnodes, what is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from headwater.log_store.buffer import LogStoreBuffer
from headwater.log_store.errors import LogClosed
from headwater.log_store.item import Done
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.stream import Epoch, VnodeBitmap


class ReaderLink:
    """Shared by one writer and one reader."""

    def __init__(self, consumer: str, buffer: LogStoreBuffer) -> None:
        self.consumer = consumer
        self._buffer = buffer
        self._starts: deque[tuple[Epoch, VnodeBitmap]] = deque()
        self._done: deque[Done] = deque()
        self._paused = False
        self._changed = threading.Condition()

    # -- writer ------------------------------------------------------------------------------------------------

    def started(self, epoch: Epoch, vnodes: VnodeBitmap, *, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._starts.append((epoch, vnodes))
            self._changed.notify_all()

    def moved(self, epoch: Epoch, vnodes: VnodeBitmap) -> None:
        """Other vnodes from *epoch* on."""
        with self._changed:
            self._starts.append((epoch, vnodes))
            self._changed.notify_all()

    def set_paused(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
        self._buffer.wake()

    def hand_over(self, before: Epoch, apply: Callable[[list[Done]], None]) -> None:
        """Give *apply* what was truncated before epoch *before*: the epoch being closed waits for the next barrier."""
        with self._changed:
            taken: list[Done] = []
            while self._done and self._done[0].epoch < before:
                taken.append(self._done.popleft())
            apply(taken)

    # -- reader ------------------------------------------------------------------------------------------------

    def wait_for_start(self, timeout: float | None) -> tuple[Epoch, VnodeBitmap]:
        """:raises LogClosed: the writer did not begin in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._starts), timeout):
                raise LogClosed("The writer of this log has not begun.")
            return self._starts.popleft()

    def is_running(self) -> bool:
        return not self._paused

    def delivered(self, durable: LogStoreVnodeProgress) -> LogStoreVnodeProgress:
        """*durable*, and what was truncated since."""
        with self._changed:
            made = LogStoreVnodeProgress(durable.vnode_count, dict(durable.places()))
            for step in self._done:
                step.apply_to(made, None)
            return made

    def add_done(self, done: list[Done]) -> None:
        with self._changed:
            self._done.extend(done)
