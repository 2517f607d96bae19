"""A query that keeps tables of a real database, staged and committed as the tasks of Spark do it, without Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.db.capture.running import RunningCapture
from tests.store.versioned.written import Rows

from headwater.backfill.keeping import Keeping
from headwater.backfill.offset import QueryOffset
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.kept_tables import KeptTables
from headwater.sinks.sink import Committed
from headwater.sources.table import SourceTable
from headwater.spark.claim_check import ClaimDelivery, ClaimReader, ClaimWriter
from headwater.versioned import VersionedTable


class Kept:
    """The query ``keep`` over a running capture."""

    def __init__(
        self, capture: RunningCapture, *tables: str, sink: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.capture = capture
        self.folder = capture.folder / "tables"
        told = {"interval_seconds": 0.0, "retention_seconds": 0.0} | (sink or {})
        self.sink = KeptTables(str(self.folder), **told)
        self.options = QueryOptions(
            **{"store": str(capture.store), "source": capture.database.dsn, "query": "keep", "tables": tables}
            | {"keyed": True}
            | options
        )
        self.checkpoint: QueryOffset | None = None
        self.logged: QueryOffset | None = None
        self.open()

    def open(self) -> None:
        def committed(table: SourceTable, backfill: str) -> Committed:
            return self.sink.committed(table, "keep", backfill)

        def recover(generation: int, backfill: str, tables: Sequence[SourceTable]) -> None:
            with Coordinator(self.options.store, "keep", generation) as coordinator:
                coordinator.recover(self.sink, backfill, tables)

        self.planner = QueryPlanner(
            self.options,
            committed=committed,
            recover=recover,
            keeping=Keeping.of(self.sink, "keep"),
            takeover=True,
        )

    def crash(self) -> None:
        """As kill -9 of the driver: what is in memory goes."""
        self.planner.close()
        self.open()

    def batch(self, timeout: float = 0.2) -> bool:
        """One batch; whether there was one."""
        start = self.checkpoint or self.planner.initial()
        end = self.logged if self.logged not in (None, start) else self.planner.advance(start, timeout=timeout)
        assert end is not None
        if end != start:
            self.logged = end
            self.deliver(start, end)
        return end != start

    def deliver(self, start: QueryOffset, end: QueryOffset) -> None:
        delivery = ClaimDelivery(self.options, self.sink, "/nowhere")
        reader, writer = ClaimReader(delivery), ClaimWriter(delivery)
        reader._opened = self.planner
        messages = [
            writer.write(reader.read(partition)) for partition in reader.partitions(start.to_json(), end.to_json())
        ]
        writer.commit(list(messages), 0)
        self.checkpoint = end

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
        self.planner.close()


@contextmanager
def kept(capture: RunningCapture, *tables: str, **options: Any) -> Iterator[Kept]:
    made = Kept(capture, *tables, **options)
    try:
        yield made
    finally:
        made.close()
