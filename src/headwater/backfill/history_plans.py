"""HistoryPlans: the history of a query's tables, handed out in plans that tasks read inside one snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headwater.backfill.batch_units import split_units
from headwater.backfill.cdc.executor import HandedOut
from headwater.backfill.errors import LogBehind, SourceBehind
from headwater.backfill.held_snapshot import HeldSnapshot
from headwater.backfill.log_ranges import LogRanges, TableChanges
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import PlanRecord, QueryState, history_position
from headwater.backfill.query import QueryOptions
from headwater.backfill.query_table import QueryTable
from headwater.backfill.tasks import Slots
from headwater.backfill.units import SnapshotUnit, SplitUnit
from headwater.capture.source_state import SourceRecord
from headwater.errors import TransientError
from headwater.sinks.sink import Committed
from headwater.sources.errors import RefusedValue, SourceBusy
from headwater.sources.snapshots import ExportedSnapshot, SnapshotSource, UnsharedSnapshots, mark_from_json
from headwater.sources.table import SourceTable

CommittedOf = Callable[[SourceTable, str], Committed]

LOCKED_SECONDS: Final = 5.0
"""How long a table that somebody has locked is let be: who asks for it waits, and the other tables with it."""
_LAST_SHARE: Final = 1.5
"""The last batch may have so many times the rows of others: one that is a little longer costs less than two."""


class HistoryPlans:
    """The plans of one query; one thread.

    :param tables: of the query, by name; its planner changes them.
    :param committed: what the sink has of a table, where the sink can tell. :param save: makes the state durable.
    :param slots: see :data:`~headwater.backfill.tasks.Slots`.
    :ivar problem: why no snapshot can be had.
    """

    def __init__(
        self,
        options: QueryOptions,
        state: QueryState,
        tables: Mapping[str, QueryTable],
        source: SnapshotSource,
        committed: CommittedOf | None,
        save: Callable[[], None],
        slots: Slots,
    ) -> None:
        self._options, self._state, self._tables = options, state, tables
        self._source, self._committed, self._save = source, committed, save
        self._ask_slots, self._known_slots = slots, 1
        self._held = HeldSnapshot()
        self._retaken = False
        self.problem: str | None = None

    def let_go(self) -> None:
        """The batch is over: its snapshot may end."""
        self._held.let_go()

    def plan(self, ranges: LogRanges, end: int, found: Mapping[str, TableChanges], place: SourceRecord | None) -> bool:
        """Hand out history; whether there is a new plan. Where the source fails, nothing is handed out.

        :param place: the place of *end* in the log of the source, if it is known.
        """
        plan = self._state.plan.following
        try:
            kept = self._hand_out_kept(ranges, end, found, place)
            snapshot, handed = self._plan_source(ranges, end, found)
        except BaseException:  # the next attempt hands it out again, under the same number
            for table in self._tables.values():
                table.roll_back(plan - 1, None)
            raise
        if not handed and not kept:
            return False
        self._keep(snapshot, ranges, end, handed, kept)
        return True

    def _hand_out_kept(
        self, ranges: LogRanges, end: int, found: Mapping[str, TableChanges], place: SourceRecord | None
    ) -> dict[str, int]:
        """Rows of tables that we keep ourselves, by table; nothing is asked of the source for them.

        Where the place of *end* is not known they get the position at which their log begins: that is before every
        later change, too.
        """
        plan, made = self._state.plan.following, {}
        left = self._budget()
        for name, table in self._tables.items():
            if table.kept is None or left <= 0 or found[name].truncated is not None:
                continue
            begin = ranges.captured[name].since if place is None else place.offset
            time_us = table.kept.executor.commit_time_us if place is None else place.commit_time_us
            rows = table.kept.hand_out(plan, left, end, begin.position_after(None), time_us)
            if rows is not None:
                made[name] = rows
                left -= rows
        return made

    def _plan_source(
        self, ranges: LogRanges, end: int, found: Mapping[str, TableChanges]
    ) -> tuple[ExportedSnapshot | None, dict[str, list[HandedOut]]]:
        """Hand out history of the source, and the snapshot in which it is read."""
        unread = [name for name, table in self._tables.items() if table.reads_source]
        fresh = {name: ranges.positions(name, found[name].after, end) for name in unread if found[name].rows}
        ready = [name for name in unread if self._may_read(ranges, name, found[name])]
        if not ready and not fresh:
            return None, {}
        try:
            snapshot = self._source.export()
        except TransientError as error:
            self.problem = error.message
            for name, positions in fresh.items():
                self._tables[name].unseen(positions, None)
            return None, {}
        self.problem = None
        try:
            for name in unread:
                self._tables[name].unseen(fresh.get(name), snapshot.mark)
            if _is_behind(snapshot, ranges):
                for name in unread:
                    self._tables[name].waiting = "the server that history is read from is behind the log (a standby)"
                ready = []
            handed = self._hand_out(snapshot, [name for name in ready if not self._tables[name].waits_for_commit], end)
        except BaseException:
            snapshot.close()
            raise
        if not handed:
            snapshot.close()
            return None, {}
        return snapshot, handed

    def _may_read(self, ranges: LogRanges, name: str, changes: TableChanges) -> bool:
        table = self._tables[name]
        stopped = ranges.stopped(name)
        table.is_stopped = stopped is not None
        if stopped is not None:
            table.waiting = f"its capture has stopped: {stopped}"
        elif changes.truncated is None and time.monotonic() >= table.rests_until and table.wants() > 0:
            return True
        return False

    def _hand_out(self, snapshot: ExportedSnapshot, names: Sequence[str], end: int) -> dict[str, list[HandedOut]]:
        """Ranges of tables within the budget, a fair share for each."""
        plan = self._state.plan.following
        left = self._stretched(self._budget(), names)
        made: dict[str, list[HandedOut]] = {}
        for place, name in enumerate(names):
            table = self._tables[name]
            share = min(max(left // (len(names) - place), 1), table.wants())
            try:
                handed = table.hand_out(plan, snapshot, share, end)
            except SourceBusy:
                table.waiting = "another session has locked it"
                table.rests_until = time.monotonic() + LOCKED_SECONDS
                continue
            except RefusedValue as error:  # in a key, where its parts would begin
                table.waiting = str(error)
                table.rests_until = time.monotonic() + LOCKED_SECONDS
                continue
            if handed is not None:
                made[name] = handed
                left -= sum(part.rows for part in handed)
            if left <= 0:
                break
        return made

    def _budget(self) -> int:
        """Rows that are read in about one interval, as the last plans went; a split for each task at least.

        The slots are those of the last batch that needed more than one: a plan does not wait for Spark.
        """
        least = self._known_slots * self._options.split_rows
        return max(least, self._held.rows_in(self._options.interval_seconds))

    def _slots(self) -> int:
        self._known_slots = self._ask_slots()
        return self._known_slots

    def _stretched(self, budget: int, names: Sequence[str]) -> int:
        """All that is left of the tables *names*, where that is not many more."""
        left = sum(self._tables[name].rows_left for name in names)
        return max(budget, int(left)) if left <= budget * _LAST_SHARE else budget

    def _keep(
        self,
        snapshot: ExportedSnapshot | None,
        ranges: LogRanges,
        end: int,
        handed: Mapping[str, list[HandedOut]],
        kept: Mapping[str, int],
    ) -> None:
        positions = {
            name: history_position(ranges.captured[name].since, self._state.table(name).last_position).hex()
            for name in handed
        }
        for name in kept:
            of_kept = self._tables[name].kept
            assert of_kept is not None
            positions[name] = of_kept.executor.position.hex()
        plan = PlanRecord(
            number=self._state.plan.following,
            upto=end,
            commit_time_us=ranges.record.commit_time_us if ranges.record is not None else 0,
            marks=[] if snapshot is None else [snapshot.mark.to_json()],
            positions=positions,
        )
        self._state.plan = plan
        self._state.put_plan()
        rows = sum(part.rows for parts in handed.values() for part in parts) + sum(kept.values())
        self._held.hold(snapshot, plan.number, rows)

    def units(self, ranges: LogRanges, end: QueryOffset, *, recovering: bool) -> list[SplitUnit | SnapshotUnit]:
        """What tasks read of the newest plan. :param recovering: nothing was planned since the start."""
        plan = self._state.plan
        names = [name for name in plan.positions if name in self._tables]
        if recovering and self._committed is not None:
            names = [name for name in names if not self.is_committed(name, plan)]
        made: list[SplitUnit | SnapshotUnit] = []
        for name in names:
            kept = self._tables[name].kept
            if kept is not None:
                made += kept.units(plan, self._slots)
        names = [name for name in names if self._tables[name].kept is None]
        if not names:
            return made
        snapshot = self._held.of(end.plan, ask=recovering)
        if snapshot is None or self._is_overtaken(snapshot, ranges, end, names):
            snapshot = self._retake(ranges, names)
        for name in names:
            newest = ranges.following(name, end.epoch)
            by_number = isinstance(self._source, UnsharedSnapshots)
            made += split_units(self._tables[name], newest, plan, snapshot, end.epoch, self._slots, by_number=by_number)
        return made

    def _retake(self, ranges: LogRanges, names: Sequence[str]) -> ExportedSnapshot:
        """The snapshot of the newest plan is gone: take another one, and write down what it has."""
        self._held.let_go()
        snapshot = self._source.export()
        try:
            if _is_behind(snapshot, ranges):
                raise SourceBehind(
                    "The server that history is read from is behind the log: its snapshots lack what was delivered.",
                    next_step="Wait until the standby has caught up, or read from the primary.",
                )
            self._require_current(snapshot, ranges, names)
            plan = self._state.plan
            for name in names:
                table, following = self._tables[name], ranges.following(name, plan.upto)
                shared = not isinstance(self._source, UnsharedSnapshots)
                if table.has_moved(snapshot) or (shared and table.is_renamed(snapshot, following)):
                    table.read_anew()
                    continue
                exact = self._committed is not None and table.has_columns_of(snapshot, following)
                table.retake(plan.number, snapshot.mark, exact=exact)
            plan.attempt += 1
            plan.marks.append(snapshot.mark.to_json())
            self._state.put_plan()
            self._save()
        except BaseException:
            snapshot.close()
            raise
        rows = sum(part.rows for name in names for part in self._tables[name].handed_out(plan.number))
        self._held.hold(snapshot, plan.number, rows)
        self._retaken = True
        return snapshot

    def _is_overtaken(
        self, snapshot: ExportedSnapshot, ranges: LogRanges, end: QueryOffset, names: Sequence[str]
    ) -> bool:
        """Whether the log has come to a change of columns that *snapshot*, which is older, does not have.

        A column that was renamed would count as one that was added and one that was dropped, and be read as null.
        """
        if isinstance(self._source, UnsharedSnapshots):
            return self._unlike(snapshot, ranges, names) is not None
        return any(self._tables[name].is_renamed(snapshot, ranges.following(name, end.epoch)) for name in names)

    def _unlike(self, snapshot: ExportedSnapshot, ranges: LogRanges, names: Sequence[str]) -> str | None:
        """A table that has other columns in *snapshot* than in its log."""
        if not self._options.new_columns:
            return None
        tables = (self._tables[name] for name in names if ranges.stopped(name) is None)
        return next((table.name for table in tables if not table.has_columns_of(snapshot, table.latest)), None)

    def _require_current(self, snapshot: ExportedSnapshot, ranges: LogRanges, names: Sequence[str]) -> None:
        """:raises LogBehind: which columns are which is told by the log, and it has not come to the snapshot."""
        unlike = self._unlike(snapshot, ranges, names) if isinstance(self._source, UnsharedSnapshots) else None
        if unlike is not None:
            raise LogBehind(
                f"The columns of {unlike} have changed, and the capture has not come to that.",
                next_step="Look whether it runs: headwater status",
            )

    def check_attempt(self) -> None:
        """A plan was read twice; an older run may have committed its rows of the first snapshot after all."""
        was_retaken, self._retaken = self._retaken, False
        if not was_retaken:
            return
        for name in self._state.plan.positions if self._committed is not None else ():
            if name in self._tables:
                self.is_committed(name, self._state.plan)

    def is_committed(self, name: str, plan: PlanRecord) -> bool:
        """Whether the sink has the rows of *plan*: then what counts is the snapshot that it has them of."""
        table = self._tables[name]
        found = self._committed(table.table, self._state.id) if self._committed is not None else Committed()
        if table.kept is None and found.plan == plan.number and found.attempt != plan.attempt:
            table.retake(plan.number, mark_from_json(plan.marks[found.attempt]), exact=True)
        return found.plan >= plan.number


def _is_behind(snapshot: ExportedSnapshot, ranges: LogRanges) -> bool:
    """Whether the log knows more than *snapshot*, though it was taken later: that of a standby may."""
    return ranges.record is not None and snapshot.mark.high.is_behind(ranges.record.offset)
