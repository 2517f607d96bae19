"""A snapshot in parts, each at the epoch of its batch, with the changes of what is read: each row once, whatever
happens in between."""

from __future__ import annotations

import itertools

import pytest
from tests.unit.backfill.snapshot.memory_table import MemoryTable, position
from tests.unit.backfill.snapshot.runner import Downstream

from headwater.backfill.progress import Phase
from headwater.backfill.snapshot.errors import BarrierOutOfOrder, InvalidSnapshotOption, ProgressWentBack
from headwater.backfill.snapshot.executor import SnapshotOptions
from headwater.backfill.snapshot.parts import Layout, VnodePart
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
    Throttle,
)

WAITING, SNAPSHOT, CHANGE_LOG, LIVE = SnapshotPhase


def filled(rows: int = 40, vnodes: int = 4) -> MemoryTable:
    table = MemoryTable(vnodes)
    table.commit(3, {key: key for key in range(rows)})
    return table


def write(table: MemoryTable) -> None:
    """One more epoch: a row of before and a new row change, another row is deleted."""
    epoch = table.newest_epoch + 1
    table.commit(epoch, {epoch % 40: -epoch, 100 + epoch: epoch}, deletes=((epoch * 7 + 1) % 40,))


def brought_to(phase: SnapshotPhase, budget: int = 4) -> Downstream:
    """A downstream in the middle of *phase*, which began while the table was written."""
    down = Downstream(filled(), budget=budget)
    down.batch()
    for _ in range(100):
        if phase is not LIVE:
            write(down.table)
            write(down.table)
        if down.planned is None:
            down.plan()
        if down.phase is phase:
            return down
        down.batch()
        down.check()
    raise AssertionError(f"it did not come to {phase}")


def finish(down: Downstream) -> None:
    down.run()
    assert down.phase is LIVE
    assert down.sink.rows == down.table.rows(down.table.newest_epoch)


# -- the phases --------------------------------------------------------------------------------------------------------


def test_s1_the_snapshot_of_a_table_without_later_changes_and_then_nothing() -> None:
    table = MemoryTable(1)
    for epoch in (1, 2, 3):
        table.commit(epoch, {epoch: epoch * 10})
    down = Downstream(table, budget=100)
    assert down.run() == 1
    assert down.sink.trace == [(3, 1, [(Op.INSERT, 1, 10), (Op.INSERT, 2, 20), (Op.INSERT, 3, 30)])]
    for kind in (BarrierKind.BARRIER, BarrierKind.CHECKPOINT, BarrierKind.SYNC_CHECKPOINT, BarrierKind.BARRIER):
        down.barrier(kind=kind)
        assert not down.batch()
    assert down.phase is LIVE


def test_s2_a_snapshot_that_was_read_before_is_followed_by_the_log_and_then_by_live_changes() -> None:
    table = MemoryTable(1)
    for epoch in (1, 2, 3):
        table.commit(epoch, {epoch: epoch})
    down = Downstream(table, budget=100)
    down.batch()
    table.commit(4, {4: 4})
    down.crash(kept=True)  # comes back with the snapshot behind it
    read = down.read_rows
    assert down.batch()
    assert down.sink.trace[-1] == (4, 1, [(Op.INSERT, 4, 4)])
    assert down.read_rows == read
    assert not down.batch()
    assert down.phase is LIVE
    table.commit(5, {5: 5})
    assert down.batch()
    assert down.sink.trace[-1] == (5, 1, [(Op.INSERT, 5, 5)])


def test_each_transition_of_the_phases() -> None:
    down = Downstream(filled())
    executor = down.executor
    executor.reach()
    executor.deliver(99, 99)
    assert executor.phase is WAITING
    down = Downstream(filled())
    executor = down.executor
    down.plan()
    assert (executor.phase, executor.epoch) == (SNAPSHOT, 3)
    executor.reach()
    assert executor.phase is SNAPSHOT
    down.run()
    assert executor.phase is LIVE
    executor.restart()
    assert (executor.phase, executor.epoch, executor.state.rows_of(0)) == (WAITING, 0, 0)


def test_a_vnode_is_live_as_soon_as_its_rows_are_delivered() -> None:
    down = Downstream(filled(), budget=10)
    down.batch()
    assert set(down.sink.rows) == set(range(0, 40, 4))  # vnode 0
    down.table.commit(4, {0: 1000, 1: 2000}, deletes=(4, 5))
    down.batch()
    epoch, _, applied = down.sink.trace[-1]
    assert epoch == 4
    assert [(Op(op), key) for op, key, _ in applied if key % 4 == 0] == [
        (Op.UPDATE_DELETE, 0),
        (Op.UPDATE_INSERT, 0),
        (Op.DELETE, 4),
    ]
    assert (Op.INSERT, 1, 2000) in applied, "vnode 1 is read at epoch 4: the change is in its row"
    assert not any(key == 5 for _, key, _ in applied)
    down.check()
    finish(down)


def test_no_epoch_waits_for_the_snapshot() -> None:
    down = Downstream(filled(), budget=3)
    for _ in range(10):
        write(down.table)
        down.batch()
        assert down.sink.offset[0] == down.table.newest_epoch
        down.check()
    finish(down)


# -- M -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [SNAPSHOT, CHANGE_LOG, LIVE])
@pytest.mark.parametrize("is_delivered", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_m1_a_crash_in_each_phase_goes_on_where_it_was(phase: SnapshotPhase, is_delivered: bool, is_kept: bool) -> None:
    down = brought_to(phase)
    write(down.table)
    if down.planned is None:
        down.plan()
    if is_delivered and down.planned is not None:
        down.deliver()
    before = down.read_rows
    down.crash(kept=is_kept or is_delivered)
    finish(down)
    assert down.read_rows - before <= 60  # the snapshot is not read from its beginning


def test_m1_a_crash_between_the_last_hand_out_and_its_delivery() -> None:
    for is_kept, is_delivered in itertools.product((True, False), repeat=2):
        down = Downstream(filled(), budget=15)
        while not down.executor.is_exhausted:
            if down.planned is not None:
                down.deliver()
                down.at = down.planned
            write(down.table)
            down.plan()
        if is_delivered:
            down.deliver()
        down.crash(kept=is_kept or is_delivered)
        finish(down)


def test_m2_a_crash_with_vnodes_that_are_finished_half_read_and_untouched() -> None:
    down = Downstream(filled(), budget=13)
    down.batch()
    down.plan()
    state = dict(down.executor.state.items())
    assert state[0] == VnodeProgress(3, 10)
    assert state[2] is not None
    assert state[2].position is not None
    assert state[3] is None
    handed_out = down.executor.filter()
    down.crash(kept=True)
    assert dict(down.executor.state.items()) == state
    assert down.executor.filter() == handed_out
    finish(down)
    assert down.read_rows == 40


def test_a_plan_that_is_at_the_sink_without_its_changes_is_remembered_with_its_epoch() -> None:
    """Its rows have the changes up to its epoch, which come again: they are left out."""
    down = Downstream(filled(), budget=10)
    down.batch()
    write(down.table)
    down.plan()
    executor, (epoch, plan) = down.executor, down.planned or (0, 0)
    parts = executor.handed_out(plan)
    assert (epoch, plan) == (4, 2)
    executor.roll_back(plan)
    executor.deliver(plan, 3)
    assert executor.handed_out(plan) == parts
    handed_out = executor.filter()
    assert handed_out is not None
    assert handed_out.parts == ((VnodePart(0, 1, 0), 0), *((part, 4) for part in parts))
    executor.hand_out(3, 10, 5, Layout([]))
    executor.roll_back(2)
    assert executor.filter() == handed_out
    executor.deliver(2, 4)
    assert executor.filter() == type(handed_out)(((VnodePart(0, 2, 0), 0),))


def test_m3_tasks_2_to_5_to_3_inside_a_snapshot_lose_nothing_and_read_nothing_twice() -> None:
    down = Downstream(filled(400, vnodes=8), budget=60, tasks=2)
    down.batch()
    down.tasks = 5
    down.batch()
    down.plan()
    down.crash(kept=True)  # planned for five, read by three
    down.tasks = 3
    finish(down)
    assert down.read_rows == 400


def test_m4_a_table_that_is_written_faster_than_it_is_read_is_caught_up_with() -> None:
    down = Downstream(filled(200), budget=5, epochs_per_batch=1)
    for _ in range(60):  # two epochs for each batch
        down.batch()
        write(down.table)
        write(down.table)
        down.check()
    lags = []
    while down.batch():
        lags.append(len([epoch for epoch in down.table.epochs() if epoch > down.at[0]]))
    assert lags == sorted(lags, reverse=True)
    assert lags[-1] == 0
    finish(down)


def test_m5_barriers_that_make_nothing_durable_come_between_checkpoints() -> None:
    down = Downstream(filled(), budget=10)
    down.batch()
    down.barrier(Throttle(7), BarrierKind.BARRIER)
    down.barrier(Pause(), BarrierKind.BARRIER)
    down.crash(kept=True)  # what no checkpoint has covered is gone
    limit = down.executor.progress().limit
    assert limit is None
    down.barrier(Pause(), BarrierKind.BARRIER)
    down.barrier(kind=BarrierKind.CHECKPOINT)
    down.crash(kept=True)
    assert down.executor.is_paused
    down.barrier(Resume())
    finish(down)


@pytest.mark.parametrize("budget", [1, 7, 100])
def test_m6_s15_what_a_plan_reads_outlives_compactions_and_the_pin_moves_on(budget: int) -> None:
    down = Downstream(filled(), budget=budget)
    down.batch()
    for _ in range(20):
        write(down.table)
        down.plan()
        down.table.compact()
        assert down.table.base_epoch <= down.at[0]
        down.batch()
        down.check()
    finish(down)
    down.table.pinned.pop("downstream")
    down.plan()
    down.table.compact()
    assert down.table.base_epoch == down.table.newest_epoch  # nothing is held any more


@pytest.mark.parametrize("phase", [SNAPSHOT, CHANGE_LOG, LIVE])
@pytest.mark.parametrize(("stop", "go"), [(Pause(), Resume()), (Throttle(0), Throttle(None))])
def test_m7_pause_and_throttle_to_nothing_stop_the_snapshot_and_no_change_in_each_phase(
    phase: SnapshotPhase, stop: Pause | Throttle, go: Resume | Throttle
) -> None:
    down = brought_to(phase)
    if down.planned is not None:
        down.batch()
    down.barrier(stop)
    read = down.read_rows
    for is_restarted in (False, True):
        if is_restarted:
            down.crash(kept=True)  # it stays paused over a restart
        write(down.table)
        while down.batch():
            down.check()
        assert down.sink.offset[0] == down.table.newest_epoch
        assert (down.read_rows, down.phase) == (read, SNAPSHOT if phase is SNAPSHOT else LIVE)
    down.barrier(go)
    finish(down)


def test_m7_a_throttle_slows_the_snapshot() -> None:
    down = Downstream(filled(), budget=100, options=SnapshotOptions(rows_per_second=5, burst_seconds=1.0))
    down.run()
    first = len(down.sink.rows)
    assert 0 < first <= 10
    assert not down.batch()
    down.now += 1.0
    assert down.batch()
    assert len(down.sink.rows) > first
    down.barrier(Throttle(None, "public.others"))  # another table
    assert not down.batch()
    down.barrier(Throttle(None))
    finish(down)


def test_m8_an_empty_table_is_live_at_once() -> None:
    table = MemoryTable()
    down = Downstream(table)
    table.commit(3)
    finish(down)
    assert down.sink.rows == {}
    table.commit(4, {1: 1})
    finish(down)


def test_m8_a_table_of_one_vnode_is_resumed_inside_it() -> None:
    down = Downstream(filled(vnodes=1), budget=4)
    down.batch()
    assert down.executor.state.get(0) == VnodeProgress(3, 3, position(3))
    write(down.table)
    down.crash(kept=True)
    down.batch()
    down.check()
    finish(down)


def test_m8_a_row_that_is_deleted_and_inserted_again_while_its_vnode_is_read() -> None:
    down = Downstream(filled(), budget=10, epochs_per_batch=2)
    down.batch()
    down.table.commit(20, deletes=(4, 5))
    down.table.commit(21, {4: 444, 5: 555})
    down.batch()
    down.check()
    assert [change for change in down.sink.trace[-1][2] if change[1] == 4] == [(Op.DELETE, 4, 4), (Op.INSERT, 4, 444)]
    assert [change for change in down.sink.trace[-1][2] if change[1] == 5] == [(Op.INSERT, 5, 555)]
    finish(down)


# -- barriers, progress, options ---------------------------------------------------------------------------------------


def test_every_kind_of_barrier_and_every_mutation_passes_in_each_phase() -> None:
    mutations = [None, Pause(), Resume(), Throttle(1000), Throttle(None)]
    for phase in (SNAPSHOT, CHANGE_LOG, LIVE):
        down = brought_to(phase)
        for kind, mutation in itertools.product(BarrierKind, mutations):
            down.barrier(mutation, kind)
        finish(down)


def test_a_barrier_that_does_not_follow_is_refused() -> None:
    executor = Downstream(filled()).executor
    late = Barrier(EpochPair(Epoch.from_ms(9), Epoch.from_ms(8)), BarrierKind.CHECKPOINT)
    executor.on_barrier(late)
    early = Barrier(EpochPair(Epoch.from_ms(5), Epoch.from_ms(4)), BarrierKind.CHECKPOINT)
    with pytest.raises(BarrierOutOfOrder):
        executor.on_barrier(early)
    executor.on_barrier(Barrier(EpochPair(Epoch.from_ms(5), Epoch.from_ms(4)), BarrierKind.INITIAL))


def test_progress_shows_rows_by_vnode_and_in_all_and_never_goes_down() -> None:
    down = Downstream(filled(), budget=13)
    down.batch()
    executor = down.executor
    shown = executor.progress()
    assert (shown.phase, shown.rows, shown.total_rows, shown.splits, shown.total_splits) == (
        Phase.READING,
        13,
        40,
        1,
        4,
    )
    assert shown.fraction == pytest.approx(13 / 40)
    assert [(vnode.rows, vnode.total_rows, vnode.finished) for vnode in executor.vnodes()] == [
        (10, 10, True),
        (3, 10, False),
        (0, 10, False),
        (0, 10, False),
    ]
    down.now = 2.0
    down.plan()
    assert executor.progress().rows == 26
    assert executor.progress().rows_per_second == pytest.approx(6.5)
    assert executor.progress().eta_seconds == pytest.approx(14 / 6.5)
    down.crash(kept=False)
    down.executor.roll_back(down.at[1])
    assert down.executor.progress().rows == 26
    for _ in range(9):
        write(down.table)
    lags: list[int] = []
    while down.batch():
        shown = down.executor.progress()
        if shown.phase is Phase.SETTLING:
            lags.append(shown.lag_epochs or 0)
            assert "epochs of the log" in shown.waiting
    assert lags == sorted(lags, reverse=True)
    assert lags[-1] == 0
    assert down.executor.progress().phase is Phase.DONE
    assert all(vnode.finished for vnode in down.executor.vnodes())


def test_plans_are_handed_out_in_order_of_their_numbers_and_epochs() -> None:
    down = Downstream(filled())
    down.plan()
    executor = down.executor
    layout = executor.layout
    assert layout is not None
    for plan, epoch in ((1, 3), (2, 2)):
        with pytest.raises(ProgressWentBack, match=f"Plan {plan} at epoch {epoch}"):
            executor.hand_out(plan, 10, epoch, layout)
    finish(down)


@pytest.mark.parametrize("wrong", [{"rows_per_second": -1}, {"burst_seconds": 0.0}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidSnapshotOption):
        SnapshotOptions(**wrong)


@pytest.mark.parametrize("budget", [1, 5, 10, 10**12])
def test_s10_one_plan_is_under_way_at_a_time_and_has_no_more_than_its_budget_and_a_block(budget: int) -> None:
    down = Downstream(filled(), budget=budget)
    while down.executor.is_reading:
        if not down.plan():
            break
        handed = down.executor.handed_out(down.at[1] + 1)
        assert sum(part.rows for part in handed) <= max(budget, 3)
        down.batch()
    finish(down)


def test_s12_the_log_is_taken_by_so_many_epochs_to_a_batch() -> None:
    down = Downstream(filled(), budget=100, epochs_per_batch=2)
    down.batch()
    for epoch in range(4, 9):
        down.table.commit(epoch, {0: epoch})
    epochs = []
    while down.batch():
        epochs.append(down.at[0])
    assert epochs == [5, 7, 8]
    assert not down.batch()  # no backlog


def test_s13_a_throttle_counts_when_the_table_begins_again() -> None:
    down = brought_to(CHANGE_LOG)
    down.barrier(Throttle(7))
    down.crash(kept=True)
    down.now += 100.0
    finish(down)
    down.executor.restart()
    assert down.executor.progress().limit == 7
