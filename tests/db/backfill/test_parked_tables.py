"""Tables that a sink did not take, and that come back: whatever the query knew of it, nothing of them is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.backfill.shops import MARIADB, MYSQL, POSTGRES, Shop, running, shared
from tests.db.capture.running import RunningCapture
from tests.query_state import group_rows

from headwater.backfill.planner import QueryPlanner
from headwater.backfill.plans import QueryState
from headwater.backfill.units import Unit
from headwater.capture.renewal import renew
from headwater.failpoints import FailpointError, arm
from headwater.pipeline.sink_state import let_back
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.delivery import TableFailure, read_parked
from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import SinkUnreachable
from headwater.state.query_store import QueryStore, open_query_store

pytestmark = pytest.mark.db

ORDERS, ENTRIES = "public.orders", "public.entries"


class Parking(Delivering):
    """A query whose sink does not take the table :attr:`refused`."""

    refused: str | None = None
    is_sink_away = False

    def start(self) -> None:
        def parked() -> dict[str, str]:
            found = read_parked(self.options.state_location, self.options.query)
            return {name: table.reason for name, table in found.items()}

        def recover(store: QueryStore, *_: object) -> None:
            self.coordinator = Coordinator(store)
            _ = self.coordinator.records
            if self.is_sink_away:
                raise SinkUnreachable("The sink is away.")

        self.planner = QueryPlanner(
            self.options, committed=self.sink.committed, recover=recover, parked=parked, takeover=True
        )

    def read(self, unit: Unit) -> list[pa.RecordBatch]:
        if unit.table.full_name != self.refused:
            return super().read(unit)
        nowhere = DeltaSink(str(self.capture.folder / "nowhere"))
        self.coordinator.deliver(nowhere, [], [TableFailure(unit.table, "another type")], tables=self.options.tables)
        return []


@pytest.fixture
def capture(shop: Shop, tmp_path: Path) -> Iterator[RunningCapture]:
    for name in ("orders", "entries"):
        shop.execute(
            f"CREATE TABLE {name} (id bigint PRIMARY KEY, note text)",
            f"INSERT INTO {name} SELECT n, 'old' FROM generate_series(1, 100) n",
        )
    with running(shop, tmp_path, ORDERS, ENTRIES) as made:
        yield made
    arm("")


def change(capture: RunningCapture, key: int) -> None:
    for name in ("orders", "entries"):
        capture.database.execute(
            f"INSERT INTO {name} VALUES ({key}, 'new')", f"DELETE FROM {name} WHERE id = {key} - 100"
        )
    capture.catch_up()


def park(query: Parking, key: int = 101) -> None:
    """Deliver a batch of which the sink does not take one table."""
    change(query.capture, key)
    query.refused = ENTRIES
    assert query.batch()
    query.refused = None
    assert list(read_parked(query.options.state_location, query.options.query)) == [ENTRIES]


@shared(MARIADB)
def test_one_that_comes_back_before_its_query_knew_of_it_is_read_once_more(capture: RunningCapture) -> None:
    query = Parking(capture, ORDERS, ENTRIES)
    query.finish()
    park(query)
    query.planner.close()  # killed before anything else was planned
    assert let_back(query.options.store, query.options.state_location, query.options.query) == [ENTRIES]
    query.start()
    change(capture, 102)
    query.finish()
    query.assert_equal()
    query.close()


@shared(POSTGRES)
def test_one_that_is_taken_out_while_the_sink_is_away_is_read_once_more_when_it_is_back(
    capture: RunningCapture,
) -> None:
    query = Parking(capture, ORDERS, ENTRIES)
    query.finish()
    query.planner.close()
    both, query.options = query.options, replace(query.options, tables=(ORDERS,))
    query.is_sink_away = True
    with pytest.raises(SinkUnreachable):
        query.start()
    query.is_sink_away = False
    assert list(group_rows(query.options.state_location, query.options.query)) == [ORDERS]
    with open_query_store(query.options.state_location, query.options.query) as store:
        assert QueryState(store).table(ENTRIES).left, "its log does not wait, and nothing says that changes are missing"
    change(capture, 101)
    query.options = both
    query.start()
    change(capture, 102)
    query.finish()
    query.assert_equal()
    query.close()


@shared(POSTGRES)
def test_one_whose_parking_was_not_saved_yet_is_read_once_more(capture: RunningCapture) -> None:
    query = Parking(capture, ORDERS, ENTRIES)
    query.finish()
    park(query)
    arm("query.before_save=raise")
    with pytest.raises(FailpointError):
        query.batch()
    arm("")
    assert list(group_rows(query.options.state_location, query.options.query)) == [ENTRIES, ORDERS]
    query.planner.close()
    assert let_back(query.options.store, query.options.state_location, query.options.query) == [ENTRIES]
    query.start()
    change(capture, 102)
    query.finish()
    query.assert_equal()
    query.close()


@shared(MYSQL)
def test_one_that_was_away_for_a_while_comes_back_and_returns_when_it_is_captured_again(
    capture: RunningCapture,
) -> None:
    query = Parking(capture, ORDERS, ENTRIES)
    query.finish()
    park(query)
    change(capture, 102)
    while query.batch(timeout=0.1):
        pass
    assert query.planner.status()["tables"][ENTRIES]["phase"] == "parked"
    assert list(group_rows(query.options.state_location, query.options.query)) == [ORDERS]  # its log does not wait
    query.crash()
    change(capture, 103)
    query.planner.close()
    assert let_back(query.options.store, query.options.state_location, query.options.query) == [ENTRIES]
    assert let_back(query.options.store, query.options.state_location, query.options.query) == []
    query.start()
    query.finish()
    query.assert_equal()
    park(query, 104)
    query.batch()
    assert query.planner.returning == []
    assert not renew(query.options.store, [ENTRIES])
    while not query.planner.returning:
        query.batch()
    query.planner.close()
    assert let_back(
        query.options.store, query.options.state_location, query.options.query, query.planner.returning
    ) == [ENTRIES]
    query.start()
    query.finish()
    query.assert_equal()
    query.close()
