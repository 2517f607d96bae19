"""Connections, passwords and slots that are lost while history is read: every row comes, none is told twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.capture.running import RunningCapture, running
from tests.db.capture.test_failures import drop_slot, proxied, write_wal
from tests.db.conftest import StartPostgres
from tests.servers.postgres import Database

from headwater.capture.renewal import renew
from headwater.errors import ConflictError, TransientError
from headwater.sources.errors import AccessDenied, SlotInvalidated, SlotLost, SnapshotExpired

pytestmark = pytest.mark.db

TABLE = "public.orders"
ROWS = 1000


def _create(database: Database) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text)",
        f"INSERT INTO orders SELECT n * 2, 'new' FROM generate_series(1, {ROWS}) n",
    )


def _write(database: Database, number: int) -> None:
    """A little of everything, all over the keys."""
    database.execute(
        f"UPDATE orders SET state = 'paid {number}' WHERE id % 14 = {number % 7 * 2}",
        f"DELETE FROM orders WHERE id % 38 = {number % 19 * 2}",
        f"INSERT INTO orders SELECT n * 40 + 1 + {number % 19 * 2}, 'live' FROM generate_series(0, 50) n"
        " ON CONFLICT DO NOTHING",
    )


def _query(capture: RunningCapture, **options: Any) -> Delivering:
    return Delivering(capture, TABLE, split_rows=100, interval_seconds=0.001, parallelism=1, **options)


def _at(step: str, do: Callable[[], object]) -> Callable[[str], None]:
    def between(now: str) -> None:
        if now == step:
            do()

    return between


@pytest.mark.parametrize("known_sink", [True, False], ids=["sink tells", "sink unknown"])
def test_m21_connections_that_are_lost_at_each_step_of_a_batch(
    newest_postgres: Database, tmp_path: Path, known_sink: bool
) -> None:
    _create(newest_postgres)
    with proxied(newest_postgres) as (proxy, dsn), running(newest_postgres, tmp_path, TABLE) as capture:
        query = _query(capture, source=dsn, known_sink=known_sink)
        lost = 0
        for number, step in enumerate(("planned", "logged", "units", "read")):
            _write(newest_postgres, number)
            try:
                query.batch(between=_at(step, proxy.cut))
            except TransientError:
                lost += 1
                query.crash()
            query.batch()
        assert lost >= 2, "the snapshot is gone with its connection"
        assert query.planner.has_history
        proxy.refuse()
        _write(newest_postgres, 5)
        capture.catch_up()
        before = query.checkpoint
        assert query.batch(), "changes flow on"
        assert query.checkpoint is not None
        assert before is not None
        assert query.checkpoint.plan == before.plan
        assert "cannot be reached" in query.planner.status()["problem"]
        proxy.resume()
        query.finish()
        assert query.planner.status()["problem"] is None
        query.assert_equal()
        query.close()


def test_m21_a_server_that_is_killed_while_history_is_read(start_postgres: StartPostgres, tmp_path: Path) -> None:
    server = start_postgres()
    with server.database() as database:
        _create(database)
        with running(database, tmp_path, TABLE) as capture:
            query = _query(capture)
            assert query.batch()
            _write(database, 1)

            def power_cut() -> None:
                server.kill9()
                server.start()
                _write(database, 2)

            with pytest.raises(SnapshotExpired):
                query.batch(between=_at("units", power_cut))
            query.crash()
            query.finish()
            query.assert_equal()
            query.close()


def test_m21_a_password_that_is_changed_while_history_is_read(newest_postgres: Database, tmp_path: Path) -> None:
    _create(newest_postgres)
    role = newest_postgres.role("reader")
    newest_postgres.execute(f'GRANT SELECT ON orders TO "{role}"')
    dsn, password = newest_postgres.dsn_of(role), newest_postgres.server.password
    with running(newest_postgres, tmp_path, TABLE) as capture:
        query = _query(capture, source=dsn)
        assert query.batch()
        _write(newest_postgres, 1)
        change = f"ALTER ROLE \"{role}\" PASSWORD 'another'"
        refused: list[AccessDenied] = []
        for step in ("units", "nowhere"):  # a task that reads; then the planner, whose snapshot was lost
            with pytest.raises(AccessDenied) as caught:
                query.batch(between=_at(step, lambda: newest_postgres.execute(change)))
            refused.append(caught.value)
            query.crash()
        for error in refused:
            assert "Check the user name and its password" in str(error)
            assert password not in str(error)
        _write(newest_postgres, 2)
        query.close()
        query.options = replace(query.options, source=dsn.replace(password, "another"))
        query.start()
        query.finish()
        query.assert_equal()
        query.close()


@pytest.fixture
def lose_slot(newest_postgres: Database) -> Iterator[Callable[[RunningCapture, str], None]]:
    def lose(capture: RunningCapture, how: str) -> None:
        if how == "dropped":
            drop_slot(newest_postgres)
            assert isinstance(capture.wait_for_end(), SlotLost)
            return
        capture.stop()
        newest_postgres.server.reload(max_slot_wal_keep_size="1MB")
        write_wal(newest_postgres.server, 40)
        assert isinstance(capture.fails_to_start(), SlotInvalidated)

    yield lose
    newest_postgres.server.reload(max_slot_wal_keep_size="-1")


@pytest.mark.parametrize(("how", "step"), [("dropped", "logged"), ("given up by the server", "committed")])
def test_m22_the_slot_is_lost_while_history_is_read(
    newest_postgres: Database,
    tmp_path: Path,
    lose_slot: Callable[[RunningCapture, str], None],
    how: str,
    step: str,
) -> None:
    """What was written after it is in no log: the source is captured anew, and the table read once more."""
    _create(newest_postgres)
    capture = RunningCapture(newest_postgres, tmp_path, [TABLE])
    capture.start()
    query = _query(capture)
    assert query.batch()
    _write(newest_postgres, 1)

    def lose() -> None:
        lose_slot(capture, how)
        _write(newest_postgres, 2)

    query.batch(between=_at(step, lose))
    while query.batch(timeout=0.3):
        pass
    assert not query.planner.is_history_done(), "no log passes its last snapshots"
    _write(newest_postgres, 3)
    assert isinstance(capture.fails_to_start(), ConflictError)
    query.crash()
    assert not renew(str(capture.store), None)
    capture.start()
    assert capture.failure is None, capture.failure
    _write(newest_postgres, 4)
    query.finish()
    query.assert_equal()
    query.close()
    capture.stop()


def test_a_table_that_is_locked_does_not_hold_the_others_and_goes_on_when_it_is_free(
    newest_postgres: Database, tmp_path: Path
) -> None:
    _create(newest_postgres)
    newest_postgres.execute(
        "CREATE TABLE notes (id bigint PRIMARY KEY, state text)",
        "INSERT INTO notes SELECT n, 'new' FROM generate_series(1, 500) n",
    )
    with running(newest_postgres, tmp_path, TABLE, "public.notes") as capture:
        query = Delivering(
            capture, TABLE, "public.notes", split_rows=100, interval_seconds=0.001, parallelism=1, split_kind=None
        )
        assert query.batch()
        session = newest_postgres.connect()
        try:
            session.autocommit = False
            session.execute("LOCK TABLE notes IN ACCESS EXCLUSIVE MODE")
            newest_postgres.execute("INSERT INTO orders VALUES (99999, 'while notes is locked')")
            capture.catch_up()
            for _ in range(30):
                query.batch(timeout=0.1)
                if (99999,) in query.sink.mirror.get(TABLE, {}):
                    break
            assert (99999,) in query.sink.mirror[TABLE]
            told = query.planner.status()["tables"]["public.notes"]
            assert told["phase"] in ("waiting", "reading")
        finally:
            session.rollback()
            session.close()
        query.finish()
        query.assert_equal()
        query.close()
