"""Jobs of a delivery loop on a real Spark: results, errors, parallelism, cancel."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark import TaskContext
from tests.db.capture.running import running
from tests.servers.postgres import Database
from tests.written_log import options, write

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.query import QueryOptions
from headwater.errors import TransientError
from headwater.pipeline.sink_query import LoopThread
from headwater.sinks.open import open_sink
from headwater.sinks.parquet import ParquetSink
from headwater.sinks.sink import Staged, Token
from headwater.sources.table import SourceTable
from headwater.spark.failure import Failure, Remedy
from headwater.spark.jobs import FrameJobs, SparkJobs

CONNECT = """
from pyspark.sql import SparkSession
from tests.spark.test_jobs import check
spark = SparkSession.builder.remote("local[2]").getOrCreate()
check(spark)
spark.stop()
"""


def double(number: int) -> int:
    return 2 * number


def fail(number: int) -> int:
    raise TransientError("The bucket is away.", next_step="Wait.")


def break_down(number: int) -> int:
    raise ValueError(f"no such number: {number}")


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def check(spark: Any) -> None:
    """What a loop relies on; by whatever session."""
    jobs = SparkJobs(spark, "shop lake")
    assert jobs.parallelism >= 2
    assert sorted(jobs.run(double, [1, 2, 3], "headwater shop 7")) == [2, 4, 6]
    with pytest.raises(Exception) as raised:  # noqa: PT011 - Spark wraps it
        jobs.run(fail, [1], "headwater shop 8")
    failure = Failure.of(raised.value)
    assert (failure.kind, failure.remedy, failure.message) == ("TransientError", Remedy.RETRY, "The bucket is away.")
    with pytest.raises(Exception) as broken:  # noqa: PT011 - Spark wraps it
        jobs.run(break_down, [7], "headwater shop 8")
    failure = Failure.of(broken.value)
    assert (failure.kind, failure.remedy) == ("ValueError", Remedy.UNSURE)
    assert failure.message == "ValueError: no such number: 7"
    check_cancel(jobs, sleep)


def check_cancel(jobs: SparkJobs, function: Callable[[float], None]) -> None:
    """A job that takes two minutes ends when it is cancelled."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            jobs.run(function, [120.0], "headwater shop 9")
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while thread.is_alive():
        assert time.monotonic() < end
        jobs.cancel()
        thread.join(0.2)
    assert raised


def test_jobs_of_a_classic_session(spark: Any) -> None:
    check(spark)


def test_what_a_function_does_with_frames_is_in_the_group_and_the_pool_of_its_sink(spark: Any) -> None:
    context, jobs = spark.sparkContext, FrameJobs(spark, "shop view")
    assert jobs.run(lambda rows: spark.range(rows).count(), [3, 4], "shop 7") == [3, 4]
    assert len(context.statusTracker().getJobIdsForGroup("shop view")) >= 2
    names = ("spark.job.description", "spark.scheduler.pool")
    assert [context.getLocalProperty(name) for name in names] == ["shop 7", "shop view"]

    def slow(seconds: float) -> None:
        spark.range(1).rdd.map(lambda _: time.sleep(seconds)).collect()

    check_cancel(jobs, slow)


@dataclass(frozen=True, kw_only=True)
class DescribedSink(ParquetSink):
    """Its tasks write down how Spark describes their job, and in which pool it is."""

    notes: str

    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
    ) -> Staged:
        context = TaskContext.get()
        assert context is not None
        names = ("spark.job.description", "spark.scheduler.pool", "spark.jobGroup.id")
        Path(self.notes).write_text(json.dumps([context.getLocalProperty(name) for name in names]))
        return super().stage_changes(table, token, batches, truncated)


def test_the_job_of_a_batch_names_its_sink_and_epoch_and_is_in_the_pool_of_the_sink(spark: Any, tmp_path: Path) -> None:
    epoch = write(str(tmp_path / "store"), 0)
    sink = DescribedSink(str(tmp_path / "lake"), notes=str(tmp_path / "notes"))
    delivery = Delivery(options(str(tmp_path / "store")), sink)
    with DeliveryLoop(delivery, SparkJobs(spark, delivery.name)) as loop:
        assert loop.plan(0.0)
        loop.deliver()
    assert json.loads((tmp_path / "notes").read_text()) == [f"headwater mirror {epoch}", "mirror", "mirror"]


def test_a_spark_that_does_not_work_ends_a_loop_that_delivers_small_batches_without_it(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(str(tmp_path / "store"), 0)
    delivery = Delivery(options(str(tmp_path / "store")), open_sink("parquet", path=str(tmp_path / "lake")))
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nowhere/python")
    running = LoopThread(lambda: delivery, delivery.name, SparkJobs(spark, "checked"), small_in_driver=True)
    end = time.monotonic() + 60
    while running.is_alive:
        assert time.monotonic() < end, "the loop goes on"
        time.sleep(0.05)
    assert running.error is not None
    assert "/nowhere/python" in str(running.error)
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup("checked")) == 1


def test_small_tables_share_a_task_and_a_large_one_is_spread_over_the_slots(
    spark: Any, newest_postgres: Database, tmp_path: Path
) -> None:
    small = [f"small{number}" for number in range(24)]
    newest_postgres.execute(*(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in (*small, "large")))
    tables = tuple(f"public.{name}" for name in (*small, "large"))
    context = spark.sparkContext

    def tasks() -> list[int]:
        """Of each job so far."""
        tracker = context.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in sorted(tracker.getJobIdsForGroup("many"))]
        return [tracker.getStageInfo(stage).numTasks for job in jobs for stage in job.stageIds]

    with running(newest_postgres, tmp_path, *tables) as capture:
        wanted = QueryOptions(str(capture.store), newest_postgres.dsn, "many", tables, history=False)
        delivery = Delivery(wanted, open_sink("delta", path=str(tmp_path / "lake"), mode="changes"))
        with DeliveryLoop(delivery, SparkJobs(spark, "many")) as loop:

            def deliver(*statements: str) -> list[int]:
                before = len(tasks())
                with newest_postgres.connect() as session, session.transaction():
                    for statement in statements:
                        session.execute(statement)
                capture.catch_up()
                while loop.plan(0.2):
                    loop.deliver()
                return tasks()[before:]

            assert deliver(*(f"INSERT INTO {name} VALUES (1)" for name in small[:8])) == [1]
            fill = "INSERT INTO large SELECT generate_series(1, 200000)"
            assert deliver(fill, *(f"INSERT INTO {name} VALUES (2)" for name in small)) == [8]
    files = pa.table(DeltaTable(tmp_path / "lake" / "public.large").get_add_actions())
    shares = files["num_records"].to_pylist()
    assert len(shares) == context.defaultParallelism
    assert sum(shares) == 200_000
    assert max(shares) < 110_000


@pytest.mark.soak
@pytest.mark.skipif(find_spec("grpc") is None, reason="Spark Connect needs grpcio")
def test_jobs_through_spark_connect() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONNECT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
