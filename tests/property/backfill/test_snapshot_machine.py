"""Random writes, batches, barriers of all kinds, crashes, rescales, pauses, throttles and compactions over the backfill
from a versioned table: after each batch the downstream is the table at the epoch that it claims, each row once."""

from __future__ import annotations

import os
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from tests.property.backfill.test_upstream_machine import KINDS, ORDERS, run
from tests.unit.backfill.snapshot.memory_table import MemoryTable
from tests.unit.backfill.snapshot.runner import Downstream

from headwater.backfill.snapshot.record import SnapshotPhase
from headwater.stream import BarrierKind, Mutation, Resume, Throttle, VnodeBitmap

VNODES = 4
WRITES = st.dictionaries(st.integers(0, 30), st.one_of(st.none(), st.integers(0, 9)), max_size=8)
Told = tuple[int, int, list[tuple[int, int, int]]]


class SnapshotMachine(RuleBasedStateMachine):
    """One query over a table in memory, with owners of its vnodes that may change."""

    traces: ClassVar[list[list[Told]] | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.table = MemoryTable(VNODES, batch_rows=2)
        self.table.commit(1, {key: key for key in range(0, 30, 2)})
        self.down = Downstream(self.table, owners=("a", "b"), budget=3)
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

    @precondition(lambda self: self.down.planned is None and self.down.phase is not SnapshotPhase.WAITING)
    @rule(owners=st.lists(st.integers(0, 2), min_size=VNODES, max_size=VNODES))
    def rescale(self, owners: list[int]) -> None:
        given = {
            name: VnodeBitmap.of([vnode for vnode in range(VNODES) if owners[vnode] == number], VNODES)
            for number, name in enumerate("abc")
        }
        self.down.rescale({name: bitmap for name, bitmap in given.items() if bitmap})
        self.check()

    @rule()
    def compact(self) -> None:
        self.table.compact()

    def check(self) -> None:
        """Phases go forward only; once the snapshot is delivered the sink is the table at its epoch."""
        order, phase = list(SnapshotPhase), self.down.phase
        assert order.index(phase) >= order.index(self.seen)
        self.seen = phase
        sink, epoch = self.down.sink, self.down.sink.offset[0]
        if phase in (SnapshotPhase.WAITING, SnapshotPhase.SNAPSHOT):
            at = self.table.rows(self.down.at[0])
            assert all(at.get(key) == value for key, value in sink.rows.items()), "only rows of the snapshot"
        else:
            assert sink.rows == self.table.rows(epoch)

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


def test_the_downstream_of_a_versioned_table_is_what_it_claims_after_each_batch() -> None:
    soak = os.environ.get("HEADWATER_SOAK") == "1"
    run(SnapshotMachine, 3000 if soak else 25, 60 if soak else 25)


def test_the_same_seed_gives_the_same_trace() -> None:
    found = []
    for _ in range(2):
        SnapshotMachine.traces = []
        run(SnapshotMachine, 5, 30, random=False)
        found.append(SnapshotMachine.traces)
    SnapshotMachine.traces = None
    assert found[0] == found[1]
    assert sum(map(len, found[0])) > 10
