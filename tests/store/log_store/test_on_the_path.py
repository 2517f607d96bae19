"""What the product reads and writes its logs with: these fail when it stops using the parts of the log store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.written_log import options, write

from headwater.backfill.planner import QueryPlanner
from headwater.log_store.status import log_status
from headwater.state import open_reader


def test_a_query_plans_its_batches_with_the_reader_and_truncates_through_it(tmp_path: Path) -> None:
    location = str(tmp_path / "store")
    epochs = [write(location, number) for number in range(4)]

    def reader_of(planner: QueryPlanner) -> dict[str, Any]:
        found: dict[str, Any] = planner.status()["reader"]
        return found

    planner = QueryPlanner(options(location, max_epochs=2))
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
    planner = QueryPlanner(options(location, max_epochs=2))
    try:
        planner.plan(second)
        assert reader_of(planner)["truncated_epoch"] == epochs[3]
    finally:
        planner.close()
    with open_reader(location) as store:
        (status,) = log_status(store)
    assert [(one.name, one.delivered) for one in status.consumers] == [("mirror", epochs[3])]
