"""The number of tasks changes inside a snapshot, 2 → 5 → 3: nothing is lost, and nothing is read twice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.db.capture.running import RunningCapture, running
from tests.db.versioned.kept import kept
from tests.here import Here
from tests.servers.postgres import Database

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.query import QueryOptions
from headwater.backfill.units import SnapshotUnit, SplitUnit
from headwater.sinks.delta import DeltaSink
from headwater.sinks.sink import HistoryPart, Staged, Token
from headwater.sources.table import SourceTable

pytestmark = pytest.mark.db

TABLE = "public.orders"
ROWS = 600_000
SPLIT_ROWS = 25_000
"""More than a task is worth its while for: so each plan has a task for every slot."""
WAYS = (2, 5, 3)

T = TypeVar("T")
R = TypeVar("R")


class Slots(Here):
    """As many tasks at a time as a test says; it keeps how many of each job read a backfill."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = WAYS[0]
        self.tasks: list[int] = []

    @property
    def parallelism(self) -> int:
        return self.slots

    def run(self, function: Callable[[T], R], inputs: Sequence[T], description: str) -> list[R]:
        reading = [
            task
            for task in inputs
            if isinstance(task, Sequence) and any(isinstance(claim.unit, SplitUnit | SnapshotUnit) for claim in task)
        ]
        if reading:
            self.tasks.append(len(reading))
        return super().run(function, inputs, description)


@dataclass(frozen=True)
class CountedDelta(DeltaSink):
    """Delta tables; it counts how often each key of the backfill was read."""

    read: Counter[int] = field(default_factory=Counter)

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        def counted() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                self.read.update(batch.column("id").to_pylist())
                yield batch

        return super().stage_history(table, token, part, counted())


def _create(database: Database) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, v int)",
        f"INSERT INTO orders SELECT n, 0 FROM generate_series(1, {ROWS}) n",
        "ANALYZE orders",
    )


def _write(database: Database, number: int) -> None:
    """Somebody writes while the snapshot is read."""
    database.execute(
        f"UPDATE orders SET v = {number} WHERE id % 1000 = {number}",
        f"DELETE FROM orders WHERE id % 1000 = {500 + number}",
        f"INSERT INTO orders VALUES ({-number}, {number})",
    )


def _change_ways(
    database: Database,
    capture: RunningCapture,
    options: QueryOptions,
    sink: CountedDelta,
    between: Callable[[], Any] = lambda: None,
) -> Slots:
    """Deliver everything, two plans with each parallelism and the rest with the last."""
    jobs = Slots()
    end = time.monotonic() + 300

    def batch(loop: DeliveryLoop[Any]) -> bool:
        assert time.monotonic() < end, loop.planner.status()
        if not loop.plan(0.2):
            return False
        loop.deliver()
        between()
        return True

    with DeliveryLoop(Delivery(options, sink), jobs) as loop:
        for number, slots in enumerate(WAYS, start=1):
            jobs.slots = slots
            wanted = len(jobs.tasks) + 2
            while len(jobs.tasks) < wanted:
                batch(loop)
            assert loop.planner.has_history, "all of it is inside the snapshot"
            _write(database, number)
        while not loop.planner.is_history_done():
            batch(loop)
        capture.catch_up()
        while batch(loop):
            pass
    return jobs


def _assert_whole(database: Database, folder: Path, sink: CountedDelta, jobs: Slots) -> None:
    found = DeltaTable(folder / "lake" / TABLE).to_pyarrow_table()
    rows = Counter(zip(found.column("id").to_pylist(), found.column("v").to_pylist(), strict=True))
    assert rows == Counter(database.execute("SELECT id, v FROM orders"))
    assert max(sink.read.values()) == 1, "read twice"
    assert len(sink.read) >= len(rows) - len(WAYS), "each row comes from the snapshot, but for those that came later"
    two, five, three = (jobs.tasks[place] for place in (1, 3, 5))
    assert 2 <= two < three < five, "the tasks of the second plan with each number of slots"


def test_a_backfill_from_the_source(newest_postgres: Database, tmp_path: Path) -> None:
    _create(newest_postgres)
    with running(newest_postgres, tmp_path, TABLE) as capture:
        options = QueryOptions(
            str(capture.store),
            newest_postgres.dsn,
            "copy",
            (TABLE,),
            split_rows=SPLIT_ROWS,
            interval_seconds=0.001,
        )
        sink = CountedDelta(str(tmp_path / "lake"))
        jobs = _change_ways(newest_postgres, capture, options, sink)
        _assert_whole(newest_postgres, tmp_path, sink, jobs)


def test_a_backfill_from_a_versioned_table(newest_postgres: Database, tmp_path: Path) -> None:
    _create(newest_postgres)
    with running(newest_postgres, tmp_path, TABLE) as capture, kept(capture, TABLE) as keeping:
        keeping.finish(300.0)
        options = QueryOptions(
            str(capture.store),
            newest_postgres.dsn,
            "later",
            (TABLE,),
            keyed=True,
            kept=str(keeping.folder),
            split_rows=SPLIT_ROWS,
            interval_seconds=0.001,
        )
        sink = CountedDelta(str(tmp_path / "lake"))
        jobs = _change_ways(newest_postgres, capture, options, sink, lambda: keeping.batch(0.0))
        _assert_whole(newest_postgres, tmp_path, sink, jobs)
