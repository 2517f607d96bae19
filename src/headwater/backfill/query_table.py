"""QueryTable: one table of a query while it is planned: its consumer, its backfill and what is known of its log."""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import replace
from typing import Any

import pyarrow as pa

from headwater.backfill.cdc.executor import BackfillExecutor, BackfillOptions, HandedOut, Phase, Renewal
from headwater.backfill.cdc.external import ExternalStorageTable
from headwater.backfill.cdc.parallel import open_backfill
from headwater.backfill.history_origin import origin_of
from headwater.backfill.kept_history import KeptHistory
from headwater.backfill.log_ranges import LogRanges, TableChanges
from headwater.backfill.plans import QueryState, TableRecord
from headwater.backfill.query import SINGLE, SOURCE, TABLES, QueryOptions
from headwater.backfill.snapshot.parts import VnodeFilter
from headwater.backfill.snapshot.record import SnapshotPhase
from headwater.backfill.table_columns import has_columns, is_renamed, readable_columns
from headwater.backfill.units import ChangeFilter
from headwater.backfill.unseen_commits import greatest, still_unseen
from headwater.log_store import Consumer
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import ExportedSnapshot, SnapshotMark, SnapshotSource
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable
from headwater.stream import Barrier


class QueryTable:
    """One table. What changes is written with the next save of the query's state.

    :ivar rests_until: nothing is asked of the source for it before, as somebody has locked it.
    :ivar table: as its log has it where the next batch ends. :ivar latest: as its log has it by now: where a source
        knows its columns by their names alone, a column is found by the name that it has last.
    """

    def __init__(
        self,
        options: QueryOptions,
        state: QueryState,
        source: SnapshotSource,
        table: SourceTable,
        consumer: Consumer,
    ) -> None:
        self._options, self._state, self._source = options, state, source
        self.table = table
        self.latest = table
        self.consumer = consumer
        self.waiting: str | None = None
        self.held_back: str | None = None
        self.is_stopped = False
        self.rests_until = 0.0
        is_kept = options.history and not table.parking and origin_of(options, state, self.name) == TABLES
        self.kept = KeptHistory(options, state, self.name) if is_kept else None
        self.executor = self._backfill() if options.history and self.kept is None else None
        self._come_back()
        self._go_on()

    def _come_back(self) -> None:
        """What the sink has of a table that was away, or whose history nobody read, is replaced."""
        record = self.record
        if self.kept is not None:
            return
        if self.executor is None:
            record.left, record.unread = False, True
        elif record.left or record.unread:
            if not self._options.keyed:
                record.empties = None
            emptied = record.empties is not None
            part = KeyRange() if record.whole and not emptied else None
            self.executor.restart(Renewal(uuid.uuid4().hex, part, emptied=emptied))
            record.left = record.unread = False
            record.last_position, record.unseen = None, []
            self._forget_heap()
        else:
            return
        self._state.put_table(self.name)

    def _backfill(self) -> BackfillExecutor:
        options, whole = self._options, self.record.whole
        kind = SplitKind.HEAP if whole else options.split_kind
        if kind is None and (not options.keyed or options.backfill == SINGLE):
            kind = SplitKind.KEY
        with self._state.store.snapshot() as view:
            return open_backfill(
                ExternalStorageTable(self.table, self._source),
                self._state.backfills,
                view,
                BackfillOptions(
                    version=1 if options.backfill == SINGLE and not whole else 2,
                    split_rows=options.split_rows,
                    kind=kind,
                    rows_per_second=options.rows_per_second,
                    burst_seconds=options.interval_seconds,
                    whole=whole,
                ),
            )

    @property
    def name(self) -> str:
        return self.table.full_name

    @property
    def record(self) -> TableRecord:
        return self._state.table(self.name)

    @property
    def is_reading(self) -> bool:
        """Whether history is left to be handed out."""
        return self.reads_source or (self.kept is not None and self.kept.is_reading)

    @property
    def reads_source(self) -> bool:
        """Whether history is left to be read from the source."""
        return self.executor is not None and self.executor.phase in (Phase.WAITING, Phase.READING)

    @property
    def is_held(self) -> bool:
        """Whether its history does not go on by itself."""
        if self.kept is not None and self.kept.is_reading:
            return self.kept.executor.is_paused or self.kept.executor.progress().limit == 0
        if self.executor is None:
            return False
        return self.is_stopped or self.executor.is_paused or self.executor.progress().limit == 0

    @property
    def has_read(self) -> bool:
        """Whether rows of its history were handed out."""
        if self.kept is not None:
            return self.kept.executor.progress().rows > 0
        return self.executor is not None and self.executor.progress().rows > 0

    @property
    def is_done(self) -> bool:
        """Whether its history is read, and the log has passed it."""
        if self.kept is not None and self.kept.phase is not SnapshotPhase.LIVE:
            return False
        return self.executor is None or self.executor.phase is Phase.DONE

    @property
    def is_complete(self) -> bool:
        """Whether its history is delivered as a whole, also where the log alone tells it."""
        return self.is_done if self.executor is not None else not int(self.consumer.started)

    @property
    def kind(self) -> SplitKind:
        return SplitKind.KEY if self.executor is None else self.executor.kind

    @property
    def changed_since(self) -> int | None:
        """The epoch after which changes may have brought rows of heap splits to the sink."""
        return self.record.heap_since if self.kind is SplitKind.HEAP and not self.record.whole else None

    @property
    def replaces(self) -> bool:
        """Whether the sink may have the rows already."""
        return self.rereads and not (self.executor and self.executor.renewal and self.executor.renewal.emptied)

    @property
    def rereads(self) -> bool:
        """Whether rows are read that the sink was given before."""
        return self.executor is not None and self.executor.renewal is not None

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Which columns are read: the key always."""
        renewal = None if self.executor is None else self.executor.renewal
        if renewal is None or renewal.columns is None:
            return None
        keys = self.table.key_columns
        wanted = [one for one in self.table.columns if {one.field_id, one.name}.intersection(renewal.columns)]
        return (*keys, *(one.name for one in wanted if not one.dropped and one.name not in keys))

    @property
    def waits_for_commit(self) -> bool:
        """Whether the log has a commit that the source does not show yet."""
        return bool(self.record.unseen)

    def after(self, epoch: int) -> int:
        """*epoch*, or where this query's part of the log begins."""
        return max(epoch, int(self.consumer.started))

    # -- the log ---------------------------------------------------------------------------------------------------

    def emptying(self, changes: TableChanges, end: int) -> TableChanges:
        """*changes* of the batch up to *end*, and whether it empties the sink's table."""
        if self.record.empties in (None, 0) or self.record.empties != end:
            return changes
        return replace(changes, emptied=True, truncated=(end, 0), events=True)

    def see(self, changes: TableChanges, since: CdcOffset | None, start: int, end: int) -> TableChanges:
        """The next batch, from *start* to *end*, has *changes*, of a log that begins at *since*; what it has with it.

        Where that has moved, the table was captured anew after a gap: its history is read once more.
        """
        if self.record.empties is not None:
            was_emptied = 0 < self.record.empties <= start
            self.record.empties = None if was_emptied else end if end > start else 0
            self._state.put_table(self.name)
        changes = self.emptying(changes, end)
        self.table = changes.table
        if self.executor is not None:
            self.executor.table = changes.table
        began = None if since is None else since.to_json()
        if began is not None and began != self.record.since:
            if self.record.since is not None:
                self._begin_anew(began, changes.emptied)
            self.record.since = began
            self._state.put_table(self.name)
        if self.executor is not None and changes.empty_since is not None:
            self.executor.truncate(changes.empty_since)
        if (self._options.keyed or self._options.takes_columns) and changes.defaulted:
            # rows that the sink has got no value for the new columns; the source gave them one without a word
            renewal = Renewal(f"{began}:{','.join(map(str, changes.defaulted))}", columns=changes.defaulted)
            if self.kept is not None:
                self.renew(renewal)
            elif self.executor is not None:
                self.executor.renew(renewal)
        return changes

    def catch_up(self, ranges: LogRanges, end: int) -> None:
        """The next batch ends at *end*, with the snapshot of our own table behind it."""
        if self.kept is not None and self.kept.phase is SnapshotPhase.CHANGE_LOG:
            self.kept.executor.lag(ranges.lag(self.name, end))

    def _begin_anew(self, since: str, emptied: bool) -> None:
        self.record.last_position, self.record.unseen = None, []  # positions of another server, perhaps
        self._forget_heap()
        if self.kept is not None:
            self._read_from_source()
        if self.executor is not None:
            part = KeyRange() if self.record.whole and not emptied else None
            self.executor.restart(Renewal(since, part, emptied=emptied))

    def unseen(self, fresh: pa.ChunkedArray | None, mark: SnapshotMark | None) -> None:
        """Keep in mind the changes that *mark*, taken after them, does not show; without one: all of them."""
        record = self.record
        if fresh is not None and len(fresh):
            record.last_position = max(filter(None, (record.last_position, greatest(fresh))))
            self._state.put_table(self.name)
        found = still_unseen(record.unseen, fresh, mark)
        if found != record.unseen:
            record.unseen = found
            self._state.put_table(self.name)
        if found:
            self.waiting = "the log has a commit that the source does not show yet (synchronous replication)"

    def unneeded(self, epoch: int) -> int | None:
        """Up to where the log may forget, once *epoch* is delivered; ``None``: no further than before."""
        keep = epoch
        if self.record.heap_since is not None and self.is_reading:
            keep = min(keep, self.record.heap_since)
        return keep if keep > self.consumer.delivered() else None

    # -- the backfill ----------------------------------------------------------------------------------------------

    def on_barrier(self, barrier: Barrier) -> None:
        if self.executor is not None:
            self.executor.on_barrier(barrier)
        if self.kept is not None:
            self.kept.executor.on_barrier(barrier)

    def wants(self) -> int:
        if self.record.empties is not None:
            self.waiting = "the sink's table is about to be emptied"
            return 0
        if self.held_back is not None:
            self.waiting = self.held_back
            return 0
        return 0 if self.executor is None else self.executor.wants(time.monotonic())

    @property
    def rows_left(self) -> float:
        """About how many rows are not handed out; infinitely many where nobody knows."""
        return math.inf if self.executor is None else self.executor.rows_left

    def hand_out(self, plan: int, snapshot: ExportedSnapshot, budget: int, upto: int) -> list[HandedOut] | None:
        """Ranges for *plan*; ``None`` when nothing has changed."""
        assert self.executor is not None
        if not self.has_columns_of(snapshot, self.table):
            self.waiting = "its columns have changed, and the capture has not come to that yet"
            return None
        if self.has_moved(snapshot):
            self.read_anew()
        before = self.executor.phase
        if before is Phase.WAITING and self.record.whole != (not snapshot.has_key(self.table)):
            self.record.whole = not self.record.whole
            self._state.put_table(self.name)
            self.executor = self._backfill()
            self.wants()
        handed = self.executor.hand_out(plan, snapshot, budget)
        if self.kind is SplitKind.HEAP and handed and self.record.heap_files is None:
            if self.record.heap_since is None:
                self.record.heap_since = upto
            self.record.heap_files = snapshot.files(self.table)
            self._state.put_table(self.name)
        if not handed and self.executor.phase is before:
            return None
        self.waiting = None
        return handed

    def handed_out(self, plan: int) -> list[HandedOut]:
        return [] if self.executor is None else self.executor.handed_out(plan)

    def retake(self, plan: int, mark: SnapshotMark, *, exact: bool) -> None:
        if self.executor is not None:
            self.executor.retake(plan, mark, exact=exact)

    def has_moved(self, snapshot: ExportedSnapshot) -> bool:
        """Whether it is read by blocks and was rewritten since: the ranges that are left have other rows now."""
        known = self.record.heap_files
        if known is None or self.record.whole:
            return False
        return not set(known.split()) <= set(snapshot.files(self.table).split())  # a new partition moves no row

    def read_anew(self) -> None:
        """Begin once more, with rows at the sink: by key, which no rewrite moves."""
        assert self.executor is not None
        self.executor.restart(Renewal(uuid.uuid4().hex))
        self._forget_heap()

    def _forget_heap(self) -> None:
        self.record.heap_since = self.record.heap_files = None
        self._state.put_table(self.name)

    def deliver(self, plan: int, epoch: int) -> None:
        """What plans up to *plan* handed out, and changes up to *epoch*, are at the sink."""
        if self.kept is not None:
            self.kept.executor.deliver(plan, epoch)

    def roll_back(self, plan: int, epoch: int | None) -> None:
        if self.kept is not None:
            self.kept.executor.roll_back(plan)
        if self.executor is not None:
            self.executor.roll_back(plan, epoch)
            if self.kind is SplitKind.HEAP and self.executor.phase is Phase.WAITING:
                self._forget_heap()

    def settle(self, position: CdcOffset, epoch: int) -> None:
        self.reach()
        if self.executor is not None:
            self.executor.settle(position, epoch)
        if self.record.heap_since is not None and self.is_done:
            self._forget_heap()

    def reach(self) -> None:
        """Its log has nothing after what is delivered."""
        if self.kept is not None:
            self.kept.executor.reach()
            self._go_on()

    def restart(self) -> None:
        """The sink has no row of the table: its history begins anew."""
        if self.kept is not None and self._options.kept is None:
            self._read_from_source()
        elif self.kept is not None:
            self.kept.executor.restart()
        elif self.executor is not None:
            self.executor.restart()
            self._forget_heap()

    def renew(self, renewal: Renewal) -> None:
        """Read the history, or a part of it, once more: from the source, after what is being read."""
        if self.kept is not None:
            if renewal.id not in (one["id"] for one in self.record.queued):
                self.record.queued.append(renewal.to_json())
                self._state.put_table(self.name)
            self._go_on()
            return
        if self.executor is None:
            self.executor = self._backfill()
        if self.record.whole:
            renewal = replace(renewal, range=KeyRange())
        self.executor.renew(renewal)

    def _go_on(self) -> None:
        """Once the history from our own table is over, read from the source what was asked for meanwhile."""
        if self.kept is None or self.kept.phase is not SnapshotPhase.LIVE or not self.record.queued:
            return
        renewals = [Renewal.from_json(one) for one in self.record.queued]
        self._read_from_source()
        assert self.executor is not None
        self.executor.restart(renewals[0])
        for renewal in renewals[1:]:
            self.executor.renew(renewal)

    def _read_from_source(self) -> None:
        """From now on what is read of its history is read from the source."""
        assert self.kept is not None
        self.kept.end()
        self._state.snapshots.forget(self._state.batch, self.name)
        self.kept = None
        self.record.origin, self.record.queued = SOURCE, []
        self._state.put_table(self.name)
        self.executor = self._backfill()

    def filter(self, plan: int) -> ChangeFilter | VnodeFilter | None:
        if self.kept is not None:
            return self.kept.executor.filter()
        return None if self.executor is None else self.executor.filter(plan)

    def save(self) -> None:
        if self.kept is not None:
            self.kept.executor.save(self._state.batch)
        if self.executor is not None:
            self.executor.state.save(self._state.batch)

    def has_columns_of(self, snapshot: ExportedSnapshot, table: SourceTable) -> bool:
        """Whether the table has in *snapshot* just the columns that its log has."""
        return has_columns(snapshot.table(self.latest), table, exactly=self._options.new_columns)

    def is_renamed(self, snapshot: ExportedSnapshot, table: SourceTable) -> bool:
        """Whether a column of *table*, which is this one at some epoch, has another name in *snapshot*."""
        return is_renamed(snapshot.table(self.latest), table)

    def readable(self, table: SourceTable, snapshot: ExportedSnapshot, *, by_number: bool) -> SourceTable:
        """*table* as it can be read in *snapshot*: what that has no longer counts as dropped.

        :param by_number: readers find a column whatever its name is by now.
        """
        return readable_columns(table, snapshot.table(self.latest), by_number=by_number)

    def status(self) -> dict[str, Any]:
        """What a person wants to know of it."""
        told: dict[str, Any] = {"phase": Phase.DONE.value}
        if self.kept is not None:
            told = self.kept.executor.progress(self.kept.waiting or "").to_json()
        elif self.executor is not None:
            told = self.executor.progress((self.waiting or "") if self.is_reading else "").to_json()
        return told | {"delivered": int(self.consumer.delivered()), "since": self.record.since}
