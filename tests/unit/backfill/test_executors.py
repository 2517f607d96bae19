"""Both versions of the backfill of a table: hand-outs, filters, restarts, requests, and the end."""

from __future__ import annotations

import pytest
from tests.unit.backfill.fake_database import FakeDatabase, Key, filled, is_in, table_of
from tests.unit.backfill.harness import Stored, barrier

from headwater.backfill.cdc.errors import InvalidBackfillOption, PlanOutOfOrder
from headwater.backfill.cdc.executor import BackfillExecutor, BackfillOptions, HandedOut
from headwater.backfill.cdc.state import Renewal
from headwater.backfill.progress import Phase
from headwater.backfill.rate_limit import NO_LIMIT
from headwater.backfill.units import DROP_ALL, ChangeFilter, Rule, Run, covered
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.state import WriteBatch
from headwater.stream import BarrierKind, Epoch, Pause, Resume, Throttle

SINGLE = BackfillOptions(version=1, split_rows=2)
PARALLEL = BackfillOptions(split_rows=2)
BOTH = pytest.mark.parametrize("options", [SINGLE, PARALLEL], ids=["single", "parallel"])


def rules(kept: ChangeFilter | None) -> list[tuple[str | None, str]]:
    """Ends and rules of a filter; a cut after a key has a plus."""
    assert kept is not None
    return [(None if run.end is None else _text(run.end), run.rule.value) for run in kept.runs]


def _text(cut: Cut) -> str:
    return ",".join(cut.values) + "+" * cut.after


def phase_of(executor: BackfillExecutor) -> Phase:
    return executor.phase


def keys_of(database: FakeDatabase, handed: list[HandedOut]) -> list[Key]:
    snapshot = database.export()
    found = [key for key in snapshot.keys if any(is_in(part.range, key) for part in handed)]
    snapshot.close()
    return found


@BOTH
def test_phases_go_from_waiting_to_done_and_the_filter_with_them(options: BackfillOptions) -> None:
    database, stored = filled([1, 2, 3, 4]), Stored()
    executor = stored.open(database.table, options)
    assert (executor.phase, executor.filter()) == (Phase.WAITING, DROP_ALL)
    executor.hand_out(1, database.export(), 2)
    assert phase_of(executor) is Phase.READING
    assert {"since", "drop"} == {rule for _, rule in rules(executor.filter())}
    executor.hand_out(2, database.export(), 2)
    assert phase_of(executor) is Phase.SETTLING
    assert {rule for _, rule in rules(executor.filter())} == {"since"}
    executor.settle(database.place(database.seal()))
    assert (executor.phase, executor.filter()) == (Phase.DONE, None)


@BOTH
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("budget", [1, 2, 3, 100])
def test_m19_every_row_is_handed_out_once_whatever_the_sizes(options: BackfillOptions, count: int, budget: int) -> None:
    database, stored = filled(list(range(10, 10 + 3 * count, 3))), Stored()
    executor = stored.open(database.table, options)
    seen: list[Key] = []
    for plan in range(1, 20):
        if executor.phase not in (Phase.WAITING, Phase.READING):
            break
        handed = executor.hand_out(plan, database.export(), budget)
        assert handed == executor.handed_out(plan)
        seen += keys_of(database, handed)
        executor = stored.again(executor)
        assert executor.handed_out(plan) == handed
    assert phase_of(executor) is Phase.SETTLING
    assert seen == sorted(database.rows_at(database.newest))
    assert executor.progress().rows == len(seen)


def test_m19_a_page_that_ends_the_table_is_the_last_and_no_batch_has_no_rows() -> None:
    database = filled([1, 2, 3, 4])
    executor = Stored().open(database.table, SINGLE)
    assert executor.hand_out(1, database.export(), 9) == [HandedOut(KeyRange(None, Cut(("2",), True)), 2)]
    assert executor.hand_out(2, database.export(), 9) == [HandedOut(KeyRange(Cut(("2",), True), None), 2)]
    assert phase_of(executor) is Phase.SETTLING
    assert executor.hand_out(3, database.export(), 9) == []
    for rows in (0, -1):
        with pytest.raises(InvalidBackfillOption, match="split_rows"):
            BackfillOptions(split_rows=rows)
    with pytest.raises(InvalidBackfillOption, match="version"):
        BackfillOptions(version=3)
    with pytest.raises(InvalidBackfillOption, match="goes by key"):
        BackfillOptions(version=1, kind=SplitKind.HEAP)


def test_c12_what_has_no_row_at_both_ends_needs_no_reading_and_comes_from_the_log_alone() -> None:
    database, stored = filled([10, 11, 12, 13]), Stored()
    executor = stored.open(database.table, PARALLEL)
    handed = executor.hand_out(1, database.export(), 2)
    assert [part.range for part in handed] == [KeyRange(Cut(("10",)), Cut(("12",)))]
    assert rules(executor.filter()) == [("12", "since"), ("13+", "drop"), (None, "since")]
    executor = stored.again(executor)
    assert rules(executor.filter()) == [("12", "since"), ("13+", "drop"), (None, "since")]
    executor.settle(database.place(database.seal()))
    assert rules(executor.filter()) == [("12", "emit"), ("13+", "drop"), (None, "emit")]
    assert rules(stored.again(executor).filter()) == [("12", "emit"), ("13+", "drop"), (None, "emit")]


def test_an_empty_split_between_others_is_read_with_them() -> None:
    database = filled([1, 2, 50, 51])
    executor = Stored().open(database.table, PARALLEL)
    handed = executor.hand_out(1, database.export(), 100)
    assert covered([part.range for part in handed]) == [KeyRange(Cut(("1",)), Cut(("51",), True))]
    assert [part.rows for part in handed] == [2, 0, 2]
    assert len(rules(executor.filter())) == 1


@BOTH
def test_m20_an_empty_and_an_idle_table_are_done_once_the_log_has_passed(options: BackfillOptions) -> None:
    for keys in ([], [1, 2]):
        database = filled(keys)
        executor = Stored().open(database.table, options)
        before = database.place(database.newest)
        database.lsn += 5
        executor.hand_out(1, database.export(), 100)
        executor.settle(before)
        assert phase_of(executor) is Phase.SETTLING
        executor.settle(database.place(database.seal()))
        assert phase_of(executor) is Phase.DONE


@BOTH
def test_m12_a_restart_before_the_first_page_reads_everything(options: BackfillOptions) -> None:
    database, stored = filled([1, 2, 3]), Stored()
    executor = stored.open(database.table, options)
    executor.on_barrier(barrier(Throttle(0)))
    assert executor.hand_out(1, database.export(), 9) == []
    executor = stored.again(executor)
    assert executor.wants(1.0) == 0
    executor.on_barrier(barrier(Throttle(None)))
    assert keys_of(database, executor.hand_out(1, database.export(), 2))[0] == (1,)
    executor.roll_back(0)
    executor = stored.again(executor)
    assert keys_of(database, executor.hand_out(1, database.export(), 2))[0] == (1,)


@BOTH
def test_27027_m11_what_was_handed_out_is_emitted_from_the_first_moment_after_a_restart(
    options: BackfillOptions,
) -> None:
    database, stored = filled([1, 2, 3, 4, 5]), Stored()
    executor = stored.open(database.table, options)
    executor.hand_out(1, database.export(), 2)
    before = executor.filter()
    assert stored.again(executor).filter() == before


def test_27022_m14_no_restart_and_no_other_plan_takes_back_what_was_handed_out() -> None:
    database, stored = filled(list(range(1, 13))), Stored()
    executor = stored.open(database.table, PARALLEL)
    seen: list[Key] = []
    for plan in (2, 5, 9, 14):
        executor = stored.again(executor)
        executor.roll_back(plan - 1)
        seen += keys_of(database, executor.hand_out(plan, database.export(), 3))
    executor.roll_back(14)
    assert seen == sorted(set(seen))
    assert [plan for plan in range(20) if executor.handed_out(plan)] == [2, 5, 9, 14]


@BOTH
def test_27028_m13_a_delete_of_a_row_that_was_read_is_emitted_although_the_rest_is_not(
    options: BackfillOptions,
) -> None:
    database, stored = filled([1, 2, 3, 4]), Stored()
    executor = stored.open(database.table, options)
    snapshot = database.export()
    executor.hand_out(1, snapshot, 2)
    database.run(((1,), None))
    kept = stored.again(executor).filter()
    assert kept is not None
    run = kept.runs[0]
    assert (run.rule, run.mark) == (Rule.SINCE, 0)
    positions = database.changes(database.newest, database.seal()).column("_position")
    assert not kept.marks[0].contains(positions).any()


@BOTH
def test_c13_a_plan_that_nobody_kept_was_not_handed_out(options: BackfillOptions) -> None:
    database, stored = filled(list(range(1, 8))), Stored()
    executor = stored.open(database.table, options)
    executor.hand_out(1, database.export(), 3)
    kept, rows = executor.filter(), executor.progress().rows
    second = executor.hand_out(2, database.export(), 3)
    executor = stored.again(executor)
    executor.roll_back(1)
    assert executor.filter() == kept
    assert executor.handed_out(2) == []
    assert executor.progress().rows > rows, "what a person has seen does not decrease"
    executor = stored.again(executor)
    assert executor.hand_out(2, database.export(), 3) == second
    with pytest.raises(PlanOutOfOrder):
        executor.hand_out(2, database.export(), 3)


@BOTH
def test_a_later_plan_does_not_count_in_the_filter_of_an_earlier_batch(options: BackfillOptions) -> None:
    database = filled([1, 2, 3, 4, 5])
    executor = Stored().open(database.table, options)
    executor.hand_out(1, database.export(), 2)
    kept = executor.filter()
    executor.hand_out(2, database.export(), 2)
    assert executor.filter(1) == kept
    assert executor.filter(2) != kept


@BOTH
def test_a_plan_that_is_read_again_has_the_other_snapshot_or_keeps_the_first(options: BackfillOptions) -> None:
    database, stored = filled([1, 2, 3]), Stored()
    for exact in (True, False):
        executor = stored.open(table_of(name=f"t{exact}"), options)
        first = database.export()
        executor.hand_out(1, first, 2)
        stored.save(executor)
        database.run(((1,), (9, 9)))
        again = database.export()
        executor.retake(1, again.mark, exact=exact)
        executor = stored.again(executor)
        kept = executor.filter()
        assert kept is not None
        assert kept.marks[kept.runs[0].mark or 0] == (
            first.mark if options.version == 2 else again.mark if exact else first.mark
        )
        assert (again.mark in kept.marks) == exact
        executor.hand_out(2, database.export(), 9)
        executor.settle(first.mark.high)
        assert phase_of(executor) is Phase.SETTLING, "not before the log has passed the second snapshot"
        executor.settle(database.place(database.seal()))
        assert phase_of(executor) is Phase.DONE


def test_what_needed_no_reading_keeps_the_snapshot_that_it_was_planned_in() -> None:
    """Between the two snapshots a row came after the last key: nobody reads it there, so that the log must bring it."""
    database = filled([1, 2])
    executor = Stored().open(database.table, PARALLEL)
    first = database.export()
    executor.hand_out(1, first, 9)
    database.run(((7,), (7, 7)))
    executor.retake(1, database.export().mark, exact=True)
    kept = executor.filter()
    assert kept is not None
    assert kept.marks[kept.runs[-1].mark or 0] == first.mark
    assert rules(kept) == [("1", "since"), ("2+", "since"), (None, "since")]


@BOTH
def test_m27_pause_and_throttle_work_in_every_phase_and_survive(options: BackfillOptions) -> None:
    database, stored = filled([1, 2, 3, 4]), Stored()
    executor = stored.open(database.table, options)
    for kind in BarrierKind:
        executor.on_barrier(barrier(Pause(), kind))
        assert executor.wants(0.0) == 0
        assert executor.hand_out(1, database.export(), 9) == []
        executor.on_barrier(barrier(Resume(), kind))
        assert executor.wants(0.0) == NO_LIMIT
    executor.on_barrier(barrier(Throttle(7, "public.others")))
    assert executor.wants(0.0) == NO_LIMIT
    executor.on_barrier(barrier(None))
    executor.hand_out(1, database.export(), 2)
    executor.on_barrier(barrier(Throttle(1, "public.orders")))
    executor.on_barrier(barrier(Pause()))
    executor = stored.again(executor)
    assert (executor.is_paused, executor.wants(0.0), executor.progress().waiting) == (True, 0, "paused")
    executor.on_barrier(barrier(Resume()))
    assert executor.wants(0.0) == 4, "what four seconds allow"
    executor.on_barrier(barrier(Throttle(0)))
    assert executor.progress().waiting == "limited to 0 rows per second"
    executor.on_barrier(barrier(Throttle(None)))
    executor = stored.again(executor)
    assert executor.wants(0.0) == NO_LIMIT
    executor.hand_out(2, database.export(), 9)
    executor.on_barrier(barrier(Pause()))
    executor.settle(database.place(database.seal()))
    assert phase_of(executor) is Phase.DONE, "a pause stops reading, not the log"
    assert stored.again(executor).is_paused


@BOTH
def test_m27_no_more_rows_than_the_rate_allows_also_inside_a_split(options: BackfillOptions) -> None:
    database = filled(list(range(100)))
    wide = BackfillOptions(version=options.version, split_rows=50, rows_per_second=5, burst_seconds=2.0)
    executor = Stored().open(database.table, wide)
    taken = []
    for second in range(6):
        budget = executor.wants(float(second))
        taken.append(sum(part.rows for part in executor.hand_out(second + 1, database.export(), budget)))
    assert taken == [10, 5, 5, 5, 5, 5]
    executor.on_barrier(barrier(Throttle(20)))
    executor.hand_out(9, database.export(), executor.wants(6.0))
    assert executor.progress().rows == (75 if options.version == 1 else 50), "of splits, what fits"
    executor.on_barrier(barrier(Throttle(0)))
    assert executor.wants(1000.0) == 0


def test_m18_a_split_of_many_rows_with_one_first_column_is_handed_out_in_parts() -> None:
    database = FakeDatabase(table_of(2))
    database.run(*(((7, key), (key, 0)) for key in range(20)))
    database.seal()
    executor = Stored().open(database.table, BackfillOptions(split_rows=100))
    first = executor.hand_out(1, database.export(), 6)
    assert [part.range.end for part in first] == [Cut(("7", "5"), after=True)]
    second = executor.hand_out(2, database.export(), 6)
    assert second[0].range == KeyRange(Cut(("7", "5"), True), Cut(("7", "11"), True))
    executor.roll_back(1)
    assert executor.hand_out(2, database.export(), 6) == second
    third = executor.hand_out(3, database.export(), 50)
    assert keys_of(database, [*first, *second, *third]) == sorted(database.rows_at(database.newest))
    assert phase_of(executor) is Phase.SETTLING


def test_an_unfinished_backfill_of_version_1_goes_on_as_version_2() -> None:
    database, stored = filled(list(range(1, 11))), Stored()
    executor = stored.open(database.table, SINGLE)
    handed = [executor.hand_out(1, database.export(), 2), executor.hand_out(2, database.export(), 2)]
    executor.on_barrier(barrier(Throttle(1000)))
    kept = executor.filter()
    executor = stored.again(executor, PARALLEL)
    assert executor.filter() == kept
    assert [executor.handed_out(plan) for plan in (1, 2)] == handed
    executor = stored.again(executor, PARALLEL)
    assert [executor.handed_out(plan) for plan in (1, 2)] == handed
    third = executor.hand_out(3, database.export(), 4)
    assert len(third) == 2, "many may read it"
    executor.settle(database.place(database.seal()))
    executor = stored.again(executor, PARALLEL)
    fourth = executor.hand_out(4, database.export(), 100)
    assert keys_of(database, [*handed[0], *handed[1], *third, *fourth]) == sorted(database.rows_at(1))
    executor.settle(database.place(database.seal()))
    assert stored.again(executor, SINGLE).phase is Phase.DONE


@pytest.mark.parametrize("pages", [0, 1, 5])
def test_version_1_goes_on_as_version_2_before_the_first_page_and_after_the_last(pages: int) -> None:
    database, stored = filled(list(range(1, 9))), Stored()
    executor = stored.open(database.table, SINGLE)
    handed: list[HandedOut] = []
    for plan in range(1, pages + 1):
        handed += executor.hand_out(plan, database.export(), 2)
    executor.settle(database.place(1))
    executor = stored.again(executor, PARALLEL)
    plan = 10
    while executor.phase in (Phase.WAITING, Phase.READING):
        handed += executor.hand_out(plan, database.export(), 3)
        plan += 1
    assert keys_of(database, handed) == [(key,) for key in range(1, 9)]
    executor.settle(database.place(database.seal()))
    assert phase_of(executor) is Phase.DONE


def test_m32_a_truncate_ends_the_backfill_once_it_is_delivered() -> None:
    database, stored = filled([1, 2, 3, 4]), Stored()
    executor = stored.open(database.table, PARALLEL)
    executor.hand_out(1, database.export(), 2)
    executor.truncate(7)
    assert (executor.phase, executor.wants(0.0)) == (Phase.SETTLING, 0)
    executor = stored.again(executor)
    executor.roll_back(1, 6)
    assert phase_of(executor) is Phase.READING, "that batch was not kept"
    executor.truncate(7)
    executor.settle(database.place(0), 6)
    assert phase_of(executor) is Phase.SETTLING
    executor.settle(database.place(0), 7)
    assert (executor.phase, executor.filter()) == (Phase.DONE, None)
    assert stored.again(executor).phase is Phase.DONE


def test_m32_a_truncate_that_was_delivered_before_a_restart_ends_the_backfill_at_once() -> None:
    """Nobody may know where the log was then: the next batch must emit what comes after the truncate all the same."""
    database, stored = filled([1, 2, 3, 4]), Stored()
    executor = stored.open(database.table, PARALLEL)
    executor.hand_out(1, database.export(), 2)
    executor.truncate(7)
    executor = stored.again(executor)
    executor.roll_back(1, 7)
    assert (executor.phase, executor.filter()) == (Phase.DONE, None)


def test_m32_a_table_that_is_truncated_before_it_is_read_needs_no_reading() -> None:
    executor = Stored().open(table_of(), PARALLEL)
    executor.truncate(3)
    assert executor.filter() == DROP_ALL, "what comes after the truncate is emitted by its place"
    assert executor.wants(0.0) == 0
    executor.settle(filled([]).place(0), 3)
    assert phase_of(executor) is Phase.DONE


@BOTH
def test_a_renewal_emits_what_it_has_not_read_yet_and_replaces_what_it_reads(options: BackfillOptions) -> None:
    database, stored = filled([1, 2, 3, 4]), Stored()
    executor = stored.open(database.table, options)
    executor.hand_out(1, database.export(), 9)
    executor.renew(Renewal("later"))
    for _ in range(2):
        assert executor.filter() != ChangeFilter(SplitKind.KEY, (Run(None, Rule.EMIT),)), "one after the other"
        executor.hand_out(2, database.export(), 9)
        executor.settle(database.place(database.seal()))
        if executor.renewal is not None:
            break
    executor = stored.again(executor)
    assert executor.renewal == Renewal("later")
    assert phase_of(executor) is Phase.WAITING
    assert (executor.progress().rereading, executor.progress().columns) == (True, ())
    assert rules(executor.filter()) == [(None, "emit")]
    handed = executor.hand_out(3, database.export(), 2)
    assert handed[-1].range.start is None or covered([part.range for part in handed])[0].start is None, "all of it"
    assert [rule for _, rule in rules(executor.filter())] == ["since", "emit"]
    assert rules(executor.filter(2)) == [(None, "emit")]
    while phase_of(executor) is Phase.READING:
        executor.hand_out(9, database.export(), 9)
    executor.settle(database.place(database.seal()))
    assert phase_of(executor) is Phase.DONE
    executor.renew(Renewal("later"))
    assert phase_of(executor) is Phase.DONE, "it was done"
    assert not executor.progress().rereading


@BOTH
def test_a_renewal_of_a_range_touches_nothing_else(options: BackfillOptions) -> None:
    database, stored = filled(list(range(1, 11))), Stored()
    executor = stored.open(database.table, options)
    executor.truncate(1)
    executor.settle(database.place(1), 1)
    part = KeyRange(Cut(("3",)), Cut(("7",), after=True))
    executor.renew(Renewal("part", part))
    handed = executor.hand_out(1, database.export(), 2)
    assert rules(executor.filter()) == [("3", "emit"), ("4+", "since"), (None, "emit")]
    executor = stored.again(executor)
    for plan in (2, 3):
        handed += executor.hand_out(plan, database.export(), 2)
    assert keys_of(database, handed) == [(3,), (4,), (5,), (6,), (7,)]
    assert phase_of(executor) is Phase.SETTLING
    assert rules(executor.filter())[-1] == (None, "emit")


def test_a_renewal_of_columns_drops_no_change_since_it_brings_no_whole_rows() -> None:
    database, stored = filled([1, 2]), Stored()
    executor = stored.open(database.table, PARALLEL)
    executor.truncate(1)
    executor.settle(database.place(1), 1)
    name = database.table.columns[1].name
    executor.renew(Renewal("b", columns=(database.table.columns[1].field_id,)))
    assert (executor.progress().rereading, executor.progress().columns) == (True, (name,))
    executor.hand_out(1, database.export(), 9)
    assert rules(executor.filter()) == [(None, "emit")]
    assert stored.again(executor).renewal == executor.renewal


def test_heap_splits_filter_all_keys_by_the_first_snapshot() -> None:
    database, stored = filled(list(range(1, 10))), Stored()
    executor = stored.open(database.table, BackfillOptions(split_rows=1, kind=SplitKind.HEAP))
    assert executor.filter() == DROP_ALL
    first = database.export()
    handed = executor.hand_out(1, first, 3)
    database.run(((99,), (1, 1)))
    executor.hand_out(2, database.export(), 3)
    executor.retake(2, database.export().mark, exact=True)
    kept = stored.again(executor).filter()
    assert kept is not None
    assert (rules(kept), kept.marks) == ([(None, "since")], (first.mark,))
    executor.roll_back(0)
    assert rules(executor.filter()) == [(None, "drop")]
    assert executor.hand_out(1, database.export(), 3)[0].range == handed[0].range


def test_a_table_whose_changes_tell_no_place_is_read_in_one_plan() -> None:
    database = filled(list(range(1, 30)))
    executor = Stored().open(database.table, BackfillOptions(split_rows=2, whole=True, kind=SplitKind.HEAP))
    handed = executor.hand_out(1, database.export(), 1)
    assert covered([part.range for part in handed]) == [KeyRange()]
    again = database.export()
    executor.retake(1, again.mark, exact=True)
    kept = executor.filter()
    assert kept is not None
    assert kept.marks == (again.mark,)


@BOTH
def test_26355_nothing_of_a_dropped_table_stays(options: BackfillOptions) -> None:
    database, stored = filled([1, 2, 3, 4]), Stored()
    neighbour = stored.open(table_of(name="orders2"), options)
    neighbour.hand_out(1, database.export(), 2)
    stored.save(neighbour)
    before = stored.rows()
    executor = stored.open(database.table, options)
    executor.hand_out(1, database.export(), 2)
    stored.save(executor)
    assert stored.rows() > before
    batch = WriteBatch()
    executor.state.forget(batch)
    stored.store.seal(Epoch.from_ms(1000), batch)
    assert stored.rows() == before
    assert stored.open(database.table, options).phase is Phase.WAITING
    assert stored.open(table_of(name="orders2"), options).handed_out(1) == neighbour.handed_out(1)


@BOTH
def test_26355_a_table_made_anew_under_its_old_name_begins_anew(options: BackfillOptions) -> None:
    database, stored = filled([1, 2, 3, 4]), Stored()
    executor = stored.open(database.table, options)
    executor.hand_out(1, database.export(), 2)
    executor.on_barrier(barrier(Pause()))
    stored.save(executor)
    other = stored.open(table_of(source_id=8), options)
    assert (other.phase, other.filter(), other.is_paused) == (Phase.WAITING, DROP_ALL, True)
    stored.save(other)
    assert stored.rows() == 1
    assert stored.open(table_of(source_id=8), options).handed_out(1) == []


def test_m33_one_table_that_stands_still_holds_back_no_other() -> None:
    database, stored = filled([1, 2]), Stored()
    slow, quick = (stored.open(table_of(name=name), PARALLEL) for name in ("slow", "quick"))
    for executor in (slow, quick):
        executor.on_barrier(barrier(Throttle(0, "public.slow")))
    assert slow.hand_out(1, database.export(), 9) == []
    assert quick.hand_out(1, database.export(), 9)
    quick.settle(database.place(database.seal()))
    slow.settle(database.place(database.newest))
    assert (slow.phase, quick.phase) == (Phase.WAITING, Phase.DONE)


@BOTH
def test_c8_a_save_writes_what_changed_and_nothing_else(options: BackfillOptions) -> None:
    database, stored = filled(list(range(20))), Stored()
    executor = stored.open(database.table, options)
    assert stored.save(executor) == 0
    executor.hand_out(1, database.export(), 2)
    assert executor.is_changed
    assert stored.save(executor) > 0
    assert (stored.save(executor), executor.is_changed) == (0, False)
    executor.hand_out(2, database.export(), 2)
    assert stored.save(executor) <= 9, "no split is written twice"
    executor.hand_out(3, database.export(), 100)
    while phase_of(executor) is Phase.READING:
        executor.hand_out(99, database.export(), 100)
        executor.settle(database.place(database.seal()))
    executor.settle(database.place(database.seal()))
    stored.save(executor)
    assert stored.rows() == 1, "of what is done one row stays"


def test_a_renewal_goes_by_key_but_where_the_whole_table_is_read_at_once() -> None:
    for whole, kind in ((False, SplitKind.KEY), (True, SplitKind.HEAP)):
        database = filled([1, 2, 3])
        options = BackfillOptions(split_rows=1, kind=SplitKind.HEAP, whole=whole)
        executor = Stored().open(database.table, options)
        executor.hand_out(1, database.export(), 99)
        executor.settle(database.place(database.seal()))
        executor.renew(Renewal("again"))
        executor.hand_out(2, database.export(), 99)
        assert executor.kind is kind
        assert [rule for _, rule in rules(executor.filter())] == (["emit"] if whole else ["since"])
