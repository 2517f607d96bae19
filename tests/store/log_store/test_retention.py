"""How much a log may hold, and who is told when something went."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.log_store.tools import Table

from headwater.log_store import LogNotFound, RetentionMiss, RetentionRefused
from headwater.log_store.remote import LogConsumer
from headwater.log_store.retention import Retention, apply_retention, plan_retention
from headwater.log_store.testing import Instance, epoch, random_chunk
from headwater.state import open_writer


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table(f"memory://{uuid.uuid4()}")
    for _ in range(5):
        made.write()
    yield made
    made.close()


def test_by_age(table: Table) -> None:
    # Epoch n was sealed at second 1000 + n.
    plan = apply_retention(table.factory, "orders", Retention(max_age_seconds=2), clock=lambda: 1_005_000)
    assert (plan.upto, plan.epochs, plan.needed_by) == (epoch(2), 2, ())
    table.seal()
    assert min(table.formats()) == 3


def test_by_size(table: Table) -> None:
    with table.store.snapshot():
        held = plan_retention(table.factory, "orders", Retention(max_bytes=0))
    assert (held.upto, held.epochs, held.rows) == (epoch(5), 5, 400)
    plan = apply_retention(table.factory, "orders", Retention(max_bytes=held.bytes // 2))
    table.seal()
    assert plan.epochs == 3
    assert sum(1 for number in table.formats() if number <= 5) == 2


def test_no_bound_and_nothing_over_a_bound_drop_nothing(table: Table) -> None:
    for retention in (Retention(), Retention(max_bytes=1 << 40, max_age_seconds=1e9)):
        assert apply_retention(table.factory, "orders", retention, clock=lambda: 1_005_000).epochs == 0
    with pytest.raises(LogNotFound):
        apply_retention(table.factory, "customers", Retention())


def test_what_a_consumer_needs_is_not_dropped(table: Table) -> None:
    with LogConsumer.open(table.location, "orders", "mirror") as consumer:
        consumer.commit(epoch(1))
        with pytest.raises(RetentionRefused, match="'mirror'"):
            apply_retention(table.factory, "orders", Retention(max_bytes=0))
        table.seal()
        table.seal()
        assert min(table.formats()) == 2
        consumer.commit(epoch(5))
        assert apply_retention(table.factory, "orders", Retention(max_bytes=0)).epochs >= 4


def test_a_consumer_whose_epochs_were_dropped_stops_and_says_why(table: Table) -> None:
    with LogConsumer.open(table.location, "orders", "mirror") as consumer:
        consumer.commit(epoch(1))
        plan = apply_retention(table.factory, "orders", Retention(max_bytes=0), force=True)
        assert plan.needed_by == ("mirror",)
        table.seal()
        with pytest.raises(RetentionMiss) as caught:
            consumer.wait(1.0)
        assert caught.value.oldest == epoch(5)
    table.factory.consumers.register(table.log, "late")  # a new one begins at what is held


def test_a_local_consumer_is_told_when_it_comes_back(table: Table) -> None:
    table.factory.consumers.register(table.log, "sink")
    table.seal()
    with pytest.raises(RetentionRefused, match="'sink'"):
        apply_retention(table.factory, "orders", Retention(max_bytes=0))
    apply_retention(table.factory, "orders", Retention(max_bytes=0), force=True)
    table.seal()
    with pytest.raises(RetentionMiss):
        table.factory.pair(table.log, "sink")


@pytest.mark.parametrize("max_rows", [0, 1000])
def test_a_live_reader_is_told_in_history_and_for_spilled_rows(tmp_path: Path, max_rows: int) -> None:
    with open_writer(tmp_path / "store") as store:
        instance = Instance.open(store, 1, max_rows=max_rows)
        for number in range(1, 4):
            instance.writer.write_chunk(random_chunk(random.Random(number)))
            instance.flush(number + 1)
        if max_rows:  # what it read is history for the next instance
            instance.flush(5, is_stop=True)
            instance = Instance.open(store, 5)
        apply_retention(instance.factory, "orders", Retention(max_bytes=0), force=True)
        instance.flush(6)
        with pytest.raises(RetentionMiss) as caught:
            instance.next(1.0)
        assert caught.value.oldest == epoch(3)
