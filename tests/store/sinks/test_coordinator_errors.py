"""Deliveries that fail at any step, again and again: nothing is lost, nothing is there twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.query_state import coordinating, coordinator

from headwater import failpoints
from headwater.failpoints import FailpointError, arm
from headwater.sinks.delivery import DeliveryState, read_deliveries
from headwater.sinks.delta import DeltaSink
from headwater.sinks.sink import Committed, Mode, Staged, Token
from headwater.sources.table import SourceColumn, SourceTable
from headwater.state import open_writer

from .file_sinks import INSERT, ORDERS, Feed, log_rows, order

QUERY = "q"
POINTS = (
    "delivery.before_pending",
    "delivery.after_pending",
    "sink.delta.before_commit",
    "sink.delta.after_commit",
    "delivery.before_committed",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    location = str(tmp_path / "store")
    with open_writer(location):
        yield location


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"), mode=Mode.CHANGES)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm("")


def batch(sink: DeltaSink, epoch: int, generation: int = 1, table: SourceTable = ORDERS) -> list[Staged]:
    token = Token(QUERY, "b1", epoch - 1, epoch, 0, generation=generation)
    return [Feed(sink, table).stage_changes(token, [(INSERT, order(epoch * 10 + place)) for place in range(3)])]


def keys(sink: DeltaSink) -> Counter[tuple[int, int]]:
    found = [row for part in sink.shown(ORDERS, ["_commit_version", "id"]) for row in part.to_pylist()]
    return Counter((row["_commit_version"], row["id"]) for row in found)


def states(store: str) -> list[tuple[int, DeliveryState]]:
    return [(record.epoch, record.state) for record in read_deliveries(store, QUERY)]


def test_51_53_an_empty_batch_that_was_pending_is_committed_by_the_next_generation(store: str, sink: DeltaSink) -> None:
    token = Token(QUERY, "b1", 0, 5, 0, generation=1)
    arm("delivery.after_pending=raise")
    with coordinating(store, QUERY) as coordinator, pytest.raises(FailpointError):
        coordinator.deliver(sink, [sink.stage_changes(ORDERS, token, iter(()), None)])
    arm("")
    assert states(store) == [(5, DeliveryState.PENDING)]
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
    assert states(store) == [(5, DeliveryState.COMMITTED)]
    assert sink.committed(ORDERS, QUERY, "b1") == Committed()
    assert not keys(sink)


def test_52_a_batch_that_cannot_be_staged_is_not_pending(store: str, sink: DeltaSink) -> None:
    token = Token(QUERY, "b1", 0, 1, 0, generation=1)

    def torn() -> Iterator[pa.RecordBatch]:
        yield log_rows(ORDERS, [(INSERT, order(1))])
        raise ConnectionError("the source is gone")

    with coordinating(store, QUERY) as coordinator:
        with pytest.raises(ConnectionError):
            coordinator.deliver(sink, [sink.stage_changes(ORDERS, token, torn(), None)])
        assert states(store) == []
        coordinator.deliver(sink, batch(sink, 1))
    assert states(store) == [(1, DeliveryState.COMMITTED)]


def test_54_a_commit_that_fails_twice_is_pending_until_it_succeeds(store: str, sink: DeltaSink) -> None:
    with coordinating(store, QUERY) as coordinator:
        for _ in range(2):
            arm("sink.delta.before_commit=raise")
            with pytest.raises(FailpointError):
                coordinator.deliver(sink, batch(sink, 1))
            assert states(store) == [(1, DeliveryState.PENDING)]
            assert not keys(sink)
        arm("")
        coordinator.deliver(sink, batch(sink, 1))
    assert states(store) == [(1, DeliveryState.COMMITTED)]
    assert sum(keys(sink).values()) == 3


def test_56_a_pending_batch_that_adds_a_column_is_committed_before_anything_is_planned(
    store: str, sink: DeltaSink, tmp_path: Path
) -> None:
    wide = replace(ORDERS, columns=(*ORDERS.columns, SourceColumn("note", pa.string(), "text", 9)))
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, batch(sink, 1))
        arm("delivery.after_pending=raise")
        with pytest.raises(FailpointError):
            coordinator.deliver(sink, batch(sink, 2, table=wide))
        arm("")
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [wide])
        assert "note" in DeltaTable(tmp_path / "lake/public.orders").schema().to_arrow().names
        assert sink.committed(wide, QUERY, "b1").epoch == 2


def test_66_an_error_before_the_commit_and_then_one_after_it(store: str, sink: DeltaSink) -> None:
    with coordinating(store, QUERY) as coordinator:
        for point in ("sink.delta.before_commit", "sink.delta.after_commit", "delivery.before_committed"):
            arm(f"{point}=raise")
            with pytest.raises(FailpointError):
                coordinator.deliver(sink, batch(sink, 1))
        arm("")
        coordinator.deliver(sink, batch(sink, 1))
    assert set(keys(sink).values()) == {1}
    assert sum(keys(sink).values()) == 3


@pytest.mark.parametrize("seed", range(3))
def test_66_errors_at_any_of_five_points_lose_and_double_nothing(
    seed: int, store: str, sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)

    def hit(name: str) -> None:
        if name in POINTS and chance.random() < 0.1:
            raise FailpointError(name)

    monkeypatch.setattr(failpoints, "hit", hit)
    epoch, generation, failures = 1, 1, 0
    current = coordinator(store, QUERY)
    while epoch <= 40:
        try:
            current.deliver(sink, batch(sink, epoch, generation))
            epoch += 1
        except FailpointError:
            failures += 1
            if chance.random() < 0.5:  # the process ends with it, and another one goes on
                generation += 1
                current = coordinator(store, QUERY)
                try:
                    current.recover(sink, "b1", [ORDERS])
                except FailpointError:
                    failures += 1
    current.flush()
    assert failures > 5
    found = keys(sink)
    assert set(found.values()) == {1}
    assert len(found) == 40 * 3
    assert states(store) == [(40, DeliveryState.COMMITTED)]


def test_m20_a_batch_that_comes_again_after_old_versions_were_removed_changes_nothing(
    sink: DeltaSink, tmp_path: Path
) -> None:
    feed = Feed(sink)
    for epoch in range(1, 4):
        feed.changes(epoch, (INSERT, order(epoch)))
    place = tmp_path / "lake/public.orders"
    table = DeltaTable(place)
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 seconds"})
    table.update_incremental()
    table.create_checkpoint()
    table.cleanup_metadata()
    assert not (place / "_delta_log/00000000000000000001.json").exists()
    assert sink.committed(ORDERS, "q", "b1") == Committed(3)
    for epoch in range(1, 4):
        assert not feed.changes(epoch, (INSERT, order(epoch)))
    assert feed.changes(4, (INSERT, order(4)))
    assert sum(keys(sink).values()) == 4
