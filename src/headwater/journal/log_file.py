"""One open log file: its lock, its known end, and what can be done to it under the lock."""

from __future__ import annotations

import os
import threading
from fcntl import LOCK_EX, LOCK_UN, flock
from pathlib import Path

from headwater import failpoints
from headwater.journal import codec, files, scan
from headwater.journal.entry import EMPTY, Head
from headwater.journal.errors import SyncFailedError, io_error

APPEND_BEFORE_WRITE = failpoints.register("journal.fs.append.before_write")
APPEND_WRITTEN = failpoints.register("journal.fs.append.after_write")
TAIL_FOUND = failpoints.register("journal.fs.tail.before_repair")
TAIL_CUT = failpoints.register("journal.fs.tail.after_repair")

_TAIL = codec.CRC_TAIL + 1


class FileSource:
    """The bytes of an open file as a :class:`~headwater.journal.scan.Source`."""

    __slots__ = ("_fd", "name")

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.name = str(path)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        while 0 < len(data) < length:
            more = os.pread(self._fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data


class LogFile:
    """One log file, open for writing. Everything but the lock and the syncs needs the lock.

    The end is remembered between appends, and believed only when the file ends there with the same checksum, which one
    read tells: a truncation and a new entry by another process to the same size shows.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        self.path, self._timeout = path, timeout
        self.fd = files.open_regular(path, os.O_RDWR | os.O_APPEND)
        self.source = FileSource(self.fd, path)
        self.head, self.offset, self._tail = EMPTY, -1, b""
        self.failed: SyncFailedError | None = None
        self.is_unsynced = False
        self._keys: dict[str, Head] = {}
        self._keys_end = scan.START
        self._thread_lock, self._sync_lock = threading.Lock(), threading.Lock()

    def lock(self) -> bool:
        """Exclude every other writer; ``False``: the handle is closed, or the name leads elsewhere. Open another.

        :raises BusyError: not free within the timeout; names the holder.
        """
        if not self._thread_lock.acquire(timeout=self._timeout):
            raise files.busy(self.fd, self.path, self._timeout)
        try:
            if self.fd >= 0:
                files.take(self.fd, LOCK_EX, self.path, self._timeout)
                if self._is_named():
                    return True
                flock(self.fd, LOCK_UN)
        except BaseException:
            flock(self.fd, LOCK_UN)
            self._thread_lock.release()
            raise
        self._thread_lock.release()
        return False

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise io_error("look at", self.path, error) from error

    def unlock(self) -> None:
        flock(self.fd, LOCK_UN)
        self._thread_lock.release()

    def settle(self) -> None:
        """Know the end, and cut a torn tail. :raises CorruptError: the last committed line is damaged."""
        size = os.fstat(self.fd).st_size
        if size == self.offset and os.pread(self.fd, _TAIL, max(0, size - _TAIL)) == self._tail:
            return
        try:
            end = scan.end_of(self.source, size)
        except scan.DamageError as damage:
            raise scan.first_corrupt(self.source, damage) from None
        if end.offset < size:
            failpoints.hit(TAIL_FOUND)
            os.ftruncate(self.fd, end.offset)
            failpoints.hit(TAIL_CUT)
        tail = max(0, end.offset - _TAIL)
        self.head, self.offset, self._tail = end.head, end.offset, os.pread(self.fd, end.offset - tail, tail)

    def write(self, data: bytes, head: Head) -> None:
        """Add *data*, which ends with *head*, at the end that is known."""
        failpoints.hit(APPEND_BEFORE_WRITE)
        files.write_whole(self.fd, data, self.offset, self.path)
        failpoints.hit(APPEND_WRITTEN)
        self.head, self.offset, self._tail = head, self.offset + len(data), (self._tail + data)[-_TAIL:]

    def head_of_key(self, key: str) -> Head | None:
        """The head that the append with *key* returned. Reads only what was added since the last call."""
        known = self._keys_end
        if not scan.stands(self.source, known):
            self._keys, known = {}, scan.START
        try:
            for block in scan.Forward(self.source, known, end=self.offset):
                for entry in block:
                    if entry.key is not None:
                        self._keys.setdefault(entry.key, entry.head)
        except scan.DamageError as damage:
            self._keys_end = scan.START
            raise scan.corrupt(self.source, damage) from None
        self._keys_end = scan.Place(self.offset, self.head)
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
                    step = "Check the disk, open the store again and compare the head before you go on."
                    self.failed = SyncFailedError("sync", str(self.path), error, next_step=step)

    def close(self, *, wait: bool) -> bool:
        """Sync what is owed and close; ``False``: a thread is at work with it, or the sync failed."""
        if not self._thread_lock.acquire(wait):
            return False
        try:
            if self.is_unsynced:
                self.sync_quietly()
            if self.failed is None or wait:
                self.abandon()
            return self.fd < 0
        finally:
            self._thread_lock.release()

    def abandon(self) -> None:
        """Close without a look at the locks: in a forked child those are the parent's."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Flusher:
    """Syncs each noted log at most *interval* seconds after it was noted, in a thread that starts with the first."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.reset()

    def reset(self) -> None:
        """In a forked child: what the parent's thread owes, the parent syncs."""
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._due: set[LogFile] = set()
        self._thread: threading.Thread | None = None

    def note(self, log: LogFile) -> None:
        with self._lock:
            self._due.add(log)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="journal-flush", daemon=True)
                self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._stop.wait(self.interval)
            self._wake.clear()
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            due, self._due = self._due, set()
        for log in due:
            log.sync_quietly()

    def close(self) -> None:
        """Sync what is owed and end the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._flush()
