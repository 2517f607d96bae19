"""``headwater upstream run``: what passes is retried and shown; what needs a person ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.servers.postgres import PostgresServer
from tests.spark.pipeline.driven import RunningPipeline
from tests.store.test_delta_upstream import Lake

ROWS = 4_000
RETRIED = "Next attempt in"


class RunningUpstream(RunningPipeline):
    """The command, until everything that the table has is delivered."""

    def __init__(self, folder: Path, path: str, dsn: str) -> None:
        self.folder, self._process = folder, None
        self._words = (
            *("upstream", "run", f"delta:{path}", "--key", "id", "--table", "public.orders", "--once"),
            *("--store", str(folder / "state"), "--rows-per-second", "1000"),
            *("--sink", "postgres", "--set", f"dsn={dsn}"),
        )

    def start(self) -> None:
        command = [sys.executable, "-m", "headwater.cli.main", *self._words]
        with (self.folder / "err").open("ab") as err:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | {"COLUMNS": "200"}, stderr=err, start_new_session=True
            )

    def until(self, done: Callable[[], object]) -> None:
        end = time.monotonic() + 120
        while not done():
            self.check()
            assert time.monotonic() < end, self.complaints()
            time.sleep(0.05)

    def retries(self) -> list[str]:
        """The lines that tell of one."""
        return [line for line in self.complaints().splitlines() if RETRIED in line]


@pytest.fixture
def target() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.mark.timeout(300)
def test_a_sink_that_is_away_and_a_java_that_is_killed_are_retried_until_everything_is_delivered(
    target: PostgresServer, tmp_path: Path
) -> None:
    lake = Lake(tmp_path / "orders", {key: f"v{key}" for key in range(ROWS)})
    with target.database() as mirror:

        def copied() -> int:
            try:
                return int(mirror.value("SELECT count(*) FROM public.orders"))
            except psycopg.errors.UndefinedTable:
                return 0

        target.stop()
        running = RunningUpstream(tmp_path, lake.path, mirror.dsn)
        running.start()
        try:
            running.until(running.retries)
            assert "127.0.0.1" in running.retries()[0], "it shows what failed"
            target.start()
            running.until(copied)
            before = len(running.retries())
            (java,) = running.named(b"SparkSubmit")
            os.kill(java, signal.SIGKILL)
            running.until(lambda: len(running.retries()) > before)
            assert copied() < ROWS
            assert running.wait() == 0, running.complaints()
        finally:
            running.close()
        assert mirror.execute("SELECT count(*), count(DISTINCT id) FROM public.orders") == [(ROWS, ROWS)]


def test_what_needs_a_person_ends_it_at_once(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "orders", {1: "a"}, configuration={})
    running = RunningUpstream(tmp_path, lake.path, "postgresql://app@127.0.0.1:1/shop?nonsense=1")
    running.start()
    try:
        assert running.wait() in (1, 2)
    finally:
        running.close()
    assert running.retries() == []
    assert "next:" in running.complaints()
