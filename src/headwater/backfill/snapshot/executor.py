"""SnapshotBackfillExecutor: the backfill of one table from our own versioned table. Pure: time and layout are given.

As with the other executors all is decided when a plan is made, on one process. The order of the calls:

1. ``begin`` at the epoch up to which the downstream has nothing, once that is pinned;
2. ``hand_out`` parts of the version at that epoch, plan after plan; ``save``, sealed before the plan is given away;
3. ``deliver``: plans up to this one are at the sink. With the last of them the change log begins;
4. ``consume``: changes up to an epoch are at the sink, and whether the log had more. Without more the table is live.

A plan that nobody kept is rolled back; what it handed out is handed out again. The live edge is attached after the
catch-up only, so nothing is drained, held back or thrown away while the snapshot is read, and nobody waits for anybody
in a circle. Pause, resume and throttle are followed in every phase: they stop or slow the reading of the snapshot and
the catch-up with the log (:meth:`allows`). Live changes flow on; what was told then counts when it begins anew.

The transitions are those of :class:`~headwater.backfill.snapshot.record.SnapshotPhase`.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.backfill.progress import Phase, RecentRate, TableProgress, seconds_left
from headwater.backfill.rate_limit import NO_LIMIT, RateLimit
from headwater.backfill.snapshot.errors import BarrierOutOfOrder, InvalidSnapshotOption, ProgressWentBack
from headwater.backfill.snapshot.parts import Layout, VnodePart, hand_out, take_back
from headwater.backfill.snapshot.record import SnapshotPhase, SnapshotRecord, SnapshotTables
from headwater.backfill.snapshot.state import BackfillState
from headwater.state import Snapshot, WriteBatch
from headwater.stream import (
    ALL_TARGETS,
    Barrier,
    BarrierKind,
    Pause,
    Resume,
    Stop,
    Throttle,
    UpdateVnodeBitmap,
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
    """The backfill of *table*, of the *vnodes* that *owner* has."""

    def __init__(
        self,
        table: str,
        tables: SnapshotTables,
        view: Snapshot,
        vnodes: VnodeBitmap,
        options: SnapshotOptions | None = None,
        *,
        owner: str = "",
    ) -> None:
        self.table, self.owner = table, owner
        self._tables = tables
        self._options = options or SnapshotOptions()
        known = tables.record(view, table, owner)
        self._record = known or SnapshotRecord()
        self._dirty = known is None
        self.state = BackfillState.load(tables.vnodes, view, table, vnodes)
        self._layout: Layout | None = None
        self._last: Barrier | None = None
        self._moving: VnodeBitmap | None = None
        self._stopped = False
        self._lag: int | None = None
        self._now = 0.0
        self._recent = RecentRate()
        rate = self._record.limit if self._record.throttled else self._options.rows_per_second
        self._rate = RateLimit(rate, self._options.burst_seconds)
        self._check_phase()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> SnapshotPhase:
        return self._record.phase

    @property
    def epoch(self) -> int:
        """The pinned epoch; 0 before it is chosen."""
        return self._record.epoch

    @property
    def consumed(self) -> int:
        """The epoch up to which its changes are delivered."""
        return self._record.consumed

    @property
    def position(self) -> bytes:
        """The ``_position`` of its rows of history."""
        return bytes.fromhex(self._record.position)

    @property
    def commit_time_us(self) -> int:
        return self._record.commit_time_us

    @property
    def is_paused(self) -> bool:
        return self._record.paused

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    @property
    def is_exhausted(self) -> bool:
        """Whether all of the snapshot is handed out."""
        return self._record.epoch > 0 and self.state.has_finished(self._record.epoch)

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
            case UpdateVnodeBitmap() as update:
                self._moving = update.bitmap_of(self.owner)
            case Stop() as stop if stop.stops(self.table):
                self._stopped = True

    @property
    def is_moving(self) -> bool:
        """Whether a barrier gave it other vnodes: save what there is, then :meth:`move`."""
        return self._moving is not None

    def move(self, view: Snapshot) -> None:
        """Own what the last barrier gave. Nothing may be pending: vnodes change hands between two batches.

        :param view: of a state in which every owner has saved.
        :raises ProgressWentBack: another owner's vnodes are not where this one is.
        """
        if self._moving is None:
            return
        if self._record.pending:
            raise ValueError("deliver or roll back before vnodes change hands")
        self.state.own(self._moving, view)
        self._moving, self._layout = None, None
        self._check_phase()

    def _check_phase(self) -> None:
        """Whoever has read its own vnodes and has unread ones of another now reads these."""
        record = self._record
        if record.phase not in (SnapshotPhase.CHANGE_LOG, SnapshotPhase.SNAPSHOT):
            return
        is_strange = any(row is not None and row.epoch != record.epoch for _, row in self.state.items())
        if is_strange or (record.consumed > record.epoch and not self.is_exhausted):
            raise ProgressWentBack(
                f"Vnodes of {self.table} came from an owner that is elsewhere in the backfill.",
                next_step="Move vnodes at a barrier that every owner has reached.",
            )
        if record.phase is SnapshotPhase.CHANGE_LOG and not self.is_exhausted:
            record.phase = SnapshotPhase.SNAPSHOT
            self._dirty = True

    # -- snapshot --------------------------------------------------------------------------------------------------

    def begin(self, epoch: int, layout: Layout, position: bytes = b"", commit_time_us: int = 0) -> None:
        """Read the version at *epoch*, which is pinned: the downstream has nothing, and no changes up to it."""
        record = self._record
        if record.phase is not SnapshotPhase.WAITING:
            raise ValueError("it has begun")
        record.phase, record.epoch, record.consumed = SnapshotPhase.SNAPSHOT, epoch, epoch
        record.position, record.commit_time_us = position.hex(), commit_time_us
        self.see(layout)
        self._dirty = True

    def see(self, layout: Layout) -> None:
        """Where rows of the version are; a compaction may have changed it."""
        self._layout = layout
        self._record.total_rows = sum(layout.rows(vnode) for vnode, _ in self.state.items())
        self._record.total_size = layout.size

    @property
    def layout(self) -> Layout | None:
        """``None``: :meth:`see` it first."""
        return self._layout

    def wants(self, now: float) -> int:
        """Rows of the snapshot that may be handed out now; 0: paused, throttled, stopped, or nothing is left."""
        self._now = max(self._now, now)
        self._recent.note(self._record.rows, self._now)
        if self._record.phase is not SnapshotPhase.SNAPSHOT or self.is_exhausted or not self._may_go():
            return 0
        return self._rate.allowed(self._now)

    def _may_go(self) -> bool:
        return not self._record.paused and not self._stopped and self._moving is None

    def hand_out(self, plan: int, budget: int) -> list[VnodePart]:
        """Parts of about *budget* rows that *plan* reads; empty: none may be read now.

        :raises ProgressWentBack: an older plan.
        """
        budget = min(budget, self.wants(self._now))
        if budget <= 0 or self._layout is None:
            return []
        if self._record.pending and plan <= max(self._record.pending):
            raise ProgressWentBack(f"Plan {plan} is not the newest one.", next_step="Roll back first.")
        parts = hand_out(self.state, self._layout, self._record.epoch, budget)
        self._record.pending[plan] = parts
        self._rate.take(sum(part.rows for part in parts), self._now)
        # rows never decrease: those of a plan that was rolled back are counted once
        self._record.rows = max(self._record.rows, self.state.rows_of(self._record.epoch))
        self._recent.note(self._record.rows, self._now)
        self._dirty = True
        return parts

    def handed_out(self, plan: int) -> list[VnodePart]:
        """What *plan* reads, until it is delivered."""
        return self._record.pending.get(plan, [])

    def roll_back(self, plan: int) -> None:
        """Nothing was handed out by plans after *plan*."""
        for undone in sorted((one for one in self._record.pending if one > plan), reverse=True):
            take_back(self.state, self._record.pending.pop(undone), self._record.epoch)
            self._dirty = True

    def deliver(self, plan: int) -> None:
        """The rows of plans up to *plan* are at the sink."""
        record = self._record
        for done in [one for one in record.pending if one <= plan]:
            del record.pending[done]
            self._dirty = True
        if record.phase is SnapshotPhase.SNAPSHOT and not record.pending and self.is_exhausted:
            record.phase = SnapshotPhase.CHANGE_LOG
            self._dirty = True

    # -- change log and live ---------------------------------------------------------------------------------------

    def allows(self, now: float) -> int:
        """Rows of changes that may be delivered now: none while the snapshot is read or the catch-up stands still."""
        self._now = max(self._now, now)
        if self._record.phase is SnapshotPhase.LIVE:
            return NO_LIMIT
        if self._record.phase is not SnapshotPhase.CHANGE_LOG or not self._may_go():
            return 0
        return self._rate.allowed(self._now)

    def take(self, rows: int) -> None:
        """So many rows of changes are in the batch that is planned."""
        if self._record.phase is SnapshotPhase.CHANGE_LOG:
            self._rate.take(rows, self._now)

    def consume(self, epoch: int, *, has_more: bool) -> None:
        """Changes up to *epoch* are at the sink.

        :param has_more: whether the log had more when that was planned.
        :raises ProgressWentBack: an earlier epoch.
        """
        record = self._record
        if record.phase in (SnapshotPhase.WAITING, SnapshotPhase.SNAPSHOT):
            return
        if epoch < record.consumed:
            raise ProgressWentBack(
                f"Epoch {epoch} of {self.table} was delivered after {record.consumed}.",
                next_step="Start the query again.",
            )
        # after the snapshot all vnodes go together: one number tells it, and no row is rewritten with each batch
        record.consumed = epoch
        if record.phase is SnapshotPhase.CHANGE_LOG and not has_more:
            record.phase = SnapshotPhase.LIVE
            self._dirty = True

    def lag(self, epochs: int) -> None:
        """So many epochs of the log are not delivered."""
        self._lag = epochs

    def restart(self) -> None:
        """The sink has no row of it: everything begins anew; a pause and a throttle stay."""
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
            self._tables.put(batch, self.table, self.owner, self._record)
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
        if self._record.phase is SnapshotPhase.LIVE:
            return ""
        if self._stopped:
            return "stopped"
        if self._record.paused:
            return "paused"
        if self._rate.rows_per_second == 0:
            return "limited to 0 rows per second"
        if self._record.phase is SnapshotPhase.CHANGE_LOG and self._lag is not None:
            return f"{self._lag} epochs of the log after the snapshot are left"
        return ""
