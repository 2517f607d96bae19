"""A query that keeps tables of a real database, staged and committed as the tasks of Spark do it, without Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.db.capture.running import RunningCapture
from tests.here import Here
from tests.store.versioned.written import Rows

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.sinks.kept_tables import KeptTables
from headwater.versioned import VersionedTable


class Kept:
    """The query ``keep`` over a running capture."""

    def __init__(
        self,
        capture: RunningCapture,
        *tables: str,
        sink: dict[str, Any] | None = None,
        parallelism: int = 2,
        **options: Any,
    ) -> None:
        self.capture, self.parallelism = capture, parallelism
        self.folder = capture.folder / "tables"
        told = {"interval_seconds": 0.0, "retention_seconds": 0.0} | (sink or {})
        self.sink = KeptTables(str(self.folder), **told)
        self.options = QueryOptions(
            **{"store": str(capture.store), "source": capture.database.dsn, "query": "keep", "tables": tables}
            | {"keyed": True}
            | options
        )
        self.open()

    def open(self) -> None:
        self.loop = DeliveryLoop(Delivery(self.options, self.sink), Here(self.parallelism))

    @property
    def planner(self) -> QueryPlanner:
        return self.loop.planner

    def crash(self) -> None:
        """As kill -9 of the driver: what is in memory goes."""
        self.loop.close()
        self.open()

    def batch(self, timeout: float = 0.2) -> bool:
        """One batch; whether there was one."""
        if not self.loop.plan(timeout):
            return False
        self.loop.deliver()
        return True

    def finish(self, seconds: float = 60.0) -> None:
        """Until all history is there, and all changes by now."""
        end = time.monotonic() + seconds
        self.capture.catch_up()
        while self.batch() or not self.planner.is_history_done():
            assert time.monotonic() < end, self.planner.status()
        self.batch(0.0)  # the sink is told that it has everything

    def table(self, name: str) -> VersionedTable:
        return VersionedTable.open(self.options.store, name, self.folder)

    def source_rows(self, name: str, key: Sequence[str] = ("id",)) -> Rows:
        """As the database has them now."""
        catalog = f"SELECT attname FROM pg_attribute WHERE attrelid = '{name}'::regclass AND attnum > 0"
        shown = self.capture.database.execute(f"{catalog} AND NOT attisdropped ORDER BY attnum")
        names = [column for (column,) in shown]
        found = self.capture.database.execute(f"SELECT {', '.join(names)} FROM {name}")
        rows = [dict(zip(names, row, strict=True)) for row in found]
        return {tuple(row[column] for column in key): row for row in rows}

    def close(self) -> None:
        self.loop.close()


@contextmanager
def kept(capture: RunningCapture, *tables: str, **options: Any) -> Iterator[Kept]:
    made = Kept(capture, *tables, **options)
    try:
        yield made
    finally:
        made.close()
