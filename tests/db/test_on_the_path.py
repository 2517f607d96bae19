"""What a pipeline reads, writes and delivers with: these fail when it stops using one of the parts.

Real batches go from real tables into Delta tables, through the loop of a pipeline; every call is recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.db.capture.running import RunningCapture, running
from tests.db.versioned.kept import Kept
from tests.here import Here
from tests.servers.postgres import NEWEST, Database, PostgresServer
from tests.store.test_delta_upstream import Lake
from tests.walked import Walk

from headwater.backfill.claims import Delivery
from headwater.backfill.control import status
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.query import QueryOptions
from headwater.control.command import PauseBackfill, QueryCommand, ResumeBackfill, ThrottleBackfill
from headwater.control.request import ask_query
from headwater.pipeline.config import configure
from headwater.pipeline.sink_state import rewind_sink
from headwater.sinks.delta import DeltaSink

pytestmark = pytest.mark.db

ORDERS, NOTES = "public.orders", "public.notes"
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
"""A source that does not answer: asking it fails."""

PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "captured": {
        "KvLogStoreFactory": ("__init__", "log", "writer"),
        "KvLogStoreWriter": ("init", "write_chunk", "note", "change_schema", "end_epoch"),
        "LogStoreBuffer": ("put", "waiting", "seal_began", "seal_ended", "statistics"),
        "LogStoreState": ("write_chunk", "write_barrier", "change_schema", "discard_unsealed"),
        "LogStoreRowSerde": ("encode", "decode_chunks"),
        "KvLogStoreReader": ("init", "start_from", "next_item", "truncate", "rewind"),
        "LogStoreVnodeProgress": ("apply_ended", "to_json", "from_json"),
        "CdcBackfillState": ("open", "save", "finish"),
        "ParallelizedCdcBackfillExecutor": ("_plan", "_take"),
        "ExternalStorageTable": ("split", "read"),
        "mark_cdc_chunk": (),
        "QueryTables": ("mutate",),
        "BackfillExecutor": ("on_barrier", "filter"),
    },
    "single": {"CdcBackfillExecutor": ("_plan", "_take"), "CdcBackfillState": ("open", "save")},
    "versioned": {
        "SnapshotBackfillExecutor": ("on_barrier", "hand_out", "filter", "deliver", "reach", "save"),
        "BackfillState": ("load", "save"),
        "VnodeStream": ("__iter__",),
        "mark_chunk": (),
        "QueryTables": ("mutate",),
    },
    "upstream": {
        "UpstreamTableExecutor": ("plan", "_apply", "save"),
        "UpstreamStream": ("take", "_take_snapshot", "_take_changes"),
        "BackfillState": ("load", "save"),
        "DeltaUpstream": ("snapshot", "change_log", "hold"),
    },
}


def _rows(table: Path) -> dict[int, dict[str, Any]]:
    found = DeltaTable(table).to_pyarrow_table().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def _batch(loop: DeliveryLoop[Any], timeout: float = 0.2) -> bool:
    if not loop.plan(timeout):
        return False
    loop.deliver()
    return True


def _finish(loop: DeliveryLoop[Any], capture: RunningCapture, seconds: float = 60.0) -> None:
    """Until the backfill is over, and everything that is committed is delivered."""
    end = time.monotonic() + seconds
    while not loop.planner.is_history_done():
        assert time.monotonic() < end, loop.planner.status()
        _batch(loop)
    capture.catch_up()
    while _batch(loop):
        pass


def _ask(loop: DeliveryLoop[Any], state: str, query: str, command: QueryCommand) -> dict[str, Any]:
    """The answer of the running query."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(ask_query(state, query, command)))
    thread.start()
    while thread.is_alive():
        _batch(loop, 0.1)
    (answer,) = answers
    return answer


def _mutation(answer: dict[str, Any]) -> str:
    found: str = answer["barrier"]["mutation"]["type"]
    return found


def _create(database: Database, rows: int) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text)",
        f"INSERT INTO orders SELECT n, 'new' FROM generate_series(1, {rows}) n",
    )


def _captured(database: Database, folder: Path) -> None:
    """A backfill from the source beside live changes, other columns, a TRUNCATE, and a rewind."""
    _create(database, 2000)
    database.execute("CREATE TABLE notes (id bigint PRIMARY KEY)")
    with running(database, folder, ORDERS, NOTES) as capture:
        config = configure(
            {
                "pipeline": {"name": "shop", "store": str(capture.store), "work": str(folder / "work")},
                "source": {"dsn": database.dsn, "tables": [ORDERS, NOTES]},
                "sink": [{"kind": "delta", "path": str(folder / "lake")}],
            },
            folder=folder,
        )
        (section,) = config.sink
        options = replace(config.query_options(section, [ORDERS, NOTES]), split_rows=200, interval_seconds=0.001)
        with DeliveryLoop(Delivery(options, section.open()), Here(), small_in_driver=True) as loop:
            assert _batch(loop, 10.0)
            database.execute("UPDATE orders SET state = 'paid' WHERE id % 3 = 0")
            capture.catch_up()
            for command, wanted in (
                (PauseBackfill(), "pause"),
                (ThrottleBackfill(None), "throttle"),
                (ResumeBackfill(), "resume"),
            ):
                assert _mutation(_ask(loop, options.state_location, options.query, command)) == wanted
            _finish(loop, capture)
            assert _rows(folder / "lake" / ORDERS)[9]["state"] == "paid"
            database.execute("TRUNCATE orders", "INSERT INTO orders VALUES (1, 'new')")
            _finish(loop, capture)
            assert _rows(folder / "lake" / ORDERS) == {1: {"id": 1, "state": "new"}}
            database.execute("ALTER TABLE notes ADD COLUMN text text", "INSERT INTO notes VALUES (1, 'new')")
            _finish(loop, capture)
            assert _rows(folder / "lake" / NOTES) == {1: {"id": 1, "text": "new"}}
            phase, end = "", time.monotonic() + 30
            while phase != "done":
                assert time.monotonic() < end
                _batch(loop)
                known = status(options.state_location, options.query)
                phase = "" if known is None else known.value["tables"][NOTES]["phase"]
            delivered = loop.position.epoch
        assert rewind_sink(config, section, delivered)["epoch"] == delivered


def _single(database: Database, folder: Path) -> None:
    """A backfill from the source, page by page."""
    _create(database, 500)
    with running(database, folder, ORDERS) as capture:
        options = QueryOptions(str(capture.store), database.dsn, "one", (ORDERS,), backfill="single", split_rows=100)
        with DeliveryLoop(Delivery(options, DeltaSink(str(folder / "lake"))), Here()) as loop:
            _finish(loop, capture)
        assert len(_rows(folder / "lake" / ORDERS)) == 500


def _versioned(database: Database, folder: Path) -> None:
    """A new sink, whose backfill comes from our own versioned table; it goes live vnode by vnode."""
    _create(database, 3000)
    with running(database, folder, ORDERS) as capture:
        keeping = Kept(capture, ORDERS)
        keeping.finish()
        options = QueryOptions(
            str(capture.store),
            NOWHERE,
            "later",
            (ORDERS,),
            keyed=True,
            kept=str(keeping.folder),
            split_rows=100,
            interval_seconds=0.0001,
        )
        with DeliveryLoop(Delivery(options, DeltaSink(str(folder / "lake"))), Here()) as loop:
            while not loop.rows:
                _batch(loop)
            assert _mutation(_ask(loop, options.state_location, "later", PauseBackfill())) == "pause"
            begun = len(_rows(folder / "lake" / ORDERS))
            assert 0 < begun < 3000
            database.execute("UPDATE orders SET state = 'paid'")
            capture.catch_up()
            while _batch(loop):
                keeping.batch(0.0)
            live = _rows(folder / "lake" / ORDERS)
            assert len(live) == begun < 3000, "the snapshot is paused"
            assert {row["state"] for row in live.values()} == {"paid"}, "changes of what was read are delivered"
            _ask(loop, options.state_location, "later", ResumeBackfill())
            _finish(loop, capture)
        found = _rows(folder / "lake" / ORDERS)
        assert len(found) == 3000
        assert {row["state"] for row in found.values()} == {"paid"}
        keeping.close()


def _upstream(_: Database, folder: Path) -> None:
    """A Delta table, its snapshot and its change log."""
    lake = Lake(folder / "orders", {key: f"v{key}" for key in range(500)})
    query = QueryOptions.over(lake.upstream(), str(folder / "state"), "copy", max_rows=200)
    with DeliveryLoop(Delivery(query, DeltaSink(str(folder / "lake"))), Here()) as loop:
        while _batch(loop):
            pass
        assert _mutation(_ask(loop, query.state_location, "copy", PauseBackfill())) == "pause"
        assert _mutation(_ask(loop, query.state_location, "copy", ResumeBackfill())) == "resume"
        lake.merge({1: "other", 1000: "new"})
        while _batch(loop):
            pass
    (table,) = (folder / "lake").iterdir()
    found = {key: row["v"] for key, row in _rows(table).items()}
    assert found == {key: f"v{key}" for key in range(500)} | {1: "other", 1000: "new"}


SCENES: dict[str, Callable[[Database, Path], None]] = {
    "captured": _captured,
    "single": _single,
    "versioned": _versioned,
    "upstream": _upstream,
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_product_uses_each_part(
    scene: str, postgres_servers: Callable[[int], PostgresServer], tmp_path: Path
) -> None:
    walk = Walk()
    with postgres_servers(NEWEST).database() as database, walk.installed(), walk.recording():
        SCENES[scene](database, tmp_path)
    wanted = {".".join((part, *call)) for part, calls in PARTS[scene].items() for call in ([one] for one in calls)}
    wanted |= {part for part, calls in PARTS[scene].items() if not calls}
    assert wanted <= walk.functions, sorted(wanted - walk.functions)
