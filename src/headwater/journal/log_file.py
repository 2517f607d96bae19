"""One open log file: its lock, its known end, and what can be done to it under the lock."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from pathlib import Path

from headwater import failpoints
from headwater.journal import reader
from headwater.journal.codec import CRC_TAIL
from headwater.journal.entry import EMPTY, Head
from headwater.journal.errors import BusyError, NotARegularFileError, StoreIoError, SyncFailedError, io_error
from headwater.journal.reader import DamageError, Position, Reader, SegmentBytes
from headwater.journal.store import settled_end
from headwater.system.owner_lock import lock_holder

APPEND_BEFORE_WRITE = failpoints.register("journal.fs.append.before_write")
APPEND_WRITTEN = failpoints.register("journal.fs.append.after_write")
TAIL_FOUND = failpoints.register("journal.fs.tail.before_repair")
TAIL_CUT = failpoints.register("journal.fs.tail.after_repair")

_TAIL = CRC_TAIL + 1


def open_regular(path: Path, flags: int) -> int:
    """Open an existing regular file; a link, directory or pipe in its place is refused.

    :raises FileNotFoundError: there is nothing. :raises NotARegularFileError: there is something else.
    :raises AccessDeniedError: not allowed to look.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise io_error("open", path, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotARegularFileError("open", path, OSError(errno.EISDIR, ""))
    return fd


def _busy(fd: int, path: Path, timeout: float) -> BusyError:
    holder = lock_holder(fd)
    by = f" by {holder}" if holder else ""
    return BusyError(f"{path} was locked{by} for {timeout:g} s.", next_step="Call again.")


def take_lock(fd: int, kind: int, path: Path, timeout: float) -> None:
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
                raise _busy(fd, path, timeout) from None
        except OSError as error:
            raise io_error("lock", path, error) from error
        time.sleep(pause)
        pause = min(pause * 1.5, 0.005)


class FileSource:
    """The bytes of an open file as a :class:`~headwater.journal.reader.SegmentBytes`."""

    __slots__ = ("_fd", "name")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.name = str(path)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        while 0 < len(data) < length and (more := os.pread(self._fd, length - len(data), offset + len(data))):
            data += more
        return data


def chunks(source: SegmentBytes, offset: int) -> Iterator[bytes]:
    """The bytes of *source* from *offset* on."""
    while data := source.read(offset, reader.CHUNK):
        yield data
        offset += len(data)


class LogFile:
    """One log file, open for writing. Everything but the lock and the syncs needs the lock.

    The end is remembered between appends, and believed only when the file ends there with the same checksum, which one
    read tells: a truncation and a new entry by another process to the same size shows.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self.path, self._timeout = path, timeout
        self.fd = open_regular(path, os.O_RDWR | os.O_APPEND)
        self.source = FileSource(self.fd, path)
        self.head, self.offset, self._tail = EMPTY, -1, b""
        self.failed: SyncFailedError | None = None
        self.is_unsynced = False
        self._keys: dict[str, Head] = {}
        self._keys_end = reader.START
        self._thread_lock, self._sync_lock = threading.Lock(), threading.Lock()

    def lock(self) -> bool:
        """Exclude every other writer; ``False``: the handle is closed, or the name leads elsewhere. Open another.

        :raises BusyError: not free within the timeout; names the holder.
        """
        if not self._thread_lock.acquire(timeout=self._timeout):
            raise _busy(self.fd, self.path, self._timeout)
        is_ours = False
        try:
            if self.fd >= 0:
                take_lock(self.fd, LOCK_EX, self.path, self._timeout)
                is_ours = self._is_named()
            return is_ours
        finally:
            if not is_ours:
                self.unlock()

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise io_error("look at", self.path, error) from error

    def unlock(self) -> None:
        if self.fd >= 0:
            flock(self.fd, LOCK_UN)
        self._thread_lock.release()

    def settle(self) -> None:
        """Know the end, and cut a torn tail. :raises CorruptError: the last committed line is damaged."""
        size = os.fstat(self.fd).st_size
        if size == self.offset and os.pread(self.fd, _TAIL, max(0, size - _TAIL)) == self._tail:
            return
        end = settled_end(self.source, size)
        if end.offset < size:
            failpoints.hit(TAIL_FOUND)
            os.ftruncate(self.fd, end.offset)
            failpoints.hit(TAIL_CUT)
        tail = max(0, end.offset - _TAIL)
        self.head, self.offset, self._tail = end.head, end.offset, os.pread(self.fd, end.offset - tail, tail)

    def write(self, data: bytes, head: Head) -> None:
        """Add *data*, which ends with *head*, at the end that is known, in one call; or put that end back.

        :raises NoRoomError: the disk or the file size limit is full.
        :raises StoreIoError: other failures, also of putting the end back: the next append does it then.
        """
        failpoints.hit(APPEND_BEFORE_WRITE)
        try:
            written = os.write(self.fd, data)
            while written < len(data):  # a short write: the next call says why, or goes on
                written += os.write(self.fd, data[written:])
        except BaseException as error:
            try:
                os.ftruncate(self.fd, self.offset)
            except OSError as second:
                raise StoreIoError(f"undo a failed write ({error}) to", self.path, second) from error
            raise
        failpoints.hit(APPEND_WRITTEN)
        self.head, self.offset, self._tail = head, self.offset + len(data), (self._tail + data)[-_TAIL:]

    def head_of_key(self, key: str) -> Head | None:
        """The head that the append with *key* returned. Reads only what was added since the last call."""
        if not reader.stands(self.source, self._keys_end):
            self._keys, self._keys_end = {}, reader.START
        try:
            for entry in Reader(self.source, self._keys_end, end=self.offset):
                if entry.key is not None:
                    self._keys.setdefault(entry.key, entry.head)
        except DamageError as damage:
            self._keys_end = reader.START
            raise reader.corrupt(self.source, damage) from None
        self._keys_end = Position(self.offset, self.head)
        return self._keys.get(key)

    # ---- durability: a sync that failed is never tried again -----------------------------------------

    def check(self) -> None:
        """:raises SyncFailedError: an earlier sync failed."""
        if self.failed is not None:
            self.failed.is_reported = True
            raise self.failed

    def sync(self) -> None:
        """Make the content durable. :raises SyncFailedError: now or before; this handle cannot be used then."""
        self.check()
        self.sync_quietly()
        self.check()

    def sync_quietly(self) -> None:
        """The same; a failure is kept for the next call."""
        with self._sync_lock:
            self.is_unsynced = False
            if self.fd >= 0 and self.failed is None:
                try:
                    os.fdatasync(self.fd)
                except OSError as error:
                    self.failed = SyncFailedError("sync", self.path, error)

    def close(self, *, wait: bool) -> None:
        """Sync what is owed and close, unless a thread is at work with it and is not to be waited for."""
        if self._thread_lock.acquire(wait):
            try:
                if self.is_unsynced:
                    self.sync_quietly()
                self.abandon()
            finally:
                self._thread_lock.release()

    def abandon(self) -> None:
        """Close without a look at the locks: in a forked child those are the parent's."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
