"""Scenario M31: random transactions, batches, crashes and requests; the mirror is explained after each batch and is the
source's table in the end, and no change is told twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.backfill.simulation import CRASHES, Query
from tests.unit.backfill.fake_database import FakeDatabase, Key, filled

from headwater.backfill.cdc.executor import BackfillOptions, Renewal
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.stream import Pause, Resume, Throttle

Step = tuple[str, int, int]

_WRITES = ("begin", "put", "put", "put", "delete", "move", "commit", "commit", "show", "roll_back", "seal", "seal")
_BATCHES = ("batch", "batch", "batch", "crash", "crash")
_REQUESTS = ("pause", "resume", "throttle", "unlimited", "renew", "renew_range", "renew_column", "truncate")

STEPS = st.lists(
    st.tuples(st.sampled_from((*_WRITES, *_BATCHES, *_REQUESTS)), st.integers(0, 29), st.integers(0, 29)),
    max_size=60,
)


class Simulation:
    """Runs steps on a database and a query."""

    def __init__(self, options: BackfillOptions, *, knows: bool = True, tells_old: bool = True) -> None:
        self.database: FakeDatabase = filled([2, 3, 5, 8, 13, 14, 15, 21, 22], tells_old=tells_old)
        self.query = Query(self.database, options, knows=knows)
        self.renewals = self.truncates = 0

    def run(self, steps: Sequence[Step]) -> list[str]:
        for name, one, two in steps:
            self.query.trace.append(f"{name} {one} {two}")
            getattr(self, name)(one, two)
        self.finish()
        return self.query.trace

    def finish(self) -> None:
        for xid in list(self.database.open):
            self.database.commit(xid)
        for transaction in self.database.commits:
            transaction.is_visible = True
        self.database.seal()
        self.query.tell(Resume())
        self.query.tell(Throttle(None))
        self.query.drain()

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
        self.query.step(budget=1 + one % 6, upto=upto)

    def crash(self, one: int, two: int) -> None:
        self.query.step(budget=1 + one % 6, crash=CRASHES[two % len(CRASHES)])

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
        if one % 3 == 0:
            self.truncates += self.database.truncate()


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
@given(steps=STEPS, tells_old=st.booleans())
@_SETTINGS
def test_m31_an_exact_backfill_loses_nothing_and_tells_nothing_twice(
    options: Callable[[], BackfillOptions], steps: list[Step], tells_old: bool
) -> None:
    simulation = Simulation(options(), tells_old=tells_old)
    simulation.run(steps)
    if not simulation.truncates:
        simulation.query.check_told_once()


@pytest.mark.parametrize("options", [*EXACT, pytest.param(_options(kind=SplitKind.HEAP), id="heap")])
@given(steps=STEPS)
@_SETTINGS
def test_m31_a_sink_that_cannot_tell_what_it_has_is_the_source_in_the_end(
    options: Callable[[], BackfillOptions], steps: list[Step]
) -> None:
    Simulation(options(), knows=False).run(steps)


@given(steps=STEPS)
@_SETTINGS
def test_m31_a_mirror_by_heap_is_the_source_in_the_end(steps: list[Step]) -> None:
    Simulation(_options(kind=SplitKind.HEAP)()).run(steps)


@given(steps=STEPS)
@settings(max_examples=20)
def test_m31_the_same_steps_give_the_same_trace(steps: list[Step]) -> None:
    assert Simulation(_options()()).run(steps) == Simulation(_options()()).run(steps)
