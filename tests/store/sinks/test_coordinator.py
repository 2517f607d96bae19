"""Batches from staged to committed: what each row tells after a crash, and who may deliver."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.query_state import coordinating, coordinator

from headwater.failpoints import FailpointError, arm
from headwater.sinks import coordinator as coordinator_module
from headwater.sinks.delivery import DeliveryState, behind_of, read_deliveries
from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import SinkBehind, SinkError, SinkFenced
from headwater.sinks.sink import Staged, Token
from headwater.state import open_writer

from .file_sinks import INSERT, ORDERS, UPDATE, Feed, IntegerOrder, order

QUERY = "q"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    location = str(tmp_path / "store")
    with open_writer(location):
        yield location


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm("")


def batch(sink: DeltaSink, epoch: int, generation: int = 1, key: int = 1, **history: object) -> list[Staged]:
    feed = Feed(sink)
    token = Token(QUERY, "b1", epoch - 1, epoch, 1 if history else 0, generation=generation)
    staged = [feed.stage_changes(token, [(INSERT, order(key)), (UPDATE, order(key, f"epoch {epoch}"))])]
    return [*staged, feed.stage_history(token, [order(900)], **history)] if history else staged


def rows(sink: DeltaSink) -> dict[int, str]:
    found = [row for part in sink.shown(ORDERS, ["id", "status"]) for row in part.to_pylist()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["status"] for row in found}


def states(store: str) -> list[tuple[int, DeliveryState]]:
    return [(record.epoch, record.state) for record in read_deliveries(store, QUERY)]


def test_a_batch_is_pending_and_then_committed_and_the_last_one_stays(store: str, sink: DeltaSink) -> None:
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, batch(sink, 1))
        coordinator.deliver(sink, batch(sink, 2, key=2))
    assert states(store) == [(2, DeliveryState.COMMITTED)]
    assert rows(sink) == {1: "epoch 1", 2: "epoch 2"}


class Hostile:
    """Its pickle creates the file *path* when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


def test_a_hostile_pickle_in_the_store_runs_nothing(
    store: str, sink: DeltaSink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = pickle.dumps(("1 0.1.0", [Hostile(tmp_path / "it ran")]))
    monkeypatch.setattr(coordinator_module, "packed", lambda _: planted)
    arm("delivery.after_pending=raise")
    with coordinating(store, QUERY) as coordinator, pytest.raises(FailpointError):
        coordinator.deliver(sink, batch(sink, 1))
    arm("")
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
    assert not (tmp_path / "it ran").exists()
    assert states(store) == []
    assert rows(sink) == {}


def test_an_empty_batch_is_recorded(store: str, sink: DeltaSink) -> None:
    token = Token(QUERY, "b1", 0, 5, 0, generation=1)
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, [sink.stage_changes(ORDERS, token, iter(()), None)])
    (record,) = read_deliveries(store, QUERY)
    assert (record.epoch, record.state, record.tables) == (5, DeliveryState.COMMITTED, {"public.orders": 0})


@pytest.mark.parametrize("step", ["delivery.after_pending", "sink.delta.before_commit", "delivery.before_committed"])
def test_what_is_pending_is_committed_by_the_next_generation(store: str, sink: DeltaSink, step: str) -> None:
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, batch(sink, 1))
        arm(f"{step}=raise")
        with pytest.raises(FailpointError):
            coordinator.deliver(sink, batch(sink, 2, key=2))
        arm("")
    assert states(store)[-1] == (2, DeliveryState.PENDING)
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
        coordinator.recover(sink, "b1", [ORDERS])
    assert states(store) == [(2, DeliveryState.COMMITTED)]
    assert rows(sink) == {1: "epoch 1", 2: "epoch 2"}
    assert sink.committed(ORDERS, QUERY, "b1").epoch == 2


def test_before_it_is_pending_nothing_is_known_and_what_was_staged_is_removed(
    store: str, sink: DeltaSink, tmp_path: Path
) -> None:
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, batch(sink, 1, replaces=False))
        arm("delivery.before_pending=raise")
        with pytest.raises(FailpointError):
            coordinator.deliver(sink, batch(sink, 2, key=2, replaces=False))
        arm("")
    files = set((tmp_path / "lake/public.orders").glob("*.parquet"))
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
    left = set((tmp_path / "lake/public.orders").glob("*.parquet"))
    assert len(files - left) == 1
    assert rows(sink) == {1: "epoch 1", 900: "new"}


def test_a_stale_generation_is_refused_before_it_is_pending(store: str, sink: DeltaSink) -> None:
    old = coordinator(store, QUERY)
    old.deliver(sink, batch(sink, 1))
    with coordinating(store, QUERY) as new:
        new.recover(sink, "b1", [ORDERS])
        with pytest.raises(SinkFenced, match="this is generation 1 of it"):
            old.deliver(sink, batch(sink, 2, key=7))
    assert rows(sink) == {1: "epoch 1"}


def test_a_stale_generation_that_was_pending_already_finds_its_token(store: str, sink: DeltaSink) -> None:
    old = coordinator(store, QUERY)
    staged = batch(sink, 1)
    arm("delivery.after_pending=raise")
    with pytest.raises(FailpointError):
        old.deliver(sink, staged)
    arm("")
    with coordinating(store, QUERY) as new:
        new.recover(sink, "b1", [ORDERS])
        version = sink.committed(ORDERS, QUERY, "b1")
        assert not sink.commit(ORDERS, staged[0].token, staged)  # what the old process does when it wakes up
        assert sink.committed(ORDERS, QUERY, "b1") == version


def test_what_was_staged_and_is_gone_is_aborted_and_staged_anew(store: str, sink: DeltaSink, tmp_path: Path) -> None:
    feed = Feed(sink)
    token = Token(QUERY, "b1", 0, 1, 0, generation=1)
    many = [(INSERT, order(key, "x" * 200)) for key in range(3000)]
    with coordinating(store, QUERY) as coordinator:
        arm("delivery.after_pending=raise")
        with pytest.raises(FailpointError):
            coordinator.deliver(sink, [feed.stage_changes(token, many)])
        arm("")
    (part,) = (tmp_path / "lake/_headwater_staging").rglob("*.arrow")
    part.unlink()
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
        assert states(store) == []
        coordinator.deliver(sink, [feed.stage_changes(replace(token, generation=2), many)])
    assert len(rows(sink)) == 3000


def test_what_knows_the_address_of_the_source_is_not_kept(store: str, sink: DeltaSink) -> None:
    feed = Feed(sink)
    token = Token(QUERY, "b1", 0, 1, 1, generation=1)
    staged = feed.stage_history(token, [order(1)], ranges=[(0, 5)], replaces=True, order=IntegerOrder())
    with coordinating(store, QUERY) as coordinator:
        arm("delivery.after_pending=raise")
        with pytest.raises(FailpointError):
            coordinator.deliver(sink, [staged])
        arm("")
    assert states(store) == [(1, DeliveryState.PENDING)]
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
    assert states(store) == []
    assert rows(sink) == {}


def test_a_table_that_fails_does_not_keep_the_others(store: str, sink: DeltaSink, tmp_path: Path) -> None:
    from .file_sinks import table_of

    lines = table_of({"id": ORDERS.columns[0].type}, name="lines")
    token = Token(QUERY, "b1", 0, 1, 0, generation=1)
    staged = [
        Feed(sink, lines).stage_changes(token, [(INSERT, {"id": 1})]),
        Feed(sink).stage_changes(token, [(INSERT, order(1))]),
    ]
    (tmp_path / "lake").mkdir(exist_ok=True)
    (tmp_path / "lake/public.lines").write_text("")
    with coordinating(store, QUERY) as coordinator, pytest.raises(SinkError):
        coordinator.deliver(sink, staged)
    assert rows(sink) == {1: "new"}
    assert states(store) == [(1, DeliveryState.PENDING)]


def test_a_sink_that_was_restored_from_a_backup_is_noticed(store: str, sink: DeltaSink, tmp_path: Path) -> None:
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, batch(sink, 1))
        shutil.copytree(tmp_path / "lake", tmp_path / "backup")
        coordinator.deliver(sink, batch(sink, 2, key=2))
    shutil.rmtree(tmp_path / "lake")
    shutil.copytree(tmp_path / "backup", tmp_path / "lake")
    assert [has.epoch for _, has in behind_of(store, QUERY, "b1", sink, [ORDERS])] == [1]
    with coordinating(store, QUERY) as coordinator, pytest.raises(SinkBehind, match="up to epoch 1, and epoch 2"):
        coordinator.recover(sink, "b1", [ORDERS])
    with coordinating(store, QUERY) as coordinator:
        coordinator.deliver(sink, batch(sink, 2, key=2))
        coordinator.recover(sink, "b1", [ORDERS])
    assert rows(sink) == {1: "epoch 1", 2: "epoch 2"}


def test_a_start_writes_nothing_into_tables_whose_batches_are_settled(store: str, sink: DeltaSink) -> None:
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
        coordinator.deliver(sink, batch(sink, 1))
        arm("delivery.before_committed=raise")
        with pytest.raises(FailpointError):
            coordinator.deliver(sink, batch(sink, 2, key=2))
        arm("")
    before = DeltaTable(f"{sink.path}/public.orders").version()
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
    assert DeltaTable(f"{sink.path}/public.orders").version() == before


@pytest.mark.parametrize("step", ["delivery.before_fences", "delivery.after_fences"])
def test_a_start_after_everything_was_forgotten_refuses_what_is_under_way(
    store: str, sink: DeltaSink, step: str
) -> None:
    """Also where a start before it ended at its fences."""
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
        coordinator.deliver(sink, batch(sink, 1))
        late = batch(sink, 2, key=2)
        coordinator.forget()
    arm(f"{step}=raise")
    with coordinating(store, QUERY) as coordinator, pytest.raises(FailpointError):
        coordinator.recover(sink, "b1", [ORDERS])
    arm("")
    with coordinating(store, QUERY) as coordinator:
        coordinator.recover(sink, "b1", [ORDERS])
    with pytest.raises(SinkFenced):
        sink.commit(ORDERS, late[0].token, late)
    assert rows(sink) == {1: "epoch 1"}
