"""SparkJobs: runs a function over inputs as one Spark job, one task for each input.

On a classic session the job is an RDD of numbers, one for each task, which is used again: to send one takes longer
than the job. Through Spark Connect, where there are none, it is ``mapInArrow`` over a range. Inputs and results are
pickled and travel with the function; they are small: rows never do.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from headwater.spark.failure import told
from headwater.spark.session import hot

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

_RESULT = "result"


class SparkJobs:
    """The jobs of one sink.

    :param spark: what runs them, or a function that gives it. That is called for the first job, and can wait.
    :param name: of the sink: its jobs share a group, which can be cancelled, and a pool of the fair scheduler.
    """

    def __init__(
        self, spark: SparkContext | SparkSession | Callable[[], SparkContext | SparkSession], name: str
    ) -> None:
        self._spark, self._name = spark, name
        self._given: Any = None
        self._numbers: dict[int, Any] = {}

    @property
    def parallelism(self) -> int:
        """The task slots, as they are now."""
        spark = self._started()
        if _is_context(spark):
            return int(spark.defaultParallelism)
        return int(spark.conf.get("spark.default.parallelism", "8") or 8)

    def run(self, function: Callable[[T], R], inputs: Sequence[T], description: str) -> list[R]:
        """See :class:`~headwater.backfill.loop.Jobs`."""
        spark = self._begin(description)
        if not _is_context(spark):
            return self._run_connect(spark, function, inputs)
        count = len(inputs)
        if count not in self._numbers:
            self._numbers[count] = spark.parallelize(range(count), count)
        return list(self._numbers[count].mapPartitionsWithIndex(_task(function, inputs)).collect())

    def cancel(self) -> None:
        """End the job that runs, if one does. Any thread."""
        if self._given is not None and _is_context(self._given):
            self._given.cancelJobGroup(self._name)
        elif self._given is not None:
            self._given.interruptTag(self._name)

    def _begin(self, description: str) -> Any:
        """What runs jobs. Those that this thread starts from now on are of the group, and of the pool."""
        spark = self._started()
        if _is_context(spark):
            spark.setJobGroup(self._name, description, interruptOnCancel=True)
            spark.setLocalProperty("spark.scheduler.pool", self._name)
        else:
            spark.addTag(self._name)
        return spark

    def _started(self) -> Any:
        if self._given is None:
            spark: Any = self._spark() if callable(self._spark) else self._spark
            self._given = spark.sparkContext if hasattr(spark, "_jsparkSession") else spark
        return self._given

    def _run_connect(self, spark: Any, function: Callable[[T], R], inputs: Sequence[T]) -> list[R]:
        numbers = spark.range(0, len(inputs), 1, len(inputs))
        rows = numbers.mapInArrow(_arrow_task(function, inputs), f"{_RESULT} binary").collect()
        return [pickle.loads(row[0]) for row in rows]


class FrameJobs(SparkJobs):
    """Runs functions in this thread; what they do with DataFrames are jobs of the same group and pool."""

    def run(self, function: Callable[[T], R], inputs: Sequence[T], description: str) -> list[R]:
        self._begin(description)
        return [function(value) for value in inputs]


def _is_context(spark: Any) -> bool:
    return hasattr(spark, "parallelize")


def _task(function: Callable[[T], R], inputs: Sequence[T]) -> Callable[[int, Iterable[int]], list[R]]:
    @told
    def run(number: int, _: Iterable[int]) -> list[R]:
        hot()
        return [function(inputs[number])]

    return run


def _arrow_task(
    function: Callable[[T], R], inputs: Sequence[T]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    @told
    def results(batches: Iterator[pa.RecordBatch]) -> list[bytes]:
        hot()
        return [pickle.dumps(function(inputs[number])) for batch in batches for number in batch.column(0).to_pylist()]

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays([pa.array(results(batches), pa.binary())], [_RESULT])

    return run
