"""What only the database can show: its modes, its errors, its pragmas, its threads."""

from __future__ import annotations

import shutil
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from headwater.errors import CorruptionError, TransientError
from headwater.journal import Entry, SqliteStore, new_id, verify
from headwater.journal.errors import AccessDeniedError, BusyError, CorruptError, UnsupportedVersionError
from headwater.journal.sqlite_schema import prepare

FIXTURES = Path(__file__).parents[2] / "fixtures" / "journal"


def make(store: SqliteStore) -> tuple[str, str]:
    ids = new_id(), new_id()
    store.create_segment(*ids)
    return ids


def test_the_files_are_private(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "deep" / "journal.db") as store:
        store.append(*make(store), Entry("x"))
        store.own(new_id()).release()
        for path in (tmp_path / "deep").rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(("level", "synchronous"), [("none", 0), ("flush", 1), ("fsync", 2)])
def test_the_level_is_the_databases_synchronous_in_wal_mode(tmp_path: Path, level: str, synchronous: int) -> None:
    with SqliteStore(tmp_path / "journal.db", durability=level) as store:
        ids = make(store)
        store.append(*ids, Entry("x"))
        store.sync(*ids)
        connection = store._connection()
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == synchronous
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_a_writer_that_waits_too_long_is_told_to_try_again(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "journal.db", busy_timeout=0.05) as store:
        ids = make(store)
        other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BusyError) as caught:
            store.append(*ids, Entry("x"))
        assert isinstance(caught.value, TransientError)
        assert store.read_entry_count(*ids) == 0, "readers do not wait"
        other.execute("ROLLBACK")
        other.close()
        store.append(*ids, Entry("x"))


def test_a_file_that_is_no_database_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"this is not a database, it is a text of some length" * 50)
    with SqliteStore(path) as store, pytest.raises(CorruptError) as caught:
        store.list_sessions()
    assert isinstance(caught.value, CorruptionError)


def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    with SqliteStore(path) as store, pytest.raises(CorruptError, match="another program"):
        store.create_segment(new_id(), new_id())
    other = sqlite3.connect(path)
    assert [row[0] for row in other.execute("SELECT name FROM sqlite_master")] == ["theirs"]
    other.close()


def test_a_database_of_a_later_version_asks_for_an_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with SqliteStore(path) as store:
        make(store)
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version=2")
    other.close()
    with SqliteStore(path) as store, pytest.raises(UnsupportedVersionError, match="Upgrade"):
        store.list_sessions()


def test_a_database_of_version_one_stays_readable(tmp_path: Path) -> None:
    """Golden file; copied, because opening a database writes beside it. Its lines are those of the golden files."""
    session = "0190b0a0-0000-7000-8000-000000000001"
    plain = "0190b0a0-0000-7000-8000-000000000002"
    shutil.copy(FIXTURES / "v1.db", tmp_path / "journal.db")
    with SqliteStore(tmp_path / "journal.db") as store:
        assert store.list_segments(session) == [plain]
        assert verify(store, session, plain).ok
        with store.source(session, plain) as source:
            assert source.read(0, source.size()) == (FIXTURES / "v1" / session / f"{plain}.jsonl").read_bytes()
        assert store.append(session, plain, Entry("again"), idempotency_key="golden").seq == 6
        assert store.append(session, plain, Entry("again"), idempotency_key="golden").seq == 6


def test_a_directory_in_place_of_the_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.db").mkdir()
    with SqliteStore(tmp_path / "journal.db") as store, pytest.raises(AccessDeniedError):
        store.list_sessions()


def test_every_thread_has_its_own_connection_and_close_takes_them_all(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "journal.db", durability="none")
    ids = make(store)
    threads = [threading.Thread(target=store.append, args=(*ids, Entry("x"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read_entry_count(*ids) == 3
    assert len(store._connections) <= 4
    store.close()
    assert store._connections == []


def test_connections_of_ended_threads_are_closed(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "journal.db", durability="none") as store:
        ids = make(store)
        for _ in range(20):
            thread = threading.Thread(target=store.append, args=(*ids, Entry("x")))
            thread.start()
            thread.join()
        assert store.read_entry_count(*ids) == 20
        assert len(store._connections) <= 2


@pytest.mark.parametrize("level", ["none", "flush"])
def test_a_sync_that_a_reader_hinders_says_so(tmp_path: Path, level: str) -> None:
    """It promises that everything is on disk; it must not return when it is not."""
    with SqliteStore(tmp_path / "journal.db", durability=level, busy_timeout=0.05) as store:
        ids = make(store)
        reader = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM lines").fetchall()
        store.append(*ids, Entry("x"))
        with pytest.raises(BusyError):
            store.sync(*ids)
        other = make(store)
        assert store.exists(*other), "a creation syncs by itself"
        reader.close()
        store.sync(*ids)
        assert store._connection().execute("PRAGMA synchronous").fetchone()[0] < 2


def test_a_sync_syncs_although_nothing_is_left_to_checkpoint(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "journal.db", durability="none") as store:
        ids = make(store)
        store.append(*ids, Entry("x"))
        store._connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        store.sync(*ids)
        assert (tmp_path / "journal.db-wal").stat().st_size > 0, "it committed something that had to be synced"


def test_a_database_that_another_process_is_just_making_is_not_taken_for_a_foreign_one(tmp_path: Path) -> None:
    """The other one commits its tables between our questions."""
    path = tmp_path / "journal.db"
    ours, theirs = (sqlite3.connect(path, isolation_level=None) for _ in range(2))
    ours.execute("PRAGMA journal_mode=WAL")

    class Interrupted:
        def execute(self, statement: str) -> sqlite3.Cursor:
            cursor = ours.execute(statement)
            if statement == "PRAGMA application_id":
                prepare(theirs, path)
            return cursor

    prepare(Interrupted(), path)  # type: ignore[arg-type]
    ours.close()
    theirs.close()
    with SqliteStore(path) as store:
        assert store.list_sessions() == []
