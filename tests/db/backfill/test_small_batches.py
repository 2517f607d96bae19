"""Small batches are staged in the driver; large ones, and one that was open when its process ended, as jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from deltalake import DeltaTable
from tests.db.capture.running import running
from tests.here import Here
from tests.servers.postgres import Database

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.sinks.delta import DeltaSink

pytestmark = pytest.mark.db

T = TypeVar("T")
R = TypeVar("R")


class Counted(Here):
    """Counts the jobs, and how often it was asked how many tasks run at a time: Spark must run for either."""

    jobs = asked = 0

    @property
    def parallelism(self) -> int:
        self.asked += 1
        return super().parallelism

    def run(self, function: Callable[[T], R], inputs: Sequence[T], description: str) -> list[R]:
        self.jobs += 1
        return super().run(function, inputs, description)


def test_small_batches_are_staged_without_a_job(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT n, 'old' FROM generate_series(1, 100) n",
    )
    counted = Counted()
    with running(newest_postgres, tmp_path, "public.orders") as capture:
        options = QueryOptions(
            store=str(capture.store), source=newest_postgres.dsn, query="lake", tables=("public.orders",), keyed=True
        )
        delivery = Delivery(options, DeltaSink(str(tmp_path / "lake")))

        def deliver(loop: DeliveryLoop[QueryPlanner], *statements: str) -> int:
            """How many jobs it took."""
            before = counted.jobs
            newest_postgres.execute(*statements)
            capture.catch_up()
            while loop.plan(0.2) or not loop.planner.is_history_done():
                if loop.plan(0.0):
                    loop.deliver()
            return counted.jobs - before

        with DeliveryLoop(delivery, counted, small_in_driver=True) as loop:
            assert deliver(loop, "SELECT 1") == 0  # history
            assert deliver(loop, "UPDATE orders SET note = 'new' WHERE id < 50") == 0
            assert not counted.asked, "a small batch does not wait for Spark"
            assert deliver(loop, "INSERT INTO orders SELECT n, 'many' FROM generate_series(1001, 7000) n") > 0
            large = "INSERT INTO orders SELECT n, repeat('x', 1000000) FROM generate_series(501, 506) n"
            assert deliver(loop, large) > 0
            newest_postgres.execute("UPDATE orders SET note = 'open' WHERE id = 1")
            capture.catch_up()
            assert loop.plan(5.0)
        with DeliveryLoop(delivery, counted, small_in_driver=True) as loop:
            assert deliver(loop, "SELECT 1") == 1  # it may have ended the process that tried it
            assert deliver(loop, "DELETE FROM orders WHERE id = 2") == 0
        rows = DeltaTable(tmp_path / "lake" / "public.orders").to_pyarrow_table(columns=["id", "note"]).to_pydict()
        expected = newest_postgres.execute("SELECT id, note FROM orders ORDER BY id")
        assert sorted(zip(rows["id"], rows["note"], strict=True)) == expected
