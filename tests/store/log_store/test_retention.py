"""How much a log may hold, and who is told when something went."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.logs import LogConsumer, epoch
from tests.store.log_store.tools import Table

from headwater.capture.capture import SteadyClock
from headwater.log_store import EpochEnd, LogNotFound, LogView, RetentionMiss, RetentionRefused
from headwater.log_store.retention import (
    CHECK_MS,
    RECOUNT_MS,
    Retention,
    apply_retention,
    plan_retention,
    retention_of,
)


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
    table.seal()
    assert min(table.formats()) == 3


def test_a_clock_that_jumps_years_ahead_drops_nothing_at_once() -> None:
    passed, off = 0, 0
    clock = SteadyClock(lambda: 1_000_000_000 + passed + off, lambda: passed)
    table = Table(f"memory://{uuid.uuid4()}", clock=clock)
    try:
        table.factory.retention.put(table.factory.sealer.batch, "orders", Retention(max_age_seconds=3600, force=True))
        table.write()
        off = 10 * 365 * 86_400_000
        for _ in range(3):
            passed += CHECK_MS
            table.write()
        assert min(table.formats()) == 1
        off = -5 * 365 * 86_400_000
        for _ in range(3):
            passed += CHECK_MS
            table.write()
        off = 0
        for _ in range(3):
            passed += CHECK_MS
            table.write()
        assert min(table.formats()) == 1, "epochs of the time in which the clock was wrong are not old either"
        passed += 3_700_000
        table.write()
        table.write()
        passed += CHECK_MS
        table.write()
        assert min(table.formats()) > 1, "they age as time passes"
    finally:
        table.close()


def test_by_size(table: Table) -> None:
    with table.store.snapshot():
        held = plan_retention(table.store, "orders", Retention(max_bytes=0))
    assert (held.upto, held.epochs, held.rows) == (epoch(5), 5, 400)
    plan = apply_retention(table.factory, "orders", Retention(max_bytes=held.bytes // 2))
    table.seal()
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
        plan = apply_retention(table.factory, "orders", Retention(max_bytes=0, force=True))
        assert plan.needed_by == ("mirror",)
        table.seal()
        with pytest.raises(RetentionMiss) as caught:
            consumer.wait(1.0)
        assert caught.value.oldest == epoch(5)
    LogConsumer.open(table.location, "orders", "late").close()  # a new one begins at what is held


def test_one_that_comes_while_an_unforced_retention_is_under_way_is_not_cut_off(table: Table) -> None:
    apply_retention(table.factory, "orders", Retention(max_bytes=0))
    with LogConsumer.open(table.location, "orders", "early") as early:
        table.seal()  # finds it: nothing may go
        table.seal()
        assert min(table.formats()) == 1
        assert early.wait(0.0)[0] == 0
        early.commit(epoch(5))
    table.seal()
    table.seal()
    assert not table.formats()


@pytest.mark.parametrize("engine", ["memory", "embedded"])
def test_a_policy_is_durable_and_applied_at_seals(engine: str, tmp_path: Path) -> None:
    made = Table(f"memory://{uuid.uuid4()}" if engine == "memory" else str(tmp_path / "store"))
    with pytest.raises(LogNotFound):
        made.factory.retention.put(made.factory.sealer.batch, "customers", Retention(max_bytes=1))
    made.factory.retention.put(made.factory.sealer.batch, "orders", Retention(max_age_seconds=30.0))
    for _ in range(20):  # a second each
        made.write()
    made.open(takeover=True)
    with made.store.snapshot() as view:
        assert retention_of(view, "orders") == Retention(max_age_seconds=30.0)
        assert retention_of(view, "customers") is None
    assert list(made.factory.retention) == [("orders", Retention(max_age_seconds=30.0))]
    for _ in range(40):
        made.write()
    ages = [(made.now - 1_000_000) // 1000 - number for number in made.formats()]
    assert 30 <= max(ages) <= 30 + CHECK_MS / 1000 + 2
    with LogConsumer.open(made.location, "orders", "mirror") as mirror:
        oldest = mirror.delivered().ms
        for _ in range(30):
            made.write()
        assert min(made.formats()) == oldest + 1, "held for the consumer"
        made.factory.retention.put(made.factory.sealer.batch, "orders", Retention(max_bytes=1, force=True))
        made.write()
        with pytest.raises(RetentionMiss, match="mirror"):
            mirror.wait(0.0)
    made.factory.retention.put(made.factory.sealer.batch, "orders", None)
    made.seal()
    with made.store.snapshot() as view:
        assert retention_of(view, "orders") is None
    made.close()


def test_a_policy_of_size_keeps_the_log_within_it(table: Table) -> None:
    policy = Retention(max_bytes=plan_retention(table.store, "orders", Retention(max_bytes=0)).bytes)
    table.factory.retention.put(table.factory.sealer.batch, "orders", policy)
    table.seal()
    assert min(table.formats()) == 1
    table.now += RECOUNT_MS
    for _ in range(3):
        table.write()
        table.now += CHECK_MS
    table.seal()
    table.seal()
    assert min(table.formats()) > 1
    assert sum(end.size for end in ends(table)) <= policy.max_bytes  # type: ignore[operator]


def ends(table: Table) -> list[EpochEnd]:
    with table.store.snapshot() as view:
        return list(LogView.open(view, "orders").epochs())
