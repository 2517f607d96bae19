"""M29: history that is read from a standby, beside changes that are captured from its primary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.capture.running import RunningCapture, running
from tests.db.conftest import StartPostgres
from tests.servers.postgres import Database, PostgresServer

from headwater.backfill.errors import SourceBehind
from headwater.backfill.loop import next_batch
from headwater.sources.errors import SourceMisconfigured

pytestmark = pytest.mark.db

TABLE = "public.orders"


@pytest.fixture
def replicated(start_postgres: StartPostgres) -> Iterator[tuple[Database, PostgresServer]]:
    """A database of a primary, and the standby."""
    primary = start_postgres()
    with primary.database() as database:
        database.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, state text)",
            "INSERT INTO orders SELECT n, 'new' FROM generate_series(1, 1000) n",
        )
        standby = start_postgres(primary=primary)
        yield database, standby
        standby.close()


def _pause(standby: PostgresServer) -> None:
    with standby.connect() as session:
        session.execute("SELECT pg_wal_replay_pause()")


def _resume(standby: PostgresServer) -> None:
    with standby.connect() as session:
        session.execute("SELECT pg_wal_replay_resume()")


def test_m29_history_is_read_from_a_standby_that_is_sometimes_behind(
    replicated: tuple[Database, PostgresServer], tmp_path: Path
) -> None:
    database, standby = replicated
    small: dict[str, Any] = {"split_rows": 100, "interval_seconds": 0.001, "parallelism": 1}
    with running(database, tmp_path, TABLE) as capture:
        _pause(standby)
        database.execute("UPDATE orders SET state = 'before' WHERE id % 3 = 0", "DELETE FROM orders WHERE id % 50 = 0")
        with closing(Delivering(capture, TABLE, query="earlier")) as earlier:
            earlier.finish()
            next_batch(earlier.planner, earlier.planner.newest(), 2.0)  # the log forgets what was delivered
        query = Delivering(capture, TABLE, source=standby.dsn(database.name), **small)
        while query.batch(timeout=0.3):
            pass
        assert query.read_rows == 0, "its snapshots lack what the log is past"
        assert "behind the log" in query.planner.status()["tables"][TABLE]["waiting"]
        _resume(standby)
        query.run_until(lambda: query.read_rows > 0)
        _pause(standby)
        database.execute("UPDATE orders SET state = 'within' WHERE id % 4 = 0", "DELETE FROM orders WHERE id % 70 = 0")
        capture.catch_up()
        read = query.read_rows
        while query.batch(timeout=0.3):
            pass
        assert query.read_rows == read
        assert query.planner.has_history
        _resume(standby)
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_m29_a_snapshot_that_a_standby_lost_is_not_replaced_by_an_older_one(
    replicated: tuple[Database, PostgresServer], tmp_path: Path
) -> None:
    database, standby = replicated
    with running(database, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, source=standby.dsn(database.name), split_rows=100)

        def behind(step: str) -> None:
            if step == "logged":
                query.crash()
                _pause(standby)
                database.execute("UPDATE orders SET state = 'later'")
                capture.catch_up()

        with pytest.raises(SourceBehind, match="standby"):
            query.run_until(lambda: query.batch(between=behind))
        _resume(standby)
        query.crash()
        query.finish()
        query.assert_equal()
        query.close()


def test_m29_capture_and_history_run_from_a_standby_alone(
    replicated: tuple[Database, PostgresServer], tmp_path: Path
) -> None:
    database, standby = replicated
    dsn = standby.dsn(database.name)
    capture = RunningCapture(database, tmp_path, [TABLE], dsn)
    refused = capture.fails_to_start()
    assert isinstance(refused, SourceMisconfigured)
    assert refused.next_step is not None
    database.execute(refused.next_step.removeprefix("On the primary, run: "))
    stop = threading.Event()
    # A new slot of a standby needs a record of the primary that comes every 15 s, or when somebody asks for it.
    helper = threading.Thread(target=_log_snapshots, args=(database, stop))
    helper.start()
    try:
        with standby.connect(database.name) as session:
            capture.wait_for(lambda: session.execute("SELECT FROM pg_publication").rowcount == 1)
        capture.start()
    finally:
        stop.set()
        helper.join()
    assert capture.failure is None, capture.failure
    query = Delivering(capture, TABLE, source=dsn, split_rows=100, interval_seconds=0.001, parallelism=1)
    for number in range(3):
        database.execute(
            f"UPDATE orders SET state = 'paid' WHERE id % 10 = {number}", f"DELETE FROM orders WHERE id % 90 = {number}"
        )
        query.batch()
    query.finish()
    query.assert_equal()
    query.close()
    capture.stop()


def _log_snapshots(database: Database, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        database.execute("SELECT pg_log_standby_snapshot()")
