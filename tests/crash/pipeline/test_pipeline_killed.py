"""A pipeline whose parts are killed at random while somebody writes: capture, driver, Spark, workers, the database.

The mirror must come out as the source is, and the change log must have every change once. Three rounds; thirty with
``make soak``.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pymysql
import pytest
from tests.db.backfill.shops import ALL, POSTGRES, MySqlShop, PostgresShop, Session, Shop
from tests.db.conftest import started_or_skipped
from tests.servers.mariadb import MariaDbServer
from tests.servers.postgres import PostgresServer
from tests.spark.pipeline.driven import RunningPipeline, are_gone

from headwater.sinks.parquet import read

pytestmark = pytest.mark.crash

MYSQL_SAFE = {"sync-binlog": "1", "innodb-flush-log-at-trx-commit": "1"}
SAFE = {"fsync": "on", "full_page_writes": "on", "logical_decoding_work_mem": "64kB", "wal_sender_timeout": "4s"}
ROUNDS = 30 if os.environ.get("HEADWATER_SOAK") else 3
ROWS = 60_000
VICTIMS = ("capture", "run", "worker", "java", "server")
CHANGES = '[[sink]]\nname = "changes"\nkind = "parquet"\npath = "changes"'


Server = PostgresServer | MariaDbServer


@pytest.fixture(params=[POSTGRES, *(pytest.param(kind, marks=pytest.mark.soak) for kind in ALL if kind != POSTGRES)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = PostgresServer(settings=SAFE) if request.param == POSTGRES else started_or_skipped(request.param, MYSQL_SAFE)
    with made:
        yield made


@pytest.fixture
def shop(server: Server) -> Iterator[Shop]:
    if isinstance(server, PostgresServer):
        with server.database() as database:
            yield _filled(PostgresShop(database))
    else:
        server.execute("CREATE DATABASE `public`")
        yield _filled(MySqlShop(server))


def _filled(shop: Shop) -> Shop:
    shop.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name varchar(40))",
        "CREATE TABLE ledger (id bigint PRIMARY KEY, name varchar(40))",
        f"INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, {ROWS}) n",
        f"INSERT INTO ledger SELECT n, 'old' FROM generate_series(1, {ROWS}) n",
        *(["ANALYZE"] if shop.kind == POSTGRES else []),
    )
    return shop


class Writer:
    """Writes until it is told to stop, through every restart of the database."""

    def __init__(self, shop: Shop, seed: int) -> None:
        self._shop, self._random = shop, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = ROWS
        while not self._stop.is_set():
            try:
                with self._shop.transaction() as session:
                    while not self._stop.wait(0.01):
                        number += 3
                        self._write(session, number)
                        session.commit()
            except (psycopg.OperationalError, pymysql.err.Error, OSError):
                time.sleep(0.2)

    def _write(self, session: Session, number: int) -> None:
        key = self._random.randrange(1, 2 * ROWS)
        for statement in (
            f"INSERT INTO ledger SELECT n, 'new' FROM generate_series({number}, {number + 2}) n",
            f"UPDATE orders SET name = '{number}' WHERE id BETWEEN {key} AND {key + 5}",
            f"DELETE FROM orders WHERE id = {key + 10}",
            f"INSERT INTO orders VALUES ({key + 20}, 'again') ON CONFLICT DO NOTHING",
            f"UPDATE orders SET id = -id WHERE id = {key + 30} AND id NOT IN"
            f" (SELECT -id FROM (SELECT id FROM orders WHERE id = {-key - 30} LIMIT 1) o)",
        ):
            session.execute(statement)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)


def _kill(victim: str, pipeline: RunningPipeline, server: Server, chance: random.Random) -> None:
    if victim == "run":
        children = pipeline.children()
        pipeline.kill9()
        assert are_gone(children)
        pipeline.start()
    elif victim == "server":
        server.kill9()
        time.sleep(chance.random())
        server.start()
    else:
        words = {
            "capture": b"headwater.spark.capture_child",
            "worker": b"pyspark.daemon",
            "java": b"org.apache.spark.deploy.SparkSubmit",
        }[victim]
        for pid in chance.sample(found := pipeline.named(words), min(2, len(found))):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.timeout(300 + 120 * ROUNDS)
def test_nothing_is_lost_or_doubled(server: Server, shop: Shop, tmp_path: Path) -> None:
    seed = int(os.environ.get("HEADWATER_SEED", random.randrange(1 << 30)))
    print(f"HEADWATER_SEED={seed}")
    chance = random.Random(seed)
    backfill = "[backfill]\nsplit_rows = 2000\ninterval_seconds = 0.5\nrows_per_second = 4000\n"
    pipeline = RunningPipeline(tmp_path, shop, '["orders", "ledger"]', backfill + CHANGES)
    pipeline.start()
    writer = Writer(shop, seed)
    try:
        pipeline.wait_for(lambda: pipeline.table("public.orders")["rows"] > 0)
        victims = [*chance.sample(VICTIMS, len(VICTIMS)), *chance.choices(VICTIMS, k=ROUNDS)][:ROUNDS]
        for victim in victims:
            time.sleep(chance.uniform(0.5, 4.0))
            _kill(victim, pipeline, server, chance)
        pipeline.headwater("throttle", "none")
        pipeline.wait_for(lambda: _phases(pipeline) == {"live"})
        writer.stop()
        pipeline.wait_until_equal("public.orders", "public.ledger")
        pipeline.wait_for(lambda: not any(table["lag_rows"] for table in _tables(pipeline)))
    finally:
        writer.stop()
        pipeline.close()
    _check_ledger(tmp_path, shop)
    _check_changes(tmp_path, shop)


def _tables(pipeline: RunningPipeline) -> list[dict[str, object]]:
    return [table for sink in pipeline.status()["sinks"] for table in sink["tables"]]


def _phases(pipeline: RunningPipeline) -> set[object]:
    return {table["phase"] for table in _tables(pipeline)}


def _check_ledger(folder: Path, shop: Shop) -> None:
    """A table of inserts only: each row came once, from history or as a change."""
    told = read(folder / "changes" / "public.ledger")
    assert set(told["_change_type"].to_pylist()) == {"insert"}
    counts = Counter(told["id"].to_pylist())
    assert [key for key, count in counts.items() if count > 1] == []
    assert counts.keys() == {key for (key,) in shop.execute("SELECT id FROM ledger")}
    commits: dict[int, set[int]] = {}
    for version, key in zip(told["_commit_version"].to_pylist(), told["id"].to_pylist(), strict=True):
        commits.setdefault(version, set()).add(key)
    for keys in commits.values():  # three rows of one transaction, or rows of history
        assert len(keys) > 3 or min(keys) <= ROWS or max(keys) - min(keys) <= 2


def _check_changes(folder: Path, shop: Shop) -> None:
    """Nothing is told twice, and what is told comes to the table as it is."""
    told = read(folder / "changes" / "public.orders")
    rows = list(
        zip(
            told["_commit_version"].to_pylist(),
            told["_change_type"].to_pylist(),
            told["id"].to_pylist(),
            told["name"].to_pylist(),
            strict=True,
        )
    )
    assert [row for row, count in Counter(rows).items() if count > 1] == []
    table: dict[int, str] = {}
    for _, kind, key, name in sorted(rows, key=lambda row: row[0]):
        if kind == "delete":
            table.pop(key, None)
        elif kind != "update_preimage":
            table[key] = name
    assert table == dict(shop.execute("SELECT id, name FROM orders"))
