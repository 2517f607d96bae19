"""What the product reads and writes its logs with: these fail when it stops using the parts of the log store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.capture.stream_log import StreamTable, write_batch
from headwater.capture.stream_records import StreamBatch
from headwater.log_store.columns import OP
from headwater.log_store.status import log_status
from headwater.sources.table import SourceColumn
from headwater.state import open_reader

TABLE = StreamTable("main", "t", (SourceColumn("id", pa.int64(), "bigint", 0),), ("id",))


def write(location: str, number: int) -> int:
    """One epoch of ten rows."""
    ids = pa.array(range(10 * number, 10 * number + 10), pa.int64())
    rows = pa.record_batch([ids, pa.array([1] * 10, pa.int8())], names=["id", OP])
    epoch = write_batch(location, TABLE, StreamBatch("q", "run", number), lambda: [rows])
    assert epoch is not None
    return epoch


def test_a_query_plans_its_batches_with_the_reader_and_truncates_through_it(tmp_path: Path) -> None:
    location = str(tmp_path / "store")
    epochs = [write(location, number) for number in range(4)]
    options = QueryOptions(location, "", "mirror", ("main.t",), history=False, max_epochs=2)

    def reader_of(planner: QueryPlanner) -> dict[str, Any]:
        found: dict[str, Any] = planner.status()["reader"]
        return found

    planner = QueryPlanner(options)
    try:
        start = planner.initial()
        first = planner.plan(start)
        assert first.epoch == epochs[1]
        assert (reader_of(planner)["ranges"], reader_of(planner)["read_epoch"]) == (1, epochs[1])
        assert sum(unit.rows for unit in planner.units(start, first)) == 20
        second = planner.plan(first)
        assert second.epoch == epochs[3]
        assert reader_of(planner)["ranges"] == 2
    finally:
        planner.close()
    planner = QueryPlanner(options)
    try:
        planner.plan(second)
        assert reader_of(planner)["truncated_epoch"] == epochs[3]
    finally:
        planner.close()
    with open_reader(location) as store:
        (status,) = log_status(store)
    assert [(one.name, one.delivered) for one in status.consumers] == [("mirror", epochs[3])]
