"""Checks and waits on epochs that every engine shares."""

from __future__ import annotations

import time
from collections.abc import Callable

from headwater.state.announcements import wait_for_announcement
from headwater.state.errors import InvalidEpoch, InvalidKey
from headwater.stream.epoch import Epoch

MAX_NAME = 100
_SHORTEST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.010


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
