"""SnapshotBackfill: the backfill of one table of a query from our own versioned table.

Each plan reads its parts at the epoch at which its batch ends. That is pinned under the name of the query, so it can be
read until it is delivered, also by another process. The pin moves on with the next plan, and goes once the last row is
delivered. Nothing is asked of the source; what has to be read from it takes over from here, as a ``CdcBackfill``.

==================================  ================================================================================
what                                when
==================================  ================================================================================
``hand_out``, ``units``             each plan of the snapshot
``release``                         what comes after the snapshot is sealed: the pin goes
==================================  ================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final
from zlib import crc32

from headwater import failpoints
from headwater.backfill.cdc.backfill import CdcBackfill, renewal_id
from headwater.backfill.cdc.state import Renewal
from headwater.backfill.log_ranges import LogRanges, TableChanges
from headwater.backfill.plans import PlanRecord, QueryState
from headwater.backfill.query import AUTO, SOURCE, TABLES, QueryOptions
from headwater.backfill.snapshot.executor import SnapshotBackfillExecutor, SnapshotOptions
from headwater.backfill.snapshot.parts import Layout, VnodeFilter, groups
from headwater.backfill.snapshot.record import SnapshotPhase
from headwater.backfill.table_backfill import TableBackfill, TableContext
from headwater.backfill.tasks import Slots, tasks_of
from headwater.backfill.units import SnapshotUnit
from headwater.sources.offset import CdcOffset
from headwater.state import WriteBatch
from headwater.stream import DEFAULT_VNODE_COUNT, Barrier
from headwater.versioned import BaseGone, NotComplete, TableNotKept, VersionedTable
from headwater.versioned.errors import NotYet

BEFORE_BEGIN = failpoints.register("snapshot_backfill.before_begin")
AFTER_PIN = failpoints.register("snapshot_backfill.after_pin")
BEFORE_LET_GO = failpoints.register("snapshot_backfill.before_let_go")
AFTER_LET_GO = failpoints.register("snapshot_backfill.after_let_go")

_RETRY_SECONDS: Final = 1.0


class SnapshotBackfill:
    """One table.

    :ivar waiting: why its snapshot has not begun.
    :ivar is_late: it has not because the query is at an epoch that the versioned table is past: it must go on first.
    """

    is_external = replaces = False

    def __init__(self, context: TableContext) -> None:
        self._context = context
        self._pin = pin_name(context.options.query)
        self._opened: VersionedTable | None = None
        self._is_released = False
        self._retry_at = 0.0
        self.waiting = ""
        self.is_late = False
        with context.state.store.snapshot() as view:
            self.executor = SnapshotBackfillExecutor(
                context.name,
                context.state.snapshots,
                view,
                DEFAULT_VNODE_COUNT,
                SnapshotOptions(context.options.rows_per_second, context.options.interval_seconds),
            )

    @classmethod
    def resume(cls, context: TableContext) -> TableBackfill:
        """As the state has it; where it is over, what was asked for meanwhile is read from the source."""
        return cls(context)._following()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> SnapshotPhase:
        return self.executor.phase

    @property
    def is_reading(self) -> bool:
        return self.executor.is_reading and not self.executor.is_exhausted

    @property
    def is_held(self) -> bool:
        return self.is_reading and (self.executor.is_paused or self.executor.progress().limit == 0)

    @property
    def is_done(self) -> bool:
        return self.phase is SnapshotPhase.LIVE

    @property
    def has_read(self) -> bool:
        return self.executor.progress().rows > 0

    @property
    def readable_epoch(self) -> int | None:
        """Up to which the query can go while parts are left to be read; ``None``: as far as it likes.

        A versioned table stands still before a change that its log does not tell, until it has read its own rows once
        more, which the pin of this query holds back. So the query waits there until the snapshot is read.
        """
        if self.phase is not SnapshotPhase.SNAPSHOT or self.executor.is_exhausted:
            return None
        try:
            return self._versioned.newest_epoch
        except (NotComplete, NotYet, TableNotKept):
            return None

    def status(self) -> dict[str, Any]:
        return self.executor.progress(self.waiting).to_json()

    # -- the log ---------------------------------------------------------------------------------------------------

    def on_barrier(self, barrier: Barrier) -> None:
        self.executor.on_barrier(barrier)

    def observe(self, changes: TableChanges, began: str | None, *, is_recaptured: bool) -> TableBackfill:
        options = self._context.options
        if is_recaptured:
            return self._read_from_source().observe(changes, began, is_recaptured=True)
        if (options.keyed or options.takes_columns) and changes.defaulted:
            return self.renew(Renewal(renewal_id(began, changes), columns=changes.defaulted))
        return self

    def catch_up(self, ranges: LogRanges, end: int) -> None:
        """The next batch ends at *end*: count what is left of the log after the snapshot."""
        if self.phase is SnapshotPhase.CHANGE_LOG:
            self.executor.lag(ranges.lag(self._context.name, end))

    def settle(self, position: CdcOffset, epoch: int) -> TableBackfill:
        self.executor.reach()
        return self._following()

    def filter(self, plan: int) -> VnodeFilter | None:
        return self.executor.filter()

    # -- plans -----------------------------------------------------------------------------------------------------

    def hand_out(self, plan: int, budget: int, end: int, position: bytes, commit_time_us: int | None) -> int | None:
        """Hand out about *budget* rows to *plan*, read at the epoch *end*; how many. ``None``: none can be read now.

        :param position: of these rows: before all changes after *end*.
        :param commit_time_us: of them; ``None``: as of the plan before.
        """
        now = self._context.clock.monotonic()
        if self.executor.wants(now) <= 0 or now < self._retry_at:
            return None
        if self.phase is SnapshotPhase.WAITING:
            failpoints.hit(BEFORE_BEGIN)
        self.is_late = False
        try:
            self._versioned.pin(self._context.options.query, end, name=self._pin)
            layout = self._layout(end)
        except BaseGone as error:
            self.waiting, self.is_late = error.message, True
            return None
        except (NotComplete, NotYet, TableNotKept) as error:
            self.waiting, self._retry_at = error.message, now + _RETRY_SECONDS
            return None
        failpoints.hit(AFTER_PIN)
        self.waiting, self._is_released = "", False
        time_us = self.executor.commit_time_us if commit_time_us is None else commit_time_us
        parts = self.executor.hand_out(plan, budget, end, layout, position, time_us)
        return sum(part.rows for part in parts) if parts else None

    @property
    def position(self) -> bytes:
        """The ``_position`` of the rows that were handed out last."""
        return self.executor.position

    @property
    def _versioned(self) -> VersionedTable:
        if self._opened is None:
            options = self._context.options
            assert options.kept is not None
            self._opened = VersionedTable.open(options.store, self._context.name, options.kept)
        return self._opened

    def _layout(self, epoch: int) -> Layout:
        return Layout(self._versioned.blocks(epoch, (0, self._versioned.vnode_count)))

    def units(self, plan: PlanRecord, slots: Slots) -> list[SnapshotUnit]:
        """What tasks read of *plan*."""
        parts, epoch = self.executor.handed_out(plan.number), self.executor.epoch
        if not parts:
            return []
        table, layout = self._versioned.table(epoch), self.executor.layout or self._layout(epoch)
        tasks = tasks_of(sum(part.rows for part in parts), 0, slots)
        return [
            SnapshotUnit(
                table=table,
                epoch=epoch,
                parts=tuple(group),
                plan=plan.number,
                attempt=plan.attempt,
                position=self.executor.position,
                commit_time_us=self.executor.commit_time_us,
                rows=sum(part.rows for part in group),
            )
            for group in groups(parts, layout, 2 * tasks if tasks > 1 else 1)
        ]

    def deliver(self, plan: int, epoch: int) -> None:
        self.executor.deliver(plan, epoch)

    def roll_back(self, plan: int, epoch: int | None) -> None:
        self.executor.roll_back(plan)

    def save(self, batch: WriteBatch) -> None:
        self.executor.save(batch)

    def release(self) -> None:
        """What was sealed no longer needs the snapshot: its pin goes, if there is one."""
        if not self._is_released and not self.executor.is_reading:
            self._release()

    def _release(self) -> None:
        failpoints.hit(BEFORE_LET_GO)
        options = self._context.options
        if options.kept is not None:
            release_pins(options.store, options.kept, options.query, [self._context.name])
        failpoints.hit(AFTER_LET_GO)
        self._is_released = True
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # -- reading again ---------------------------------------------------------------------------------------------

    def restart(self) -> TableBackfill:
        if self._context.options.kept is None:
            return self._read_from_source()
        self.executor.restart()
        return self

    def renew(self, renewal: Renewal) -> TableBackfill:
        record = self._context.record
        if renewal.id not in (queued["id"] for queued in record.queued):
            record.queued.append(renewal.to_json())
            self._context.put()
        return self._following()

    def _following(self) -> TableBackfill:
        """This one; once it is over, one that reads from the source what was asked for meanwhile."""
        queued = self._context.record.queued
        if self.phase is not SnapshotPhase.LIVE or not queued:
            return self
        backfill = self._read_from_source()
        backfill.restart_with([Renewal.from_json(renewal) for renewal in queued])
        return backfill

    def _read_from_source(self) -> CdcBackfill:
        """What is read of the table from now on is read from the source."""
        self._release()
        context = self._context
        context.state.snapshots.forget(context.state.batch, context.name)
        context.record.origin, context.record.queued = SOURCE, []
        context.put()
        return CdcBackfill(context)


def origin_of(options: QueryOptions, state: QueryState, name: str) -> str:
    """Where the rows of table *name* come from: ``source``, or our own ``tables``.

    It is chosen once, and written with the next save; a table that comes back is read from the source.
    """
    known, record = state.tables.get(name), state.table(name)
    if record.origin == TABLES and _is_no_longer_versioned(options, state, name):
        record.unread = True
    if known is not None and (known.left or known.unread):
        if record.origin == TABLES and options.kept is not None:
            release_pins(options.store, options.kept, options.query, [name])
        record.origin = SOURCE
        state.snapshots.forget(state.batch, name)
    elif record.origin is None:
        wanted = options.origin
        if wanted == AUTO:
            is_new = known is None and state.delivered is None
            wanted = TABLES if is_new and _is_complete(options, name) else SOURCE
        elif known is not None:
            wanted = SOURCE  # its backfill was begun by a release that had no choice
        record.origin = wanted
        state.put_table(name)
    return record.origin


def _is_no_longer_versioned(options: QueryOptions, state: QueryState, name: str) -> bool:
    """Whether there is no versioned table any more of whose snapshot something is left to be read."""
    if options.kept is not None:
        return False
    with state.store.snapshot() as view:
        known = state.snapshots.record(view, name)
    return known is None or known.phase in (SnapshotPhase.WAITING, SnapshotPhase.SNAPSHOT)


def _is_complete(options: QueryOptions, table: str) -> bool:
    """Whether *table* is versioned, and has all its rows."""
    if options.kept is None:
        return False
    try:
        VersionedTable.open(options.store, table, options.kept).close()
    except (NotComplete, TableNotKept, NotYet, BaseGone):
        return False
    return True


def pin_name(query: str) -> str:
    """What the pin of a query is called: a name of a file."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", query)[:60]
    return f"query-{plain}-{crc32(query.encode()):08x}"


def release_pins(store: str, folder: str, query: str, tables: Sequence[str]) -> None:
    """The query is dropped: nothing is held for it."""
    for table in tables:
        VersionedTable(store, table, folder).release(pin_name(query))
