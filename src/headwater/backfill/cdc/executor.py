"""BackfillExecutor: the backfill of one table, whichever its version. Pure but for the snapshots that it is given.

What it decides, it decides when a plan is made, on one process; nothing is told back by those who read. The order of
the calls that make a batch from the offset *start*:

1. ``roll_back``: plans that nobody kept were not handed out after all, and a TRUNCATE that was delivered ends it;
2. ``settle`` with the place in the log **where the batch begins**: what comes after it is in no snapshot up to there;
3. ``truncate`` if the batch has a TRUNCATE of the table;
4. ``hand_out`` inside a snapshot that has every change of the batch; ``save``, sealed before the offset is given away;
5. ``filter`` for the changes of the batch.

The filter is right for any batch that begins where was settled or later, and for the batch before it: a snapshot that
was taken later has all of its changes, so that they are dropped as if nothing had been handed out. Only in a renewal
that is not so, where what is not handed out is emitted: ``filter(plan)`` leaves out what later plans handed out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from headwater.backfill.cdc.errors import InvalidBackfillOption, PlanOutOfOrder
from headwater.backfill.cdc.external import ExternalStorageTable
from headwater.backfill.cdc.state import CdcBackfillState, Renewal, Segment
from headwater.backfill.progress import Phase, RecentRate, TableProgress, seconds_left
from headwater.backfill.rate_limit import RateLimit
from headwater.backfill.units import DROP_ALL, ChangeFilter, Rule, Run
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import ExportedSnapshot, SnapshotMark
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceTable
from headwater.stream import ALL_TARGETS, Barrier, Pause, Resume, Throttle


@dataclass(frozen=True, slots=True)
class BackfillOptions:
    """How a table is backfilled.

    :ivar version: 1 reads one page after the other, 2 splits of which many are read at once.
    :ivar split_rows: about so many rows to a split; version 1: at most so many to a page.
    :ivar kind: of the splits; ``None`` lets the source choose.
    :ivar rows_per_second: until a throttle says otherwise; ``None`` is no limit.
    :ivar burst_seconds: for how long what the rate allows may gather: about the time between two plans.
    :ivar whole: everything in one plan, for a table whose changes do not tell their place.
    :raises InvalidBackfillOption: a value that makes no sense.
    """

    version: int = 2
    split_rows: int = 200_000
    kind: SplitKind | None = None
    rows_per_second: int | None = None
    burst_seconds: float = 4.0
    whole: bool = False

    def __post_init__(self) -> None:
        if self.version not in (1, 2):
            raise InvalidBackfillOption(f"Received backfill version {self.version}; valid values are 1 and 2.")
        if self.split_rows < 1:
            raise InvalidBackfillOption(
                f"Received split_rows={self.split_rows}; valid values are numbers from 1.",
                next_step="Set split_rows to the rows that one task reads, for example 200000.",
            )
        if self.version == 1 and self.kind is SplitKind.HEAP:
            raise InvalidBackfillOption(
                "A backfill by one reader goes by key.", next_step="Use version 2 for splits of the heap."
            )


@dataclass(frozen=True, slots=True)
class HandedOut:
    """A range that a plan reads, and about how many rows it has."""

    range: KeyRange
    rows: int


class BackfillExecutor(ABC):
    """The backfill of one table."""

    def __init__(self, external: ExternalStorageTable, state: CdcBackfillState[Any], options: BackfillOptions) -> None:
        self.external = external
        self.options = options
        self.state = state
        self._now = 0.0
        self._recent = RecentRate()
        record = state.record
        rate = record.limit if record.throttled else options.rows_per_second
        self._rate = RateLimit(rate, options.burst_seconds)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def table(self) -> SourceTable:
        return self.external.table

    @table.setter
    def table(self, table: SourceTable) -> None:
        """The same table with other columns."""
        if table != self.external.table:
            self.external = ExternalStorageTable(table, self.external.source)

    @property
    def phase(self) -> Phase:
        if self.state.record.finished:
            return Phase.DONE
        if self.state.record.kind is None:
            return Phase.SETTLING if self.state.record.truncated is not None else Phase.WAITING
        if self.state.record.truncated is not None or self._is_exhausted():
            return Phase.SETTLING
        return Phase.READING

    @property
    def kind(self) -> SplitKind:
        """Of its cuts; before they are planned: what is wanted."""
        return self.state.record.kind or self.options.kind or SplitKind.KEY

    @property
    def renewal(self) -> Renewal | None:
        """Which one this is; ``None``: the first backfill of the table."""
        return self.state.record.renewal

    @property
    def is_paused(self) -> bool:
        return self.state.record.paused

    @property
    def is_changed(self) -> bool:
        """Whether there is something to save."""
        return self.state.is_changed

    # -- what is asked of it ---------------------------------------------------------------------------------------

    def on_barrier(self, barrier: Barrier) -> None:
        """Apply what *barrier* carries, in every phase; a pause and a throttle survive a restart once saved."""
        match barrier.mutation:
            case Pause():
                self._set_paused(True)
            case Resume():
                self._set_paused(False)
            case Throttle(rows_per_second=rate, target=target) if target in (ALL_TARGETS, self.table.full_name):
                self._rate.change(rate, self._now)
                self.state.record.throttled, self.state.record.limit = True, rate
                self.state.change()

    def _set_paused(self, paused: bool) -> None:
        if self.state.record.paused != paused:
            self.state.record.paused = paused
            self.state.change()

    def wants(self, now: float) -> int:
        """Rows that may be handed out now: 0 when paused, throttled or when there is nothing left."""
        self._now = max(self._now, now)
        self._recent.note(self.state.record.rows, self._now)
        if self.state.record.paused or self.phase not in (Phase.WAITING, Phase.READING):
            return 0
        return self._rate.allowed(self._now)

    @property
    def rows_left(self) -> float:
        """About how many rows are not handed out; infinitely many before the splits are planned."""
        total = self.state.record.total_rows
        return math.inf if total is None else max(total - self.state.record.rows, 0)

    # -- plans -----------------------------------------------------------------------------------------------------

    def hand_out(self, plan: int, snapshot: ExportedSnapshot, budget: int) -> list[HandedOut]:
        """Ranges of at most about *budget* rows that *plan* reads inside *snapshot*; the first call plans the splits.

        Nothing may be left to read although nothing was handed out: a table without rows.

        :raises PlanOutOfOrder: an older plan. :raises UnsupportedTable: the table cannot be split.
        """
        budget = min(budget, self.wants(self._now))
        if budget <= 0:
            return []
        newest = self._pending()[-1].plan if self._pending() else 0
        if plan <= newest:
            raise PlanOutOfOrder(f"Plan {plan} cannot hand out after plan {newest}.", next_step="Roll back first.")
        if self.state.record.kind is None:
            self._plan(snapshot)
            self.state.change()
        made = self._take(plan, snapshot, budget)
        if made:
            rows = sum(part.rows for part in made)
            self._rate.take(rows, self._now)
            self._count()
            self.state.change()
        return made

    def handed_out(self, plan: int) -> list[HandedOut]:
        """What *plan* handed out, as long as the log has not passed its snapshot."""
        return [part for segment in self._pending() if segment.plan == plan for part in self._parts(segment)]

    def retake(self, plan: int, mark: SnapshotMark, *, exact: bool) -> None:
        """What *plan* handed out is read again, in another snapshot.

        :param exact: nothing of it was delivered before: changes are filtered by *mark* alone. Otherwise by the first
            snapshot still, and what both have comes twice. What needed no reading keeps its mark.
        """
        for segment in self._pending():
            if segment.plan != plan:
                continue
            if exact:
                segment.mark, segment.until = mark, mark.high
            else:
                segment.until = segment.until.joined(mark.high)
            self._changed_plan(segment)
            self.state.change()

    def roll_back(self, plan: int, epoch: int | None = None) -> None:
        """Nothing was handed out by plans after *plan*; what was delivered is what the epochs up to *epoch* have."""
        if epoch is not None and self.state.record.truncated is not None:
            if self.state.record.truncated <= epoch:
                self._finish()
                return
            self.state.record.truncated = None
            self.state.change()
        undone = [segment for segment in self._pending() if segment.plan > plan]
        if undone:
            self._undo(undone)
            self.state.change()

    def truncate(self, epoch: int) -> None:
        """The batch has a TRUNCATE of the table in *epoch*: from there on the log alone tells everything."""
        if not self.state.record.finished and self.state.record.truncated != epoch:
            self.state.record.truncated = epoch
            self.state.change()

    def settle(self, position: CdcOffset, epoch: int | None = None) -> None:
        """All batches from now on begin at *position*, after *epoch*, or later."""
        if self.state.record.finished:
            return
        cut = self.state.record.truncated
        if cut is not None and epoch is not None and epoch >= cut:
            self._finish()
        elif self.state.record.kind is not None:
            if self._settle(position):
                self.state.change()
            if self._is_exhausted() and self._is_settled():
                self._finish()

    def _finish(self) -> None:
        self.state.finish()
        if self.state.record.queued:
            self._reset(self.state.record.queued.pop(0))

    # -- beginning anew --------------------------------------------------------------------------------------------

    def renew(self, renewal: Renewal) -> None:
        """Read the table, or a part of it, once more; while it is being read: after that. The same one is done once."""
        record = self.state.record
        if record.finished:
            if record.renewal is None or record.renewal.id != renewal.id:
                self._reset(renewal)
            return
        known = [*record.queued, *([record.renewal] if record.renewal else [])]
        if renewal.id not in (one.id for one in known):
            record.queued.append(renewal)
            self.state.change()

    def restart(self, renewal: Renewal | None = None) -> None:
        """Begin anew at once. Where the sink has no row of it any more, changes are dropped until it is read."""
        self._reset(renewal)

    def _reset(self, renewal: Renewal | None) -> None:
        self.state.restart(self.table.source_id, renewal)
        self._recent = RecentRate()

    # -- the filter ------------------------------------------------------------------------------------------------

    def filter(self, plan: int | None = None) -> ChangeFilter | None:
        """Which changes are emitted; ``None``: all.

        :param plan: of the batch: what later plans handed out does not count.
        """
        if self.state.record.finished:
            return None
        renewal, kind = self.state.record.replacing, self.state.record.kind
        unread = Rule.DROP if renewal is None else Rule.EMIT
        if kind is None or (renewal is not None and (kind is SplitKind.HEAP or renewal.columns is not None)):
            return DROP_ALL if renewal is None else ChangeFilter(SplitKind.KEY, (Run(None, Rule.EMIT),))
        pending = [segment for segment in self._pending() if plan is None or segment.plan <= plan]
        made = FilterBuilder(kind)
        if kind is SplitKind.HEAP:
            if self._has_settled():
                made.add(None, Rule.EMIT)
            elif pending:
                made.add(None, Rule.SINCE, pending[0].mark)
            made.add(None, Rule.DROP)
            return made.build()
        part = KeyRange() if renewal is None or renewal.range is None else renewal.range
        if part.start is not None:
            made.add(part.start, Rule.EMIT)
        before, after, mark = self._free()
        free = Rule.EMIT if mark is None else Rule.SINCE
        if before is not None:
            made.add(before.end, free, mark)
        if self._has_settled():
            made.add(self._settled_end(), Rule.EMIT)
        for segment in pending:
            made.add(segment.range.end, Rule.SINCE, segment.mark)
        if not self._is_exhausted() or len(pending) < len(self._pending()):
            made.add(part.end if after is None else after.start, unread)
        if after is not None:
            made.add(None, free, mark)
        made.add(None, unread if part.end is None else Rule.EMIT)
        return made.build()

    # -- state and progress ----------------------------------------------------------------------------------------

    def _count(self) -> None:
        """Rows never decrease: those of a plan that was rolled back are counted once."""
        self.state.record.rows = max(self.state.record.rows, self._rows())
        self._recent.note(self.state.record.rows, self._now)

    def progress(self, waiting: str = "") -> TableProgress:
        """How far it is. :param waiting: what it waits for, where the caller knows."""
        record, phase = self.state.record, self.phase
        over = phase in (Phase.SETTLING, Phase.DONE)
        known = record.total_rows
        total = record.rows if over or known is None else max(known, record.rows)
        size = record.total_size
        share = 1.0 if over or not total else record.rows / total
        rate = self._recent.per_second()
        splits, total_splits = self._splits()
        return TableProgress(
            self.table.full_name,
            phase,
            rows=record.rows,
            total_rows=total if over or known is not None else None,
            size=0 if size is None or phase is Phase.WAITING else int(size * share),
            total_size=size,
            splits=total_splits if over else splits,
            total_splits=total_splits,
            rows_per_second=rate,
            eta_seconds=seconds_left(phase, record.rows, known, rate),
            paused=record.paused,
            limit=self._rate.rows_per_second,
            waiting=waiting or self._waiting(phase),
            rereading=record.renewal is not None and not record.finished,
            columns=self._reread_columns(),
        )

    def _reread_columns(self) -> tuple[str, ...]:
        renewal = self.state.record.renewal
        wanted = set() if renewal is None or renewal.columns is None else set(renewal.columns)
        return tuple(one.name for one in self.table.columns if wanted & {one.field_id, one.name})

    def _waiting(self, phase: Phase) -> str:
        if phase is Phase.DONE:
            return ""
        if phase is Phase.SETTLING:
            return "the log has not passed the last snapshot"
        if self.state.record.paused:
            return "paused"
        return "limited to 0 rows per second" if self._rate.rows_per_second == 0 else ""

    # -- what the versions do ----------------------------------------------------------------------------------------

    @abstractmethod
    def _plan(self, snapshot: ExportedSnapshot) -> None:
        """Plan the table in *snapshot*."""

    @abstractmethod
    def _take(self, plan: int, snapshot: ExportedSnapshot, budget: int) -> list[HandedOut]:
        """Hand out ranges."""

    @abstractmethod
    def _parts(self, segment: Segment) -> list[HandedOut]:
        """The ranges of *segment*."""

    @abstractmethod
    def _undo(self, undone: list[Segment]) -> None:
        """The newest segments were not handed out."""

    @abstractmethod
    def _pending(self) -> list[Segment]:
        """What was handed out and is not settled, in key order."""

    @abstractmethod
    def _changed_plan(self, segment: Segment) -> None:
        """*segment* is to be saved again."""

    @abstractmethod
    def _settle(self, position: CdcOffset) -> bool:
        """Forget the snapshots that the log has passed; whether there was one."""

    @abstractmethod
    def _has_settled(self) -> bool:
        """Whether something was handed out and is settled."""

    @abstractmethod
    def _settled_end(self) -> Cut | None:
        """Up to where it is."""

    @abstractmethod
    def _is_settled(self) -> bool:
        """Whether the log has passed all snapshots."""

    @abstractmethod
    def _is_exhausted(self) -> bool:
        """Whether everything is handed out."""

    @abstractmethod
    def _free(self) -> tuple[KeyRange | None, KeyRange | None, SnapshotMark | None]:
        """What needs no reading at the beginning and at the end, and the snapshot in which it had no row."""

    @abstractmethod
    def _rows(self) -> int:
        """About how many were handed out."""

    @abstractmethod
    def _splits(self) -> tuple[int, int]:
        """How many were handed out, and how many there are."""


def settled_prefix(pending: list[Segment], position: CdcOffset) -> int:
    """How many segments from the first on have snapshots that end at *position* or before."""
    count = 0
    while count < len(pending) and pending[count].until <= position:
        count += 1
    return count


@dataclass(slots=True)
class FilterBuilder:
    """Makes a filter of runs in key order; neighbours of one rule are one run."""

    kind: SplitKind
    runs: list[Run] = field(default_factory=list)
    marks: list[SnapshotMark] = field(default_factory=list)
    is_whole: bool = False

    def add(self, end: Cut | None, rule: Rule, mark: SnapshotMark | None = None) -> None:
        """The rule for the keys up to *end*; nothing comes after a run without an end."""
        if self.is_whole or (self.runs and end is not None and self.runs[-1].end == end):
            return
        self.is_whole = end is None
        run = Run(end, rule, None if mark is None else self._number(mark))
        if self.runs and (self.runs[-1].rule, self.runs[-1].mark) == (run.rule, run.mark):
            self.runs.pop()
        self.runs.append(run)

    def build(self) -> ChangeFilter:
        return ChangeFilter(self.kind, tuple(self.runs), tuple(self.marks))

    def _number(self, mark: SnapshotMark) -> int:
        if mark not in self.marks:
            self.marks.append(mark)
        return self.marks.index(mark)
