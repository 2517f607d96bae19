"""Bounded loss for the durability level `flush`: one thread that syncs what was written, every interval.

The thread starts with the first write and holds no lock while it syncs. A sync that fails is reported to the
writer's next call by the target itself, which is then unusable.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Target(Protocol):
    """Something with unsynced bytes."""

    def sync_quietly(self) -> None:
        """Sync; keep a failure for the next call of the owner."""


class Flusher:
    """Syncs each noted target at most *interval* seconds after it was noted."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._dirty: dict[int, Target] = {}
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def after_fork(self) -> None:
        """The parent's thread is not here; what it owes, the parent syncs."""
        self._reset()

    def note(self, target: Target) -> None:
        """*target* has unsynced bytes."""
        with self._lock:
            self._dirty[id(target)] = target
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="journal-flush", daemon=True)
                self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._stop.wait(self.interval)
            self._wake.clear()
            self.flush()

    def flush(self) -> None:
        """Sync everything noted so far, now."""
        with self._lock:
            due, self._dirty = self._dirty, {}
        for target in due.values():
            target.sync_quietly()

    def close(self) -> None:
        """Sync what is owed and end the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.flush()
