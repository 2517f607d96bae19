"""SnapshotBackfillExecutor: the backfill of one table from our own versioned table. Pure: time and layout are given.

The query never stands still for it. Each plan reads its parts of the table at the epoch at which its batch ends, so
that every part has all changes up to there, and later changes of its keys are delivered as they come: the table goes
live vnode by vnode. Changes of keys that are not handed out are left out (:meth:`filter`); a later part has them.

The order of the calls:

1. ``hand_out`` parts at an epoch that is pinned; ``save``, sealed before the plan is given away;
2. ``deliver``: plans up to this one, and changes up to an epoch, are at the sink. After the last part the change log
   alone counts;
3. ``reach``: the log has nothing more. The table is live.

A plan that is not kept is rolled back; what it handed out is handed out again, at a later epoch. Pause, resume and
throttle stop or slow the reading of the snapshot; changes flow on.

The transitions are those of :class:`~headwater.backfill.snapshot.record.SnapshotPhase`.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.backfill.progress import Phase, RecentRate, TableProgress, seconds_left
from headwater.backfill.rate_limit import RateLimit
from headwater.backfill.snapshot.errors import BarrierOutOfOrder, InvalidSnapshotOption, ProgressWentBack
from headwater.backfill.snapshot.parts import Layout, VnodeFilter, VnodePart, hand_out, joined, take_back, unfinished
from headwater.backfill.snapshot.record import SnapshotPhase, SnapshotPlan, SnapshotRecord, SnapshotTables
from headwater.backfill.snapshot.state import BackfillState
from headwater.state import Snapshot, WriteBatch
from headwater.stream import (
    ALL_TARGETS,
    Barrier,
    BarrierKind,
    Pause,
    Resume,
    Throttle,
    VnodeBitmap,
)

_PHASES = {
    SnapshotPhase.WAITING: Phase.WAITING,
    SnapshotPhase.SNAPSHOT: Phase.READING,
    SnapshotPhase.CHANGE_LOG: Phase.SETTLING,
    SnapshotPhase.LIVE: Phase.DONE,
}


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """How a table is backfilled.

    :ivar rows_per_second: until a throttle says otherwise; ``None`` is no limit.
    :ivar burst_seconds: for how long what the rate allows may gather.
    :raises InvalidSnapshotOption: a value that makes no sense.
    """

    rows_per_second: int | None = None
    burst_seconds: float = 4.0

    def __post_init__(self) -> None:
        if (self.rows_per_second is not None and self.rows_per_second < 0) or self.burst_seconds <= 0:
            raise InvalidSnapshotOption(
                "rows_per_second must be 0 or more, and burst_seconds above 0.",
                next_step="Use None for no limit and 0 to stand still.",
            )


@dataclass(frozen=True, slots=True)
class VnodeRows:
    """How far one vnode is: rows that were handed out, about how many there are, and whether all were."""

    vnode: int
    rows: int
    total_rows: int
    finished: bool


class SnapshotBackfillExecutor:
    """The backfill of *table*, which has *vnode_count* vnodes."""

    def __init__(
        self,
        table: str,
        tables: SnapshotTables,
        view: Snapshot,
        vnode_count: int,
        options: SnapshotOptions | None = None,
    ) -> None:
        self.table = table
        self._tables = tables
        self._options = options or SnapshotOptions()
        known = tables.record(view, table)
        self._record = known or SnapshotRecord()
        self._dirty = known is None
        self.state = BackfillState.load(tables.vnodes, view, table, VnodeBitmap.full(vnode_count))
        self._layout: Layout | None = None
        self._last: Barrier | None = None
        self._lag: int | None = None
        self._now = 0.0
        self._recent = RecentRate()
        rate = self._record.limit if self._record.throttled else self._options.rows_per_second
        self._rate = RateLimit(rate, self._options.burst_seconds)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> SnapshotPhase:
        return self._record.phase

    @property
    def epoch(self) -> int:
        """At which the newest plan reads; 0 before the first."""
        return self._record.epoch

    @property
    def position(self) -> bytes:
        """The ``_position`` of its rows of history: no later change has one that is not greater."""
        return bytes.fromhex(self._record.position)

    @property
    def commit_time_us(self) -> int:
        return self._record.commit_time_us

    @property
    def is_paused(self) -> bool:
        return self._record.paused

    @property
    def is_exhausted(self) -> bool:
        """Whether all of the snapshot is handed out."""
        return self.state.is_finished

    @property
    def is_reading(self) -> bool:
        """Whether a part of the snapshot is left to be handed out or to be delivered."""
        return self._record.phase in (SnapshotPhase.WAITING, SnapshotPhase.SNAPSHOT)

    @property
    def is_changed(self) -> bool:
        """Whether there is something to save."""
        return self._dirty or self.state.is_changed

    # -- barriers --------------------------------------------------------------------------------------------------

    def on_barrier(self, barrier: Barrier) -> None:
        """Follow what *barrier* carries, in every phase and for every kind; it is durable with the next save.

        :raises BarrierOutOfOrder: not after the one before.
        """
        last = self._last
        if last is not None and barrier.kind is not BarrierKind.INITIAL and barrier.epoch.curr <= last.epoch.curr:
            raise BarrierOutOfOrder(
                f"Barrier {int(barrier.epoch.curr)} came after {int(last.epoch.curr)}.",
                next_step="Begin a stream of barriers with one of kind 'initial'.",
            )
        self._last = barrier
        match barrier.mutation:
            case Pause():
                self._dirty |= not self._record.paused
                self._record.paused = True
            case Resume():
                self._dirty |= self._record.paused
                self._record.paused = False
            case Throttle(rows_per_second=rate, target=target) if target in (ALL_TARGETS, self.table):
                self._rate.change(rate, self._now)
                self._record.throttled, self._record.limit = True, rate
                self._dirty = True

    # -- snapshot --------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout | None:
        """Where the rows were when parts were handed out last; ``None``: not since the start."""
        return self._layout

    def wants(self, now: float) -> int:
        """Rows of the snapshot that may be handed out now; 0: paused, throttled, or nothing is left."""
        self._now = max(self._now, now)
        self._recent.note(self._record.rows, self._now)
        if not self.is_reading or self.is_exhausted or self._record.paused:
            return 0
        return self._rate.allowed(self._now)

    def hand_out(
        self, plan: int, budget: int, epoch: int, layout: Layout, position: bytes = b"", commit_time_us: int = 0
    ) -> list[VnodePart]:
        """Parts of about *budget* rows that *plan* reads at *epoch*; empty: none may be read now.

        :param epoch: at which the batch of *plan* ends; it is pinned. :param layout: of the table then.
        :param position: of its rows: before all changes after *epoch*.
        :raises ProgressWentBack: an older plan or epoch.
        """
        record = self._record
        budget = min(budget, self.wants(self._now))
        if budget <= 0:
            return []
        if (record.pending and plan <= max(record.pending)) or epoch < record.epoch:
            raise ProgressWentBack(f"Plan {plan} at epoch {epoch} is not the newest one.", next_step="Roll back first.")
        self._layout = layout
        record.total_rows = sum(layout.rows(vnode) for vnode, _ in self.state.items())
        record.total_size = layout.size
        record.phase, record.epoch = SnapshotPhase.SNAPSHOT, epoch
        record.position, record.commit_time_us = position.hex(), commit_time_us
        parts = hand_out(self.state, unfinished(self.state), layout, epoch, budget)
        record.pending[plan] = SnapshotPlan(epoch, parts)
        self._rate.take(sum(part.rows for part in parts), self._now)
        # rows never decrease: those of a plan that was rolled back are counted once
        record.rows = max(record.rows, self.state.row_count)
        self._recent.note(record.rows, self._now)
        self._dirty = True
        return parts

    def handed_out(self, plan: int) -> list[VnodePart]:
        """What *plan* reads, until it is delivered."""
        known = self._record.pending.get(plan)
        return [] if known is None else known.parts

    def roll_back(self, plan: int) -> None:
        """Nothing was handed out by plans after *plan*."""
        record = self._record
        for undone in sorted((number for number in record.pending if number > plan), reverse=True):
            parts = record.pending.pop(undone).parts
            record.epoch = max([record.consumed, *(left.epoch for left in record.pending.values())])
            take_back(self.state, parts, record.epoch)
            self._dirty = True

    def deliver(self, plan: int, epoch: int) -> None:
        """Plans up to *plan* and changes up to *epoch* are at the sink.

        A plan may be there without the changes of its batch: then its parts are remembered with their epoch, so that
        the changes up to it are not delivered a second time.
        """
        record = self._record
        record.consumed = max(record.consumed, epoch)
        for number, known in list(record.pending.items()):
            if number <= plan and known.epoch <= epoch:
                del record.pending[number]
                self._dirty = True
        if record.phase is SnapshotPhase.SNAPSHOT and not record.pending and self.is_exhausted:
            record.phase = SnapshotPhase.CHANGE_LOG
            self._dirty = True

    def filter(self) -> VnodeFilter | None:
        """Which changes of the next batch are delivered; ``None``: all of them."""
        if not self.is_reading:
            return None
        plans = [(part, known.epoch) for known in self._record.pending.values() for part in known.parts]
        begun: dict[int, bytes | None] = {}  # where the parts of plans begin
        for part, _ in reversed(plans):
            begun |= dict.fromkeys(range(part.first, part.end), part.start)
        delivered = []
        for vnode, row in self.state.items():
            stop = begun.get(vnode, None if row is None else row.position)
            if row is not None and (stop is not None or vnode not in begun):
                delivered.append(VnodePart(vnode, vnode + 1, 0, None, stop))
        return VnodeFilter((*((part, 0) for part in joined(delivered)), *plans))

    # -- change log and live ---------------------------------------------------------------------------------------

    def reach(self) -> None:
        """The log has no more changes than were delivered."""
        if self._record.phase is SnapshotPhase.CHANGE_LOG:
            self._record.phase = SnapshotPhase.LIVE
            self._dirty = True

    def lag(self, epochs: int) -> None:
        """So many epochs of the log are not delivered."""
        self._lag = epochs

    def restart(self) -> None:
        """The sink has no row of it: everything begins again; a pause and a throttle stay."""
        before = self._record
        self._record = SnapshotRecord(paused=before.paused, throttled=before.throttled, limit=before.limit)
        self.state.clear()
        self._layout, self._recent, self._dirty = None, RecentRate(), True

    # -- state and progress ----------------------------------------------------------------------------------------

    def save(self, batch: WriteBatch) -> None:
        """Write what has changed."""
        if self.state.is_changed:
            self.state.save(batch)
        if self._dirty:
            self._tables.put(batch, self.table, self._record)
            self._dirty = False

    def vnodes(self) -> list[VnodeRows]:
        """How far each vnode is."""
        done = self._record.phase in (SnapshotPhase.CHANGE_LOG, SnapshotPhase.LIVE)
        made = []
        for vnode, row in self.state.items():
            rows = 0 if row is None else row.row_count
            total = rows if self._layout is None else max(rows, self._layout.rows(vnode))
            finished = done or (row is not None and row.is_finished)
            made.append(VnodeRows(vnode, rows, rows if finished else total, finished))
        return made

    def progress(self, waiting: str = "") -> TableProgress:
        """How far it is in all. :param waiting: what it waits for, where the caller knows."""
        record, phase = self._record, _PHASES[self._record.phase]
        over = phase in (Phase.SETTLING, Phase.DONE)
        total = record.rows if over else None if record.total_rows is None else max(record.total_rows, record.rows)
        rate = self._recent.per_second()
        size = record.total_size
        share = 1.0 if over or not total else record.rows / total
        rows_of_vnodes = self.vnodes()
        return TableProgress(
            self.table,
            phase,
            rows=record.rows,
            total_rows=total,
            size=0 if size is None else int(size * share),
            total_size=size,
            splits=sum(one.finished for one in rows_of_vnodes),
            total_splits=len(rows_of_vnodes),
            rows_per_second=rate,
            eta_seconds=seconds_left(phase, record.rows, total, rate),
            paused=record.paused,
            limit=self._rate.rows_per_second,
            waiting=waiting or self._waiting(),
            origin="tables",
            lag_epochs=self._lag if phase is Phase.SETTLING else None,
        )

    def _waiting(self) -> str:
        if not self.is_reading:
            behind = self._record.phase is SnapshotPhase.CHANGE_LOG and self._lag is not None
            return f"{self._lag} epochs of the log after the snapshot are left" if behind else ""
        if self._record.paused:
            return "paused"
        return "limited to 0 rows per second" if self._rate.rows_per_second == 0 else ""
