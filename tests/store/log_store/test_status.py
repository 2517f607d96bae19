"""What a log says of itself and of its consumers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.logs import LogConsumer, epoch
from tests.store.log_store.tools import Table

from headwater.log_store import LogNotFound
from headwater.log_store.retention import Retention, apply_retention
from headwater.log_store.status import log_status
from headwater.state import open_reader, open_writer
from headwater.stream import VnodeBitmap


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(f"memory://{uuid.uuid4()}")
    for _ in range(4):
        made.write()
    yield made
    made.close()


def test_lag_in_epochs_rows_bytes_and_seconds_and_who_holds_the_log_back(table: Table) -> None:
    with (
        LogConsumer.open(table.location, "orders", "mirror") as mirror,
        LogConsumer.open(table.location, "orders", "audit") as audit,
    ):
        mirror.commit(epoch(4))
        audit.commit(epoch(2))
        audit.commit(epoch(3), VnodeBitmap.of(range(10), 256))
        with open_reader(table.location) as store:
            (status,) = log_status(store, "orders", clock=lambda: 1_010_000)
    by_name = {consumer.name: consumer for consumer in status.consumers}
    assert status.held_back_by == "audit"
    assert (status.epochs, status.rows, status.format, status.formats_held) == (4, 320, 2, (2,))
    assert (status.oldest, status.newest, status.oldest_age_seconds) == (epoch(1), epoch(4), 9.0)
    late = by_name["audit"]
    assert (late.delivered, late.lag_epochs, late.lag_rows, late.lag_seconds) == (epoch(2), 2, 160, 7.0)
    assert 0 < late.lag_bytes < status.bytes
    assert not late.missed
    done = by_name["mirror"]
    assert (done.lag_epochs, done.lag_rows, done.lag_bytes, done.lag_seconds) == (0, 0, 0, 0)
    assert not done.holds_back


def test_a_consumer_that_missed_something_is_shown_as_such(table: Table) -> None:
    LogConsumer.open(table.location, "orders", "sink").close()
    apply_retention(table.factory, "orders", Retention(max_bytes=0, force=True))
    table.seal()
    (status,) = log_status(table.store)
    assert status.consumers[0].missed
    assert status.dropped == status.gone > epoch(0)


def test_an_empty_log_a_foreign_name_and_a_store_without_logs(tmp_path: Path, table: Table) -> None:
    table.factory.log("customers", table.log.schema, ("id",))
    table.seal()
    status = log_status(table.store)[0]
    assert (status.name, status.epochs, status.oldest, status.held_back_by) == ("customers", 0, None, None)
    with pytest.raises(LogNotFound, match="customers, orders"):
        log_status(table.store, "nothing")
    with open_writer(tmp_path / "other") as other, pytest.raises(LogNotFound):
        log_status(other)
