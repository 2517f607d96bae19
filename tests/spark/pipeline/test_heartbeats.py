"""Processes that are killed, frozen or hang are seen in the status within 10 s, and their lag is unknown.

One pipeline for all of it, as its start costs seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers.postgres import Database
from tests.spark.pipeline.driven import RunningPipeline

from headwater.pipeline import status as status_module
from headwater.pipeline.config import load
from headwater.pipeline.metrics import pipeline_metrics
from headwater.pipeline.status import PipelineStatus, read_status

SEEN_SECONDS = 10.0


@pytest.fixture
def running(tmp_path: Path, newest_postgres: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningPipeline]:
    monkeypatch.setenv("SHOP_DSN", newest_postgres.dsn)
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)", "INSERT INTO orders VALUES (1, 'one')"
    )
    made = RunningPipeline(tmp_path, newest_postgres, '["public.orders"]')
    made.start()
    yield made
    made.close()


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def seen(
    read: Callable[[], PipelineStatus], wanted: Callable[[PipelineStatus], bool], seconds: float = 60.0
) -> PipelineStatus:
    """The status, once it is as wanted."""
    end = time.monotonic() + seconds
    while not wanted(found := read()):
        assert time.monotonic() < end, found
        time.sleep(0.2)
    return found


def lags(found: PipelineStatus) -> set[float | None]:
    return {found.capture["lag_seconds"], *(table.lag_seconds for sink in found.sinks for table in sink.tables)}


@pytest.mark.timeout(600)
def test_a_process_that_does_not_answer_is_seen_and_one_that_comes_back_too(
    running: RunningPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(running.folder / "pipeline.toml")

    def read() -> PipelineStatus:
        return read_status(config)

    def is_well(found: PipelineStatus) -> bool:
        return (
            found.is_live
            and (found.state, found.capture["state"], found.sinks[0].state) == ("running",) * 3
            and lags(found) == {0.0}
            and not found.capture.get("last_error")
            and found.sinks[0].error is None
        )

    running.wait_for(lambda: (running.folder / "headwater/shop").exists() and is_well(read()))
    capture = read().capture["pid"]
    with frozen(capture):
        found = seen(read, lambda now: now.capture["state"] == "not responding", SEEN_SECONDS)
        assert lags(found) == {None}
        shown = running.ask("status")
        assert "capture not responding since" in shown
        assert "lag unknown" in shown
        figures = {one.name: one.value for one in pipeline_metrics(config)}
        assert figures["capture_up"] == 0
        assert "capture_lag_seconds" not in figures
        assert "sink_lag_seconds" not in figures
    seen(read, is_well)

    os.kill(capture, signal.SIGKILL)
    found = seen(read, lambda now: now.capture["state"] == "down", SEEN_SECONDS)
    assert lags(found) == {None}
    seen(read, lambda now: now.capture.get("pid") != capture and is_well(now))

    monkeypatch.setattr(status_module, "SILENT_SECONDS", 6.0)  # the promise was tested above
    monkeypatch.setattr(status_module, "SILENT_SECONDS", 3.0)
    with frozen(running.pid):
        found = seen(read, lambda now: now.state == "not responding", SEEN_SECONDS)
        assert lags(found) == {None}
        assert (found.capture["state"], found.sinks[0].state) == ("unknown", "unknown")
    monkeypatch.undo()
    monkeypatch.setenv("SHOP_DSN", running.database.dsn)
    seen(read, is_well)

    running.kill9()
    found = seen(read, lambda now: not now.running, SEEN_SECONDS)
    assert (found.state, found.capture["state"]) == ("interrupted", "not running")
    assert lags(found) == {None}
