"""A lock file with one owner, which is named in every refusal.

The lock is `flock` on a file that is never renamed or removed; the kernel frees it when its process ends, however it
ends. Its content names the holder: host, pid and start time of the process. Appends do not need it: each append
is safe by the segment's own short lock. It is for a process that wants to be the only writer of a session.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self

from headwater.errors import FencedError, InputError
from headwater.system.process import host_name, started


@dataclass(frozen=True, slots=True)
class Owner:
    """A process on a host; `started` tells it from a later one with the same pid."""

    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


class OwnedElsewhereError(FencedError):
    """Another process, or another lock object of this one, has the lock; :attr:`owner` says which."""

    def __init__(self, what: str, owner: Owner) -> None:
        self.owner = owner
        super().__init__(
            f"{what} is owned by {owner}.",
            next_step=f"Stop process {owner.pid} on {owner.host}, or wait until it ends.",
        )


class LockUnusable(InputError):
    """The lock file cannot be opened or written."""

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(
            f"Cannot use the lock {path}: {cause.strerror}.", next_step="Check the owner and mode of the path."
        )


class Holder(Protocol):
    """Keeps descriptors or locks of this process."""

    def after_fork(self) -> None:
        """In a forked child: close inherited descriptors, which share their `flock` with the parent."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def register_at_fork(holder: Holder) -> None:
    """Call `after_fork` of *holder* in each child of `os.fork`, before any other code runs there.

    Without it a child that outlives a killed parent would keep the parent's locks.
    """
    _holders.add(holder)


def _in_child() -> None:
    for holder in list(_holders):
        holder.after_fork()


os.register_at_fork(after_in_child=_in_child)

_UNKNOWN = Owner("an unknown host", 0, "at an unknown time")


def process(pid: int) -> Owner:
    """A process of this host."""
    return Owner(host_name(), pid, f"{started(pid):%Y-%m-%dT%H:%M:%SZ}")


def lock_holder(fd: int) -> Owner | None:
    """The process that holds `flock` on the file of *fd*, as far as the kernel tells."""
    try:
        inode = os.fstat(fd).st_ino
        for row in Path("/proc/locks").read_text().splitlines():
            words = row.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}") and int(words[4]) > 0:
                return process(int(words[4]))
    except (OSError, ValueError, IndexError):
        pass
    return None


def _parse(data: bytes) -> Owner | None:
    try:
        return Owner(**json.loads(data))
    except (ValueError, TypeError):
        return None


def current_owner(path: Path) -> Owner | None:
    """Who holds the lock file *path* now; None when there is no holder. Writes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockUnusable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _parse(os.pread(fd, 4096, 0)) or lock_holder(fd) or _UNKNOWN
    finally:
        os.close(fd)
    return None


class OwnerLock:
    """Hold with `with`, or `release()`. A forked child does not own what its parent owns.

    :raises OwnedElsewhereError: another process, or another lock object of this one, holds it.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._pid = os.getpid()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise LockUnusable(path, error) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _parse(os.pread(self._fd, 4096, 0)) or lock_holder(self._fd) or _UNKNOWN
            os.close(self._fd)
            self._fd = -1
            raise OwnedElsewhereError(what, holder) from None
        self.owner = process(self._pid)
        text = json.dumps(asdict(self.owner)).encode()
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text, 0)
        except OSError as error:
            fd, self._fd = self._fd, -1
            os.close(fd)
            raise LockUnusable(path, error) from error
        register_at_fork(self)

    def after_fork(self) -> None:
        """In a forked child: not ours, and not kept alive by us."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def release(self) -> None:
        """Release the lock. Does nothing the second time, or in a forked child."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            os.ftruncate(fd, 0)
        except OSError:
            pass  # the name of a past owner does no harm: the lock itself tells
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.release()
