"""Writers of the data source, driven as Spark drives them: the same calls in the same order, without a JVM."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as st
from pyspark.sql.datasource import CaseInsensitiveDict

from headwater.log_store import LogView
from headwater.spark.source import HeadwaterDataSource
from headwater.spark.types import arrow_schema
from headwater.state import open_reader
from headwater.stream.op import Op

LOG = "shop.orders"
PLAIN = "id INT, v STRING"
CHANGES = f"{PLAIN}, _change_type STRING"


KINDS = {
    "INT": st.IntegerType(),
    "BIGINT": st.LongType(),
    "DOUBLE": st.DoubleType(),
    "STRING": st.StringType(),
    "TIMESTAMP": st.TimestampType(),
    "INTERVAL": st.CalendarIntervalType(),
}


def struct(text: str) -> st.StructType:
    """Names and types by commas; Spark's own reading of such a text needs a JVM."""
    return st.StructType([st.StructField(name, KINDS[kind]) for name, kind in map(str.split, text.split(","))])


class DrivenWriter:
    """One run of a query. *query* is what its checkpoint keeps, *run* what Spark gives each start."""

    def __init__(
        self, folder: Path, schema: str = PLAIN, *, query: str = "q", run: str = "run 1", **options: str
    ) -> None:
        given = {"store": str(folder / "store"), "table": LOG, "checkpointLocation": "c", **options}
        self._source = HeadwaterDataSource(CaseInsensitiveDict(given))
        self._schema = struct(schema)
        self.query, self.run = query, run

    def _writer(self) -> Any:
        return pickle.loads(pickle.dumps(self._source)).streamWriter(self._schema, False)

    def stage(self, number: int, *partitions: Sequence[pa.RecordBatch | Sequence[Any]]) -> list[Any]:
        """The answers of the tasks: each partition is some Arrow batches, or rows."""
        with _task(self.query, self.run, number):
            return [pickle.loads(pickle.dumps(self._task(partition))) for partition in partitions]

    def _task(self, partition: Sequence[Any]) -> Any:
        batches = partition if partition and isinstance(partition[0], pa.RecordBatch) else [self.rows(*partition)]
        return pickle.loads(pickle.dumps(self._writer())).write(iter(batches))

    def rows(self, *rows: Sequence[Any]) -> pa.RecordBatch:
        schema = arrow_schema(self._schema)
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def commit(self, number: int, messages: list[Any]) -> None:
        self._writer().commit(messages, number)

    def abort(self, number: int, messages: list[Any]) -> None:
        self._writer().abort(messages, number)

    def batch(self, number: int, *partitions: Sequence[Any]) -> None:
        self.commit(number, self.stage(number, *partitions))


@contextmanager
def _task(query: str, run: str, number: int) -> Iterator[None]:
    """As in a task of a streaming query."""
    context = TaskContext()
    context._localProperties = {
        "sql.streaming.queryId": query,
        "streaming.sql.batchId": str(number),
        "spark.jobGroup.id": run,
    }
    TaskContext._setTaskContext(context)
    try:
        yield
    finally:
        TaskContext._taskContext = None


def logged(folder: Path, *columns: str) -> list[tuple[Any, ...]]:
    """The rows of the log in the order in which they were written: what happened, and some columns."""
    found = []
    with open_reader(str(folder / "store")) as reader, reader.snapshot() as view:
        shown = LogView.open(view, LOG)
        for batch in shown.read_range(shown.bounds().gone, shown.sealed):
            found += batch.to_pylist()
    found.sort(key=lambda row: row["_position"])
    return [(Op(row["_op"]).change_type, *(row[name] for name in columns or ("id", "v"))) for row in found]


def epochs(folder: Path) -> list[int]:
    """How many rows each epoch has."""
    with open_reader(str(folder / "store")) as reader, reader.snapshot() as view:
        return [end.rows for end in LogView.open(view, LOG).epochs()]


def staged(folder: Path) -> list[str]:
    return [path.name for path in (folder / "store" / "staging").rglob("*") if path.is_file()]
