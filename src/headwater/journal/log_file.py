"""One open log file: its lock, its known end, and what may be done to it under the lock.

The lock is `flock` on the log itself. That is sound because a log's name never changes hands unseen: a log is created
under another name and linked, changed only in place, and before it is deleted or replaced it is made a byte longer
(:meth:`LogFile.retire`). A thread lock stands before it, since threads share the descriptor.

The end (offset, head) is remembered between appends and believed only when the file ends there *and* the last bytes
still state the same chained checksum, which one read tells: a truncation and re-append by another process to the
same size shows, and so does the byte of a retired file. Only then is it asked whether the segment's name still leads
to this file; its link count would not tell, since a backup may hold another link. (To ask for the status each time
would be simpler, and on current kernels makes each following write twice as expensive.) A file that was removed,
moved with its directory or replaced by hand is noticed within a fifth of a second.
"""

from __future__ import annotations

import os
import threading
import time
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from pathlib import Path

from headwater import failpoints
from headwater.journal import codec, files, locks, scan
from headwater.journal.entry import EMPTY, Head
from headwater.journal.errors import SyncFailedError, io_error

RETIRED = failpoints.register("journal.fs.retire.after_mark")
TAIL_FOUND = failpoints.register("journal.fs.tail.before_repair")
TAIL_CUT = failpoints.register("journal.fs.tail.after_repair")

_TAIL = codec.CRC_TAIL + 1
_LOOK_AGAIN = 0.2
_TRY = LOCK_EX | LOCK_NB


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
    """See the module's docstring. All methods but the lock's own need the lock."""

    def __init__(self, path: Path, lock_timeout: float) -> None:
        self.path = path
        self.fd = files.open_regular(path, os.O_RDWR | os.O_APPEND)
        self.failed: SyncFailedError | None = None
        self.unsynced = False
        self._timeout = lock_timeout
        self._thread_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self.offset = -1
        self.head = EMPTY
        self._tail = b""
        self._look_at = 0.0
        self._keys: dict[str, Head] | None = None
        self._keys_end = scan.START

    # ---- the lock ------------------------------------------------------------------------------

    def lock(self) -> bool:
        """Exclude every other writer of this file; False when this handle was closed meanwhile: open another.

        :raises BusyError: not free within the timeout; names the holder.
        """
        if not self._thread_lock.acquire(False) and not self._thread_lock.acquire(timeout=self._timeout):
            raise locks.busy(self.fd, self.path, self._timeout)
        if self.fd < 0:
            self._thread_lock.release()
            return False
        try:
            flock(self.fd, _TRY)
        except OSError:
            try:
                locks.take(self.fd, LOCK_EX, self.path, self._timeout)
            except BaseException:
                self._thread_lock.release()
                raise
        except BaseException:
            self._thread_lock.release()
            raise
        return True

    def unlock(self) -> None:
        """Let others write."""
        flock(self.fd, LOCK_UN)
        self._thread_lock.release()

    def close_if_idle(self) -> bool:
        """Let go of the descriptor unless a thread is at work with it."""
        if not self._thread_lock.acquire(blocking=False):
            return False
        try:
            self.close()
        finally:
            self._thread_lock.release()
        return True

    def close_when_idle(self) -> None:
        """Let the thread that is at work with it finish, then let go."""
        with self._thread_lock:
            self.close()

    def abandon(self) -> None:
        """Let go in a forked child, whatever other threads were doing in the parent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Let go of the descriptor; a sync that is still owed is made first."""
        with self._sync_lock:
            if self.unsynced:
                self._sync_if_open()
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)

    # ---- its end -------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Know the end, and remove a torn tail; False when the file is no longer the segment's.

        :raises CorruptError: the last committed line is damaged.
        """
        if (
            self.offset >= 0
            and os.pread(self.fd, _TAIL + 1, self.offset - len(self._tail)) == self._tail
            and time.monotonic() < self._look_at
        ):
            return True
        if not self.is_named():
            return False
        size = os.fstat(self.fd).st_size
        self._look_at = time.monotonic() + _LOOK_AGAIN
        source = FileSource(self.fd, self.path)
        try:
            place = scan.end_of(source, size)
        except scan.DamageError as damage:
            raise scan.first_corrupt(source, damage) from None
        if place.offset < size:
            self._drop_torn(place.offset)
        self.remember(place.offset, place.head)
        return True

    def is_named(self) -> bool:
        """Does the segment's name still lead to this file?"""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _drop_torn(self, offset: int) -> None:
        failpoints.hit(TAIL_FOUND)
        try:
            os.ftruncate(self.fd, offset)
        except OSError as error:
            raise io_error("repair the end of", self.path, error) from error
        failpoints.hit(TAIL_CUT)

    def retire(self) -> None:
        """Make every other handle look closer before it appends: this file is about to lose its name."""
        self.forget()
        try:
            os.ftruncate(self.fd, os.fstat(self.fd).st_size + 1)  # needs no space: a full disk can be tidied up
        except OSError as error:
            raise io_error("mark", self.path, error) from error
        failpoints.hit(RETIRED)

    def remember(self, offset: int, head: Head) -> None:
        """The file now ends at *offset* with *head*."""
        self.offset = offset
        self.head = head
        begin = max(0, offset - _TAIL)
        self._tail = os.pread(self.fd, offset - begin, begin)

    def forget(self) -> None:
        """Believe nothing about the end."""
        self.offset = -1

    def wrote(self, data: bytes, head: Head) -> None:
        """*data*, which ends with *head*, was added at the end."""
        self.offset += len(data)
        self.head = head
        self._tail = data[-_TAIL:]

    # ---- idempotency keys ----------------------------------------------------------------------

    def head_of_key(self, key: str) -> Head | None:
        """The head that the append with *key* returned. Reads what was added since the last question only."""
        source = FileSource(self.fd, self.path)
        known = self._keys_end
        if self._keys is None or not self._still_known(source, known):
            self._keys, known = {}, scan.START
        forward = scan.Forward(source, known, end=self.offset)
        try:
            for block in forward:
                for entry in block:
                    if entry.key is not None:
                        self._keys.setdefault(entry.key, entry.head)
        except scan.DamageError as damage:
            self._keys = None
            raise scan.corrupt(source, damage) from None
        self._keys_end = scan.Place(self.offset, self.head)
        return self._keys.get(key)

    def add_key(self, key: str) -> None:
        """The entry just written, the head now, has *key*."""
        if self._keys is not None:
            self._keys[key] = self.head
            self._keys_end = scan.Place(self.offset, self.head)

    def _still_known(self, source: FileSource, place: scan.Place) -> bool:
        if place.offset > self.offset:
            return False
        try:
            return scan.crc_before(source, place.offset) == place.head.crc
        except scan.DamageError:
            return False

    # ---- durability ----------------------------------------------------------------------------

    def sync(self) -> None:
        """Make the content durable.

        :raises SyncFailedError: now or before; this handle is dead then.
        """
        if self.failed is not None:
            self.failed.told = True
            raise self.failed
        self.unsynced = False
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            self.failed = SyncFailedError(
                "sync",
                str(self.path),
                error,
                next_step="Check the disk, open the store again and compare the head before you go on.",
            )
            self.failed.told = True
            raise self.failed from error

    def sync_quietly(self) -> None:
        """For the flusher: a failure is told to the next call."""
        with self._sync_lock:
            self._sync_if_open()

    def _sync_if_open(self) -> None:
        if self.fd >= 0:
            try:
                self.sync()
            except SyncFailedError as error:
                error.told = False
