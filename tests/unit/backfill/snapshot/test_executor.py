"""Snapshot at one epoch, then the change log, then live: each row once, whatever happens in between."""

from __future__ import annotations

import itertools

import pytest
from tests.unit.backfill.snapshot.memory_table import MemoryTable, position
from tests.unit.backfill.snapshot.runner import Downstream

from headwater.backfill.progress import Phase
from headwater.backfill.snapshot.errors import BarrierOutOfOrder, InvalidSnapshotOption, ProgressWentBack
from headwater.backfill.snapshot.executor import SnapshotOptions
from headwater.backfill.snapshot.mark import KeySpan
from headwater.backfill.snapshot.record import SnapshotPhase
from headwater.backfill.snapshot.state import VnodeProgress
from headwater.stream import (
    Barrier,
    BarrierKind,
    Epoch,
    EpochPair,
    Op,
    Pause,
    Resume,
    Stop,
    Throttle,
    VnodeBitmap,
)

WAITING, SNAPSHOT, CHANGE_LOG, LIVE = SnapshotPhase


def filled(rows: int = 40, vnodes: int = 4) -> MemoryTable:
    table = MemoryTable(vnodes)
    table.commit(3, {key: key for key in range(rows)})
    return table


def brought_to(phase: SnapshotPhase, table: MemoryTable | None = None, **options: object) -> Downstream:
    """A downstream in the middle of *phase*; the table has changes after the snapshot."""
    made = Downstream(table or filled(), **options)  # type: ignore[arg-type]
    made.batch()
    for epoch in range(4, 9):
        made.table.commit(epoch, {epoch: -epoch, 100 + epoch: epoch}, deletes=(20 + epoch,))
    go_to(phase, made)
    return made


def go_to(phase: SnapshotPhase, made: Downstream) -> None:
    for _ in range(100):
        if made.planned is None:
            made.plan()
        if made.phase is phase:
            return
        assert made.planned is not None
        made.deliver()
        made.at, made.planned = made.planned, None
    raise AssertionError(f"it did not come to {phase}")


# -- the phases --------------------------------------------------------------------------------------------------------


def test_s1_the_snapshot_of_a_table_without_later_changes_and_then_nothing() -> None:
    table = MemoryTable(1)
    for epoch in (1, 2, 3):
        table.commit(epoch, {epoch: epoch * 10})
    made = Downstream(table, budget=100)
    assert made.run() == 1
    assert made.sink.trace == [(3, 1, [(Op.INSERT, 1, 10), (Op.INSERT, 2, 20), (Op.INSERT, 3, 30)])]
    for kind in (BarrierKind.BARRIER, BarrierKind.CHECKPOINT, BarrierKind.SYNC_CHECKPOINT, BarrierKind.BARRIER):
        made.barrier(kind=kind)
        assert not made.batch()
    assert made.phase is LIVE


def test_s2_a_snapshot_that_was_read_before_is_followed_by_the_log_and_then_by_live_changes() -> None:
    table = MemoryTable(1)
    for epoch in (1, 2, 3):
        table.commit(epoch, {epoch: epoch})
    made = Downstream(table, budget=100)
    made.batch()
    table.commit(4, {4: 4})
    made.crash(kept=True)  # comes back with the snapshot behind it
    read = made.read_rows
    assert made.batch()
    assert made.sink.trace[-1] == (4, 1, [(Op.INSERT, 4, 4)])
    assert made.read_rows == read
    assert not made.batch()
    assert made.phase is LIVE
    table.commit(5, {5: 5})
    assert made.batch()
    assert made.sink.trace[-1] == (5, 1, [(Op.INSERT, 5, 5)])
    made.barrier(Stop())
    assert made.executors[""].is_stopped


def test_each_transition_of_the_phases() -> None:
    made = Downstream(filled())
    executor = made.executors[""]
    assert (executor.phase, executor.wants(0.0), executor.allows(0.0)) == (WAITING, 0, 0)
    executor.consume(99, has_more=False)
    executor.deliver(99)
    assert executor.phase is WAITING
    made.plan()
    assert (executor.phase, executor.epoch) == (SNAPSHOT, 3)
    executor.consume(99, has_more=False)
    assert executor.phase is SNAPSHOT
    with pytest.raises(ValueError, match="begun"):
        executor.begin(3, made._layout())
    made.run()
    assert executor.phase is LIVE
    executor.restart()
    assert (executor.phase, executor.epoch, executor.state.least_epoch()) == (WAITING, 0, 0)


def test_no_change_is_delivered_before_the_snapshot_is_whole() -> None:
    made = Downstream(filled(), budget=3)
    made.batch()
    made.table.commit(4, {0: 1000})
    while made.phase is SNAPSHOT:
        assert made.sink.rows.get(0) in (None, 0)
        made.batch()
        made.plan()
    assert made.sink.rows == made.table.rows(3)
    made.planned = None
    made.run()
    assert made.sink.rows[0] == 1000


# -- M -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [SNAPSHOT, CHANGE_LOG, LIVE])
@pytest.mark.parametrize("is_delivered", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_m1_a_crash_in_each_phase_goes_on_where_it_was(phase: SnapshotPhase, is_delivered: bool, is_kept: bool) -> None:
    made = brought_to(phase)
    made.table.commit(20, {7: 77})
    if made.planned is None:
        made.plan()
    if is_delivered and made.planned is not None:
        made.deliver()
    before = made.read_rows
    made.crash(kept=is_kept or is_delivered)
    made.run()
    assert made.sink.rows == made.table.rows(20)
    assert made.read_rows - before <= 40  # the snapshot is not read from its beginning
    assert made.phase is LIVE


def test_m1_a_crash_between_the_last_hand_out_and_its_delivery() -> None:
    for is_kept, is_delivered in itertools.product((True, False), repeat=2):
        made = Downstream(filled(), budget=15)
        while not made.executors[""].is_exhausted:
            if made.planned is not None:
                made.deliver()
                made.at = made.planned
            made.plan()
        if is_delivered:
            made.deliver()
        made.crash(kept=is_kept or is_delivered)
        made.run()
        assert made.sink.rows == made.table.rows(3)


def test_m2_a_crash_with_vnodes_that_are_finished_half_read_and_untouched() -> None:
    made = Downstream(filled(), budget=13)
    made.batch()
    made.plan()
    state = dict(made.executors[""].state.items())
    assert state[0] == VnodeProgress(3, 10)
    assert state[2] is not None
    assert state[2].position is not None
    assert state[3] is None
    made.crash(kept=True)
    assert dict(made.executors[""].state.items()) == state
    made.run()
    assert made.sink.rows == made.table.rows(3)
    assert made.read_rows == 40


@pytest.mark.parametrize("phase", [SNAPSHOT, CHANGE_LOG, LIVE])
def test_m3_vnodes_change_hands_in_each_phase(phase: SnapshotPhase) -> None:
    made = brought_to(phase, owners=("a", "b"))
    if made.planned is not None:
        made.deliver()
        made.at, made.planned = made.planned, None
        for executor in made.executors.values():
            executor.deliver(made.at[1])
    count = made.table.vnode_count
    full = VnodeBitmap.full(count)
    made.rescale({"a": full, "b": VnodeBitmap.empty(count)})
    made.batch()
    one, two, three = VnodeBitmap.of([0], count), VnodeBitmap.of([1, 3], count), VnodeBitmap.of([2], count)
    made.rescale({"a": three, "b": one, "c": two})
    made.table.commit(20, {7: 77})
    made.crash(kept=True)
    made.run()
    assert made.sink.rows == made.table.rows(20)
    assert made.phase is LIVE


def test_m3_vnodes_of_an_owner_that_is_elsewhere_are_refused() -> None:
    made = Downstream(filled(), owners=("a", "b"), budget=100)
    made.batch()
    made.table.commit(4, {1: 10})
    made.table.commit(5, {1: 11})
    made.batch()
    made.plan()
    made.planned = None
    a, b = made.executors["a"], made.executors["b"]
    b.restart()
    made.save()
    full = VnodeBitmap.full(made.table.vnode_count)
    with pytest.raises(ProgressWentBack, match="elsewhere"):
        made.rescale({"a": full})
    assert a.phase is CHANGE_LOG


def test_m4_an_upstream_that_is_faster_than_the_backfill_is_caught_up_with_when_it_slows_down() -> None:
    made = Downstream(filled(200), budget=5, epochs_per_batch=4)
    epochs = itertools.count(10)
    for _ in range(60):  # two epochs for each batch
        made.batch()
        for _ in range(2):
            epoch = next(epochs)
            made.table.commit(epoch, {epoch % 200: epoch})
    lags = []
    while made.batch():
        lags.append(len([epoch for epoch in made.table.epochs() if epoch > made.at[0]]))
    assert lags[-1] == 0
    assert made.sink.rows == made.table.rows(made.table.newest_epoch)
    assert made.phase is LIVE


def test_m5_barriers_that_make_nothing_durable_come_between_checkpoints() -> None:
    made = Downstream(filled(), budget=10)
    made.batch()
    made.barrier(Throttle(7), BarrierKind.BARRIER)
    made.barrier(Pause(), BarrierKind.BARRIER)
    made.crash(kept=True)  # what no checkpoint has covered is gone
    assert [one.is_paused for one in made.executors.values()] == [False]
    made.barrier(Pause(), BarrierKind.BARRIER)
    made.barrier(kind=BarrierKind.CHECKPOINT)
    made.crash(kept=True)
    assert [one.is_paused for one in made.executors.values()] == [True]
    made.barrier(Resume())
    made.run()
    assert made.sink.rows == made.table.rows(3)


@pytest.mark.parametrize("budget", [1, 7, 100])
def test_m6_s15_the_pinned_epoch_outlives_compactions_for_the_whole_backfill(budget: int) -> None:
    made = Downstream(filled(), budget=budget)
    made.batch()
    for epoch in range(10, 30):
        made.table.commit(epoch, {epoch: epoch})
        made.table.compact()
        assert made.table.base_epoch <= made.at[0]
        made.batch()
    made.run()
    assert made.sink.rows == made.table.rows(29)
    made.plan()
    made.table.compact()
    assert made.table.base_epoch == 29  # nothing is held any more


@pytest.mark.parametrize("phase", [SNAPSHOT, CHANGE_LOG, LIVE])
@pytest.mark.parametrize(("stop", "go"), [(Pause(), Resume()), (Throttle(0), Throttle(None))])
def test_m7_pause_and_throttle_to_nothing_and_back_in_each_phase(
    phase: SnapshotPhase, stop: Pause | Throttle, go: Resume | Throttle
) -> None:
    made = brought_to(phase)
    if made.planned is not None:
        made.deliver()
        made.at, made.planned = made.planned, None
    was = made.phase
    made.barrier(stop)
    made.table.commit(20, {7: 77})
    for is_restarted in (False, True):
        if is_restarted:
            made.crash(kept=True)  # it stays paused over a restart
        assert made.batch() is (phase is LIVE and not is_restarted)
        assert made.phase is was
    made.barrier(go)
    made.run()
    assert made.sink.rows == made.table.rows(20)


def test_m7_a_throttle_slows_the_snapshot_and_the_catch_up() -> None:
    made = Downstream(filled(), budget=100, options=SnapshotOptions(rows_per_second=5, burst_seconds=1.0))
    made.run()
    first = len(made.sink.rows)
    assert 0 < first <= 10
    assert not made.batch()
    made.now += 1.0
    assert made.batch()
    assert len(made.sink.rows) > first
    made.barrier(Throttle(None, "public.others"))  # somebody else's
    assert not made.batch()
    made.barrier(Throttle(None))
    made.table.commit(4, {1: 10})
    go_to(CHANGE_LOG, made)
    executor = made.executors[""]
    made.barrier(Throttle(5))
    executor.take(50)
    assert executor.allows(made.now) == 0
    assert executor.allows(made.now + 20.0) > 0


def test_m8_an_empty_table_is_live_at_once() -> None:
    table = MemoryTable()
    made = Downstream(table)
    table.commit(3)
    made.run()
    assert (made.phase, made.sink.rows) == (LIVE, {})
    table.commit(4, {1: 1})
    made.run()
    assert made.sink.rows == {1: 1}


def test_m8_a_table_of_one_vnode_is_resumed_inside_it() -> None:
    made = Downstream(filled(vnodes=1), budget=4)
    made.batch()
    assert made.executors[""].state.get(0) == VnodeProgress(3, 3, position(3))
    made.crash(kept=True)
    made.run()
    assert made.sink.rows == made.table.rows(3)
    assert made.read_rows == 40


def test_m8_a_row_that_is_deleted_and_made_anew_between_two_batches_is_one_change() -> None:
    made = brought_to(LIVE)
    made.table.commit(20, deletes=(3,))
    made.table.commit(21, {3: 333})
    made._epochs_per_batch = 2
    made.run()
    assert made.sink.trace[-1][2] == [(Op.UPDATE_DELETE, 3, 3), (Op.UPDATE_INSERT, 3, 333)]
    made.table.commit(22, {500: 1})
    made.table.commit(23, deletes=(500,))
    made.run()
    assert made.sink.trace[-1][2] == []


def test_m9_changes_outside_the_range_of_keys_do_not_come() -> None:
    span = KeySpan(position(10), position(20))
    made = Downstream(filled(), span=span)
    made.batch()
    made.table.commit(4, {5: 55, 15: 155, 300: 1}, deletes=(11, 25))
    made.run()
    assert made.sink.rows == {key: key for key in range(10, 20) if key != 11} | {15: 155}


# -- barriers, progress, options ---------------------------------------------------------------------------------------


def test_every_kind_of_barrier_and_every_mutation_passes_in_each_phase() -> None:
    mutations = [None, Pause(), Resume(), Throttle(1000), Throttle(None)]
    for phase in (SNAPSHOT, CHANGE_LOG, LIVE):
        made = brought_to(phase)
        for kind, mutation in itertools.product(BarrierKind, mutations):
            made.barrier(mutation, kind)
        made.run()
        assert made.sink.rows == made.table.rows(8)


def test_a_barrier_that_does_not_follow_is_refused() -> None:
    executor = Downstream(filled()).executors[""]
    late = Barrier(EpochPair(Epoch.from_ms(9), Epoch.from_ms(8)), BarrierKind.CHECKPOINT)
    executor.on_barrier(late)
    early = Barrier(EpochPair(Epoch.from_ms(5), Epoch.from_ms(4)), BarrierKind.CHECKPOINT)
    with pytest.raises(BarrierOutOfOrder):
        executor.on_barrier(early)
    executor.on_barrier(Barrier(EpochPair(Epoch.from_ms(5), Epoch.from_ms(4)), BarrierKind.INITIAL))


def test_progress_tells_rows_by_vnode_and_in_all_and_never_goes_down() -> None:
    made = Downstream(filled(), budget=13)
    made.batch()
    executor = made.executors[""]
    told = executor.progress()
    assert (told.phase, told.rows, told.total_rows, told.splits, told.total_splits) == (Phase.READING, 13, 40, 1, 4)
    assert told.fraction == pytest.approx(13 / 40)
    assert [(one.rows, one.total_rows, one.finished) for one in executor.vnodes()] == [
        (10, 10, True),
        (3, 10, False),
        (0, 10, False),
        (0, 10, False),
    ]
    made.now = 2.0
    made.plan()
    assert executor.progress().rows == 26
    assert executor.progress().rows_per_second == pytest.approx(6.5)
    assert executor.progress().eta_seconds == pytest.approx(14 / 6.5)
    made.crash(kept=False)
    made.executors[""].roll_back(made.at[1])
    assert made.executors[""].progress().rows == 26
    for epoch in range(4, 9):
        made.table.commit(epoch, {0: epoch})
    lags = []
    while made.batch():
        told = made.executors[""].progress()
        lags.append((told.phase, told.lag_epochs))
    assert lags[-5:] == [(Phase.SETTLING, lag) for lag in (4, 3, 2, 1, 0)]
    assert "epochs of the log" in told.waiting
    assert made.executors[""].progress().phase is Phase.DONE
    assert all(one.finished for one in made.executors[""].vnodes())


def test_plans_are_handed_out_in_order_and_progress_of_the_log_goes_forward() -> None:
    made = Downstream(filled())
    made.plan()
    executor = made.executors[""]
    with pytest.raises(ProgressWentBack, match="Plan 1"):
        executor.hand_out(1, 10)
    made.run()
    made.table.commit(9, {1: 9})
    made.run()
    with pytest.raises(ProgressWentBack, match="Epoch 3"):
        executor.consume(3, has_more=False)


@pytest.mark.parametrize("wrong", [{"rows_per_second": -1}, {"burst_seconds": 0.0}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidSnapshotOption):
        SnapshotOptions(**wrong)


# -- what the coordinator of others does -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 5, 10, 10**12])
def test_s10_one_plan_is_under_way_at_a_time_and_has_no_more_than_its_budget_and_a_block(budget: int) -> None:
    made = Downstream(filled(), budget=budget)
    while made.phase in (WAITING, SNAPSHOT):
        if not made.plan():
            break
        handed = made.executors[""].handed_out(made.at[1] + 1)
        assert sum(part.rows for part in handed) <= max(budget, 3)
        assert len(made.executors[""]._record.pending) == 1
        made.batch()
    made.run()
    assert made.sink.rows == made.table.rows(3)


def test_s12_the_catch_up_takes_so_many_epochs_to_a_batch_and_nothing_when_it_is_stopped() -> None:
    made = Downstream(filled(), budget=100, epochs_per_batch=2)
    made.batch()
    for epoch in range(4, 9):
        made.table.commit(epoch, {0: epoch})
    epochs = []
    while made.batch():
        epochs.append(made.at[0])
    assert epochs == [5, 7, 8]
    assert not made.batch()  # no backlog
    made.table.commit(9, {0: 9})
    other = Downstream(filled(), budget=100)
    other.batch()
    other.table.commit(4, {0: 4})
    other.barrier(Stop())
    assert not other.batch()


def test_s13_a_throttle_of_the_catch_up_counts_when_it_begins_anew() -> None:
    made = brought_to(CHANGE_LOG)
    made.barrier(Throttle(7))
    made.crash(kept=True)
    made.now += 100.0
    made.run()
    executor = made.executors[""]
    executor.restart()
    assert executor.progress().limit == 7
