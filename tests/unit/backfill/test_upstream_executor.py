"""The executor over an upstream table: barriers, what they carry, and owners that give vnodes to each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from tests.unit.backfill.upstream_model import Downstream, MemoryUpstream, epoch

from headwater.backfill.snapshot.consume_upstream.errors import InvalidUpstream
from headwater.backfill.snapshot.consume_upstream.executor import UpstreamOptions, UpstreamTableExecutor
from headwater.backfill.snapshot.consume_upstream.stream import StreamPhase
from headwater.backfill.snapshot.consume_upstream.upstream_table import Part
from headwater.backfill.snapshot.errors import BarrierOutOfOrder, InvalidSnapshotOption
from headwater.backfill.snapshot.state import BackfillState
from headwater.state import Catalog, StateStore, StateTable, WriteBatch, open_writer
from headwater.stream import (
    Barrier,
    BarrierKind,
    Epoch,
    EpochPair,
    Mutation,
    Pause,
    Resume,
    Throttle,
    VnodeBitmap,
)

CHECKPOINT = BarrierKind.CHECKPOINT


class Run:
    """Executors of one table that share a store; every barrier is sealed that is durable."""

    def __init__(self, upstream: MemoryUpstream, store: StateStore, options: UpstreamOptions | None = None) -> None:
        self.upstream, self.store, self.options = upstream, store, options
        self.batch = WriteBatch()
        with store.snapshot() as view:
            self.states: StateTable = BackfillState.open_table(Catalog.load(view), self.batch)
        self.snapshot_epoch = upstream.newest_epoch()
        self.downstream = Downstream()
        self.now = 0.0
        self.pair = EpochPair(Epoch.from_ms(1001), Epoch.from_ms(1000))
        self.executors: dict[str, UpstreamTableExecutor] = {}
        self.own({"a": VnodeBitmap.full(upstream.vnode_count)})

    def own(self, owners: dict[str, VnodeBitmap]) -> None:
        with self.store.snapshot() as view:
            for owner, vnodes in owners.items():
                state = BackfillState.load(self.states, view, self.upstream.name, vnodes)
                self.executors[owner] = UpstreamTableExecutor(self.upstream, state, self.snapshot_epoch, self.options)

    @property
    def one(self) -> UpstreamTableExecutor:
        (made,) = self.executors.values()
        return made

    def barrier(self, mutation: Mutation | None = None, kind: BarrierKind = CHECKPOINT) -> list[Part]:
        """One barrier through all executors, a second after the one before."""
        self.now += 1.0
        self.pair = self.pair.next(self.pair.curr.next())
        barrier = Barrier(self.pair, kind, mutation)
        parts = []
        for executor in self.executors.values():
            made = executor.plan(barrier, self.now)
            for part in made:
                self.downstream.read(self.upstream, part)
            parts += made
        if barrier.is_durable:
            for executor in self.executors.values():
                executor.save(self.batch)
            self.store.seal(self.pair.curr, self.batch)
            self.batch = WriteBatch()
        return parts


@pytest.fixture
def upstream() -> MemoryUpstream:
    made = MemoryUpstream()
    made.commit({key: key for key in range(40)}, 10)
    return made


_stores = count()


@pytest.fixture
def store() -> Iterator[StateStore]:
    with open_writer(f"memory://upstream-executor-{next(_stores)}") as made:
        yield made


def newest(upstream: MemoryUpstream) -> dict[int, int]:
    return upstream.versions[upstream.newest_epoch()]


def test_snapshot_then_every_epoch(upstream: MemoryUpstream, store: StateStore) -> None:
    run = Run(upstream, store)
    assert run.one.consumed_epoch == 0
    run.barrier()
    assert run.one.has_snapshot
    assert run.one.consumed_epoch == epoch(10)
    for number in (20, 30, 40):
        upstream.commit({number: 1, 1: number, 2: None}, number)
    (part,) = run.barrier()
    assert (part.after, part.epoch) == (epoch(10), epoch(40))
    assert run.downstream.rows == newest(upstream)
    assert run.one.consumed_epoch == epoch(40)


def test_an_initial_barrier_has_no_rows_before_it(upstream: MemoryUpstream, store: StateStore) -> None:
    run = Run(upstream, store)
    assert run.barrier(kind=BarrierKind.INITIAL) == []
    assert run.barrier(kind=BarrierKind.BARRIER) != []


def test_a_barrier_that_does_not_follow_is_refused(upstream: MemoryUpstream, store: StateStore) -> None:
    run = Run(upstream, store)
    run.barrier()
    with pytest.raises(BarrierOutOfOrder):
        run.one.plan(Barrier(EpochPair(Epoch.from_ms(5000), Epoch.from_ms(4999)), CHECKPOINT), 0.0)


def test_so_many_epochs_at_a_time(upstream: MemoryUpstream, store: StateStore) -> None:
    run = Run(upstream, store, UpstreamOptions(batch_epochs=2))
    run.barrier()
    for number in range(20, 25):
        upstream.commit({1: number}, number)
    assert [run.barrier()[0].epoch for _ in range(3)] == [epoch(21), epoch(23), epoch(24)]
    assert run.barrier() == []


@pytest.mark.parametrize("phase", ["snapshot", "change log", "caught up"])
def test_m7_pause_and_resume_in_every_phase(upstream: MemoryUpstream, store: StateStore, phase: str) -> None:
    run = Run(upstream, store, UpstreamOptions(batch_rows=5))
    if phase != "snapshot":
        while not run.one.has_snapshot:
            run.barrier()
    if phase == "change log":
        upstream.commit(dict.fromkeys(range(40), -1), 20)
    run.barrier(Pause())
    upstream.commit({99: 1})
    assert all(run.barrier(kind=kind) == [] for kind in (CHECKPOINT, BarrierKind.BARRIER))
    assert run.barrier(Resume()) == []
    while run.barrier():
        pass
    assert run.downstream.rows == newest(upstream)


@pytest.mark.parametrize("phase", ["snapshot", "change log"])
def test_m7_throttled_to_nothing_and_back_in_every_phase(
    upstream: MemoryUpstream, store: StateStore, phase: str
) -> None:
    run = Run(upstream, store)
    run.barrier(Throttle(4))
    if phase == "change log":
        upstream.commit(dict.fromkeys(range(40), -1), 20)
    else:
        run.one.restart(upstream.newest_epoch())
        run.downstream = Downstream()
    run.barrier(Throttle(0, upstream.name))
    assert run.barrier() == []
    assert run.barrier(Throttle(4)) == []
    began = len(run.downstream.told)
    for seconds in range(1, 6):
        run.barrier()
        assert len(run.downstream.told) - began <= 2 * (4 * seconds + 4)  # pairs, and a piece more
    run.barrier(Throttle(None))
    while run.barrier():
        pass
    assert run.downstream.rows == newest(upstream)


def test_a_throttle_of_another_table_is_not_meant(upstream: MemoryUpstream, store: StateStore) -> None:
    run = Run(upstream, store)
    run.barrier(Throttle(0, "public.others"), BarrierKind.INITIAL)
    assert run.barrier() != []


def test_s9_m10_a_retention_miss_stops_and_a_new_snapshot_goes_on(upstream: MemoryUpstream, store: StateStore) -> None:
    """S9: down for longer than the retention. M10: and then the user acts."""
    run = Run(upstream, store)
    run.barrier()
    kept = dict(run.downstream.rows)
    for number in (20, 30, 40):
        upstream.commit({number: number}, number)
    upstream.compact()
    run.own({"a": VnodeBitmap.full(upstream.vnode_count)})
    for kind in (CHECKPOINT, BarrierKind.BARRIER, BarrierKind.SYNC_CHECKPOINT):
        assert run.barrier(kind=kind) == []
        assert run.one.phase is StreamPhase.STOPPED
        assert run.one.stopped is not None
        assert run.one.stopped.next_step
    assert run.downstream.rows == kept
    run.one.restart(upstream.newest_epoch())
    run.downstream = Downstream()
    run.barrier()
    upstream.commit({1: -1})
    run.barrier()
    assert run.one.stopped is None
    assert run.downstream.rows == newest(upstream)


def test_what_must_stay_readable_never_goes_back(upstream: MemoryUpstream, store: StateStore) -> None:
    run = Run(upstream, store, UpstreamOptions(batch_rows=3))
    needed = [run.one.needed_epoch]
    for number in range(20, 30):
        upstream.commit(dict.fromkeys(range(0, 40, 5), number), number)
        run.barrier()
        needed.append(run.one.needed_epoch)
    assert needed == sorted(needed)
    assert needed[0] == epoch(10)


def test_a_state_of_another_number_of_vnodes_is_refused(upstream: MemoryUpstream, store: StateStore) -> None:
    with pytest.raises(InvalidUpstream):
        Run(upstream, store).own({"a": VnodeBitmap.full(16)})


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in ({"batch_rows": 0}, {"batch_epochs": 0}, {"burst_seconds": 0}):
        with pytest.raises(InvalidSnapshotOption):
            UpstreamOptions(**wrong)
