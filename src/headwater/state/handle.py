"""What all engines share: handles and snapshots are open until closed, and never used in a forked child; checks of
epochs and names; the wait for an epoch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from headwater.state.announcements import wait_for_announcement
from headwater.state.errors import InvalidEpoch, InvalidKey, StoreClosed
from headwater.stream.epoch import Epoch

MAX_NAME = 100
_SHORTEST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.010


class Closable:
    """Closed once, by hand or at the end of a ``with`` block."""

    def __init__(self) -> None:
        self._closed = False
        self._pid = os.getpid()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"This {type(self).__name__} is closed.", next_step="Open the store again.")
        if self._pid != os.getpid():
            raise StoreClosed(
                f"This {type(self).__name__} was opened in process {self._pid} and does not survive a fork.",
                next_step="Open the store again in this process.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Handle(Closable):
    """A handle on a store."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self._location = location

    @property
    def location(self) -> str:
        return self._location

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._location}{' closed' if self._closed else ''}>"


class SnapshotBase(Closable):
    """A snapshot of one epoch."""

    def __init__(self, epoch: Epoch) -> None:
        super().__init__()
        self._epoch = epoch

    @property
    def epoch(self) -> Epoch:
        return self._epoch


def check_epoch(epoch: int) -> Epoch:
    """*epoch* as one that can be sealed. :raises InvalidEpoch: it is 0."""
    if not isinstance(epoch, int):
        raise InvalidEpoch(f"An epoch is a number, not {type(epoch).__name__}.")
    if not epoch:
        raise InvalidEpoch("Nothing can be sealed under epoch 0: it means that no epoch was sealed yet.")
    return Epoch(epoch)


def check_pin_name(name: str) -> None:
    """:raises InvalidKey: not a name for a pin."""
    if type(name) is not str or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidKey(f"A pin's name is printable text of 1 to {MAX_NAME} characters.")


def wait_until(committed: Callable[[], Epoch], location: str, after: int, timeout: float) -> Epoch | None:
    """Look at *committed* until it passes *after*: when an epoch of the store at *location* is announced.

    Where none is announced pauses grow from half a millisecond to ten.
    """
    deadline = time.monotonic() + timeout
    pause = _SHORTEST_PAUSE
    while (epoch := committed()) <= after:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        if wait_for_announcement(location, after, left):
            continue
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return epoch
