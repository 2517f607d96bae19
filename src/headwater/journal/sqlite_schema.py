"""Tables of a `SqliteStore`, its bytes as a source, and SQLite's errors as ours."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.journal.errors import (
    AccessDeniedError,
    BusyError,
    CorruptError,
    NoRoomError,
    StoreIoError,
    UnsupportedVersionError,
)

VERSION = 1
_APPLICATION = 0x48574A4C  # "HWJL": this database is a journal

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS segments (
        id INTEGER PRIMARY KEY, session TEXT NOT NULL, segment TEXT NOT NULL,
        modified_at INTEGER NOT NULL, deleted_at INTEGER, UNIQUE (session, segment))""",
    "CREATE TABLE IF NOT EXISTS deleted_sessions (session TEXT PRIMARY KEY, deleted_at INTEGER NOT NULL)",
    """CREATE TABLE IF NOT EXISTS lines (
        segment_id INTEGER NOT NULL, start INTEGER NOT NULL, line BLOB NOT NULL, key TEXT)""",
    "CREATE UNIQUE INDEX IF NOT EXISTS lines_start ON lines (segment_id, start)",
    "CREATE INDEX IF NOT EXISTS lines_key ON lines (segment_id, key) WHERE key IS NOT NULL",
    """CREATE TABLE IF NOT EXISTS saved (
        id INTEGER PRIMARY KEY, segment_id INTEGER NOT NULL, label TEXT NOT NULL, saved_at INTEGER NOT NULL)""",
    "CREATE TABLE IF NOT EXISTS saved_lines (saved_id INTEGER NOT NULL, start INTEGER NOT NULL, line BLOB NOT NULL)",
    f"PRAGMA application_id={_APPLICATION}",
    f"PRAGMA user_version={VERSION}",
)


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables of a new database; refuse one that is not ours.

    :raises UnsupportedVersionError: a later version wrote it.
    :raises CorruptError: it is the database of another program.
    """
    connection.execute("BEGIN")  # one view for all questions: another process may be making the tables right now
    try:
        ready = _state(connection, path)
    finally:
        connection.execute("ROLLBACK")
    if ready:
        return
    connection.execute("BEGIN IMMEDIATE")
    if not _state(connection, path):  # two processes may open a new journal at once
        for statement in SCHEMA:
            connection.execute(statement)
    connection.execute("COMMIT")


def _state(connection: sqlite3.Connection, path: Path) -> bool:
    """Is it ready? False: it is empty."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    ours = bool(connection.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION)
    if ours and version > VERSION:
        raise UnsupportedVersionError(str(path), 0, str(version))
    if not ours and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise CorruptError(
            str(path), 0, 0, 0, "a database of another program", next_step="Name another file for the journal."
        )
    return ours


class SqliteSource:
    """The rows of one segment as one run of bytes."""

    __slots__ = ("_connection", "_number", "name")

    def __init__(self, connection: sqlite3.Connection, number: int, name: str) -> None:
        self._connection = connection
        self._number = number
        self.name = name

    def size(self) -> int:
        query = "SELECT start+length(line) FROM lines WHERE segment_id=? ORDER BY start DESC LIMIT 1"
        row = self._connection.execute(query, (self._number,)).fetchone()
        return 0 if row is None else int(row[0])

    def read(self, offset: int, length: int) -> bytes:
        rows = self._connection.execute(
            "SELECT start, line FROM lines WHERE segment_id=?1 AND start<?3 AND start>="
            "coalesce((SELECT max(start) FROM lines WHERE segment_id=?1 AND start<=?2), 0) ORDER BY start",
            (self._number, offset, offset + length),
        ).fetchall()
        if not rows:
            return b""
        data = b"".join(bytes(row[1]) for row in rows)
        begin = offset - int(rows[0][0])
        return data[begin : begin + length]


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """SQLite's errors as errors of this package."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise BusyError(f"{path} is locked by another writer.", next_step="Call again.") from error
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE")):
            raise NoRoomError("write to", str(path), error, next_step="Free some space and call again.") from error
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            raise AccessDeniedError(
                "use", str(path), error, next_step="Check the owner and mode of the path."
            ) from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise CorruptError(str(path), 0, 0, 0, f"the database is damaged: {error}") from error
        raise StoreIoError("use", str(path), error) from error
