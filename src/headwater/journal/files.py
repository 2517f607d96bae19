"""Careful file operations: regular files only, modes 0600/0700, durable creation, whole writes or none, and locks."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from fcntl import LOCK_NB, flock
from pathlib import Path

from headwater.journal.errors import BusyError, NotARegularFileError, StoreIoError, io_error
from headwater.system.files import DIRECTORY_MODE, FILE_MODE
from headwater.system.owner_lock import lock_holder

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_COPY_CHUNK = 1 << 20


def present(path: Path) -> bool:
    """Is there anything under this name?

    :raises AccessDeniedError: it cannot be known.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise io_error("look at", path, error) from error
    return True


def is_regular(path: Path) -> bool:
    """Is there a file?

    :raises NotARegularFileError: there is something else. :raises AccessDeniedError: it cannot be known.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise io_error("look at", path, error) from error
    if not stat.S_ISREG(mode):
        raise NotARegularFileError("use", str(path), OSError("not a regular file"))
    return True


def entries(directory: Path) -> list[os.DirEntry[str]]:
    """What is in *directory*; nothing when there is none."""
    try:
        with os.scandir(directory) as names:
            return list(names)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise io_error("list", directory, error) from error


def busy(fd: int, path: Path, timeout: float) -> BusyError:
    """The lock on *path*, open as *fd*, was not free for *timeout* seconds."""
    holder = lock_holder(fd)
    by = f" by {holder}" if holder else ""
    return BusyError(f"{path} was locked{by} for {timeout:g} s.", next_step="Call again.")


def take(fd: int, kind: int, path: Path, timeout: float) -> None:
    """Lock *fd* with `flock`; closing it, or `LOCK_UN`, releases the lock.

    A holder that is stopped, swapped out or waits for its disk does not block others for ever.

    :raises BusyError: not free within *timeout* seconds; names the holder.
    """
    deadline, pause = time.monotonic() + timeout, 0.00005
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


def open_regular(path: Path, flags: int) -> int:
    """Open an existing regular file; a link, directory or pipe in its place is refused.

    :raises FileNotFoundError: there is nothing.
    :raises NotARegularFileError: there is something else.
    :raises AccessDeniedError: not allowed to look.
    """
    try:
        fd = os.open(path, flags | _FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise io_error("open", path, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotARegularFileError("open", str(path), OSError(errno.EISDIR, "")) from None
    return fd


def create_exclusive(path: Path) -> int:
    """A new file, open for writing.

    :raises FileExistsError: the name is taken.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | _FLAGS, FILE_MODE)
    except FileExistsError:
        raise
    except OSError as error:
        raise io_error("create", path, error) from error


def write_whole(fd: int, data: bytes, start: int, path: Path) -> None:
    """Write all of *data* at the end, which is *start*, in one call; put the old end back when that fails.

    The caller holds the file's lock: without it the rollback could take somebody else's bytes.

    :raises NoRoomError: the disk or the file size limit is full.
    :raises StoreIoError: other failures, also of the rollback itself.
    """
    try:
        written = os.write(fd, data)
        while written < len(data):  # a short write: the next call tells why, or goes on
            written += os.write(fd, data[written:])
    except BaseException as error:
        try:
            os.ftruncate(fd, start)
        except OSError as second:
            raise StoreIoError(
                f"undo a failed write ({error}) to", str(path), second, next_step="The next append repairs the end."
            ) from error
        if isinstance(error, OSError):
            raise io_error("write to", path, error) from error
        raise


def write_new(path: Path, parts: Iterable[bytes]) -> None:
    """A new durable file with *parts*, whole or not at all; its directory is not synced.

    :raises FileExistsError: the name is taken.
    """
    fd = create_exclusive(path)
    try:
        at = 0
        for part in _gathered(parts):
            write_whole(fd, part, at, path)
            at += len(part)
        os.fsync(fd)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise io_error("write", path, error) from error
        raise
    finally:
        os.close(fd)


def _gathered(parts: Iterable[bytes]) -> Iterable[bytes]:
    """The same bytes in fewer, larger parts."""
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= _COPY_CHUNK:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def chunks(fd: int, offset: int, end: int) -> Iterable[bytes]:
    """The bytes of *fd* from *offset* to *end*."""
    while offset < end:
        data = os.pread(fd, min(_COPY_CHUNK, end - offset), offset)
        if not data:
            return
        yield data
        offset += len(data)


def sync_directory(path: Path) -> None:
    """Make names in *path* durable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise io_error("sync the directory", path, error) from error


def make_directory(path: Path) -> None:
    """Make *path* and its parents, private and durable."""
    missing = []
    current = path
    while not present(current):
        missing.append(current)
        current = current.parent
    for directory in reversed(missing):
        try:
            directory.mkdir(DIRECTORY_MODE)
        except FileExistsError:
            continue
        except OSError as error:
            raise io_error("create the directory", directory, error) from error
        sync_directory(directory.parent)
