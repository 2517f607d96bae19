"""The least that a batch costs on Spark: a job of one task that does nothing, run as a delivery loop runs its jobs."""

from __future__ import annotations

import statistics
import time
from typing import Any

from headwater.spark.jobs import SparkJobs

_WARM = 15


def job_floor(spark: Any, jobs: int, runs: int) -> float:
    """The best of *runs*: the median seconds of *jobs* such jobs, once they are warm."""
    return min(_one_run(SparkJobs(spark, "floor"), jobs) for _ in range(runs))


def _one_run(floor: SparkJobs, jobs: int) -> float:
    spent = []
    for _ in range(_WARM + jobs):
        began = time.perf_counter()
        floor.run(int, [0], "nothing")
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[_WARM:])
