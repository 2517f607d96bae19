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

import atexit
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_SH
from pathlib import Path
from typing import Any

from headwater import failpoints
from headwater.journal import codec
from headwater.journal.entry import Durability, Entry, Head, Limits, Truncation, check_id, is_id, new_id
from headwater.journal.errors import (
    AlreadyExistsError,
    BusyError,
    HeadConflictError,
    JournalError,
    NotARegularFileError,
    SegmentDeletedError,
    SegmentNotFoundError,
    StoreClosedError,
    io_error,
    io_errors,
)
from headwater.journal.log_file import FileSource, LogFile, chunks, open_regular, take_lock
from headwater.journal.store import Store, changed_meanwhile, plan_truncation
from headwater.journal.trace import TraceFiles
from headwater.system.files import make_private, open_private, sync
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


class FsStore(Store):
    """A store in a directory of a local file system. Close it: the logs that it wrote stay open until then.

    :param durability: what `append` promises, see :class:`~headwater.journal.entry.Durability`.
    :param flush_interval: seconds; the bound of the level `flush`.
    :param lock_timeout: seconds to wait for another process that is inside the segment.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        durability: Durability | str = Durability.FSYNC,
        flush_interval: float = 0.2,
        limits: Limits | None = None,
        lock_timeout: float = 30.0,
        trace_bytes: int = 8 << 20,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self.root = Path(root)
        self.limits = limits or Limits()
        self._durability, self._flush_interval = Durability(durability), flush_interval
        self._clock, self._timeout, self._trace_bytes = clock, lock_timeout, trace_bytes
        self._logs: dict[tuple[str, str], LogFile] = {}
        self._closed = False
        self._start_fresh()
        register_at_fork(self)
        atexit.register(self.close)  # what `flush` owes is synced also when no one closes the store

    def _start_fresh(self) -> None:
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._flusher: threading.Thread | None = None
        self._traces = TraceFiles(self.root / "trace", max_bytes=self._trace_bytes)

    def after_fork(self) -> None:
        """In a forked child: descriptors, locks and the thread that syncs are the parent's."""
        for log in self._logs.values():
            log.abandon()
        self._logs.clear()
        self._start_fresh()

    # ---- open logs -----------------------------------------------------------------------------

    def _path(self, session: str, segment: str) -> Path:
        return self.root / check_id(session, "session") / f"{check_id(segment, 'segment')}{_LOG}"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("The store is closed.", next_step="Open it again.")

    def _open(self, session: str, segment: str) -> LogFile:
        with self._lock:
            self._check_open()
            log = self._logs.get((session, segment))
            if log is None:
                try:
                    log = LogFile(self._path(session, segment), self._timeout)
                except FileNotFoundError:
                    raise self._missing(session, segment) from None
                self._logs[session, segment] = log
            return log

    def _missing(self, session: str, segment: str) -> JournalError:
        if self._is_deleted(session, segment):
            return SegmentDeletedError(session, segment)
        return SegmentNotFoundError(session, segment)

    @contextmanager
    def _locked(self, session: str, segment: str, operation: str = "change") -> Iterator[LogFile]:
        """The segment's log under its lock, its end not yet looked at."""
        while not (log := self._open(session, segment)).lock():
            with self._lock:  # its name leads to another file now: open what is there
                if self._logs.get((session, segment)) is log:
                    del self._logs[session, segment]
            log.close(wait=False)
        try:
            yield log
        except OSError as error:
            raise io_error(operation, log.path, error) from error
        finally:
            log.unlock()

    def _flush(self) -> None:
        """The thread that syncs each log at most `flush_interval` after an append; it starts with the first one."""
        while not self._stop.is_set():
            self._wake.wait()
            self._stop.wait(self._flush_interval)
            self._wake.clear()
            with self._lock:
                due = [log for log in self._logs.values() if log.is_unsynced]
            for log in due:
                log.sync_quietly()

    def _sync_soon(self, log: LogFile) -> None:
        log.is_unsynced = True
        if self._flusher is None:
            with self._lock:
                if self._flusher is None:
                    self._flusher = threading.Thread(target=self._flush, name="journal-flush", daemon=True)
                    self._flusher.start()
        self._wake.set()

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
                self._sync_soon(log)
        return head

    def create_segment(self, session: str, segment: str, entries: Iterable[Entry] = ()) -> Head:
        path = self._path(session, segment)
        lines = codec.NewSegment(session, segment, entries, self.limits, self._clock())
        self._check_open()
        if self._is_deleted(session, segment):
            raise SegmentDeletedError(session, segment)
        _make_directory(path.parent)
        with io_errors("create", path), self._locked_directory(session, LOCK_SH) as directory:
            if directory is None or self._is_deleted(session, segment):
                raise SegmentDeletedError(session, segment)
            self._sweep(path.parent)
            draft = path.with_name(f".{segment}.{os.getpid()}-{secrets.token_hex(6)}.tmp")
            _write_new(draft, lines)
            try:
                failpoints.hit(CREATE_WRITTEN)
                self._link(draft, path)
                failpoints.hit(CREATE_LINKED)
            finally:
                draft.unlink(missing_ok=True)
            failpoints.hit(CREATE_UNLINKED)
            sync(path.parent)
            failpoints.hit(CREATE_SYNCED)
        return lines.head

    def _link(self, draft: Path, path: Path) -> None:
        try:
            os.link(draft, path, follow_symlinks=False)
        except FileExistsError:
            raise AlreadyExistsError(
                f"Session {path.parent.name} has a segment {path.stem} already.",
                next_step="Append to it, or create one with a new id.",
            ) from None
        except FileNotFoundError:
            raise BusyError(
                f"The creation of {path} took so long that it was swept away as stale.", next_step="Call again."
            ) from None

    def _sweep(self, directory: Path) -> None:
        """Remove what crashed creations left behind more than a minute ago."""
        for item in _entries(directory):
            if item.name.startswith(".") and item.name.endswith(".tmp"):
                with suppress(OSError):
                    if time.time() - item.stat(follow_symlinks=False).st_mtime >= _STALE_SECONDS:
                        Path(item.path).unlink(missing_ok=True)

    def truncate(self, session: str, segment: str, n: int, *, expected_head: Head | None = None) -> Truncation:
        with self._locked(session, segment, "truncate") as log:
            end = plan_truncation(log.source, segment, n, expected_head)
            if end is None:
                log.settle()
                return Truncation(log.head, None)
            return Truncation(end[1], self._cut(log, end[0], f"removed-{n + 1}"))

    def cut(self, session: str, segment: str, offset: int, label: str, expected_size: int) -> str:
        with self._locked(session, segment, "truncate") as log:
            if log.source.size() != expected_size:
                raise changed_meanwhile(segment)
            return self._cut(log, offset, label)

    def _cut(self, log: LogFile, offset: int, label: str) -> str:
        saved = log.path.with_name(f"{log.path.stem}.{label}.{new_id()[-12:]}.saved")
        _write_new(saved, chunks(log.source, offset))
        sync(saved.parent)
        failpoints.hit(CUT_SAVED)
        os.ftruncate(log.fd, offset)
        failpoints.hit(CUT_DONE)
        log.sync()
        failpoints.hit(CUT_SYNCED)
        return str(saved)

    def sync(self, session: str, segment: str) -> None:
        with self._locked(session, segment) as log:
            log.sync()

    def close(self) -> None:
        if self._closed:
            return
        self._stop.set()
        self._wake.set()
        if self._flusher is not None:
            self._flusher.join()
        atexit.unregister(self.close)
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
        return any(_status(path) is not None for path in tombstones)

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
            take_lock(fd, kind, directory, self._timeout)
            yield directory if os.fstat(fd).st_nlink else None
        finally:
            os.close(fd)

    def delete_session(self, session: str, *, modified_at: int | None = None) -> bool:
        tombstone, known = self.root / f"{check_id(session, 'session')}.deleted", bool(self.segment_ids(session))
        if not known and (_status(tombstone) is None or _status(self.root / session) is None):
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
            with io_errors("delete", self.root / session):
                if directory is not None:
                    shutil.rmtree(directory)
                failpoints.hit(SESSION_REMOVED)
                sync(self.root)
        with suppress(OSError):
            self._owner_path(session).unlink(missing_ok=True)
        self._traces.remove_session(session)
        return known

    def _mark(self, tombstone: Path) -> None:
        """An empty file: a full disk has room for its name, and its time says when."""
        with io_errors("write", tombstone):
            open_private(tombstone, "ab").close()
            sync(tombstone.parent)
        failpoints.hit(SESSION_MARKED)

    # ---- owner and traces ----------------------------------------------------------------------

    def _owner_path(self, session: str) -> Path:
        return self.root / "owners" / f"{check_id(session, 'session')}.lock"

    def own(self, session: str) -> OwnerLock:
        path = self._owner_path(session)
        _make_directory(path.parent)
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
        path = self._path(session, segment)
        status = _status(path)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise NotARegularFileError("use", path, OSError("not a regular file"))
        return status is not None

    def session_ids(self) -> list[str]:
        return [
            item.name
            for item in _entries(self.root)
            if is_id(item.name) and item.is_dir(follow_symlinks=False) and self.segment_ids(item.name)
        ]

    def segment_ids(self, session: str) -> list[str]:
        return [
            item.name.removesuffix(_LOG)
            for item in _entries(self.root / check_id(session, "session"))
            if item.name.endswith(_LOG) and is_id(item.name[: -len(_LOG)]) and item.is_file(follow_symlinks=False)
        ]

    def modified_at(self, session: str, segment: str) -> int | None:
        status = _status(self._path(session, segment))
        return None if status is None else status.st_mtime_ns // 1_000_000

    def location(self, session: str, segment: str) -> str:
        return str(self._path(session, segment))

    @contextmanager
    def source(self, session: str, segment: str, *, still: bool = False) -> Iterator[FileSource]:
        path = self._path(session, segment)
        try:
            fd = open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._missing(session, segment) from None
        try:
            if still:
                take_lock(fd, LOCK_SH, path, self._timeout)
            with io_errors("read", path):
                yield FileSource(fd, path)
        finally:
            os.close(fd)


# -- files ---------------------------------------------------------------------------------------------------------


def _status(path: Path) -> os.stat_result | None:
    """What is under this name, links not followed; ``None``: nothing.

    :raises AccessDeniedError: it cannot be known.
    """
    with io_errors("look at", path):
        try:
            return path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    """What is in *directory*; nothing when there is none."""
    with io_errors("list", directory):
        try:
            with os.scandir(directory) as names:
                return list(names)
        except FileNotFoundError:
            return []


def _write_new(path: Path, parts: Iterable[bytes]) -> None:
    """A new durable file with *parts*, whole or not at all; its directory is not synced.

    The name must be free.
    """
    with io_errors("write", path):
        file = open_private(path, "xb", buffering=1 << 20)
        try:
            with file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _make_directory(path: Path) -> None:
    """Make *path* and its parents, private and durable."""
    if _status(path) is None:
        _make_directory(path.parent)
        with io_errors("create the directory", path):
            make_private(path)
            sync(path.parent)
