"""A sink is added later, from the tables that we keep, while somebody writes; driver and workers are killed meanwhile.

The mirror must come out as the source is, no row of history may be asked of the source, and what was read before a kill
stays read. One story: each start of Spark costs seconds. ``make soak`` runs it; the steps of it, one by one and without
Spark, are killed in ``tests/crash/backfill``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers.postgres import Database, PostgresServer
from tests.spark.pipeline.driven import RunningPipeline, are_gone

from headwater.backfill.snapshot.record import SnapshotRecord, SnapshotTables
from headwater.state import Catalog, WriteBatch
from headwater.state.query_store import QueryReader, pipeline_state

pytestmark = pytest.mark.crash

ROWS = 60_000
TABLES = ("public.orders", "public.ledger")
PIPELINE = """
[pipeline]
name = "shop"
[source]
dsn_env = "SHOP_DSN"
tables = ["orders", "ledger"]
heartbeat_seconds = 0.5
[spark]
master = "local[2]"
[backfill]
split_rows = 1000
interval_seconds = 0.2
rows_per_second = 6000
[[sink]]
kind = "table"
interval_seconds = 0.5
"""
SLOW = "[limits]\nmax_rows = 300\n"
"""Batches of so few changes that the catch-up after the snapshot lasts."""
WORKERS = b"pyspark.daemon"


@pytest.fixture
def shop() -> Iterator[Database]:
    with PostgresServer() as server, server.database() as made:
        made.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, name text)",
            "CREATE TABLE ledger (id bigint PRIMARY KEY, name text)",
            f"INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, {ROWS}) n",
            f"INSERT INTO ledger SELECT n, 'old' FROM generate_series(1, {ROWS}) n",
            "ANALYZE",
        )
        yield made


@pytest.fixture
def pipeline(tmp_path: Path, shop: Database) -> Iterator[RunningPipeline]:
    made = RunningPipeline(tmp_path, shop, "[]")
    (tmp_path / "pipeline.toml").write_text(PIPELINE.replace("[[sink]]", f"{SLOW}[[sink]]"))
    made.start()
    yield made
    made.close()


class Writer:
    """Writes to orders until it is told to stop."""

    def __init__(self, database: Database) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(database.dsn,), daemon=True)
        self._thread.start()

    def _run(self, dsn: str) -> None:
        number = 0
        with psycopg.connect(dsn, autocommit=True) as session:
            while not self._stop.wait(0.02):
                number += 1
                key = number * 7919 % (2 * ROWS) + 1
                with session.transaction():
                    session.execute("UPDATE orders SET name = %s WHERE id = %s", [str(number), key])
                    session.execute("DELETE FROM orders WHERE id = %s", [key + 10])
                    session.execute("INSERT INTO orders VALUES (%s, 'again') ON CONFLICT DO NOTHING", [key + 20])

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)


def _scans(shop: Database) -> list[tuple[Any, ...]]:
    """How often tables were read at the source, the ledger by any means."""
    return shop.execute(
        "SELECT relname, seq_scan, CASE relname WHEN 'ledger' THEN idx_scan END FROM pg_stat_user_tables"
        " WHERE relname IN ('orders', 'ledger') ORDER BY 1"
    )


def _table(pipeline: RunningPipeline, sink: str, name: str) -> dict[str, Any]:
    sinks = {one["name"]: one for one in pipeline.status()["sinks"]}
    found: dict[str, dict[str, Any]] = {one["name"]: one for one in sinks.get(sink, {"tables": []})["tables"]}
    return found.get(name, {"phase": "", "rows": 0})


def _records(folder: Path) -> dict[str, SnapshotRecord]:
    """What is durable of the backfills: what a start reads again is what is pending here."""
    with (
        QueryReader(pipeline_state(str(folder / "headwater/shop"), "shop"), "shop-delta") as reader,
        reader.snapshot() as view,
    ):
        tables = SnapshotTables(Catalog.load(view), WriteBatch())
        found = {name: tables.record(view, name) for name in TABLES}
    return {name: record for name, record in found.items() if record is not None}


def _phase_is(pipeline: RunningPipeline, *phases: str) -> bool:
    return any(_table(pipeline, "delta", name)["phase"] in phases for name in TABLES)


def _epoch(pipeline: RunningPipeline) -> int:
    """Up to which changes are in the new sink."""
    return max((one["epoch"] for one in pipeline.status()["sinks"] if one["name"] == "delta"), default=0)


def _killed_and_goes_on(pipeline: RunningPipeline, words: bytes) -> None:
    """Processes of the run are killed; it goes on by itself, and delivers."""
    before = _epoch(pipeline)
    found = pipeline.named(words)
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    pipeline.wait_for(lambda: _epoch(pipeline) > before)


def _phases(pipeline: RunningPipeline) -> set[str]:
    return {record.phase.value for record in _records(pipeline.folder).values()}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_m1_a_sink_that_is_added_later_comes_from_the_kept_tables_whatever_is_killed_in_each_phase(
    pipeline: RunningPipeline, shop: Database
) -> None:
    pipeline.wait_for(lambda: all(_table(pipeline, "table", name)["phase"] == "live" for name in TABLES))
    writer = Writer(shop)
    before = _scans(shop)
    again: list[int] = []
    try:
        added = pipeline.headwater("add-sink", "delta", "--set", "path=lake")
        assert added.returncode == 0, added.stderr
        pipeline.wait_for(lambda: _phase_is(pipeline, "reading") and _table(pipeline, "delta", TABLES[0])["rows"] > 0)
        assert _table(pipeline, "delta", TABLES[0])["origin"] == "tables"
        for pid in pipeline.named(WORKERS):  # in the snapshot
            os.kill(pid, signal.SIGKILL)
        rows = _table(pipeline, "delta", TABLES[0])["rows"]
        pipeline.wait_for(lambda: _table(pipeline, "delta", TABLES[0])["rows"] > rows)
        assert _phases(pipeline) == {"snapshot"}
        _killed(pipeline, again)  # the driver, in the snapshot
        pipeline.start()
        pipeline.wait_for(lambda: pipeline.headwater("throttle", "none", "--sink", "delta").returncode == 0)
        pipeline.wait_for(lambda: "snapshot" not in _phases(pipeline))
        _killed_and_goes_on(pipeline, WORKERS)
        _killed(pipeline, again)  # the driver, in the change log or live
        settings = pipeline.folder / "pipeline.toml"
        settings.write_text(settings.read_text().replace(SLOW, ""))
        pipeline.start()
        pipeline.wait_for(lambda: all(_table(pipeline, "delta", name)["phase"] == "live" for name in TABLES))
        _killed_and_goes_on(pipeline, WORKERS)  # live
        _killed(pipeline, again)
        pipeline.start()
        pipeline.wait_for(lambda: _phases(pipeline) == {"live"} and _epoch(pipeline))
    finally:
        writer.stop()
    assert max(again) < 0.1 * ROWS * len(TABLES), again
    shop.execute("SELECT pg_sleep(1.5)")  # the server counts late
    assert _scans(shop) == before
    pipeline.wait_until_equal(*TABLES)
    assert pipeline.stop() == 0


def _killed(pipeline: RunningPipeline, again: list[int]) -> None:
    """kill -9 of the driver and all that it started.

    :param again: is told how many rows of the snapshot are read once more.
    """
    children = pipeline.children()
    pipeline.kill9()
    assert are_gone(children)
    records = _records(pipeline.folder)
    plans = [plan for record in records.values() for plan in record.pending.values()]
    again.append(sum(part.rows for plan in plans for part in plan.parts))
