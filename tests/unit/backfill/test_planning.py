"""Planning decides and never waits: time, pauses and ids are given, and the loop around it waits as it is told."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headwater.backfill.errors import LogBehind
from headwater.backfill.loop import next_batch, units_of
from headwater.backfill.offset import QueryOffset
from headwater.system.clock import Clock, Wait

START, END = QueryOffset(1, 0), QueryOffset(2, 0)
PLANNING = [
    "backfill.backfill_plans",
    "backfill.cdc.backfill",
    "backfill.cdc.executor",
    "backfill.keeping",
    "backfill.log_ranges",
    "backfill.planner",
    "backfill.plans",
    "backfill.query_table",
    "backfill.query_tables",
    "backfill.since",
    "backfill.snapshot.backfill",
    "backfill.snapshot.consume_upstream.executor",
    "backfill.snapshot.consume_upstream.upstream_log",
    "backfill.snapshot.executor",
    "backfill.store_logs",
    "backfill.table_backfill",
    "backfill.tasks",
    "derive.planner",
]


@dataclass
class FakeTime:
    """Seconds that pass only when somebody sleeps."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: int(self.now * 1000), self.sleep, lambda: "0" * 32)


class Scripted:
    """A planner that has a batch at a time, and units after it was asked some times."""

    generation, backfill_id = 1, "b"

    def __init__(self, fake: FakeTime, due: float, wait: Wait, *, behind: int = 0) -> None:
        self._fake, self._due, self.wait, self._behind = fake, due, wait, behind
        self.returning: Sequence[str] = ()
        self.limits: list[int | None] = []

    def resume(self, committed: Collection[QueryOffset]) -> tuple[QueryOffset, QueryOffset | None]:
        return START, None

    def plan(self, start: QueryOffset, *, upto: int | None = None) -> QueryOffset:
        self.limits.append(upto)
        return END if self._fake.now >= self._due else start

    def units(self, start: QueryOffset, end: QueryOffset) -> Sequence[Any]:
        if self._behind:
            self._behind -= 1
            raise LogBehind("The columns have changed.")
        return ["unit"]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", PLANNING)
def test_a_planning_module_knows_no_clock_no_pause_no_socket_and_makes_no_id(name: str) -> None:
    module = import_module(f"headwater.{name}")
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"random", "secrets", "socket", "threading", "time", "uuid"}
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "sleep" not in called


def test_the_loop_waits_as_the_planner_says_until_there_is_a_batch() -> None:
    fake = FakeTime()
    planner = Scripted(fake, 100.35, Wait(0.1))
    assert next_batch(planner, START, 5.0, fake.clock, upto=7) == END
    assert fake.slept == [0.1] * 4
    assert set(planner.limits) == {7}


def test_the_loop_waits_no_longer_than_its_timeout_and_asks_once_without_one() -> None:
    fake = FakeTime()
    planner = Scripted(fake, 1e9, Wait(0.4))
    assert next_batch(planner, START, 1.0, fake.clock) == START
    assert fake.slept == pytest.approx([0.4, 0.4, 0.2])
    assert next_batch(planner, START, 0.0, fake.clock) == START
    assert len(planner.limits) == 5


def test_news_end_a_wait_and_the_clock_is_not_slept() -> None:
    fake = FakeTime()
    told: list[float] = []

    def news(seconds: float) -> None:
        told.append(seconds)
        fake.now += 0.01

    assert next_batch(Scripted(fake, 100.02, Wait(1.0, news)), START, 3.0, fake.clock) == END
    assert told == pytest.approx([1.0, 1.0])
    assert not fake.slept


def test_a_planner_whose_parked_table_returns_is_not_waited_for() -> None:
    fake = FakeTime()
    planner = Scripted(fake, 1e9, Wait(0.4))
    planner.returning = ["public.orders"]
    assert next_batch(planner, START, 60.0, fake.clock) == START
    assert not fake.slept


def test_units_are_asked_for_again_while_the_log_is_behind_a_snapshot() -> None:
    fake = FakeTime()
    assert units_of(Scripted(fake, 0, Wait(1.0), behind=3), START, END, fake.clock) == ["unit"]
    assert fake.slept == [0.05] * 3


def test_units_of_columns_that_the_capture_does_not_come_to_are_an_error_after_20_seconds() -> None:
    fake = FakeTime()
    with pytest.raises(LogBehind):
        units_of(Scripted(fake, 0, Wait(1.0), behind=1000), START, END, fake.clock)
    assert sum(fake.slept) == pytest.approx(20.0, abs=0.2)
