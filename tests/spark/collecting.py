"""Streams of the data source under test, and what they have delivered."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.servers.postgres import Database


class Stream:
    """A stream of one table into Parquet files; it can be stopped and started again with the same checkpoint."""

    def __init__(self, spark: Any, database: Database, folder: Path, table: str, **options: str) -> None:
        self._spark = spark
        self.folder = folder
        self.options = {"source": database.dsn, "store": str(folder / "store"), "table": table, **options}
        self.schema: Any = None
        self.query: Any = None

    def load(self) -> Any:
        reader = self._spark.readStream.format("headwater").options(**self.options)
        return (reader if self.schema is None else reader.schema(self.schema)).load()

    def start(self, **trigger: Any) -> None:
        writer = self.load().writeStream.format("parquet").option("checkpointLocation", str(self.folder / "checkpoint"))
        self.query = writer.trigger(**trigger or {"processingTime": "0 seconds"}).start(str(self.folder / "rows"))

    def run(self) -> None:
        """All that there is by now."""
        self.start(availableNow=True)
        assert self.query.awaitTermination(120), "the query did not end"

    def rows(self) -> list[dict[str, Any]]:
        """What was delivered, in the order of the commits."""
        if not list((self.folder / "rows").glob("*.parquet")):
            return []
        found = self._spark.read.option("mergeSchema", "true").parquet(str(self.folder / "rows")).collect()
        return sorted((row.asDict() for row in found), key=lambda row: row["_commit_version"])

    def wait_for(self, count: int, seconds: float = 60.0) -> list[dict[str, Any]]:
        end = time.monotonic() + seconds
        while len(rows := self.rows()) < count:
            assert time.monotonic() < end, f"{len(rows)} of {count} rows in {seconds} s"
            assert self.query.exception() is None, self.query.exception()
            time.sleep(0.1)
        return rows

    def stop(self) -> None:
        if self.query is not None:
            self.query.stop()


def mirrored(rows: Iterable[dict[str, Any]], key: str = "id") -> dict[Any, dict[str, Any]]:
    """The table that the rows tell of, in their order."""
    made: dict[Any, dict[str, Any]] = {}
    for row in rows:
        if row["_change_type"] in ("delete", "update_preimage"):
            made.pop(row[key], None)
        else:
            made[row[key]] = {name: value for name, value in row.items() if not name.startswith("_")}
    return made
