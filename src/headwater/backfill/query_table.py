"""QueryTable: one table of a query while it is planned: where it is in its log, and its backfill."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from headwater.backfill.cdc.backfill import CdcBackfill
from headwater.backfill.cdc.state import Renewal
from headwater.backfill.log_ranges import TableChanges
from headwater.backfill.plans import TableRecord
from headwater.backfill.progress import Phase
from headwater.backfill.query import TABLES
from headwater.backfill.snapshot.backfill import SnapshotBackfill, origin_of
from headwater.backfill.table_backfill import TableBackfill, TableContext
from headwater.backfill.tasks import Slots, tasks_of
from headwater.backfill.units import LogUnit
from headwater.log_store import Consumer
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable
from headwater.state import WriteBatch
from headwater.stream import DEFAULT_VNODE_COUNT, Barrier


class NoBackfill:
    """The query wants what its log has, and nothing from before; if it ever does, everything is read."""

    is_external = is_reading = is_held = has_read = replaces = False
    is_done = True

    def __init__(self, context: TableContext) -> None:
        self._context = context
        context.record.left, context.record.unread = False, True
        context.put()

    def on_barrier(self, barrier: Barrier) -> None:
        """Nothing can be paused."""

    def observe(self, changes: TableChanges, began: str | None, *, is_recaptured: bool) -> TableBackfill:
        if is_recaptured:
            self._context.record.last_position, self._context.record.unseen = None, []
        return self

    def settle(self, position: CdcOffset, epoch: int) -> TableBackfill:
        return self

    def deliver(self, plan: int, epoch: int) -> None:
        """The progress in the log says it."""

    def roll_back(self, plan: int, epoch: int | None) -> None:
        """Nothing was handed out."""

    def restart(self) -> TableBackfill:
        return self

    def renew(self, renewal: Renewal) -> TableBackfill:
        return CdcBackfill(self._context).renew(renewal)

    def filter(self, plan: int) -> None:
        return None

    def save(self, batch: WriteBatch) -> None:
        """The record of the table has all."""

    def status(self) -> dict[str, Any]:
        return {"phase": Phase.DONE.value}


def open_table_backfill(context: TableContext) -> TableBackfill:
    """The backfill of a table, as the options and the state of its query have it."""
    if not context.options.history:
        return NoBackfill(context)
    if not context.table.parking and origin_of(context.options, context.state, context.name) == TABLES:
        return SnapshotBackfill.resume(context)
    return CdcBackfill.resume(context)


class QueryTable:
    """One table. What changes is written with the next save of the query's state.

    :ivar backfill: the rows from before its log; replaced where another one takes over.
    :ivar held_back: why the sink does not let rows from before its log be read now.
    """

    def __init__(self, context: TableContext, consumer: Consumer) -> None:
        self._context = context
        self.consumer = consumer
        self.held_back: str | None = None
        self.backfill = open_table_backfill(context)

    @property
    def name(self) -> str:
        return self._context.name

    @property
    def table(self) -> SourceTable:
        """As its log has it where the next batch ends."""
        return self._context.table

    @property
    def record(self) -> TableRecord:
        return self._context.record

    @property
    def is_complete(self) -> bool:
        """Whether the table is delivered as a whole, also where the log alone tells it."""
        return self.backfill.is_done if self.backfill.is_external else not int(self.consumer.started)

    @property
    def blocked(self) -> str | None:
        """Why nothing may be handed out, whatever its backfill wants."""
        return self.held_back if self.record.empties is None else "the sink's table is about to be emptied"

    # -- the log ---------------------------------------------------------------------------------------------------

    def after(self, epoch: int) -> int:
        """*epoch*, or where this query's part of the log begins."""
        return max(epoch, int(self.consumer.started))

    def emptying(self, changes: TableChanges, end: int) -> TableChanges:
        """*changes* of the batch up to *end*, and whether it empties the sink's table."""
        if self.record.empties in (None, 0) or self.record.empties != end:
            return changes
        return replace(changes, emptied=True, truncated=(end, 0), events=True)

    def observe(self, changes: TableChanges, since: CdcOffset | None, start: int, end: int) -> TableChanges:
        """The next batch, from *start* to *end*, has *changes*, of a log that begins at *since*; what it has with it.

        Where that has moved, the table was captured again after a gap: it is read once more.
        """
        record = self.record
        if record.empties is not None:
            was_emptied = 0 < record.empties <= start
            record.empties = None if was_emptied else end if end > start else 0
            self._context.put()
        changes = self.emptying(changes, end)
        self._context.table = changes.table
        began = None if since is None else since.to_json()
        has_moved = began is not None and began != record.since
        is_recaptured = has_moved and record.since is not None
        if has_moved:
            record.since = began
            self._context.put()
        self.backfill = self.backfill.observe(changes, began, is_recaptured=is_recaptured)
        return changes

    def settle(self, position: CdcOffset, epoch: int) -> None:
        """Nothing after *epoch* is left of its log, which has come to *position*."""
        self.backfill = self.backfill.settle(position, epoch)

    def unneeded(self, epoch: int) -> int | None:
        """Up to where the log may forget, once *epoch* is delivered; ``None``: no further than before."""
        keep = epoch
        if self.record.heap_since is not None and self.backfill.is_reading:
            keep = min(keep, self.record.heap_since)
        return keep if keep > self.consumer.delivered() else None

    def units(self, changes: TableChanges, end: int, plan: int, slots: Slots) -> list[LogUnit]:
        """What tasks read of *changes* in the batch of *plan* up to *end*: ranges of vnodes."""
        if changes.emptied and self.backfill.is_external:  # the sink empties its table; the rows are read again
            return [LogUnit(changes.table, end, end, 0, 1, plan, truncated=changes.truncated)]
        emitted = self.backfill.filter(plan)
        count = self.consumer.vnode_count or DEFAULT_VNODE_COUNT
        parts = min(tasks_of(changes.rows, changes.size, slots), count)
        cuts = [count * part // parts for part in range(parts + 1)]
        return [
            LogUnit(
                changes.table,
                changes.after,
                end,
                low,
                high,
                plan,
                emitted,
                changes.truncated,
                changes.rows // parts,
                changes.size // parts,
            )
            for low, high in pairwise(cuts)
        ]

    # -- the backfill ----------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """The sink has no row of the table: it is read again."""
        self.backfill = self.backfill.restart()

    def renew(self, renewal: Renewal) -> None:
        """Read the table, or a part of it, once more: from the source, after what is being read."""
        self.backfill = self.backfill.renew(renewal)

    def status(self) -> dict[str, Any]:
        """What a person wants to know of it."""
        return self.backfill.status() | {"delivered": int(self.consumer.delivered()), "since": self.record.since}
