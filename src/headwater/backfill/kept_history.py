"""KeptHistory: the history of one table of a query, read from the table that we keep ourselves.

Each plan reads its parts at the epoch at which its batch ends. That is pinned under the name of the query, so it can be
read until it is delivered, also by another process. The pin moves on with the next plan, and goes once the last row is
delivered. Nothing is asked of the source.

==================================  ================================================================================
what                                when
==================================  ================================================================================
``hand_out``, ``units``             each plan of the snapshot
``let_go``                          what comes after the snapshot is sealed: the pin goes
==================================  ================================================================================
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from headwater import failpoints
from headwater.backfill.plans import PlanRecord, QueryState
from headwater.backfill.query import QueryOptions
from headwater.backfill.snapshot.executor import SnapshotBackfillExecutor, SnapshotOptions
from headwater.backfill.snapshot.parts import Layout, groups
from headwater.backfill.snapshot.record import SnapshotPhase
from headwater.backfill.tasks import Slots, tasks_of
from headwater.backfill.units import SnapshotUnit
from headwater.stream import DEFAULT_VNODE_COUNT
from headwater.versioned import BaseGone, NotComplete, TableNotKept, VersionedTable
from headwater.versioned.errors import NotYet

BEFORE_BEGIN = failpoints.register("snapshot_backfill.before_begin")
AFTER_PIN = failpoints.register("snapshot_backfill.after_pin")
BEFORE_LET_GO = failpoints.register("snapshot_backfill.before_let_go")
AFTER_LET_GO = failpoints.register("snapshot_backfill.after_let_go")

_RETRY_SECONDS: Final = 1.0


class KeptHistory:
    """One table.

    :ivar waiting: why its snapshot has not begun.
    :ivar is_late: it has not because the query is at an epoch that the kept table is past: it must go on first.
    """

    def __init__(self, options: QueryOptions, state: QueryState, table: str) -> None:
        self._options, self._name = options, table
        self._pin = pin_name(options.query)
        self._opened: VersionedTable | None = None
        self._is_let_go = False
        self._retry_at = 0.0
        self.waiting: str | None = None
        self.is_late = False
        with state.store.snapshot() as view:
            self.executor = SnapshotBackfillExecutor(
                table,
                state.snapshots,
                view,
                DEFAULT_VNODE_COUNT,
                SnapshotOptions(options.rows_per_second, options.interval_seconds),
            )

    @property
    def phase(self) -> SnapshotPhase:
        return self.executor.phase

    @property
    def is_reading(self) -> bool:
        """Whether rows of the snapshot are left to be handed out."""
        return self.executor.is_reading and not self.executor.is_exhausted

    @property
    def readable_epoch(self) -> int | None:
        """Up to which the query can go while parts are left to be read; ``None``: as far as it likes.

        A versioned table stands still before a change that its log does not tell, until it has read its own history
        once more, which the pin of this query holds back. So the query waits there until the snapshot is read.
        """
        if self.phase is not SnapshotPhase.SNAPSHOT or self.executor.is_exhausted:
            return None
        try:
            return self._kept.newest_epoch
        except (NotComplete, NotYet, TableNotKept):
            return None

    @property
    def _kept(self) -> VersionedTable:
        if self._opened is None:
            assert self._options.kept is not None
            self._opened = VersionedTable.open(self._options.store, self._name, self._options.kept)
        return self._opened

    def hand_out(self, plan: int, budget: int, epoch: int, position: bytes, commit_time_us: int) -> int | None:
        """Hand out about *budget* rows to *plan*, read at *epoch*; how many, ``None``: nothing can be read now.

        :param position: of these rows: before all changes after *epoch*.
        """
        now = time.monotonic()
        if self.executor.wants(now) <= 0 or now < self._retry_at:
            return None
        if self.phase is SnapshotPhase.WAITING:
            failpoints.hit(BEFORE_BEGIN)
        self.is_late = False
        try:
            self._kept.pin(self._options.query, epoch, name=self._pin)
            layout = self._layout(epoch)
        except BaseGone as error:
            self.waiting, self.is_late = error.message, True
            return None
        except (NotComplete, NotYet, TableNotKept) as error:
            self.waiting, self._retry_at = error.message, now + _RETRY_SECONDS
            return None
        failpoints.hit(AFTER_PIN)
        self.waiting, self._is_let_go = None, False
        parts = self.executor.hand_out(plan, budget, epoch, layout, position, commit_time_us)
        return sum(part.rows for part in parts) if parts else None

    def _layout(self, epoch: int) -> Layout:
        return Layout(self._kept.blocks(epoch, (0, self._kept.vnode_count)))

    def units(self, plan: PlanRecord, slots: Slots) -> list[SnapshotUnit]:
        """What tasks read of *plan*."""
        parts, epoch = self.executor.handed_out(plan.number), self.executor.epoch
        if not parts:
            return []
        table, layout = self._kept.table(epoch), self.executor.layout or self._layout(epoch)
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

    def let_go(self) -> None:
        """What was sealed no longer needs the snapshot: its pin goes, if there is one."""
        if self._is_let_go or self.executor.is_reading:
            return
        self.end()

    def end(self) -> None:
        """Nothing of the snapshot is needed any more."""
        failpoints.hit(BEFORE_LET_GO)
        if self._options.kept is not None:
            release_pins(self._options.store, self._options.kept, self._options.query, [self._name])
        failpoints.hit(AFTER_LET_GO)
        self._is_let_go = True
        self.close()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def pin_name(query: str) -> str:
    """What the pin of a query is called: a name of a file."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", query)[:60]
    return f"query-{plain}-{crc32(query.encode()):08x}"


def is_complete(options: QueryOptions, table: str) -> bool:
    """Whether *table* is kept, and its history read."""
    if options.kept is None:
        return False
    try:
        VersionedTable.open(options.store, table, options.kept).close()
    except (NotComplete, TableNotKept, NotYet, BaseGone):
        return False
    return True


def release_pins(store: str, folder: str, query: str, tables: Sequence[str]) -> None:
    """The query is dropped: nothing is held for it."""
    for table in tables:
        VersionedTable(store, table, folder).release(pin_name(query))
