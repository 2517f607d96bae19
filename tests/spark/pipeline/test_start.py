"""The start of a pipeline: what it does while Java starts, what it shows when that fails, and the next start."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from tests.servers.postgres import Database
from tests.spark.pipeline.driven import RunningPipeline, are_gone

from headwater import Pipeline
from headwater.backfill.control import status as query_status
from headwater.pipeline.config import PipelineConfig, configure
from headwater.pipeline.errors import PipelineFailed
from headwater.pipeline.spark_host import SparkHost
from headwater.spark import class_archive, directories

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # pyspark leaves a pipe open


@pytest.fixture
def fake_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Gives a SPARK_HOME whose Spark is a shell script, as in a process that has started no Spark yet."""
    monkeypatch.setattr(SparkContext, "_gateway", None)
    # else the child that starts Java shuts down the connections of this process to the Java of other tests
    monkeypatch.delattr("py4j.clientserver.ClientServerConnection.__del__", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def create(script: str) -> Path:
        home = tmp_path / "home"
        for part in ("bin", "jars"):
            (home / part).mkdir(parents=True)
        submit = home / "bin/spark-submit"
        submit.write_text(f"#!/bin/sh\ncd {home}\n{script}\n")
        submit.chmod(0o755)
        monkeypatch.setenv("SPARK_HOME", str(home))
        return home

    return create


@pytest.fixture
def orders(newest_postgres: Database, tmp_path: Path) -> Pipeline:
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)", "INSERT INTO orders VALUES (1, 'one')"
    )
    source = {"dsn": newest_postgres.dsn, "tables": ["public.orders"], "heartbeat_seconds": 0.5}
    return Pipeline(source, store=tmp_path / "store").sink("delta", path=tmp_path / "lake")


def wait_until(is_done: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, f"waited {seconds} s"
        time.sleep(0.05)


def test_a_sink_plans_while_java_starts_and_stops_without_it(
    orders: Pipeline, fake_spark: Callable[[str], Path]
) -> None:
    home = fake_spark("touch started; while [ ! -e go ]; do sleep 0.1; done; exit 1")
    config = orders.config
    orders.start()
    try:
        wait_until((home / "started").exists)
        wait_until(lambda: query_status(config.state, config.query(config.sink[0])) is not None)
        wait_until(lambda: orders.status().sinks[0].state == "running")
    finally:
        orders.ask_to_stop()
        (home / "go").touch()
        assert orders.wait(60)
    sink = orders.status().sinks[0]
    assert (sink.error, sink.restarts) == (None, 0)
    gc.collect()


def test_a_missing_java_fails_the_sink(
    orders: Pipeline, fake_spark: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_spark("exit 1")
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    orders.start()
    with pytest.raises(PipelineFailed, match=r"Spark needs Java 17.*/nowhere, which has no bin/java"):
        assert orders.wait(60)
    assert orders.status().sinks[0].restarts == 0


def test_the_archive_is_created_in_the_background_and_ends_with_the_pipeline(
    fake_spark: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(class_archive.OFF, raising=False)
    home = fake_spark("echo $$ >> started; sleep 600")
    config: PipelineConfig = configure({"source": {"dsn": "postgresql://x", "tables": ["t"]}}, folder=tmp_path)
    host = SparkHost(config)
    host.prepare_next_start()
    preparing = host._preparation
    assert preparing is not None
    try:
        wait_until(lambda: (home / "started").exists() and (home / "started").read_text().strip())
        assert os.getpriority(os.PRIO_PROCESS, preparing.pid) == 19
        host.prepare_next_start()
        assert host._preparation is preparing, "once"
    finally:
        host.stop()
    pids = [int(pid) for pid in (home / "started").read_text().split()]
    assert len(pids) == 1
    assert are_gone([preparing.pid, *pids])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_first_run_creates_the_archive_and_later_ones_use_it_unless_it_is_damaged(
    newest_postgres: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(class_archive.OFF, "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", f"-Xlog:class+load:file={tmp_path}/classes-%p.log")
    newest_postgres.execute("CREATE TABLE orders (id bigint PRIMARY KEY, name text)")
    cache = directories.cache_directory()
    pipeline = RunningPipeline(tmp_path, newest_postgres, '["public.orders"]')

    def shared_classes(row: int) -> int:
        """Run the pipeline until a new row is delivered; how many classes its Java has read from the archive."""
        newest_postgres.execute(f"INSERT INTO orders VALUES ({row}, 'new')")
        pipeline.start()
        try:
            pipeline.wait_until_equal("public.orders")
            java = pipeline.named(b"SparkSubmit")[0]
            pipeline.wait_for(lambda: list(cache.glob("*.jsa")), 600)
            assert pipeline.stop() == 0, pipeline.complaints()
        finally:
            pipeline.close()
        return (tmp_path / f"classes-{java}.log").read_text().count("shared objects file (top)")

    assert shared_classes(1) == 0
    (archive,) = cache.glob("*.jsa")
    assert not list(cache.glob(".spark-classes*"))
    assert shared_classes(2) > 3000
    assert list(cache.glob("*.jsa")) == [archive]
    archive.chmod(0o600)
    with archive.open("r+b") as file:
        file.seek(archive.stat().st_size // 2)
        file.write(os.urandom(65536))
    assert shared_classes(3) == 0
