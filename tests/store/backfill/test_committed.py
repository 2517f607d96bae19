"""When it becomes durable that a batch is committed: with the next plan, or soon when there is none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.here import Here
from tests.written_log import options, write

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.planner import QueryPlanner
from headwater.sinks.delivery import DeliveryState, read_deliveries
from headwater.sinks.open import open_sink

pytestmark = pytest.mark.store


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def loop(store: str, tmp_path: Path) -> Iterator[DeliveryLoop[QueryPlanner]]:
    write(store, 0)
    sink = open_sink("parquet", path=str(tmp_path / "lake"))
    with DeliveryLoop(Delivery(options(store), sink), Here()) as made:
        yield made


def sealed(store: str) -> list[tuple[int, DeliveryState]]:
    """The batches as another process sees them."""
    state = options(store).state_location
    return [(record.epoch, record.state) for record in read_deliveries(state, "mirror")]


def test_the_plan_of_the_next_batch_seals_that_the_one_before_is_committed(
    loop: DeliveryLoop[QueryPlanner], store: str
) -> None:
    assert loop.plan(0.0)
    loop.deliver()
    first = loop.position.epoch
    assert sealed(store) == [(first, DeliveryState.PENDING)]
    write(store, 1)
    assert loop.plan(0.0)
    assert sealed(store) == [(first, DeliveryState.COMMITTED)]


def test_a_turn_with_nothing_to_deliver_seals_it(
    loop: DeliveryLoop[QueryPlanner], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loop.plan(0.0)
    loop.deliver()
    with monkeypatch.context() as patch:
        patch.setattr(loop.planner, "plan", lambda start, **limits: start)  # it has nothing of its own to seal
        loop.run(threading.Event(), until=lambda: True)
    assert sealed(store) == [(loop.position.epoch, DeliveryState.COMMITTED)]
