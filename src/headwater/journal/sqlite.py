"""Segments in one SQLite database: the same lines, byte for byte, as rows.

A row is one line of a segment under its byte offset, so the rows of a segment in order are what `FsStore` has in
a file, and reading, checking and repairing are the same code. WAL mode; readers never wait for a writer. The
durability level is SQLite's `synchronous`: `none` OFF, `flush` NORMAL (synced at each checkpoint), `fsync` FULL. Local
disks only.

One connection per thread. A forked child leaves its parent's connections alone, unclosed: closing them would drop
locks that the parent relies on.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headwater import failpoints
from headwater.journal import codec, files, forking, scan
from headwater.journal.checks import as_batch, changed_meanwhile, check_cut, check_new_header, end_of_entry
from headwater.journal.entry import Durability, Entry, Head, Limits, Truncation
from headwater.journal.errors import (
    AlreadyExistsError,
    BusyError,
    HeadConflictError,
    SegmentDeletedError,
    SegmentNotFoundError,
    StoreClosedError,
)
from headwater.journal.fs import now_ms
from headwater.journal.ids import check_id
from headwater.journal.side_files import StoreWithSideFiles
from headwater.journal.sqlite_schema import SqliteSource, prepare, translated
from headwater.journal.trace import TraceFiles

_STEPS = ("append", "create", "replace", "cut", "save", "delete")
_BEFORE = {step: failpoints.register(f"journal.sqlite.{step}.before_commit") for step in _STEPS}
_AFTER = {step: failpoints.register(f"journal.sqlite.{step}.after_commit") for step in _STEPS}
_SYNCHRONOUS = {Durability.NONE: "OFF", Durability.FLUSH: "NORMAL", Durability.FSYNC: "FULL"}

_inherited: list[sqlite3.Connection] = []


class SqliteStore(StoreWithSideFiles):
    """A store in one database file.

    :param busy_timeout: seconds to wait for another writer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Durability | str = Durability.FSYNC,
        limits: Limits | None = None,
        busy_timeout: float = 30.0,
        trace_bytes: int = 8 << 20,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self.path = Path(path)
        self.limits = limits or Limits()
        self._durability = Durability(durability)
        self._busy_timeout = busy_timeout
        self._clock = clock
        self._beside = self.path.with_name(f"{self.path.name}.d")
        self._traces = TraceFiles(self._beside / "trace", max_bytes=trace_bytes)
        self._lock = threading.Lock()
        self._local = threading.local()
        self._connections: list[tuple[threading.Thread, sqlite3.Connection]] = []
        self._closed = False
        forking.register(self)

    def after_fork(self) -> None:
        """In a forked child: leave the parent's connections as they are."""
        _inherited.extend(connection for _, connection in self._connections)
        self._connections = []
        self._local = threading.local()
        self._lock = threading.Lock()

    # ---- connections and transactions ----------------------------------------------------------

    def _connection(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreClosedError("The store is closed.", next_step="Open it again.")
        known: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if known is not None:
            return known
        files.make_directory(self.path.parent)
        if not files.present(self.path):
            try:
                os.close(files.create_exclusive(self.path))
            except FileExistsError:
                pass
            files.sync_directory(self.path.parent)
        with translated(self.path):
            connection = sqlite3.connect(
                self.path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
            )
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(f"PRAGMA synchronous={_SYNCHRONOUS[self._durability]}")
                prepare(connection, self.path)
            except BaseException:
                connection.close()
                raise
        self._local.connection = connection
        with self._lock:
            ended = [known for thread, known in self._connections if not thread.is_alive()]
            self._connections = [pair for pair in self._connections if pair[0].is_alive()]
            self._connections.append((threading.current_thread(), connection))
        with translated(self.path):
            for known in ended:
                known.close()
        return connection

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection()
        with translated(self.path):
            yield connection

    @contextmanager
    def _writing(self, step: str) -> Iterator[sqlite3.Connection]:
        """One transaction that excludes other writers from its beginning: committed at the end, or nothing."""
        connection = self._connection()
        with translated(self.path):
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                failpoints.hit(_BEFORE[step])
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            failpoints.hit(_AFTER[step])

    def _id(self, connection: sqlite3.Connection, session: str, segment: str) -> int:
        check_id(session, "session")
        check_id(segment, "segment")
        row = connection.execute(
            "SELECT id, deleted_at FROM segments WHERE session=? AND segment=?", (session, segment)
        ).fetchone()
        if row is None or row[1] is not None:
            if row is not None or self._session_deleted(connection, session):
                raise SegmentDeletedError(session, segment)
            raise SegmentNotFoundError(session, segment)
        return int(row[0])

    @staticmethod
    def _session_deleted(connection: sqlite3.Connection, session: str) -> bool:
        query = "SELECT 1 FROM deleted_sessions WHERE session=?"
        return connection.execute(query, (session,)).fetchone() is not None

    def _source_of(self, connection: sqlite3.Connection, number: int, segment: str) -> SqliteSource:
        return SqliteSource(connection, number, f"{self.path}#{segment}")

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
        items = codec.prepare_all(as_batch(entry), self.limits, idempotency_key)
        with self._writing("append") as connection:
            number = self._id(connection, session, segment)
            source = self._source_of(connection, number, segment)
            if idempotency_key is not None:
                known = self._head_of_key(connection, number, idempotency_key)
                if known is not None:
                    return known
            try:
                end = scan.end_of(source)
            except scan.DamageError as damage:
                raise scan.first_corrupt(source, damage) from None
            if expected_head is not None and expected_head != end.head:
                raise HeadConflictError(segment, expected_head, end.head)
            self._delete_from(connection, number, end.offset)
            lines, head = codec.lines(items, end.head, self._clock())
            self._insert(connection, number, end.offset, zip(lines, (item.key for item in items), strict=True))
        return head

    @staticmethod
    def _head_of_key(connection: sqlite3.Connection, number: int, key: str) -> Head | None:
        query = "SELECT line FROM lines WHERE segment_id=? AND key=? ORDER BY start LIMIT 1"
        row = connection.execute(query, (number, key)).fetchone()
        if row is None:
            return None
        line = row[0].rstrip(b"\r\n")
        return Head(codec.stated_seq(line) or 0, codec.stated_crc(line) or 0)

    def _insert(
        self,
        connection: sqlite3.Connection,
        number: int,
        offset: int,
        lines: Iterable[tuple[bytes, str | None]],
    ) -> None:
        def rows() -> Iterator[tuple[int, int, bytes, str | None]]:
            start = offset
            for line, key in lines:
                yield number, start, line, key
                start += len(line)

        connection.executemany("INSERT INTO lines(segment_id, start, line, key) VALUES (?,?,?,?)", rows())
        self._touch(connection, number)

    def _touch(self, connection: sqlite3.Connection, number: int) -> None:
        connection.execute("UPDATE segments SET modified_at=? WHERE id=?", (self._clock(), number))

    @staticmethod
    def _delete_from(connection: sqlite3.Connection, number: int, offset: int) -> None:
        """Remove the bytes from *offset* on; a row that it cuts in two (damage made a newline) keeps its begin."""
        connection.execute("DELETE FROM lines WHERE segment_id=? AND start>=?", (number, offset))
        connection.execute(
            "UPDATE lines SET line=substr(line, 1, ?1 - start) WHERE segment_id=?2 AND start<?1"
            " AND start+length(line)>?1 AND start=(SELECT max(start) FROM lines WHERE segment_id=?2)",
            (offset, number),
        )

    def create_segment(
        self, session: str, segment: str, entries: Iterable[Entry] = (), *, replacing: Head | None = None
    ) -> Head:
        check_id(session, "session")
        check_id(segment, "segment")
        check_new_header(session, segment, entries)
        lines = codec.WholeSegment(entries, self.limits, self._clock())
        if replacing is not None:
            with self._writing("replace") as connection:
                number = self._id(connection, session, segment)
                current = scan.end_of(self._source_of(connection, number, segment)).head
                if current != replacing:
                    raise HeadConflictError(segment, replacing, current)
                self._delete_from(connection, number, 0)
                self._insert(connection, number, 0, lines.with_keys())
            return lines.head
        with self._synced(), self._writing("create") as connection:
            row = connection.execute(
                "SELECT deleted_at FROM segments WHERE session=? AND segment=?", (session, segment)
            ).fetchone()
            if self._session_deleted(connection, session) or (row is not None and row[0] is not None):
                raise SegmentDeletedError(session, segment)
            if row is not None:
                raise AlreadyExistsError(
                    f"Session {session} has a segment {segment} already.",
                    next_step="Append to it, or create one with a new id.",
                )
            cursor = connection.execute(
                "INSERT INTO segments(session, segment, modified_at) VALUES (?,?,?)", (session, segment, self._clock())
            )
            self._insert(connection, int(cursor.lastrowid or 0), 0, lines.with_keys())
        return lines.head

    def truncate(
        self, session: str, segment: str, n: int, *, expected_head: Head | None = None, keep_suffix: bool = True
    ) -> Truncation:
        with self._writing("cut") as connection:
            number = self._id(connection, session, segment)
            source = self._source_of(connection, number, segment)
            current: Head | None = None
            try:
                current = scan.end_of(source).head
            except scan.DamageError as damage:
                if expected_head is not None:
                    raise scan.first_corrupt(source, damage) from None
            check_cut(segment, n, current or Head(max(n, 0), 0), expected_head)
            if current is not None and n == current.seq:
                return Truncation(current, None)
            offset, head = end_of_entry(source, segment, n)
            saved = self._save(connection, number, f"removed-{n + 1}", offset) if keep_suffix else None
            self._delete_from(connection, number, offset)
            self._touch(connection, number)
        return Truncation(head, saved)

    def _save(self, connection: sqlite3.Connection, number: int, label: str, offset: int) -> str:
        cursor = connection.execute(
            "INSERT INTO saved(segment_id, label, saved_at) VALUES (?,?,?)", (number, label, self._clock())
        )
        connection.execute(
            "INSERT INTO saved_lines(saved_id, start, line) SELECT ?, start, line FROM lines"
            " WHERE segment_id=? AND start+length(line)>?",
            (cursor.lastrowid, number, offset),
        )
        return f"{self.path}#saved={cursor.lastrowid}"

    def save_side(self, session: str, segment: str, label: str, after: int) -> str:
        with self._writing("save") as connection:
            number = self._id(connection, session, segment)
            offset, _ = end_of_entry(self._source_of(connection, number, segment), segment, after)
            return self._save(connection, number, label, offset)

    def cut(self, session: str, segment: str, offset: int, label: str | None, expected_size: int) -> str | None:
        with self._writing("cut") as connection:
            number = self._id(connection, session, segment)
            if self._source_of(connection, number, segment).size() != expected_size:
                raise changed_meanwhile(segment)
            saved = None if label is None else self._save(connection, number, label, offset)
            self._delete_from(connection, number, offset)
            self._touch(connection, number)
        return saved

    def sync(self, session: str, segment: str) -> None:
        with self._reading() as connection:
            self._id(connection, session, segment)
        if self._durability is Durability.FSYNC:
            return
        with self._synced(), self._reading() as connection:
            # Earlier checkpoints may have written pages without a sync, and one with nothing to do syncs nothing: a
            # commit (of a page that is as before) gives it something. It syncs the log, the checkpoint the database.
            connection.execute("BEGIN IMMEDIATE")
            for step in (1, -1):
                connection.execute("UPDATE segments SET modified_at=modified_at+? WHERE session=?", (step, session))
            connection.execute("COMMIT")
            busy = connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()[0]
        if busy:
            raise BusyError(f"{self.path} is in use: not all of it could be synced.", next_step="Call again.")

    @contextmanager
    def _synced(self) -> Iterator[None]:
        """What is committed in here is on disk at the commit, whatever the level."""
        with self._reading() as connection:
            connection.execute("PRAGMA synchronous=FULL")
            try:
                yield
            finally:
                connection.execute(f"PRAGMA synchronous={_SYNCHRONOUS[self._durability]}")

    def delete_segment(self, session: str, segment: str, *, expected_head: Head | None = None) -> bool:
        with self._writing("delete") as connection:
            try:
                number = self._id(connection, session, segment)
            except SegmentNotFoundError:
                return False
            if expected_head is not None:
                current = scan.end_of(self._source_of(connection, number, segment)).head
                if current != expected_head:
                    raise HeadConflictError(segment, expected_head, current)
            self._remove(connection, number)
        self._traces.remove(session, segment)
        return True

    def _remove(self, connection: sqlite3.Connection, number: int) -> None:
        connection.execute(
            "DELETE FROM saved_lines WHERE saved_id IN (SELECT id FROM saved WHERE segment_id=?)", (number,)
        )
        connection.execute("DELETE FROM saved WHERE segment_id=?", (number,))
        connection.execute("DELETE FROM lines WHERE segment_id=?", (number,))
        connection.execute("UPDATE segments SET deleted_at=? WHERE id=?", (self._clock(), number))

    def delete_session(self, session: str, *, modified_at: int | None = None) -> bool:
        check_id(session, "session")
        with self._writing("delete") as connection:
            if modified_at is not None and self.session_modified_at(session) != modified_at:
                return False
            query = "SELECT id FROM segments WHERE session=? AND deleted_at IS NULL"
            numbers = [int(row[0]) for row in connection.execute(query, (session,))]
            if not numbers:
                return False
            connection.execute("INSERT OR IGNORE INTO deleted_sessions VALUES (?,?)", (session, self._clock()))
            for number in numbers:
                self._remove(connection, number)
        self._forget_side_files(session)
        return True

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections, self._connections = self._connections, []
        with translated(self.path):
            for _, connection in connections:
                connection.close()

    # ---- what exists, reading ------------------------------------------------------------------

    def exists(self, session: str, segment: str) -> bool:
        with self._reading() as connection:
            try:
                self._id(connection, session, segment)
            except SegmentNotFoundError:
                return False
        return True

    def session_ids(self) -> list[str]:
        with self._reading() as connection:
            query = "SELECT DISTINCT session FROM segments WHERE deleted_at IS NULL"
            return [row[0] for row in connection.execute(query)]

    def segment_ids(self, session: str) -> list[str]:
        check_id(session, "session")
        with self._reading() as connection:
            query = "SELECT segment FROM segments WHERE session=? AND deleted_at IS NULL"
            return [row[0] for row in connection.execute(query, (session,))]

    def modified_at(self, session: str, segment: str) -> int | None:
        with self._reading() as connection:
            query = "SELECT modified_at FROM segments WHERE session=? AND segment=? AND deleted_at IS NULL"
            row = connection.execute(query, (session, segment)).fetchone()
        return None if row is None else int(row[0])

    def location(self, session: str, segment: str) -> str:
        return f"{self.path}#{segment}"

    @contextmanager
    def source(self, session: str, segment: str) -> Iterator[SqliteSource]:
        with self._reading() as connection:
            yield self._source_of(connection, self._id(connection, session, segment), segment)

    @contextmanager
    def still(self, session: str, segment: str) -> Iterator[SqliteSource]:
        with self._reading() as connection:
            connection.execute("BEGIN")  # a read transaction: one unchanging view
            try:
                yield self._source_of(connection, self._id(connection, session, segment), segment)
            finally:
                connection.execute("ROLLBACK")
