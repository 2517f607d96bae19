"""Who owns a store: a record that names a process, and a lock that the kernel drops when the process dies.

Writers come in generations. Each writer holds an ``flock`` on the lock file of its own generation for as long as it
lives, so "is the owner alive?" is answered by the kernel, not by a guess about process ids; a takeover moves to the
next generation without touching the old owner's lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from datetime import datetime
from pathlib import Path

from headwater.state.errors import StoreUnavailable
from headwater.state.store import Owner

_held: weakref.WeakSet[OwnerLock] = weakref.WeakSet()


class OwnerLock:
    """An exclusive lock on a file, held until :meth:`release` or the end of the process. The file names its owner."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, owner: Owner | None = None) -> bool:
        """Take the lock and write down *owner*; ``False`` when a live process holds it.

        :raises StoreUnavailable: the file cannot be opened.
        """
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"Cannot open {self._path}: {error.strerror}.") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        if owner is not None:
            os.pwrite(fd, owner_to_bytes(owner), 0)
        self._fd = fd
        _held.add(self)
        return True

    def holder(self) -> Owner | None:
        """Who wrote the file last."""
        try:
            return owner_from_bytes(self._path.read_bytes())
        except (OSError, ValueError, KeyError):
            return None

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def remove(self) -> None:
        """Release, and take the file away."""
        self._path.unlink(missing_ok=True)
        self.release()


def owner_to_bytes(owner: Owner) -> bytes:
    started = owner.started.isoformat()
    return json.dumps(
        {"generation": owner.generation, "host": owner.host, "pid": owner.pid, "started": started}
    ).encode()


def owner_from_bytes(data: bytes) -> Owner:
    """:raises ValueError: not an owner's record. :raises KeyError: likewise."""
    fields = json.loads(data)
    return Owner(fields["generation"], fields["host"], fields["pid"], datetime.fromisoformat(fields["started"]))


def _after_fork_in_child() -> None:
    """A child must not keep its dead parent's lock alive."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_after_fork_in_child)
