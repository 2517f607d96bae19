"""Scenario M31: random transactions, batches, crashes and requests; the mirror is explained after each batch and is the
source's table in the end, and no change is told twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.backfill.simulation import CRASHES, Query
from tests.unit.backfill.fake_database import FakeDatabase, Key, filled

from headwater.backfill.cdc.executor import BackfillOptions
from headwater.backfill.cdc.state import Renewal
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.stream import Pause, Resume, Throttle

Step = tuple[str, int, int]

_WRITES = ("begin", "put", "put", "put", "delete", "move", "commit", "commit", "show", "roll_back", "seal", "seal")
_BATCHES = ("batch", "batch", "batch", "crash", "crash")
_REQUESTS = ("pause", "resume", "throttle", "unlimited", "renew", "renew_range", "renew_column", "truncate")

BEGINS = st.sampled_from((None, None, "renew", "renew_range", "renew_column"))
STEPS = st.lists(
    st.tuples(st.sampled_from((*_WRITES, *_BATCHES, *_REQUESTS)), st.integers(0, 29), st.integers(0, 29)),
    max_size=60,
)


class Simulation:
    """Runs steps on a database and a query."""

    def __init__(
        self, options: BackfillOptions, *, knows: bool = True, tells_old: bool = True, begins_with: str | None = None
    ) -> None:
        self.database: FakeDatabase = filled([2, 3, 5, 8, 13, 14, 15, 21, 22], tells_old=tells_old)
        self.query = Query(self.database, options, knows=knows)
        self.renewals = self.truncates = 0
        if begins_with is not None:
            self.query.drain()
            getattr(self, begins_with)(6, 16)

    def run(self, steps: Sequence[Step]) -> list[str]:
        for name, one, two in steps:
            self.query.trace.append(f"{name} {one} {two}")
            getattr(self, name)(one, two)
        self.finish()
        return self.query.trace

    def finish(self) -> None:
        self._all_over()
        self.database.seal()
        self.query.tell(Resume())
        self.query.tell(Throttle(None))
        self.query.drain()

    def _all_over(self) -> None:
        for xid in list(self.database.open):
            self.database.commit(xid)
        for transaction in self.database.commits:
            transaction.is_visible = True

    def _open(self, one: int) -> int:
        known = list(self.database.open)
        return known[one % len(known)] if known else self.database.begin()

    def begin(self, one: int, two: int) -> None:
        if len(self.database.open) < 3:
            self.database.begin()

    def put(self, one: int, two: int) -> None:
        key: Key = (one,)
        self.database.put(self._open(two), key, (self.database.lsn, two))

    def delete(self, one: int, two: int) -> None:
        self.database.put(self._open(two), (one,), None)

    def move(self, one: int, two: int) -> None:
        if one != two:
            self.database.move(self._open(one), (one,), (two,))

    def commit(self, one: int, two: int) -> None:
        if self.database.open:
            xid = self._open(one)
            self.database.commit(xid)
            if two % 3:
                self.database.show(xid)

    def roll_back(self, one: int, two: int) -> None:
        if self.database.open:
            self.database.roll_back(self._open(one))

    def show(self, one: int, two: int) -> None:
        hidden = [t for t in self.database.commits if not t.is_visible]
        if hidden:
            hidden[one % len(hidden)].is_visible = True

    def seal(self, one: int, two: int) -> None:
        self.database.seal(one % 3 or None)

    def batch(self, one: int, two: int) -> None:
        upto = None if two % 3 else self.query.logged[-1][0] + 1
        self.query.step(budget=1 + one % 6, upto=upto, settles=two % 2 == 0)

    def crash(self, one: int, two: int) -> None:
        self.query.step(budget=1 + one % 6, crash=CRASHES[two % len(CRASHES)], settles=two % 2 == 0)

    def pause(self, one: int, two: int) -> None:
        self.query.tell(Pause())

    def resume(self, one: int, two: int) -> None:
        self.query.tell(Resume())

    def throttle(self, one: int, two: int) -> None:
        self.query.tell(Throttle(one % 4))

    def unlimited(self, one: int, two: int) -> None:
        self.query.tell(Throttle(None))

    def renew(self, one: int, two: int) -> None:
        self._renew(Renewal(f"r{self.renewals}"))

    def renew_range(self, one: int, two: int) -> None:
        low, high = min(one, two), max(one, two)
        start = None if low == 0 else Cut((str(low),))
        end = None if high == 29 else Cut((str(high),), after=True)
        self._renew(Renewal(f"r{self.renewals}", KeyRange(start, end)))

    def renew_column(self, one: int, two: int) -> None:
        self._renew(Renewal(f"r{self.renewals}", columns=("b",)))

    def _renew(self, renewal: Renewal) -> None:
        if self.query.options.kind is SplitKind.HEAP and renewal.range is not None:
            return
        self.renewals += 1
        self.query.renew(renewal)

    def truncate(self, one: int, two: int) -> None:
        """It waits for all others, and they for it; a row may come right after it."""
        if one % 3 == 0 and self.query.is_delivered:
            self.query.let_go()
            self._all_over()
            self.truncates += self.database.truncate()
            if two % 2:
                self.database.run(((two,), (two, two)))


def _options(**changed: object) -> Callable[[], BackfillOptions]:
    return lambda: BackfillOptions(**{"split_rows": 2, **changed})  # type: ignore[arg-type]


EXACT = [
    pytest.param(_options(version=1), id="single"),
    pytest.param(_options(), id="parallel"),
    pytest.param(_options(whole=True), id="whole"),
    pytest.param(_options(whole=True, kind=SplitKind.HEAP), id="whole heap"),
]
_SETTINGS = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.parametrize("options", EXACT)
@given(steps=STEPS, tells_old=st.booleans(), begins_with=BEGINS)
@_SETTINGS
def test_m31_an_exact_backfill_loses_nothing_and_tells_nothing_twice(
    options: Callable[[], BackfillOptions], steps: list[Step], tells_old: bool, begins_with: str | None
) -> None:
    simulation = Simulation(options(), tells_old=tells_old, begins_with=begins_with)
    simulation.run(steps)
    if not simulation.truncates:
        simulation.query.check_told_once()


@pytest.mark.parametrize("options", [*EXACT, pytest.param(_options(kind=SplitKind.HEAP), id="heap")])
@given(steps=STEPS, begins_with=BEGINS)
@_SETTINGS
def test_m31_a_sink_that_cannot_tell_what_it_has_is_the_source_in_the_end(
    options: Callable[[], BackfillOptions], steps: list[Step], begins_with: str | None
) -> None:
    Simulation(options(), knows=False, begins_with=begins_with).run(steps)


@given(steps=STEPS, begins_with=BEGINS)
@_SETTINGS
def test_m31_a_mirror_by_heap_is_the_source_in_the_end(steps: list[Step], begins_with: str | None) -> None:
    Simulation(_options(kind=SplitKind.HEAP)(), begins_with=begins_with).run(steps)


def test_m32_a_truncate_that_the_snapshot_has_already_costs_no_row_that_came_after_it() -> None:
    """The log is at the epoch before the truncate when the snapshot is taken; the row after it is in the snapshot."""
    for options in (_options(version=1), _options()):
        simulation = Simulation(options())
        simulation.database.truncate()
        simulation.database.run(((7,), (7, 7)))
        simulation.query.step(budget=100)
        simulation.database.seal()
        simulation.query.step(budget=100)
        assert simulation.query.sink.mirror == {(7,): (7, 7)}
        simulation.finish()


def test_a_batch_that_is_delivered_again_does_not_know_of_a_renewal_that_was_planned_after_it() -> None:
    """The plan was saved and not logged, so that it is rolled back: the change must have been emitted."""
    simulation = Simulation(_options()())
    simulation.query.drain()
    simulation.database.run(((5,), (55, 55)))
    simulation.database.seal()
    simulation.query.step(budget=9, crash="before_commit")
    simulation.query.renew(Renewal("r"))
    simulation.query.executor.hand_out(simulation.query.logged[-1][1] + 1, simulation.database.export(), 100)
    simulation.query.step(budget=9)
    assert simulation.query.sink.mirror[5,] == (55, 55)


@given(steps=STEPS)
@settings(max_examples=20)
def test_m31_the_same_steps_give_the_same_trace(steps: list[Step]) -> None:
    assert Simulation(_options()()).run(steps) == Simulation(_options()()).run(steps)
