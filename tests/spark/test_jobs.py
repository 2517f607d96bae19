"""Jobs of a delivery loop on a real Spark: results, errors, parallelism, cancel."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import TransientError
from headwater.spark.failure import Failure, Remedy
from headwater.spark.jobs import SparkJobs

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
    raised_by_cancel: list[BaseException] = []
    began = threading.Event()

    def run() -> None:
        began.set()
        try:
            jobs.run(sleep, [120.0], "headwater shop 9")
        except Exception as error:
            raised_by_cancel.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    began.wait()
    end = time.monotonic() + 60
    while thread.is_alive():
        assert time.monotonic() < end
        jobs.cancel()
        thread.join(0.2)
    assert raised_by_cancel


def test_jobs_of_a_classic_session(spark: Any) -> None:
    check(spark)


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
