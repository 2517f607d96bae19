"""``headwater upstream run`` from a Delta table that somebody writes to, into Postgres; driver and workers are killed
in the snapshot, in the change log and live.

The table in Postgres must come out as the Delta table is, and what was read before a kill stays read. One story: each
start of Spark costs seconds. ``make soak`` runs it; the steps, one by one and without Spark, are killed in
``tests/crash/backfill/test_upstream_killed.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers.postgres import Database, PostgresServer
from tests.spark.pipeline.driven import RunningPipeline, are_gone
from tests.store.test_delta_upstream import Lake

from headwater.backfill.plans import UpstreamRecords
from headwater.state import Catalog, WriteBatch
from headwater.state.query_store import QueryReader, own_state

pytestmark = pytest.mark.crash

ROWS = 60_000
SECONDS = 240.0
WORKERS = b"pyspark.daemon"


class RunningUpstream(RunningPipeline):
    """The command, and what it tells."""

    def __init__(self, folder: Path, database: Database, lake: Lake) -> None:
        super().__init__(folder, database, "[]")
        self.store = folder / "state"
        self._run = (
            *("upstream", "run", f"delta:{lake.path}", "--key", "id", "--table", "public.orders"),
            *("--store", str(self.store), "--query", "copy", "--rows-per-second", "3000"),
            *("--sink", "postgres", "--set", f"dsn={database.dsn}"),
        )

    def start(self) -> None:
        command, environment = self._command(*self._run)
        with (self.folder / "err").open("ab") as err:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=err, stderr=err, start_new_session=True
            )

    def told(self) -> dict[str, Any]:
        shown = self.headwater("upstream", "status", "--store", str(self.store), "--json").stdout
        found: list[dict[str, Any]] = json.loads(shown) if shown else []
        nothing = {"snapshot_rows": 0, "snapshot_done": False, "consumed_version": None, "newest_version": None}
        return found[0] if found else nothing

    def throttle(self, rows: str) -> None:
        asked = self.headwater("throttle", rows, "--store", str(self.store), "--query", "copy")
        assert asked.returncode == 0, asked.stderr

    def until(self, done: Callable[[dict[str, Any]], bool]) -> None:
        """Until it tells so; workers that are killed do not end it."""
        end = time.monotonic() + SECONDS
        while not done(self.told()):
            assert time.monotonic() < end, self.told()
            self.check()

    def kill(self, words: bytes) -> None:
        """Those of its processes that are called so."""
        for pid in self.named(words):
            os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> int:
        """kill -9 of the driver and all that it started; how many rows are read again by the next start."""
        children = self.children()
        self.kill9()
        assert are_gone(children)
        with QueryReader(own_state(str(self.store), "copy"), "copy") as reader, reader.snapshot() as view:
            records = UpstreamRecords(Catalog.load(view), WriteBatch())
            return sum(part.rows for part in records.read(view)[1].parts)


class Writer:
    """Writes versions of the Delta table until it is told to stop."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.5):
            number += 1
            key = number * 7919 % ROWS
            self._lake.merge(dict.fromkeys(range(key, key + 50), f"{number}"))
            self._lake.delta.delete(f"id = {key + 60}")
            self._lake.append({ROWS + number: "new"})

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def mirror() -> Iterator[Database]:
    with PostgresServer() as server, server.database() as made:
        yield made


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "orders", {key: f"v{key}" for key in range(ROWS)})


@pytest.fixture
def running(mirror: Database, lake: Lake, tmp_path: Path) -> Iterator[RunningUpstream]:
    made = RunningUpstream(tmp_path, mirror, lake)
    yield made
    made.close()


def _rows(lake: Lake) -> list[tuple[Any, ...]]:
    found = lake.delta.to_pyarrow_table().to_pydict()
    return sorted(zip(found["id"], found["v"], strict=True))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_m1_a_query_over_a_delta_table_goes_on_whatever_is_killed_in_each_phase(
    mirror: Database, lake: Lake, running: RunningUpstream
) -> None:
    writer = Writer(lake)
    again: list[int] = []
    try:
        running.start()
        running.until(lambda told: told["snapshot_rows"] > 0)
        version, before = (running.told()[name] for name in ("snapshot_version", "snapshot_rows"))
        running.kill(WORKERS)  # in the snapshot
        running.until(lambda told: told["snapshot_rows"] > before + 3000)
        assert not running.told()["snapshot_done"]
        again.append(running.kill_all())
        running.start()
        running.until(lambda told: told["snapshot_rows"] > before + 9000)
        assert running.told()["snapshot_version"] == version, "resumed, not begun anew"
        running.throttle("none")
        running.until(lambda told: told["snapshot_done"])
        running.throttle("200")  # so that the catch-up lasts
        running.until(lambda told: told["snapshot_done"] and (told["consumed_version"] or 0) > 0)
        told = running.told()
        assert told["consumed_version"] < told["newest_version"], "in the change log"
        running.kill(WORKERS)
        running.until(lambda now: now["consumed_version"] > told["consumed_version"])
        again.append(running.kill_all())
        running.start()
        running.throttle("none")
        running.until(lambda told: told["newest_version"] - told["consumed_version"] < 30)  # live
        running.kill(WORKERS)
        at = running.told()["newest_version"]
        running.until(lambda told: (told["consumed_version"] or 0) > at)
        again.append(running.kill_all())
        running.start()
    finally:
        writer.stop()
    assert max(again) < 0.1 * ROWS, again
    newest = lake.delta.version()
    running.until(lambda told: (told["consumed_version"] or 0) >= newest)
    expected = _rows(lake)
    end = time.monotonic() + SECONDS
    while sorted(mirror.execute("SELECT id, v FROM orders")) != expected:
        assert time.monotonic() < end
        time.sleep(0.5)
