"""Readers of the data source, driven as Spark drives them: the same calls in the same order, without a JVM."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import types as st
from pyspark.sql.datasource import CaseInsensitiveDict
from tests.servers.postgres import Database

from headwater.log_store import LogView
from headwater.spark.data_source_api import ReadAllAvailable
from headwater.spark.source import HeadwaterDataSource
from headwater.spark.types import arrow_schema
from headwater.state import open_reader


def source_of(database: Database, folder: Path, table: str, **options: str) -> HeadwaterDataSource:
    given = {"source": database.dsn, "store": str(folder / "store"), "table": table, **options}
    return HeadwaterDataSource(CaseInsensitiveDict(given))


def read_all(reader: Any, schema: st.StructType, partitions: Any) -> list[dict[str, Any]]:
    """What tasks give: each gets the reader and its partition as copies."""
    rows = []
    for partition in partitions:
        task, mine = pickle.loads(pickle.dumps((reader, partition)))
        for batch in task.read(mine):
            assert isinstance(batch, pa.RecordBatch)
            assert batch.schema.equals(arrow_schema(schema))
            assert 0 < batch.num_rows <= 32768
            rows += batch.to_pylist()
    return rows


def wait_for_changes(folder: Path, rows: int, log: str = "public.t") -> int:
    """Until a log has so many changes; the newest epoch by then."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with open_reader(folder / "store") as reader, reader.snapshot() as view:
            shown = LogView.open(view, log)
            if sum(epoch.rows for epoch in shown.epochs()) >= rows:
                return int(shown.sealed)
        time.sleep(0.05)
    raise AssertionError(f"no {rows} changes in the log")


class DrivenStream:
    """One run of a query. *offset* is what the checkpoint has: the end of the last batch that was committed."""

    def __init__(self, source: HeadwaterDataSource, offset: dict[str, int] | None = None, schema: Any = None) -> None:
        self.schema: st.StructType = schema or source.schema()
        self.reader: Any = source.streamReader(self.schema)
        self.offset = offset
        self.batches = 0

    def plan(self, limit: Any = None) -> dict[str, int] | None:
        """The end of the next batch; ``None`` when there is nothing."""
        start = self.offset or self.reader.initialOffset()
        end = self.reader.latestOffset(start, limit or ReadAllAvailable())
        return None if end == start else end

    def next_end(self) -> dict[str, int]:
        """The end of the next batch, which there is."""
        for _ in range(60):
            if (end := self.plan()) is not None:
                return end
        raise AssertionError("nothing to do")

    def rows(self, end: dict[str, int]) -> list[dict[str, Any]]:
        """The rows of the batch that ends at *end*."""
        start = self.offset or self.reader.initialOffset()
        return read_all(self.reader, self.schema, self.reader.partitions(start, end))

    def batch(self, limit: Any = None) -> list[dict[str, Any]] | None:
        """One batch, delivered."""
        end = self.plan(limit)
        if end is None:
            return None
        rows = self.rows(end)
        if self.offset is not None:
            self.reader.commit(self.offset)
        self.offset = end
        self.batches += 1
        return rows

    def until(self, count: int) -> list[dict[str, Any]]:
        """Batches until there are *count* rows."""
        rows: list[dict[str, Any]] = []
        for _ in range(60):
            rows += self.batch() or []
            if len(rows) >= count:
                return rows
        raise AssertionError(f"{len(rows)} of {count} rows")

    def available_now(self) -> list[dict[str, Any]]:
        self.reader.prepareForTriggerAvailableNow()
        rows: list[dict[str, Any]] = []
        while (batch := self.batch()) is not None:
            rows += batch
        return rows

    def stop(self) -> None:
        self.reader.stop()

    def kill(self) -> None:
        """As if the process of the reader were gone: nothing is said to anybody."""
        opened, self.reader._opened = self.reader._opened, None
        opened.close()
