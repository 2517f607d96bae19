"""Random writes, batches, barriers of all kinds, crashes, pauses, throttles and compactions over the backfill from a
table that we really keep, with another number of tasks at any time: after each batch the downstream has the rows of all
vnodes and keys that are read as they are at the epoch that it claims, each once.

The same over a table in memory, for many more lives: ``test_snapshot_backfill.py``.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from tests.property.backfill.kept_downstream import KeptDownstream, KeptTable
from tests.property.backfill.test_upstream_machine import KINDS, run
from tests.sampled import SOAK

from headwater.backfill.snapshot.record import SnapshotPhase
from headwater.stream import BarrierKind, Mutation, Pause, Resume, Throttle
from headwater.versioned import run_file

KEYS = 120
WRITES = st.dictionaries(st.integers(0, KEYS), st.one_of(st.none(), st.integers(0, 9)), max_size=8)
ORDERS = st.sampled_from((Pause(), Resume(), Resume(), Throttle(0), Throttle(20), Throttle(None), Throttle(None)))
Told = tuple[int, int, list[tuple[int, int, int]]]


class SnapshotMachine(RuleBasedStateMachine):
    """One query over a kept table."""

    traces: ClassVar[list[list[Told]] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.table = KeptTable({key: key for key in range(0, KEYS, 2)})
        self.down = KeptDownstream(self.table, budget=8)
        self.seen = SnapshotPhase.WAITING

    @rule(changes=WRITES)
    def write(self, changes: dict[int, int | None]) -> None:
        upserts = {key: value for key, value in changes.items() if value is not None}
        deletes = tuple(key for key, value in changes.items() if value is None)
        self.table.commit(self.table.newest_epoch + 1, upserts, deletes)

    @rule(seconds=st.sampled_from((0.1, 1.0, 10.0)))
    def batch(self, seconds: float) -> None:
        self.down.now += seconds
        self.down.batch()
        self.check()

    @rule(kept=st.booleans(), delivered=st.booleans())
    def crash(self, kept: bool, delivered: bool) -> None:
        """In the middle of a batch, or between two."""
        if self.down.planned is None and self.down.plan() and delivered:
            self.down.deliver()
        self.down.crash(kept=kept)
        self.check()

    @rule(kind=KINDS, mutation=ORDERS)
    def ask(self, kind: BarrierKind, mutation: Mutation) -> None:
        self.down.barrier(mutation, kind)

    @rule(kind=KINDS)
    def barrier(self, kind: BarrierKind) -> None:
        self.down.barrier(kind=kind)

    @rule(tasks=st.sampled_from((1, 2, 3, 5)))
    def rescale(self, tasks: int) -> None:
        self.down.tasks = tasks

    @rule()
    def compact(self) -> None:
        self.table.compact()

    def check(self) -> None:
        """Phases go forward only, and each vnode has what it claims."""
        order, phase = list(SnapshotPhase), self.down.phase
        assert order.index(phase) >= order.index(self.seen)
        self.seen = phase
        self.down.check()

    def teardown(self) -> None:
        self.down.barrier(Resume())
        self.down.barrier(Throttle(None))
        self.down.run()
        assert self.down.phase is SnapshotPhase.LIVE
        assert self.down.sink.rows == self.table.rows(self.table.newest_epoch)
        told = [(epoch, plan) for epoch, plan, _ in self.down.sink.trace]
        assert told == sorted(set(told)), "each batch once"
        if SnapshotMachine.traces is not None:
            SnapshotMachine.traces.append(self.down.sink.trace)
        self.table.close()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that reads begin, and go on, inside vnodes."""
    monkeypatch.setattr(run_file, "BLOCK_ROWS", 2)


def test_the_downstream_of_a_versioned_table_is_what_it_claims_after_each_batch() -> None:
    run(SnapshotMachine, 300 if SOAK else 5, 50 if SOAK else 25)


def test_the_same_seed_gives_the_same_trace() -> None:
    found = []
    for _ in range(2):
        SnapshotMachine.traces = []
        run(SnapshotMachine, 2, 25, random=False)
        found.append(SnapshotMachine.traces)
    SnapshotMachine.traces = None
    assert found[0] == found[1]
    assert sum(map(len, found[0])) > 10
