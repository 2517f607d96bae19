"""What only the database can show: its modes, its errors, its pragmas, its threads."""

from __future__ import annotations

import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from headwater.errors import CorruptionError, TransientError
from headwater.journal import Entry, SqliteStore, new_id
from headwater.journal.errors import AccessDeniedError, BusyError, CorruptError


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
    assert len(store._connections) == 4
    store.close()
    assert store._connections == []
