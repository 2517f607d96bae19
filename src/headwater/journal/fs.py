"""Segments as JSON Lines files: one directory per session, one file per segment.

Layout below the root (all 0600/0700)::

    {session}/{segment}.jsonl           the log
    {session}/{segment}.removed-….saved what a truncation took off, {segment}.damaged-….saved what a repair did
    {session}/{segment}.deleted         tombstone of a segment; {session}.deleted that of a session
    {session}/.{segment}.….tmp          a creation in progress, or one that crashed: ignored, swept later
    owners/{session}.lock               who owns the session
    trace/{session}/{segment}.jsonl     debug records

The order of durable steps is in docs/formats/journal.md; each has a failpoint.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from headwater import failpoints
from headwater.journal import codec, files, forking, locks, scan
from headwater.journal.checks import as_batch, changed_meanwhile, check_cut, check_new_header, end_of_entry
from headwater.journal.entry import Durability, Entry, Head, Limits, Truncation
from headwater.journal.errors import (
    AlreadyExistsError,
    HeadConflictError,
    JournalError,
    NoRoomError,
    SegmentDeletedError,
    SegmentNotFoundError,
    StoreClosedError,
    SyncFailedError,
    io_error,
)
from headwater.journal.flusher import Flusher
from headwater.journal.fs_layout import Layout
from headwater.journal.ids import check_id
from headwater.journal.log_file import FileSource, LogFile
from headwater.journal.side_files import StoreWithSideFiles
from headwater.journal.trace import TraceFiles

APPEND_BEFORE_WRITE = failpoints.register("journal.fs.append.before_write")
APPEND_WRITTEN = failpoints.register("journal.fs.append.after_write")
APPEND_SYNCED = failpoints.register("journal.fs.append.after_sync")
REPLACE_WRITTEN = failpoints.register("journal.fs.replace.after_write")
REPLACE_RENAMED = failpoints.register("journal.fs.replace.after_rename")
REPLACE_SYNCED = failpoints.register("journal.fs.replace.after_directory_sync")
CUT_SAVED = failpoints.register("journal.fs.cut.after_save")
CUT_DONE = failpoints.register("journal.fs.cut.after_cut")
CUT_SYNCED = failpoints.register("journal.fs.cut.after_sync")
SESSION_MARKED = failpoints.register("journal.fs.delete_session.after_tombstone")
SESSION_EMPTIED = failpoints.register("journal.fs.delete_session.after_segments")
DELETE_MARKED = failpoints.register("journal.fs.delete.after_tombstone")
DELETE_UNLINKED = failpoints.register("journal.fs.delete.after_unlink")
DELETE_SYNCED = failpoints.register("journal.fs.delete.after_directory_sync")

_HELD = 128  # logs that the deletion of a session holds locked at once: the newest, which somebody may be writing


def _finish(flusher: Flusher, logs: OrderedDict[tuple[str, str], LogFile]) -> None:
    flusher.close()
    for log in logs.values():
        log.close()


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


class FsStore(StoreWithSideFiles):
    """A store in a directory of a local file system.

    :param durability: what `append` promises, see :class:`~headwater.journal.entry.Durability`.
    :param flush_interval: seconds; the bound of the level `flush`.
    :param max_open: how many log files stay open between appends.
    :param lock_timeout: seconds to wait for another process that is inside the segment.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        durability: Durability | str = Durability.FSYNC,
        flush_interval: float = 0.2,
        limits: Limits | None = None,
        max_open: int = 64,
        lock_timeout: float = 30.0,
        trace_bytes: int = 8 << 20,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self.root = self._beside = Path(root)
        self.limits = limits or Limits()
        self._durability = Durability(durability)
        self._layout = Layout(self.root, lock_timeout)
        self._clock = clock
        self._max_open = max_open
        self._lock_timeout = lock_timeout
        self._lock = threading.Lock()
        self._logs: OrderedDict[tuple[str, str], LogFile] = OrderedDict()
        self._failed: dict[tuple[str, str], SyncFailedError] = {}
        self._closed = False
        self._flusher = Flusher(flush_interval)
        self._traces = TraceFiles(self.root / "trace", max_bytes=trace_bytes)
        forking.register(self)
        # A store that nobody closed still syncs what `flush` owes, when it is collected and at the end of Python.
        self._finish = weakref.finalize(self, _finish, self._flusher, self._logs)

    def after_fork(self) -> None:
        """In a forked child: descriptors and locks are the parent's."""
        self._lock = threading.Lock()
        for log in self._logs.values():
            log.abandon()
        self._logs.clear()
        self._flusher.after_fork()

    # ---- open logs -----------------------------------------------------------------------------

    def _open(self, session: str, segment: str) -> LogFile:
        key = (session, segment)
        log = self._logs.get(key)
        if log is not None and len(self._logs) <= self._max_open // 2:
            return log  # nothing will be evicted soon: no need to keep the order of use
        with self._lock:
            if self._closed:
                raise StoreClosedError("The store is closed.", next_step="Open it again.")
            log = self._logs.get(key)
            if log is not None:
                self._logs.move_to_end(key)
                return log
            if key in self._failed:
                self._failed[key].told = True
                raise self._failed[key]
            path = self._layout.log(session, segment)
            try:
                log = LogFile(path, self._lock_timeout)
            except FileNotFoundError:
                raise self._missing(session, segment) from None
            self._logs[key] = log
            if len(self._logs) > self._max_open:
                self._evict(key)
            return log

    def _evict(self, opened: tuple[str, str]) -> None:
        """Close what is idle, but for *opened*: more logs than may stay open can be held locked at once."""
        for key, log in list(self._logs.items()):
            if len(self._logs) <= self._max_open:
                return
            if key != opened and log.close_if_idle():
                if log.failed is not None:
                    self._failed[key] = log.failed
                del self._logs[key]

    def _drop(self, session: str, segment: str, log: LogFile) -> None:
        """The file is not the segment's any more: the next call opens what is there now."""
        with self._lock:
            if self._logs.get((session, segment)) is log:
                del self._logs[(session, segment)]
        log.close_if_idle()

    def _missing(self, session: str, segment: str) -> JournalError:
        if self._layout.is_deleted(session, segment):
            return SegmentDeletedError(session, segment)
        return SegmentNotFoundError(session, segment)

    @contextmanager
    def _locked(self, session: str, segment: str) -> Iterator[LogFile]:
        """The segment's log under its lock, its end not yet looked at."""
        while True:
            log = self._open(session, segment)
            if log.lock():
                try:
                    if log.is_named():
                        yield log
                        return
                except OSError as error:
                    raise io_error("change", log.path, error) from error
                finally:
                    log.unlock()
            self._drop(session, segment, log)

    # ---- writing -------------------------------------------------------------------------------

    def append(
        self,
        session: str,
        segment: str,
        entry: Entry | Sequence[Entry],
        *,
        expected_head: Head | None = None,
        idempotency_key: str | None = None,
    ) -> Head:
        items = (
            [codec.prepare(entry, self.limits, idempotency_key)]
            if isinstance(entry, Entry)
            else codec.prepare_all(as_batch(entry), self.limits, idempotency_key)
        )
        while True:
            log = self._open(session, segment)
            if log.lock():
                try:
                    if log.settle():
                        return self._append_locked(log, segment, items, expected_head, idempotency_key)
                except OSError as error:
                    raise io_error("append to", log.path, error) from error
                finally:
                    log.unlock()
            self._drop(session, segment, log)

    def _append_locked(
        self, log: LogFile, segment: str, items: list[codec.Prepared], expected: Head | None, key: str | None
    ) -> Head:
        if log.failed is not None:
            log.failed.told = True
            raise log.failed
        if key is not None:
            known = log.head_of_key(key)
            if known is not None:
                return known
        before = log.head
        if expected is not None and expected != before:
            raise HeadConflictError(segment, expected, before)
        if len(items) == 1:
            data, head = codec.next_line(items[0], before, self._clock())
        else:
            done, head = codec.lines(items, before, self._clock())
            data = b"".join(done)
        failpoints.hit(APPEND_BEFORE_WRITE)
        files.write_whole(log.fd, data, log.offset, log.path)
        failpoints.hit(APPEND_WRITTEN)
        log.wrote(data, head)
        if key is not None:
            log.add_key(key)
        if self._durability is Durability.FSYNC:
            log.sync()
            failpoints.hit(APPEND_SYNCED)
        elif self._durability is Durability.FLUSH:
            log.unsynced = True
            self._flusher.note(log)
        return head

    def create_segment(
        self, session: str, segment: str, entries: Iterable[Entry] = (), *, replacing: Head | None = None
    ) -> Head:
        path = self._layout.log(session, segment)
        check_new_header(session, segment, entries)
        lines = codec.WholeSegment(entries, self.limits, self._clock())
        if self._closed:
            raise StoreClosedError("The store is closed.", next_step="Open it again.")
        if replacing is not None:
            return self._replace(session, segment, path, lines, replacing)
        files.make_directory(path.parent)
        with self._layout.session_lock(session, segment):
            try:
                self._layout.create(path, lines)
            except FileExistsError:
                raise AlreadyExistsError(
                    f"Session {session} has a segment {segment} already.",
                    next_step="Append to it, or create one with a new id.",
                ) from None
        return lines.head

    def _replace(self, session: str, segment: str, path: Path, lines: codec.WholeSegment, replacing: Head) -> Head:
        with self._locked(session, segment) as log:
            log.settle()
            if log.head != replacing:
                raise HeadConflictError(segment, replacing, log.head)
            temporary = self._layout.temporary(path)
            files.write_new(temporary, lines)
            failpoints.hit(REPLACE_WRITTEN)
            log.retire()
            try:
                temporary.rename(path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise io_error("replace", path, error) from error
            failpoints.hit(REPLACE_RENAMED)
            self._layout.sweep(path.parent, segment, min_age=0)
            files.sync_directory(path.parent)
            failpoints.hit(REPLACE_SYNCED)
        self._drop(session, segment, log)
        return lines.head

    def truncate(
        self, session: str, segment: str, n: int, *, expected_head: Head | None = None, keep_suffix: bool = True
    ) -> Truncation:
        with self._locked(session, segment) as log:
            source = FileSource(log.fd, log.path)
            current: Head | None = None
            try:
                current = scan.end_of(source).head
            except scan.DamageError as damage:
                if expected_head is not None:
                    raise scan.first_corrupt(source, damage) from None
            check_cut(segment, n, current or Head(max(n, 0), 0), expected_head)
            if current is not None and n == current.seq:
                log.settle()
                return Truncation(current, None)
            offset, head = end_of_entry(source, segment, n)
            label = f"removed-{n + 1}" if keep_suffix else None
            return Truncation(head, self._cut(log, offset, head, label))

    def _cut(self, log: LogFile, offset: int, head: Head | None, label: str | None) -> str | None:
        saved: str | None = None
        if label is not None:
            saved = str(self._save(log, offset, label))
            failpoints.hit(CUT_SAVED)
        log.forget()
        try:
            os.ftruncate(log.fd, offset)
        except OSError as error:
            raise io_error("truncate", log.path, error) from error
        failpoints.hit(CUT_DONE)
        log.sync()
        failpoints.hit(CUT_SYNCED)
        if head is not None:
            log.remember(offset, head)
        return saved

    def _save(self, log: LogFile, offset: int, label: str) -> Path:
        """Copy the bytes from *offset* on to a side file, durably."""
        path = self._layout.side(log.path, label)
        try:
            files.write_new(path, files.chunks(log.fd, offset, os.fstat(log.fd).st_size))
        except OSError as error:
            raise io_error("save the removed entries to", path, error) from error
        files.sync_directory(path.parent)
        return path

    def save_side(self, session: str, segment: str, label: str, after: int) -> str:
        with self._locked(session, segment) as log:
            offset, _ = end_of_entry(FileSource(log.fd, log.path), segment, after)
            return str(self._save(log, offset, label))

    def cut(self, session: str, segment: str, offset: int, label: str | None, expected_size: int) -> str | None:
        with self._locked(session, segment) as log:
            if os.fstat(log.fd).st_size != expected_size:
                raise changed_meanwhile(segment)
            return self._cut(log, offset, None, label)

    def sync(self, session: str, segment: str) -> None:
        with self._locked(session, segment) as log:
            log.sync()

    def delete_segment(self, session: str, segment: str, *, expected_head: Head | None = None) -> bool:
        path = self._layout.log(session, segment)
        try:
            with self._locked(session, segment) as log:
                if expected_head is not None:
                    log.settle()
                    if log.head != expected_head:
                        raise HeadConflictError(segment, expected_head, log.head)
                self._unname(log, session, segment)
        except SegmentNotFoundError:
            return False
        except OSError as error:
            raise io_error("delete", path, error) from error
        self._drop(session, segment, log)
        self._traces.remove(session, segment)
        return True

    def _unname(self, log: LogFile, session: str, segment: str) -> None:
        """Take the name from a locked log, and everything beside it."""
        self._layout.mark_deleted(session, segment)
        failpoints.hit(DELETE_MARKED)
        # A temporary name left by a crashed creation holds the same bytes.
        self._layout.sweep(log.path.parent, segment, min_age=0)
        try:
            log.retire()
        except NoRoomError:  # as long as a file may be; its bytes are not needed any more
            os.ftruncate(log.fd, 0)
        log.path.unlink()
        failpoints.hit(DELETE_UNLINKED)
        self._layout.remove_sides(log.path)
        files.sync_directory(log.path.parent)
        failpoints.hit(DELETE_SYNCED)

    def delete_session(self, session: str, *, modified_at: int | None = None) -> bool:
        check_id(session, "session")
        existed = bool(self.segment_ids(session))
        if not existed and not self._layout.is_half_deleted(session):
            return False
        if modified_at is None:
            self._layout.mark_session_deleted(session)  # first, or creations might keep it waiting
            failpoints.hit(SESSION_MARKED)
        elif self.session_modified_at(session) != modified_at:
            return False
        logs: dict[str, LogFile] = {}
        with self._layout.emptying(session), ExitStack() as held:  # no creation is under way, and none can begin
            segments = sorted(self.segment_ids(session))
            for segment in segments[-_HELD:]:  # nobody writes between the look and the deletion
                with suppress(SegmentNotFoundError):
                    logs[segment] = held.enter_context(self._locked(session, segment))
            if modified_at is not None and self.session_modified_at(session) != modified_at:
                return False
            self._layout.mark_session_deleted(session)
            for segment in segments:
                if segment in logs:
                    self._unname(logs[segment], session, segment)
                else:
                    self.delete_segment(session, segment)
            failpoints.hit(SESSION_EMPTIED)
        for segment, log in logs.items():
            self._drop(session, segment, log)
        self._forget_side_files(session)
        return existed

    def close(self) -> None:
        if self._closed:
            return
        self._flusher.close()
        with self._lock:
            self._closed = True
            logs = list(self._logs.values())
            self._logs.clear()
        for log in logs:
            log.close_when_idle()
        for failed in (*(log.failed for log in logs), *self._failed.values()):
            if failed is not None and not failed.told:
                raise failed

    # ---- what exists, reading ------------------------------------------------------------------

    def exists(self, session: str, segment: str) -> bool:
        return self._layout.is_regular(self._layout.log(session, segment))

    def session_ids(self) -> list[str]:
        return self._layout.session_ids()

    def segment_ids(self, session: str) -> list[str]:
        return self._layout.segment_ids(session)

    def modified_at(self, session: str, segment: str) -> int | None:
        path = self._layout.log(session, segment)
        try:
            return path.lstat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None
        except OSError as error:
            raise io_error("look at", path, error) from error

    def location(self, session: str, segment: str) -> str:
        return str(self._layout.log(session, segment))

    @contextmanager
    def source(self, session: str, segment: str) -> Iterator[FileSource]:
        path = self._layout.log(session, segment)
        try:
            fd = files.open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._missing(session, segment) from None
        try:
            yield FileSource(fd, path)
        except OSError as error:
            raise io_error("read", path, error) from error
        finally:
            os.close(fd)

    @contextmanager
    def still(self, session: str, segment: str) -> Iterator[FileSource]:
        path = self._layout.log(session, segment)
        try:
            fd = files.open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._missing(session, segment) from None
        try:
            locks.take(fd, locks.SHARED, path, self._lock_timeout)
            yield FileSource(fd, path)
        except OSError as error:
            raise io_error("read", path, error) from error
        finally:
            os.close(fd)
