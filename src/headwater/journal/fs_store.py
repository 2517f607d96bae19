"""Segments as JSON Lines files: one directory per session, one file per segment.

Layout below the root (all 0600/0700)::

    {session}/{segment}.jsonl           the log
    {session}/{segment}.removed-….saved what a truncation took off, {segment}.damaged-….saved what a repair did
    {session}.deleted                   tombstone of a session; {session}/{segment}.deleted that of a segment
    {session}/.{segment}.….tmp          a creation in progress, or one that crashed: ignored, swept later
    owners/{session}.lock               who owns the session
    trace/{session}/{segment}.jsonl     debug records

A log is written under `flock` on itself. That is sound because its name never changes hands unseen: it is created under
another name and linked, changed only in place, and a writer that has the lock looks whether the name still leads to its
file. The order of durable steps is in docs/formats/journal.md; each has a failpoint.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_SH
from pathlib import Path
from typing import Any

from headwater import failpoints
from headwater.journal import codec, files, scan
from headwater.journal.entry import Durability, Entry, Head, Limits, Truncation, check_id, is_id, new_id
from headwater.journal.errors import (
    AlreadyExistsError,
    BusyError,
    HeadConflictError,
    JournalError,
    SegmentDeletedError,
    SegmentNotFoundError,
    StoreClosedError,
    io_error,
)
from headwater.journal.log_file import FileSource, Flusher, LogFile
from headwater.journal.store import Store, changed_meanwhile, check_cut, check_new_header
from headwater.journal.trace import TraceFiles
from headwater.system.owner_lock import Owner, OwnerLock, current_owner, register_at_fork

APPEND_SYNCED = failpoints.register("journal.fs.append.after_sync")
CREATE_WRITTEN = failpoints.register("journal.fs.create.after_write")
CREATE_LINKED = failpoints.register("journal.fs.create.after_link")
CREATE_UNLINKED = failpoints.register("journal.fs.create.after_unlink")
CREATE_SYNCED = failpoints.register("journal.fs.create.after_directory_sync")
CUT_SAVED = failpoints.register("journal.fs.cut.after_save")
CUT_DONE = failpoints.register("journal.fs.cut.after_cut")
CUT_SYNCED = failpoints.register("journal.fs.cut.after_sync")
SESSION_MARKED = failpoints.register("journal.fs.delete_session.after_tombstone")
SESSION_REMOVED = failpoints.register("journal.fs.delete_session.after_removal")

_LOG = ".jsonl"
_STALE_SECONDS = 60.0
_HELD = 128  # logs that the deletion of a session holds locked at once: the newest, which can have a writer


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000


def _finish(flusher: Flusher, logs: Mapping[tuple[str, str], LogFile]) -> None:
    flusher.close()
    for log in logs.values():
        log.abandon()


class FsStore(Store):
    """A store in a directory of a local file system.

    :param durability: what `append` promises, see :class:`~headwater.journal.entry.Durability`.
    :param flush_interval: seconds; the bound of the level `flush`.
    :param max_open: log files that stay open between appends.
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
        self.root = Path(root)
        self.limits = limits or Limits()
        self._durability = Durability(durability)
        self._clock, self._max_open, self._timeout = clock, max_open, lock_timeout
        self._lock = threading.Lock()
        self._logs: OrderedDict[tuple[str, str], LogFile] = OrderedDict()
        self._closed = False
        self._flusher = Flusher(flush_interval)
        self._traces = TraceFiles(self.root / "trace", max_bytes=trace_bytes)
        register_at_fork(self)
        # A store that is not closed still syncs what `flush` owes, when it is collected and at the end of Python.
        weakref.finalize(self, _finish, self._flusher, self._logs)

    def after_fork(self) -> None:
        """In a forked child: descriptors and locks are the parent's."""
        self._lock = threading.Lock()
        for log in self._logs.values():
            log.abandon()
        self._logs.clear()
        self._flusher.reset()

    # ---- open logs -----------------------------------------------------------------------------

    def _path(self, session: str, segment: str) -> Path:
        return self.root / check_id(session, "session") / f"{check_id(segment, 'segment')}{_LOG}"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("The store is closed.", next_step="Open it again.")

    def _open(self, session: str, segment: str) -> LogFile:
        key = (session, segment)
        with self._lock:
            self._check_open()
            log = self._logs.get(key)
            if log is None:
                path = self._path(session, segment)
                try:
                    log = self._logs[key] = LogFile(path, self._timeout)
                except FileNotFoundError:
                    raise self._missing(session, segment) from None
                for other, idle in list(self._logs.items()):  # more can be held locked than stay open
                    if len(self._logs) <= self._max_open:
                        break
                    if other != key and idle.close(wait=False):
                        del self._logs[other]
            else:
                self._logs.move_to_end(key)
            return log

    def _drop(self, session: str, segment: str, log: LogFile) -> None:
        """The file is not the segment's any more: the next call opens what is there now."""
        with self._lock:
            if self._logs.get((session, segment)) is log:
                del self._logs[session, segment]
        log.close(wait=False)

    def _missing(self, session: str, segment: str) -> JournalError:
        if self._is_deleted(session, segment):
            return SegmentDeletedError(session, segment)
        return SegmentNotFoundError(session, segment)

    @contextmanager
    def _locked(self, session: str, segment: str, operation: str = "change") -> Iterator[LogFile]:
        """The segment's log under its lock, its end not yet looked at."""
        while True:
            log = self._open(session, segment)
            if log.lock():
                try:
                    yield log
                    return
                except OSError as error:
                    raise io_error(operation, log.path, error) from error
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
        items = codec.prepare_all(entry, self.limits, idempotency_key)
        with self._locked(session, segment, "append to") as log:
            log.check()
            log.settle()
            if idempotency_key is not None and (known := log.head_of_key(idempotency_key)) is not None:
                return known
            if expected_head is not None and expected_head != log.head:
                raise HeadConflictError(segment, expected_head, log.head)
            data, head = codec.lines(items, log.head, self._clock())
            log.write(data, head)
            if self._durability is Durability.FSYNC:
                log.sync()
                failpoints.hit(APPEND_SYNCED)
            elif self._durability is Durability.FLUSH:
                log.is_unsynced = True
                self._flusher.note(log)
        return head

    def create_segment(self, session: str, segment: str, entries: Iterable[Entry] = ()) -> Head:
        path = self._path(session, segment)
        check_new_header(session, segment, entries)
        lines = codec.WholeSegment(entries, self.limits, self._clock())
        self._check_open()
        if self._is_deleted(session, segment):
            raise SegmentDeletedError(session, segment)
        files.make_directory(path.parent)
        with self._locked_directory(session, LOCK_SH) as directory:
            if directory is None or self._is_deleted(session, segment):
                raise SegmentDeletedError(session, segment)
            self._sweep(path.parent)
            temporary = path.with_name(f".{segment}.{os.getpid()}-{secrets.token_hex(6)}.tmp")
            files.write_new(temporary, lines)
            try:
                failpoints.hit(CREATE_WRITTEN)
                os.link(temporary, path, follow_symlinks=False)
                failpoints.hit(CREATE_LINKED)
            except FileExistsError:
                raise AlreadyExistsError(
                    f"Session {session} has a segment {segment} already.",
                    next_step="Append to it, or create one with a new id.",
                ) from None
            except FileNotFoundError:
                raise BusyError(
                    f"The creation of {path} took so long that it was swept away as stale.", next_step="Call again."
                ) from None
            except OSError as error:
                raise io_error("create", path, error) from error
            finally:
                temporary.unlink(missing_ok=True)
            failpoints.hit(CREATE_UNLINKED)
            files.sync_directory(path.parent)
            failpoints.hit(CREATE_SYNCED)
        return lines.head

    def _sweep(self, directory: Path) -> None:
        """Remove what crashed creations left behind more than a minute ago."""
        for found in files.entries(directory):
            if found.name.startswith(".") and found.name.endswith(".tmp"):
                with suppress(OSError):
                    if time.time() - found.stat(follow_symlinks=False).st_mtime >= _STALE_SECONDS:
                        Path(found.path).unlink(missing_ok=True)

    def truncate(
        self, session: str, segment: str, n: int, *, expected_head: Head | None = None, keep_suffix: bool = True
    ) -> Truncation:
        with self._locked(session, segment, "truncate") as log:
            current: Head | None = None
            try:
                current = scan.end_of(log.source).head
            except scan.DamageError as damage:
                if expected_head is not None:
                    raise scan.first_corrupt(log.source, damage) from None
            check_cut(segment, n, current or Head(max(n, 0), 0), expected_head)
            if current is not None and n == current.seq:
                log.settle()
                return Truncation(current, None)
            offset, head = scan.end_of_entry(log.source, segment, n)
            return Truncation(head, self._cut(log, offset, f"removed-{n + 1}" if keep_suffix else None))

    def cut(self, session: str, segment: str, offset: int, label: str | None, expected_size: int) -> str | None:
        with self._locked(session, segment, "truncate") as log:
            if log.source.size() != expected_size:
                raise changed_meanwhile(segment)
            return self._cut(log, offset, label)

    def _cut(self, log: LogFile, offset: int, label: str | None) -> str | None:
        saved: Path | None = None
        if label is not None:
            saved = log.path.with_name(f"{log.path.stem}.{label}.{new_id()[-12:]}.saved")
            try:
                files.write_new(saved, files.chunks(log.fd, offset, log.source.size()))
            except OSError as error:
                raise io_error("save the removed entries to", saved, error) from error
            files.sync_directory(saved.parent)
            failpoints.hit(CUT_SAVED)
        os.ftruncate(log.fd, offset)
        failpoints.hit(CUT_DONE)
        log.sync()
        failpoints.hit(CUT_SYNCED)
        return None if saved is None else str(saved)

    def sync(self, session: str, segment: str) -> None:
        with self._locked(session, segment) as log:
            log.sync()

    def close(self) -> None:
        if self._closed:
            return
        self._flusher.close()
        with self._lock:
            self._closed = True
            logs = list(self._logs.values())
            self._logs.clear()
        for log in logs:
            log.close(wait=True)
        for log in logs:
            if log.failed is not None and not log.failed.is_reported:
                raise log.failed

    # ---- deletion ------------------------------------------------------------------------------

    def _is_deleted(self, session: str, segment: str) -> bool:
        tombstones = self.root / f"{session}.deleted", self.root / session / f"{segment}.deleted"
        return any(map(files.present, tombstones))

    @contextmanager
    def _locked_directory(self, session: str, kind: int) -> Iterator[Path | None]:
        """A session's directory: creations share its lock, a deletion has it alone. ``None``: there is none."""
        directory = self.root / session
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield None
            return
        except OSError as error:
            raise io_error("open the directory", directory, error) from error
        try:
            files.take(fd, kind, directory, self._timeout)
            yield directory if os.fstat(fd).st_nlink else None
        finally:
            os.close(fd)

    def delete_session(self, session: str, *, modified_at: int | None = None) -> bool:
        tombstone, known = self.root / f"{check_id(session, 'session')}.deleted", bool(self.segment_ids(session))
        if not known and not (files.present(tombstone) and files.present(self.root / session)):
            return False
        if modified_at is None:
            self._mark(tombstone)  # first, or creations could keep it waiting
        with self._locked_directory(session, LOCK_EX) as directory, ExitStack() as held:
            for segment in sorted(self.segment_ids(session))[-_HELD:]:  # nothing is appended after the look
                with suppress(SegmentNotFoundError):
                    held.enter_context(self._locked(session, segment))
            if modified_at is not None:
                if self.session_modified_at(session) != modified_at:
                    return False
                self._mark(tombstone)
            try:
                if directory is not None:
                    shutil.rmtree(directory)
            except OSError as error:
                raise io_error("delete", self.root / session, error) from error
            failpoints.hit(SESSION_REMOVED)
            files.sync_directory(self.root)
        with suppress(OSError):
            self._owner_path(session).unlink(missing_ok=True)
        self._traces.remove_session(session)
        return known

    def _mark(self, tombstone: Path) -> None:
        """An empty file: a full disk has room for its name, and its time says when."""
        with suppress(FileExistsError):
            files.write_new(tombstone, [])
        files.sync_directory(tombstone.parent)
        failpoints.hit(SESSION_MARKED)

    # ---- owner and traces ----------------------------------------------------------------------

    def _owner_path(self, session: str) -> Path:
        return self.root / "owners" / f"{check_id(session, 'session')}.lock"

    def own(self, session: str) -> OwnerLock:
        path = self._owner_path(session)
        files.make_directory(path.parent)
        return OwnerLock(path, f"Session {session}")

    def owner(self, session: str) -> Owner | None:
        return current_owner(self._owner_path(session))

    def append_trace(self, session: str, segment: str, record: Mapping[str, Any]) -> bool:
        self._path(session, segment)
        return self._traces.append(session, segment, record)

    def iter_trace(self, session: str, segment: str) -> Iterator[dict[str, Any]]:
        self._path(session, segment)
        return self._traces.iter(session, segment)

    # ---- what exists, reading ------------------------------------------------------------------

    def exists(self, session: str, segment: str) -> bool:
        return files.is_regular(self._path(session, segment))

    def session_ids(self) -> list[str]:
        return [
            found.name
            for found in files.entries(self.root)
            if is_id(found.name) and found.is_dir(follow_symlinks=False) and self.segment_ids(found.name)
        ]

    def segment_ids(self, session: str) -> list[str]:
        return [
            found.name.removesuffix(_LOG)
            for found in files.entries(self.root / check_id(session, "session"))
            if found.name.endswith(_LOG) and is_id(found.name[: -len(_LOG)]) and found.is_file(follow_symlinks=False)
        ]

    def modified_at(self, session: str, segment: str) -> int | None:
        path = self._path(session, segment)
        try:
            return path.lstat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None
        except OSError as error:
            raise io_error("look at", path, error) from error

    def location(self, session: str, segment: str) -> str:
        return str(self._path(session, segment))

    @contextmanager
    def source(self, session: str, segment: str, *, still: bool = False) -> Iterator[FileSource]:
        path = self._path(session, segment)
        try:
            fd = files.open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._missing(session, segment) from None
        try:
            if still:
                files.take(fd, LOCK_SH, path, self._timeout)
            yield FileSource(fd, path)
        except OSError as error:
            raise io_error("read", path, error) from error
        finally:
            os.close(fd)
