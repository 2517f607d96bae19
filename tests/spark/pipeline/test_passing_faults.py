"""Faults that pass are waited for: a sink whose server is away, workers that hang and are killed. One run for all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers.postgres import Database, PostgresServer
from tests.spark.pipeline.driven import RunningPipeline

from headwater.pipeline import status as status_module
from headwater.pipeline.config import load
from headwater.pipeline.status import PipelineStatus, read_status

SLOW_SECONDS = 2.0
POSTGRES = '[[sink]]\nname = "copy"\nkind = "postgres"\ndsn = "{dsn}"\ntable = "copy_of_{{table}}"'


@pytest.fixture
def target() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.mark.timeout(300)
def test_a_server_that_is_away_and_workers_that_hang_are_waited_for(
    newest_postgres: Database, target: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_DSN", newest_postgres.dsn)
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)", "INSERT INTO orders VALUES (1, 'a')"
    )
    with target.database() as database:
        target.stop()
        running = RunningPipeline(tmp_path, newest_postgres, '["public.orders"]', POSTGRES.format(dsn=database.dsn))
        running.start()
        try:
            config = load(tmp_path / "pipeline.toml")

            def sinks() -> dict[str, Any]:
                return {one.name: one for one in read_status(config).sinks}

            def copied() -> list[tuple[Any, ...]]:
                try:
                    return database.execute("SELECT id, name FROM public.copy_of_orders ORDER BY id")
                except psycopg.errors.UndefinedTable:
                    return []

            running.wait_for((tmp_path / "lake/public.orders/_delta_log").exists)
            running.wait_until_equal("public.orders")
            running.wait_for(lambda: sinks()["copy"].restarts > 1)
            assert sinks()["copy"].state in ("running", "waiting")
            assert "127.0.0.1" in (sinks()["copy"].error or "")
            target.start()
            running.wait_for(lambda: copied() == [(1, "a")])
            running.wait_for(lambda: sinks()["copy"].error is None)

            monkeypatch.setattr(status_module, "SILENT_SECONDS", SLOW_SECONDS)
            workers = running.named(b"pyspark.daemon")
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
            newest_postgres.execute("INSERT INTO orders VALUES (2, 'b')")
            running.wait_for(lambda: sinks()["delta"].waits_for == "Spark")
            found: PipelineStatus = read_status(config)
            assert not found.is_live
            assert "waiting for Spark since" in running.ask("status")
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            running.wait_until_equal("public.orders")
            running.wait_for(lambda: copied() == [(1, "a"), (2, "b")])
            running.wait_for(lambda: read_status(config).is_live)
            assert running.stop() == 0, running.complaints()
        finally:
            running.close()
