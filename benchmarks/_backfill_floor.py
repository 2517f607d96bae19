"""The least that a micro-batch costs here: one row from a Python source into a Python writer that does nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit

from headwater.spark.session import hot

FORMAT = "headwater_floor"
_WARM = 15


class FloorSource(DataSource):
    """A stream with one row in every batch."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return "n BIGINT"

    def streamReader(self, schema: Any) -> FloorReader:  # noqa: N802 - Spark's name
        return FloorReader(int(self.options["batches"]))

    def streamWriter(self, schema: Any, overwrite: bool) -> FloorWriter:  # noqa: N802 - Spark's name
        hot()
        return FloorWriter()


class FloorReader(DataSourceStreamReader):
    def __init__(self, batches: int) -> None:
        self._batches = batches

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"n": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        hot()
        return {"n": min(start["n"] + 1, self._batches)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(end["n"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        hot()
        yield pa.RecordBatch.from_arrays([pa.array([partition.value], pa.int64())], ["n"])


class FloorWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        hot()
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        hot()


def micro_batch_floor(spark: Any, folder: Path, batches: int, runs: int) -> float:
    """The best of *runs* queries: the median seconds of *batches* such batches, once they are warm."""
    spark.dataSource.register(FloorSource)
    return min(_one_query(spark, folder / f"floor{run}", batches) for run in range(runs))


def _one_query(spark: Any, checkpoint: Path, batches: int) -> float:
    rows = spark.readStream.format(FORMAT).option("batches", _WARM + batches).load()
    query = rows.writeStream.format(FORMAT).option("checkpointLocation", str(checkpoint)).start()
    try:
        query.processAllAvailable()
        spent = [batch["durationMs"]["triggerExecution"] for batch in query.recentProgress if batch["numInputRows"]]
    finally:
        query.stop()
    return float(statistics.median(spent[_WARM:])) / 1000
