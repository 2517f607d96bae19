"""Many small tables of one source in one query, under a live writer: all are mirrored, each with its lag told."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.postgres import Database, PostgresServer
from tests.spark.pipeline.driven import RunningPipeline

TABLES = 500 if "HEADWATER_SOAK" in os.environ else 24
LARGEST_BYTES = 4 << 30


@pytest.fixture
def many() -> Iterator[Database]:
    """A server of its own: whoever drops so many tables at once needs as many locks."""
    with PostgresServer(settings={"max_locks_per_transaction": "1024"}) as server, server.database() as database:
        for number in range(TABLES):
            database.execute(
                f"CREATE TABLE t{number} (id bigint PRIMARY KEY, name text)",
                f"INSERT INTO t{number} SELECT n, 'row ' || n FROM generate_series(1, 100) n",
            )
        yield database


def held(pids: list[int]) -> int:
    """The bytes that processes hold, shared ones in parts."""
    found = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return found


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_one_query_mirrors_many_tables_under_a_live_writer(many: Database, tmp_path: Path) -> None:
    running = RunningPipeline(tmp_path, many, '["public.*"]')
    stop = threading.Event()

    def write() -> None:
        rng, number = random.Random(7), 1000
        while not stop.wait(0.1):
            number += 10
            chosen = [rng.randrange(TABLES) for _ in range(10)]
            many.execute(*(f"INSERT INTO t{table} VALUES ({number + n}, 'live')" for n, table in enumerate(chosen)))

    writer = threading.Thread(target=write)
    running.start()
    writer.start()
    try:
        running.wait_for(lambda: running.status().get("live"), 600)
        batches = running.status()["sinks"][0]["batches"]
        running.wait_for(lambda: running.status()["sinks"][0]["batches"] > batches + 2)
        (sink,) = running.status()["sinks"]
        assert len(sink["tables"]) == TABLES
        assert all({"lag_rows", "lag_seconds"} <= one.keys() for one in sink["tables"])
        assert held(running.children()) < LARGEST_BYTES
    finally:
        stop.set()
        writer.join()
    try:
        running.wait_until_equal(*(f"public.t{number}" for number in range(TABLES)))
        assert running.stop() == 0, running.complaints()
    finally:
        running.close()
