"""Announcements: another thread of this process knows when epochs of a store are sealed, so nobody needs to poll.

Nothing depends on them: who waits looks at the store itself, also when nothing is announced for a while.
"""

from __future__ import annotations

import os
import threading
import time
from functools import lru_cache
from typing import Final

from headwater.state.location import identity

_UNHEARD_SECONDS: Final = 0.25
"""What a lost announcement costs."""

_changed = threading.Condition()
_announcers: dict[str, list[Announcer]] = {}


class Announcer:
    """Announces the epochs of the store at *location* in this process, until it is closed; any thread."""

    def __init__(self, location: str) -> None:
        self._key = _key(location)
        self.epoch = 0
        with _changed:
            _announcers.setdefault(self._key, []).append(self)

    def announce(self, epoch: int) -> None:
        """*epoch* is sealed."""
        with _changed:
            self.epoch = epoch
            _changed.notify_all()

    def close(self) -> None:
        """Nothing is announced any more; closing twice is no error."""
        with _changed:
            known = _announcers.get(self._key, [])
            if self in known:
                known.remove(self)
            if not known:
                _announcers.pop(self._key, None)
            _changed.notify_all()


def wait_for_announcement(location: str, after: int, timeout: float) -> bool:
    """Wait until an epoch newer than *after* is announced, at most for *timeout* seconds, or for a moment.

    ``False``, at once: nothing is announced for the store, or such an epoch was announced before and need not be
    visible yet.
    """
    if not _announcers:
        return False
    key = _key(location)
    end = time.monotonic() + min(timeout, _UNHEARD_SECONDS)
    with _changed:
        if not _is_quiet(key, after):
            return False
        while _is_quiet(key, after) and (left := end - time.monotonic()) > 0:
            _changed.wait(left)
    return True


def _is_quiet(key: str, after: int) -> bool:
    announcers = _announcers.get(key, [])
    return bool(announcers) and all(one.epoch <= after for one in announcers)


_key = lru_cache(maxsize=256)(identity)


def _after_fork_in_child() -> None:
    global _changed
    _changed = threading.Condition()
    _announcers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
