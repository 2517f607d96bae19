"""CdcBackfill: the backfill of one table of a query from the source, inside snapshots that the source exports.

What is handed out is decided by its :class:`~headwater.backfill.cdc.executor.BackfillExecutor`. Around it: the columns
of the snapshot against those of the log, the files of a table that is read by heap blocks, and the commits that the log
has and no snapshot has shown yet. Nothing is asked of the source but through the snapshot that is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from headwater.backfill.cdc.executor import BackfillExecutor, BackfillOptions
from headwater.backfill.cdc.external import ExternalStorageTable
from headwater.backfill.cdc.parallel import open_backfill
from headwater.backfill.cdc.state import Renewal
from headwater.backfill.log_ranges import TableChanges
from headwater.backfill.plans import PlanRecord
from headwater.backfill.progress import Phase
from headwater.backfill.query import SINGLE
from headwater.backfill.table_backfill import TableContext
from headwater.backfill.tasks import Slots, groups, tasks_of
from headwater.backfill.units import ChangeFilter, SplitUnit, covered
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import ExportedSnapshot, SnapshotMark
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceColumn, SourceTable
from headwater.state import WriteBatch
from headwater.stream import Barrier


class CdcBackfill:
    """One table.

    :ivar latest: the table as its log has it now: where a source knows its columns by their names alone, a column is
        found by the name that it has last.
    :ivar waiting: why nothing is handed out. :ivar is_stopped: its capture has stopped.
    :ivar rests_until: nothing is asked of the source for it before: another session has locked it.
    """

    is_external = True

    def __init__(self, context: TableContext) -> None:
        self._context = context
        self.latest = context.table
        self.waiting = ""
        self.is_stopped = False
        self.rests_until = 0.0
        self._executor = self._open()

    @classmethod
    def resume(cls, context: TableContext) -> Self:
        """As the state has it. The rows of a table that was away, or whose backfill was not read, are read again."""
        backfill, record = cls(context), context.record
        if record.left or record.unread:
            if not context.options.keyed:
                record.empties = None
            backfill._restart(context.clock.new_id(), emptied=record.empties is not None)
            record.left = record.unread = False
            context.put()
        return backfill

    def _open(self) -> BackfillExecutor:
        context, whole = self._context, self._context.record.whole
        options = context.options
        kind = SplitKind.HEAP if whole else options.split_kind
        if kind is None and (not options.keyed or options.backfill == SINGLE):
            kind = SplitKind.KEY
        with context.state.store.snapshot() as view:
            return open_backfill(
                ExternalStorageTable(context.table, context.source),
                context.state.backfills,
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

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        return self._executor.phase in (Phase.WAITING, Phase.READING)

    @property
    def is_held(self) -> bool:
        return self.is_stopped or self._executor.is_paused or self._executor.progress().limit == 0

    @property
    def is_done(self) -> bool:
        return self._executor.phase is Phase.DONE

    @property
    def has_read(self) -> bool:
        return self._executor.progress().rows > 0

    @property
    def replaces(self) -> bool:
        renewal = self._executor.renewal
        return renewal is not None and not renewal.emptied

    @property
    def kind(self) -> SplitKind:
        return self._executor.kind

    @property
    def rows_left(self) -> float:
        """About how many rows are not handed out; infinitely many where that is unknown."""
        return self._executor.rows_left

    @property
    def waits_for_commit(self) -> bool:
        """Whether the log has a commit that the source does not show yet."""
        return bool(self._context.record.unseen)

    def status(self) -> dict[str, Any]:
        return self._executor.progress(self.waiting if self.is_reading else "").to_json()

    # -- the log ---------------------------------------------------------------------------------------------------

    def on_barrier(self, barrier: Barrier) -> None:
        self._executor.on_barrier(barrier)

    def observe(self, changes: TableChanges, began: str | None, *, is_recaptured: bool) -> CdcBackfill:
        options, executor = self._context.options, self._executor
        executor.table = changes.table
        if is_recaptured:
            assert began is not None
            self._restart(began, emptied=changes.emptied)
        if changes.empty_since is not None:
            executor.truncate(changes.empty_since)
        if (options.keyed or options.takes_columns) and changes.defaulted:
            # the sink has rows without a value for the new columns; the source gave them one without logging it
            executor.renew(Renewal(renewal_id(began, changes), columns=changes.defaulted))
        return self

    def observe_commits(self, positions: pa.ChunkedArray | None, mark: SnapshotMark | None) -> None:
        """Remember the changes at *positions* that *mark*, taken after them, does not show; without one: all."""
        record = self._context.record
        if positions is not None and len(positions):
            record.last_position = max(filter(None, (record.last_position, _newest(positions))))
            self._context.put()
        not_visible = _not_visible(record.unseen, positions, mark)
        if not_visible != record.unseen:
            record.unseen = not_visible
            self._context.put()
        if not_visible:
            self.waiting = "the log has a commit that the source does not show yet (synchronous replication)"

    def settle(self, position: CdcOffset, epoch: int) -> CdcBackfill:
        self._executor.settle(position, epoch)
        if self._context.record.heap_since is not None and self.is_done:
            self._forget_heap()
        return self

    def filter(self, plan: int) -> ChangeFilter | None:
        return self._executor.filter(plan)

    # -- plans -----------------------------------------------------------------------------------------------------

    def wants(self, now: float) -> int:
        """Rows that may be handed out now."""
        return self._executor.wants(now)

    def hand_out(self, plan: int, snapshot: ExportedSnapshot, budget: int, end: int) -> int | None:
        """Hand out about *budget* rows to *plan*, of a batch up to the epoch *end*, read inside *snapshot*.

        How many; 0 for a table without rows. ``None``: nothing has changed.
        """
        context = self._context
        record, table = context.record, context.table
        if not self.has_columns(snapshot, table):
            self.waiting = "its columns have changed, and the capture has not come to that yet"
            return None
        if self.has_moved(snapshot):
            self.restart_by_key()
        before = self._executor.phase
        if before is Phase.WAITING and record.whole != (not snapshot.has_key(table)):
            record.whole = not record.whole
            context.put()
            self._executor = self._open()
            self.wants(context.clock.monotonic())
        handed_out = self._executor.hand_out(plan, snapshot, budget)
        if self.kind is SplitKind.HEAP and handed_out and record.heap_files is None:
            if record.heap_since is None:
                record.heap_since = end
            record.heap_files = snapshot.files(table)
            context.put()
        if not handed_out and self._executor.phase is before:
            return None
        self.waiting = ""
        return sum(part.rows for part in handed_out)

    def position(self, since: CdcOffset) -> bytes:
        """The ``_position`` of the rows that are handed out, of a table whose log begins at *since*."""
        last = self._context.record.last_position
        return since.position_after(None if last is None else bytes.fromhex(last))

    def rows_of(self, plan: int) -> int:
        """About how many rows *plan* handed out."""
        return sum(part.rows for part in self._executor.handed_out(plan))

    def units(
        self,
        plan: PlanRecord,
        newest: SourceTable,
        snapshot: ExportedSnapshot,
        end: int,
        slots: Slots,
        *,
        by_number: bool,
    ) -> list[SplitUnit]:
        """What tasks read of *plan* inside *snapshot*.

        :param newest: the table as its log has it after the batch, which ends with the epoch *end*.
        :param by_number: readers find a column whatever its name is now.
        """
        handed_out = self._executor.handed_out(plan.number)
        rows = sum(part.rows for part in handed_out)
        tasks = tasks_of(rows, 0, slots) if rows or len(handed_out) < 2 else slots()
        table, columns = self._readable(newest, snapshot, by_number=by_number), self._columns()
        record = self._context.record
        changed_since = record.heap_since if self.kind is SplitKind.HEAP and not record.whole else None
        return [
            SplitUnit(
                table=table,
                kind=self.kind,
                ranges=tuple(covered([part.range for part in parts])),
                snapshot=snapshot.name,
                plan=plan.number,
                attempt=plan.attempt,
                upto=end,
                position=bytes.fromhex(plan.positions[self._context.name]),
                commit_time_us=plan.commit_time_us,
                rows=sum(part.rows for part in parts),
                columns=columns,
                changed_since=changed_since,
                until=None if changed_since is None else snapshot.mark.high,
                replaces=self.replaces,
                rereads=self._executor.renewal is not None,
            )
            for parts in ([handed_out] if handed_out and tasks == 1 else groups(handed_out, tasks))
        ]

    def _columns(self) -> tuple[str, ...] | None:
        """Which columns are read: the key always; ``None``: all."""
        renewal, table = self._executor.renewal, self._context.table
        if renewal is None or renewal.columns is None:
            return None
        keys = table.key_columns
        wanted = [column for column in table.columns if {column.field_id, column.name}.intersection(renewal.columns)]
        return (*keys, *(column.name for column in wanted if not column.dropped and column.name not in keys))

    def deliver(self, plan: int, epoch: int) -> None:
        """The log tells what was delivered: see :meth:`settle`."""

    def roll_back(self, plan: int, epoch: int | None) -> None:
        self._executor.roll_back(plan, epoch)
        if self.kind is SplitKind.HEAP and self._executor.phase is Phase.WAITING:
            self._forget_heap()

    def retake(self, plan: int, mark: SnapshotMark, *, exact: bool) -> None:
        """What *plan* handed out is read again, in the snapshot of *mark*; see the executor."""
        self._executor.retake(plan, mark, exact=exact)

    # -- reading again ---------------------------------------------------------------------------------------------

    def restart(self) -> CdcBackfill:
        self._executor.restart()
        self._forget_heap()
        return self

    def restart_by_key(self) -> None:
        """Begin again, with rows at the sink: by key, which no rewrite moves."""
        self._executor.restart(Renewal(self._context.clock.new_id()))
        self._forget_heap()

    def restart_with(self, renewals: Sequence[Renewal]) -> None:
        """Begin again with the first of *renewals*; the others follow."""
        self._executor.restart(renewals[0])
        for renewal in renewals[1:]:
            self._executor.renew(renewal)

    def renew(self, renewal: Renewal) -> CdcBackfill:
        self._executor.renew(replace(renewal, range=KeyRange()) if self._context.record.whole else renewal)
        return self

    def _restart(self, renewal_id: str, *, emptied: bool) -> None:
        """Begin again what the sink has rows of, unless they are *emptied*."""
        record = self._context.record
        record.last_position, record.unseen = None, []  # positions of another server, perhaps
        self._forget_heap()
        part = KeyRange() if record.whole and not emptied else None
        self._executor.restart(Renewal(renewal_id, part, emptied=emptied))

    def _forget_heap(self) -> None:
        record = self._context.record
        record.heap_since = record.heap_files = None
        self._context.put()

    def save(self, batch: WriteBatch) -> None:
        self._executor.state.save(batch)

    # -- the table in a snapshot -----------------------------------------------------------------------------------

    def has_moved(self, snapshot: ExportedSnapshot) -> bool:
        """Whether it is read by blocks and was rewritten since: the ranges that are left have other rows now."""
        record = self._context.record
        if record.heap_files is None or record.whole:
            return False
        # a new partition moves no row
        return not set(record.heap_files.split()) <= set(snapshot.files(self._context.table).split())

    def has_columns(self, snapshot: ExportedSnapshot, table: SourceTable) -> bool:
        """Whether the columns of *table* are those in *snapshot*, or some of them where new ones are not read."""
        there = {column.field_id: (column.name, column.type) for column in self._columns_in(snapshot)}
        wanted = {column.field_id: (column.name, column.type) for column in table.columns if not column.dropped}
        return there == wanted if self._context.options.new_columns else wanted.items() <= there.items()

    def is_renamed(self, snapshot: ExportedSnapshot, table: SourceTable) -> bool:
        """Whether a column of *table*, which is this one at some epoch, has another name in *snapshot*."""
        names = {column.field_id: column.name for column in self._columns_in(snapshot)}
        known = (column for column in table.columns if not column.dropped)
        return any(names.get(column.field_id, column.name) != column.name for column in known)

    def _readable(self, table: SourceTable, snapshot: ExportedSnapshot, *, by_number: bool) -> SourceTable:
        """*table* as it can be read in *snapshot*: what that has no longer counts as dropped."""
        names = {column.field_id: column.name for column in self._columns_in(snapshot)}
        columns = tuple(
            column
            if (column.field_id in names if by_number else names.get(column.field_id) == column.name)
            else replace(column, dropped=True)
            for column in table.columns
        )
        return replace(table, columns=columns)

    def _columns_in(self, snapshot: ExportedSnapshot) -> list[SourceColumn]:
        return [column for column in snapshot.table(self.latest).columns if not column.dropped]


def renewal_id(began: str | None, changes: TableChanges) -> str:
    """Names the new snapshot of columns that came with a value, in the log that *began* there."""
    return f"{began}:{','.join(map(str, changes.defaulted))}"


# -- commits that no snapshot has shown yet, by one position each. The first eight bytes of a position are the number of
#    its commit; within a commit any position will do.


def _not_visible(known: Sequence[str], fresh: pa.ChunkedArray | None, mark: SnapshotMark | None) -> list[str]:
    """Those of *known* and of the commits of *fresh* positions that *mark* does not show; without one: all of them."""
    positions = [bytes.fromhex(text) for text in known]
    if fresh is not None:
        positions += _one_per_commit(fresh)
    if mark is not None and positions:
        hidden = mark.unseen(pa.array(positions, pa.binary(len(positions[0]))))
        positions = [position for position, is_hidden in zip(positions, hidden, strict=True) if is_hidden]
    return [position.hex() for position in positions]


def _newest(positions: pa.ChunkedArray) -> str:
    """The newest of *positions*, as text."""
    return max(bytes(_words(chunk)[int(np.argmax(_numbers(chunk)))]) for chunk in positions.chunks if len(chunk)).hex()


def _one_per_commit(positions: pa.ChunkedArray) -> list[bytes]:
    chosen: list[bytes] = []
    for chunk in positions.chunks:
        if len(chunk):
            _, first = np.unique(_numbers(chunk), return_index=True)
            words = _words(chunk)
            chosen += [bytes(words[index]) for index in first]
    return chosen


def _words(chunk: pa.FixedSizeBinaryArray) -> np.ndarray[Any, np.dtype[Any]]:
    width = chunk.type.byte_width
    return np.frombuffer(chunk.buffers()[1], f"V{width}", len(chunk), chunk.offset * width)


def _numbers(chunk: pa.FixedSizeBinaryArray) -> np.ndarray[Any, np.dtype[Any]]:
    numbers: np.ndarray[Any, np.dtype[Any]] = _words(chunk).view(">u8").reshape(len(chunk), -1)[:, 0]
    return numbers
