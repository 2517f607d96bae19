"""BackfillPlans: what each plan of a query hands out of the backfills of its tables, and the snapshot it is read in.

Backfills from versioned tables need nothing of others. Those from the source share one exported snapshot, which is kept
open until the batch is over. Export, the questions that are put to a snapshot, and what the sink has are the only calls
that leave the process; they are given (``source``, ``committed``), as is the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headwater.backfill.cdc.backfill import CdcBackfill
from headwater.backfill.errors import LogBehind, SourceBehind
from headwater.backfill.log_ranges import LogRanges, TableChanges
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import PlanRecord, QueryState
from headwater.backfill.query import QueryOptions
from headwater.backfill.query_tables import CommittedOf, QueryTables
from headwater.backfill.tasks import Slots
from headwater.backfill.units import SnapshotUnit, SplitUnit
from headwater.capture.source_state import SourceRecord
from headwater.errors import TransientError
from headwater.sinks.sink import Committed
from headwater.sources.errors import RefusedValue, SourceBusy
from headwater.sources.snapshots import ExportedSnapshot, SnapshotSource, UnsharedSnapshots, mark_from_json
from headwater.system.clock import Clock

LOCKED_SECONDS: Final = 5.0
"""How long a table that another session has locked is left alone: asking for it waits, and the other tables with it."""
_LAST_SHARE: Final = 1.5
"""The last batch may have so many times the rows of others: one that is a little longer costs less than two."""


class HeldSnapshot:
    """The snapshot that the tasks of the newest plan read in, and how fast they read; one at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._snapshot: ExportedSnapshot | None = None
        self._plan = 0
        self._handed_out: tuple[int, float] | None = None
        self._rate: float | None = None

    def hold(self, snapshot: ExportedSnapshot | None, plan: int, rows: int) -> None:
        """Keep *snapshot* open, if the plan has one: *plan* reads about *rows* rows."""
        self._snapshot, self._plan = snapshot, plan
        self._handed_out = rows, self._clock.monotonic()

    def of(self, plan: int, *, ask: bool) -> ExportedSnapshot | None:
        """That of *plan*; ``None``: it is gone. :param ask: the server whether it still has it."""
        snapshot = self._snapshot
        if snapshot is None or self._plan != plan or (ask and not snapshot.is_open()):
            return None
        return snapshot

    def rows_in(self, seconds: float) -> int:
        """How many rows were read in this many seconds, as the last plans went; 0: unknown."""
        return 0 if self._rate is None else int(self._rate * seconds)

    def release(self) -> None:
        """The batch is over: its snapshot may end."""
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
        if self._handed_out is not None:
            rows, began = self._handed_out
            self._handed_out = None
            if rows:  # the first batch includes the start of the tasks: its rate is too low, and the next corrects it
                rate = rows / max(self._clock.monotonic() - began, 0.01)
                self._rate = rate if self._rate is None or rate > self._rate else (self._rate + rate) / 2


class BackfillPlans:
    """The plans of one query; one thread.

    :param tables: of the query; its planner changes them.
    :param committed: what the sink has of a table, where the sink knows. :param save: makes the state durable.
    :param slots: see :data:`~headwater.backfill.tasks.Slots`.
    :ivar problem: why no snapshot can be had.
    """

    def __init__(
        self,
        options: QueryOptions,
        state: QueryState,
        tables: QueryTables,
        source: SnapshotSource,
        committed: CommittedOf | None,
        save: Callable[[], None],
        slots: Slots,
        clock: Clock,
    ) -> None:
        self._options, self._state, self._tables = options, state, tables
        self._source, self._committed, self._save, self._clock = source, committed, save, clock
        self._is_unshared = isinstance(source, UnsharedSnapshots)
        self._ask_slots, self._known_slots = slots, 1
        self._held = HeldSnapshot(clock)
        self._is_retaken = False
        self.problem: str | None = None

    def release(self) -> None:
        """The batch is over: its snapshot may end."""
        self._held.release()

    # -- handing out -----------------------------------------------------------------------------------------------

    def plan(
        self, ranges: LogRanges, end: int, changes: Mapping[str, TableChanges], record: SourceRecord | None
    ) -> bool:
        """Hand out rows; whether there is a new plan. Where the source fails, nothing is handed out.

        :param record: where *end* is in the log of the source, if that is known.
        """
        plan = self._state.plan.following
        try:
            versioned = self._hand_out_versioned(ranges, end, changes, record)
            snapshot, external = self._plan_source(ranges, end, changes)
        except BaseException:  # the next attempt hands it out again, under the same number
            for table in self._tables.values():
                table.backfill.roll_back(plan - 1, None)
            raise
        if not external and not versioned:
            return False
        self._keep(snapshot, ranges, end, external, versioned)
        return True

    def _hand_out_versioned(
        self, ranges: LogRanges, end: int, changes: Mapping[str, TableChanges], record: SourceRecord | None
    ) -> dict[str, int]:
        """Rows of our own versioned tables, by table; nothing is asked of the source for them.

        Where the position of *end* is unknown they get the one at which their log begins: that is before every later
        change, too.
        """
        plan, left = self._state.plan.following, self._budget()
        handed_out: dict[str, int] = {}
        for name, backfill in self._tables.versioned.items():
            if left <= 0 or changes[name].truncated is not None:
                continue
            began, time_us = (
                (ranges.captured[name].since, None) if record is None else (record.offset, record.commit_time_us)
            )
            rows = backfill.hand_out(plan, left, end, began.position_after(None), time_us)
            if rows is not None:
                handed_out[name] = rows
                left -= rows
        return handed_out

    def _plan_source(
        self, ranges: LogRanges, end: int, changes: Mapping[str, TableChanges]
    ) -> tuple[ExportedSnapshot | None, dict[str, int]]:
        """Rows of the source, by table, and the snapshot in which they are read."""
        unread = {name: backfill for name, backfill in self._tables.external.items() if backfill.is_reading}
        fresh = {name: ranges.positions(name, changes[name].after, end) for name in unread if changes[name].rows}
        ready = [name for name, backfill in unread.items() if self._may_read(ranges, name, backfill, changes[name])]
        if not ready and not fresh:
            return None, {}
        try:
            snapshot = self._source.export()
        except TransientError as error:
            self.problem = error.message
            for name, positions in fresh.items():
                unread[name].observe_commits(positions, None)
            return None, {}
        self.problem = None
        try:
            for name, backfill in unread.items():
                backfill.observe_commits(fresh.get(name), snapshot.mark)
            if _is_behind(snapshot, ranges):
                for backfill in unread.values():
                    backfill.waiting = "the server that history is read from is behind the log (a standby)"
                ready = []
            handed_out = self._hand_out(snapshot, [name for name in ready if not unread[name].waits_for_commit], end)
        except BaseException:
            snapshot.close()
            raise
        if not handed_out:
            snapshot.close()
            return None, {}
        return snapshot, handed_out

    def _may_read(self, ranges: LogRanges, name: str, backfill: CdcBackfill, changes: TableChanges) -> bool:
        stopped, blocked, now = ranges.stopped(name), self._tables[name].blocked, self._clock.monotonic()
        backfill.is_stopped = stopped is not None
        if stopped is not None:
            backfill.waiting = f"its capture has stopped: {stopped}"
        elif changes.truncated is None and now >= backfill.rests_until:
            if blocked is None:
                return backfill.wants(now) > 0
            backfill.waiting = blocked
        return False

    def _hand_out(self, snapshot: ExportedSnapshot, names: Sequence[str], end: int) -> dict[str, int]:
        """Rows of tables within the budget, a fair share for each."""
        plan, external = self._state.plan.following, self._tables.external
        left = self._stretched(self._budget(), names)
        handed_out: dict[str, int] = {}
        for index, name in enumerate(names):
            backfill, now = external[name], self._clock.monotonic()
            share = min(max(left // (len(names) - index), 1), backfill.wants(now))
            try:
                rows = backfill.hand_out(plan, snapshot, share, end)
            except SourceBusy:
                backfill.waiting = "another session has locked it"
                backfill.rests_until = self._clock.monotonic() + LOCKED_SECONDS
                continue
            except RefusedValue as error:  # in a key, where its parts would begin
                backfill.waiting = str(error)
                backfill.rests_until = self._clock.monotonic() + LOCKED_SECONDS
                continue
            if rows is not None:
                handed_out[name] = rows
                left -= rows
            if left <= 0:
                break
        return handed_out

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
        external = self._tables.external
        left = sum(external[name].rows_left for name in names)
        return max(budget, int(left)) if left <= budget * _LAST_SHARE else budget

    def _keep(
        self,
        snapshot: ExportedSnapshot | None,
        ranges: LogRanges,
        end: int,
        external: Mapping[str, int],
        versioned: Mapping[str, int],
    ) -> None:
        read_source, read_versions = self._tables.external, self._tables.versioned
        positions = {name: read_source[name].position(ranges.captured[name].since).hex() for name in external}
        positions |= {name: read_versions[name].position.hex() for name in versioned}
        plan = PlanRecord(
            number=self._state.plan.following,
            upto=end,
            commit_time_us=ranges.record.commit_time_us if ranges.record is not None else 0,
            marks=[] if snapshot is None else [snapshot.mark.to_json()],
            positions=positions,
        )
        self._state.plan = plan
        self._state.put_plan()
        self._held.hold(snapshot, plan.number, sum(external.values()) + sum(versioned.values()))

    # -- units -----------------------------------------------------------------------------------------------------

    def units(self, ranges: LogRanges, end: QueryOffset, *, recovering: bool) -> list[SplitUnit | SnapshotUnit]:
        """What tasks read of the newest plan. :param recovering: nothing was planned since the start."""
        plan = self._state.plan
        names = [name for name in plan.positions if name in self._tables]
        if recovering and self._committed is not None:
            names = [name for name in names if not self.is_committed(name, plan)]
        versioned, external = self._tables.versioned, self._tables.external
        units: list[SplitUnit | SnapshotUnit] = []
        for name in names:
            if name in versioned:
                units += versioned[name].units(plan, self._slots)
        names = [name for name in names if name in external]
        if not names:
            return units
        snapshot = self._held.of(end.plan, ask=recovering)
        if snapshot is None or self._is_overtaken(snapshot, ranges, end, names):
            snapshot = self._retake(ranges, names)
        for name in names:
            newest, unshared = ranges.following(name, end.epoch), self._is_unshared
            units += external[name].units(plan, newest, snapshot, end.epoch, self._slots, by_number=unshared)
        return units

    def _retake(self, ranges: LogRanges, names: Sequence[str]) -> ExportedSnapshot:
        """The snapshot of the newest plan is gone: take another one, and write down what it has."""
        self._held.release()
        snapshot, external = self._source.export(), self._tables.external
        try:
            if _is_behind(snapshot, ranges):
                raise SourceBehind(
                    "The server that history is read from is behind the log: its snapshots lack what was delivered.",
                    next_step="Wait until the standby has caught up, or read from the primary.",
                )
            self._require_current(snapshot, ranges, names)
            plan = self._state.plan
            for name in names:
                backfill, following = external[name], ranges.following(name, plan.upto)
                is_renamed = not self._is_unshared and backfill.is_renamed(snapshot, following)
                if backfill.has_moved(snapshot) or is_renamed:
                    backfill.restart_by_key()
                    continue
                exact = self._committed is not None and backfill.has_columns(snapshot, following)
                backfill.retake(plan.number, snapshot.mark, exact=exact)
            plan.attempt += 1
            plan.marks.append(snapshot.mark.to_json())
            self._state.put_plan()
            self._save()
        except BaseException:
            snapshot.close()
            raise
        self._held.hold(snapshot, plan.number, sum(external[name].rows_of(plan.number) for name in names))
        self._is_retaken = True
        return snapshot

    def _is_overtaken(
        self, snapshot: ExportedSnapshot, ranges: LogRanges, end: QueryOffset, names: Sequence[str]
    ) -> bool:
        """Whether the log has come to a change of columns that *snapshot*, which is older, does not have.

        A column that was renamed would count as one that was added and one that was dropped, and be read as null.
        """
        if self._is_unshared:
            return self._unlike(snapshot, ranges, names) is not None
        external = self._tables.external
        return any(external[name].is_renamed(snapshot, ranges.following(name, end.epoch)) for name in names)

    def _unlike(self, snapshot: ExportedSnapshot, ranges: LogRanges, names: Sequence[str]) -> str | None:
        """A table that has other columns in *snapshot* than in its log."""
        if not self._options.new_columns:
            return None
        external = self._tables.external
        followed = (name for name in names if ranges.stopped(name) is None)
        return next((n for n in followed if not external[n].has_columns(snapshot, external[n].latest)), None)

    def _require_current(self, snapshot: ExportedSnapshot, ranges: LogRanges, names: Sequence[str]) -> None:
        """:raises LogBehind: which columns are which is told by the log, and it has not come to the snapshot."""
        unlike = self._unlike(snapshot, ranges, names) if self._is_unshared else None
        if unlike is not None:
            raise LogBehind(
                f"The columns of {unlike} have changed, and the capture has not come to that.",
                next_step="Look whether it runs: headwater status",
            )

    # -- what the sink has -----------------------------------------------------------------------------------------

    def check_attempt(self) -> None:
        """A plan was read twice; an older run may have committed its rows of the first snapshot after all."""
        was_retaken, self._is_retaken = self._is_retaken, False
        if not was_retaken:
            return
        for name in self._state.plan.positions if self._committed is not None else ():
            if name in self._tables:
                self.is_committed(name, self._state.plan)

    def is_committed(self, name: str, plan: PlanRecord) -> bool:
        """Whether the sink has the rows of *plan*: then what counts is the snapshot that it has them of."""
        known = Committed()
        if self._committed is not None:
            known = self._committed(self._tables[name].table, self._state.id)
        is_other = known.plan == plan.number and known.attempt != plan.attempt
        if is_other and self._tables[name].backfill.is_external:
            mark = mark_from_json(plan.marks[known.attempt])
            self._tables.external[name].retake(plan.number, mark, exact=True)
        return known.plan >= plan.number


def _is_behind(snapshot: ExportedSnapshot, ranges: LogRanges) -> bool:
    """Whether the log knows more than *snapshot*, though it was taken later: that of a standby may."""
    return ranges.record is not None and snapshot.mark.high.is_behind(ranges.record.offset)
