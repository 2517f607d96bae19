"""SparkJobs: runs a function over inputs as one Spark job, one task for each input.

On a classic session the job is an RDD; through Spark Connect, where there are none, it is ``mapInArrow`` over a range
of numbers. Inputs and results are pickled and travel with the job; they are small: rows never do.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from headwater.spark.failure import told
from headwater.spark.session import hot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

_RESULT = "result"


class SparkJobs:
    """The jobs of one sink.

    :param name: of the sink: its jobs share a group, which can be cancelled, and a pool of the fair scheduler.
    """

    def __init__(self, spark: SparkSession, name: str) -> None:
        self._spark, self._name = spark, name

    @property
    def _is_classic(self) -> bool:
        return hasattr(self._spark, "_jsparkSession")

    @property
    def parallelism(self) -> int:
        """The task slots of the session, as they are now."""
        if self._is_classic:
            return int(self._spark.sparkContext.defaultParallelism)
        return int(self._spark.conf.get("spark.default.parallelism", "8") or 8)

    def run(self, function: Callable[[T], R], inputs: Sequence[T], description: str) -> list[R]:
        """See :class:`~headwater.backfill.loop.Jobs`."""
        if not self._is_classic:
            return self._run_connect(function, inputs)
        context = self._spark.sparkContext
        context.setJobGroup(self._name, description, interruptOnCancel=True)
        context.setLocalProperty("spark.scheduler.pool", self._name)
        results = context.parallelize(list(inputs), len(inputs)).mapPartitions(_partition(function)).collect()
        return list(results)

    def cancel(self) -> None:
        """End the job that runs, if one does. Any thread."""
        if self._is_classic:
            self._spark.sparkContext.cancelJobGroup(self._name)
        else:
            self._spark.interruptTag(self._name)

    def _run_connect(self, function: Callable[[T], R], inputs: Sequence[T]) -> list[R]:
        self._spark.addTag(self._name)
        numbers: Any = self._spark.range(0, len(inputs), 1, len(inputs))
        rows = numbers.mapInArrow(_arrow_task(function, inputs), f"{_RESULT} binary").collect()
        return [pickle.loads(row[0]) for row in rows]


def _partition(function: Callable[[T], R]) -> Callable[[Iterable[T]], Iterable[R]]:
    @told
    def run(inputs: Iterable[T]) -> list[R]:
        hot()
        return [function(value) for value in inputs]

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
