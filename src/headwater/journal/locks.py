"""`flock` with an end: whoever waits for another process gets `BusyError` after a while, and the holder's name.

A holder that is stopped, or swapped out, or hangs on its disk, must not hang everybody who looks.
"""

from __future__ import annotations

import time
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path

from headwater.journal.errors import BusyError, io_error
from headwater.journal.owner import lock_holder

EXCLUSIVE, SHARED = LOCK_EX, LOCK_SH


def busy(fd: int, path: Path, timeout: float) -> BusyError:
    """The lock on *path*, open as *fd*, was not free for *timeout* seconds."""
    holder = lock_holder(fd)
    by = f" by {holder}" if holder else ""
    return BusyError(f"{path} was locked{by} for {timeout:g} s.", next_step="Call again.")


def take(fd: int, kind: int, path: Path, timeout: float) -> None:
    """Lock *fd*; closing it, or `LOCK_UN`, lets go.

    :raises BusyError: not free within *timeout* seconds.
    """
    deadline = time.monotonic() + timeout
    pause = 0.00005
    while True:
        try:
            flock(fd, kind | LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise busy(fd, path, timeout) from None
        except OSError as error:
            raise io_error("lock", path, error) from error
        time.sleep(pause)
        pause = min(pause * 1.5, 0.005)
