"""The walk of one UPDATE: which modules a row visits between its arrival and its commit in a Delta table.

A real row goes from a real Postgres through a capture session, the log store and a delivery loop into a Delta table, in
one process. Its batch is small, so the loop stages it itself, as in a pipeline. The path is warm: the same UPDATE was
delivered before, and the backfill is over.

What is counted: every module of `headwater` of which a Python function is entered in any thread from the UPDATE until
the row is committed at the sink and acknowledged at the source. That includes what a loop does while it waits. It does
not include :data:`UPKEEP`: work that goes on at intervals and not because of a row (requests, status, the check of the
source's catalog), with everything that is called inside. A compiled function belongs to the module that calls it, and
the methods that `dataclass` generates to none.

A function only forwards where its whole body is one call of a function of the product with its own arguments.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from deltalake import DeltaTable
from tests.db.capture.running import RunningCapture
from tests.here import Here
from tests.servers.postgres import NEWEST, Database, PostgresServer
from tests.walked import Walk

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.query import QueryOptions
from headwater.sinks.delta import DeltaSink

pytestmark = pytest.mark.db

MOST_MODULES: Final = 93
"""How many the walk visits at most; one less where the loop does not have to wait. It may only go down."""

FORWARDS: Final = frozenset(
    {
        "headwater.backfill.cdc.backfill.CdcBackfill.filter",
        "headwater.backfill.cdc.backfill.CdcBackfill.save",
        "headwater.backfill.store_logs.StoreLogs.save",
    }
)
"""Methods that only forward, because a protocol with several implementations asks for them."""

UPKEEP: Final = frozenset(
    {
        ("headwater.backfill.planner", "_serve"),
        ("headwater.backfill.planner", "_tell"),
        ("headwater.capture.session", "_look"),
        ("headwater.capture.session", "serve"),
        ("headwater.capture.statistics", "look"),
        ("headwater.control.request", "open"),
    }
)


def _deliver(loop: DeliveryLoop[Any], seconds: float = 60.0) -> None:
    """Deliver the next batch."""
    end = time.monotonic() + seconds
    while not loop.plan(1.0):
        assert time.monotonic() < end
    loop.deliver()


@pytest.fixture(scope="module")
def walk(postgres_servers: Callable[[int], PostgresServer], tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """The walk of one UPDATE."""
    folder, walk = tmp_path_factory.mktemp("walk"), Walk(UPKEEP)
    with postgres_servers(NEWEST).database() as database, walk.installed():
        _update(database, folder, walk)
    return walk


def _update(database: Database, folder: Path, walk: Walk) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text)",
        "INSERT INTO orders SELECT n, 'new' FROM generate_series(1, 100) n",
    )
    capture = RunningCapture(database, folder, ["public.orders"])
    capture.options = replace(capture.options, heartbeat_seconds=3600.0, schema_check_seconds=3600.0)
    capture.start()
    assert capture.failure is None
    options = QueryOptions(str(capture.store), database.dsn, "mirror", ("public.orders",), keyed=True)
    delivery = Delivery(options, DeltaSink(str(folder / "lake")))
    try:
        with DeliveryLoop(delivery, Here(), small_in_driver=True) as loop:
            while not loop.planner.is_history_done():
                if loop.plan(0.2):
                    loop.deliver()
            for state in ("warm", "warmer"):
                database.execute(f"UPDATE orders SET state = '{state}' WHERE id = 7")
                _deliver(loop)
            while loop.plan(1.5):
                loop.deliver()
            sealed = capture.capture.statistics.epoch
            with walk.recording():
                database.execute("UPDATE orders SET state = 'paid' WHERE id = 7")
                _deliver(loop)
                capture.wait_for(lambda: capture.capture.statistics.epoch > sealed)
    finally:
        capture.stop()
    rows = DeltaTable(folder / "lake" / "public.orders").to_pyarrow_table().to_pylist()
    assert len(rows) == 100
    assert [row["state"] for row in rows if row["id"] == 7] == ["paid"]


def test_a_row_visits_few_modules_on_its_way(walk: Walk) -> None:
    assert len(walk.modules) <= MOST_MODULES, "\n".join(walk.modules)


def test_no_function_on_the_way_only_forwards(walk: Walk) -> None:
    assert set(walk.forwarding) <= FORWARDS
