"""Connections, passwords and logs that are lost while history is read: every row comes, none is told twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.backfill.shops import (
    MARIADB,
    MYSQL,
    POSTGRES,
    MySqlShop,
    PostgresShop,
    Shop,
    on,
    running,
    shared,
)
from tests.db.capture.captured import drop_slot, write_much_wal
from tests.db.capture.running import RunningCapture
from tests.db.conftest import StartPostgres, StartServer
from tests.db.mysql.test_failures import purge
from tests.servers.mariadb import MariaDbServer
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import TcpProxy

from headwater.backfill import backfill_plans, reader
from headwater.backfill.errors import LogBehind
from headwater.capture.renewal import renew
from headwater.errors import ConflictError, TransientError
from headwater.sources.errors import AccessDenied, LogPurged, SlotInvalidated, SlotLost

pytestmark = pytest.mark.db

TABLE = "public.orders"
ROWS = 1000


def _create(shop: Shop) -> None:
    shop.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text)",
        f"INSERT INTO orders SELECT n * 2, 'new' FROM generate_series(1, {ROWS}) n",
    )


def _write(shop: Shop, number: int) -> None:
    """A little of everything, all over the keys."""
    shop.execute(
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


@pytest.mark.parametrize(
    ("known_sink", "shop"),
    [(True, server) for server in on(MARIADB)] + [(False, server) for server in on(POSTGRES)],
    indirect=["shop"],
)
def test_m21_connections_that_are_lost_at_each_step_of_a_batch(shop: Shop, tmp_path: Path, known_sink: bool) -> None:
    _create(shop)
    with TcpProxy("127.0.0.1", shop.port) as proxy, running(shop, tmp_path, TABLE) as capture:
        dsn = shop.dsn.replace(f":{shop.port}/", f":{proxy.port}/")
        query = _query(capture, source=dsn, known_sink=known_sink)
        lost = 0
        for number, step in enumerate(("planned", "logged", "units", "read")):
            _write(shop, number)
            try:
                query.batch(between=_at(step, proxy.cut))
            except TransientError:
                lost += 1
                query.crash()
            query.batch()
        # who has no snapshot of others reads on over another connection
        assert lost >= 2 if shop.kind == POSTGRES else not lost, "the snapshot is gone with its connection"
        assert query.planner.has_history
        proxy.refuse()
        proxy.cut()
        _write(shop, 5)
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


@pytest.mark.parametrize("kind", on(MARIADB))
def test_m21_a_server_that_is_killed_while_history_is_read(
    kind: str, start_postgres: StartPostgres, start_mysql: StartServer, tmp_path: Path
) -> None:
    if kind == POSTGRES:
        postgres = start_postgres()
        with postgres.database() as database:
            _killed(PostgresShop(database), postgres, tmp_path)
        return
    server = start_mysql(kind, {"sync-binlog": "1", "innodb-flush-log-at-trx-commit": "1"})
    server.execute("CREATE DATABASE `public`")
    _killed(MySqlShop(server), server, tmp_path)


def _killed(shop: Shop, server: PostgresServer | MariaDbServer, folder: Path) -> None:
    _create(shop)
    with running(shop, folder, TABLE) as capture:
        query = _query(capture)
        assert query.batch()
        for number, step in enumerate(("units", "planned")):
            _write(shop, number)

            def power_cut(number: int = number) -> None:
                server.kill9()
                server.start()
                _write(shop, number + 7)

            try:
                query.batch(between=_at(step, power_cut))
            except TransientError:
                query.crash()
        query.finish()
        query.assert_equal()
        assert capture.capture.statistics.restarts > 0
        query.close()


@shared(MYSQL)
def test_m21_a_password_that_is_changed_while_history_is_read(shop: Shop, tmp_path: Path) -> None:
    _create(shop)
    dsn, password = shop.reader("orders"), shop.password
    with running(shop, tmp_path, TABLE) as capture:
        query = _query(capture, source=dsn)
        assert query.batch()
        _write(shop, 1)
        refused: list[AccessDenied] = []
        for step in ("units", "nowhere"):  # a task that reads; then the planner, whose snapshot was lost
            with pytest.raises(AccessDenied) as caught:
                query.batch(between=_at(step, lambda: shop.change_password("another")))
            refused.append(caught.value)
            query.crash()
        for error in refused:
            assert "Check the user name and its password" in str(error)
            assert password not in str(error)
        _write(shop, 2)
        query.close()
        query.options = replace(query.options, source=dsn.replace(password, "another"))
        query.start()
        query.finish()
        query.assert_equal()
        query.close()


DROPPED, GIVEN_UP, PURGED = "its slot is dropped", "the server gave its slot up", "its files are purged"


@pytest.fixture
def lose_log(shop: Shop) -> Iterator[Callable[[RunningCapture, str], None]]:
    def lose(capture: RunningCapture, how: str) -> None:
        if isinstance(shop, PostgresShop) and how == DROPPED:
            drop_slot(shop.database)
            assert isinstance(capture.wait_for_end(), SlotLost)
            return
        capture.stop()
        if isinstance(shop, PostgresShop):
            shop.database.server.reload(max_slot_wal_keep_size="1MB")
            write_much_wal(shop.database.server)
            assert isinstance(capture.fails_to_start(), SlotInvalidated)
        elif isinstance(shop, MySqlShop):
            _write(shop, 11)
            shop.execute("FLUSH LOGS")
            purge(shop.server)
            assert isinstance(capture.fails_to_start(), LogPurged)

    yield lose
    if isinstance(shop, PostgresShop):
        shop.database.server.reload(max_slot_wal_keep_size="-1")


@pytest.mark.parametrize(
    ("how", "step", "shop"),
    [
        (DROPPED, "logged", POSTGRES),
        (GIVEN_UP, "committed", POSTGRES),
        *((PURGED, "logged", server) for server in on(MARIADB, never=[POSTGRES])),
        *((PURGED, "committed", server) for server in on(never=[POSTGRES])),
    ],
    indirect=["shop"],
)
def test_m22_the_log_is_lost_while_history_is_read(
    shop: Shop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lose_log: Callable[[RunningCapture, str], None],
    how: str,
    step: str,
) -> None:
    """What was written after it is in no log: the source is captured anew, and the table read once more."""
    _create(shop)
    monkeypatch.setattr(reader, "LOG_SECONDS", 1.0)
    capture = shop.capture(tmp_path, [TABLE])
    capture.start()
    query = _query(capture)
    assert query.batch()
    _write(shop, 1)

    def lose() -> None:
        lose_log(capture, how)
        _write(shop, 2)

    try:
        query.batch(between=_at(step, lose))
        while query.batch(timeout=0.3):
            pass
    except LogBehind:  # a task that waits for the log to come to what it reads
        assert shop.kind != POSTGRES
        query.crash()
    assert not query.planner.is_history_done(), "no log passes its last snapshots"
    _write(shop, 3)
    assert isinstance(capture.fails_to_start(), ConflictError)
    query.crash()
    assert renew(str(capture.store), None)
    capture.start()
    assert capture.failure is None, capture.failure
    _write(shop, 4)
    query.finish()
    query.assert_equal()
    query.close()
    capture.stop()


@shared(POSTGRES)
def test_a_table_that_is_locked_does_not_hold_the_others_and_goes_on_when_it_is_free(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill_plans, "LOCKED_SECONDS", 1.0)
    _create(shop)
    shop.execute(
        "CREATE TABLE notes (id bigint PRIMARY KEY, state text)",
        "INSERT INTO notes SELECT n, 'new' FROM generate_series(1, 500) n",
    )
    with running(shop, tmp_path, TABLE, "public.notes") as capture:
        query = Delivering(
            capture, TABLE, "public.notes", split_rows=100, interval_seconds=0.001, parallelism=1, split_kind=None
        )
        assert query.batch()
        with shop.transaction() as session:
            session.execute("LOCK TABLE notes IN ACCESS EXCLUSIVE MODE")
            shop.execute("INSERT INTO orders VALUES (99999, 'while notes is locked')")
            capture.catch_up()
            for _ in range(30):
                query.batch(timeout=0.1)
                if (99999,) in query.sink.mirror.get(TABLE, {}):
                    break
            assert (99999,) in query.sink.mirror[TABLE]
            told = query.planner.status()["tables"]["public.notes"]
            assert told["phase"] in ("waiting", "reading")
            session.rollback()
        query.finish()
        query.assert_equal()
        query.close()
