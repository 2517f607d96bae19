"""UpstreamLog: the upstream table of a query, as the planner plans it: its change log, and its snapshot before that.

A batch is a plan: parts of the snapshot, or of the change log. It is sealed together with the progress of the vnodes
that it moves, before its offset is given away; so an offset that somebody holds always has its plan, and a batch that
is delivered again is the same plan. A plan whose offset nobody kept is given again: its rows were not delivered.

The table is held from the oldest epoch that is needed on, where it can be held.

A table that no longer keeps what comes next stops the query where it is: no batch follows, it does not fail and nothing
is tried again and again. Its status says so, with the command that reads the table once more, the metric
``upstream_stopped`` is 1, and the journal has an entry.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from headwater import failpoints
from headwater.backfill.errors import InvalidQuery, QueryStateLost
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import QueryState, UpstreamPlan, UpstreamRecord, UpstreamRecords
from headwater.backfill.query import QueryOptions
from headwater.backfill.since import resolve_upstream_since
from headwater.backfill.snapshot.consume_upstream.errors import (
    ChangeLogGone,
    EpochMismatch,
    RetentionMiss,
    UpstreamWaits,
)
from headwater.backfill.snapshot.consume_upstream.executor import (
    BATCH_EPOCHS,
    BATCH_ROWS,
    UpstreamOptions,
    UpstreamTableExecutor,
)
from headwater.backfill.snapshot.consume_upstream.stream import StreamPhase
from headwater.backfill.snapshot.consume_upstream.upstream_table import Part, PartKind, UpstreamTable
from headwater.backfill.snapshot.state import BackfillState
from headwater.backfill.tasks import Slots, cut_parts
from headwater.backfill.units import UpstreamUnit
from headwater.control.command import QueryCommand, ResnapshotTable
from headwater.control.mutation import mutation_of
from headwater.errors import HeadwaterError
from headwater.journal.fs_store import FsStore
from headwater.journal.run_log import RunLog
from headwater.sources.table import SourceTable
from headwater.state.location import split_location
from headwater.stream import Barrier, BarrierKind, Epoch, EpochPair, Mutation, Pause, Resume, Throttle, VnodeBitmap
from headwater.system.clock import Clock, Wait

BEFORE_HOLD = failpoints.register("upstream.before_hold")
AFTER_HOLD = failpoints.register("upstream.after_hold")

_WAIT_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.05
_TRIES: Final = 5

_log = logging.getLogger(__name__)


class UpstreamLog:
    """See :class:`~headwater.backfill.planner.QueryLogs`; the parameters are those of its planner."""

    returning: Sequence[str] = ()

    def __init__(self, options: QueryOptions, table: UpstreamTable, slots: Slots, clock: Clock) -> None:
        self._options, self._table = options, table
        place = f"--store {shlex.quote(options.store)} --query {shlex.quote(options.query)}"
        self._advice = f"Read the table once more: headwater resnapshot {place}"
        self._slots, self._clock = slots, clock
        self._forgotten: QueryOffset | None = None
        self._noted: str | None = None
        self._waits: UpstreamWaits | None = None
        self._epochs = EpochPair(Epoch.from_ms(2), Epoch.from_ms(1))
        self.moved = True

    def open(self, state: QueryState) -> None:
        """:raises SinceOutOfRange: what it is to begin at is not kept. :raises InvalidQuery: the state is of another
        table.
        """
        self._state = state
        states = BackfillState.open_table(state.catalog, state.batch)
        self._records = UpstreamRecords(state.catalog, state.batch)
        with state.store.snapshot() as view:
            known, self._plan = self._records.read(view)
            self._record = record = known or self._first_record()
            self._check_record()
            vnodes = BackfillState.load(states, view, self._table.name, VnodeBitmap.full(record.vnodes))
        given = self._options
        limits = UpstreamOptions(
            given.max_rows or BATCH_ROWS,
            given.max_epochs or BATCH_EPOCHS,
            given.rows_per_second,
        )
        self._executor = UpstreamTableExecutor(self._table, vnodes, record.snapshot, limits, paused=record.paused)
        if record.lost is not None:
            self._executor.stop(ChangeLogGone(record.lost, next_step=self._advice))
        if known is None:
            if record.since:
                vnodes.finish(record.snapshot)
            self._put_record()

    def begin(self) -> None:
        self._barrier(None, BarrierKind.INITIAL)
        if self._record.throttled:
            self._barrier(Throttle(self._record.limit))
        self._hold()

    def close(self) -> None:
        """What is held of the table stays held."""

    def _first_record(self) -> UpstreamRecord:
        table, given = self._table, self._options.since
        since = None if given is None else resolve_upstream_since(table, given)
        chosen = self._held_newest() if since is None else since
        return UpstreamRecord(table.name, table.identity, table.vnode_count, chosen, since=since is not None)

    def _held_newest(self) -> int:
        """The newest epoch, held: what folds the table may be faster, and is asked again then."""
        for _ in range(_TRIES):
            newest = self._table.newest_epoch()
            try:
                self._table.hold(self._options.query, newest)
                break
            except RetentionMiss:
                continue
        return newest

    def _check_record(self) -> None:
        record, table = self._record, self._table
        if (record.table, record.vnodes) != (table.name, table.vnode_count):
            raise InvalidQuery(
                f"Query {self._options.query!r} consumes {record.table} with {record.vnodes} vnodes, not {table.name}"
                f" with {table.vnode_count}.",
                next_step="Give this query another name, or consume the same table.",
            )

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def backfills(self) -> Sequence[UpstreamLog]:
        return (self,)

    @property
    def is_reading(self) -> bool:
        """Whether rows of the snapshot are left to be planned."""
        return not self._executor.has_snapshot

    @property
    def is_done(self) -> bool:
        return self._executor.has_snapshot

    @property
    def is_held(self) -> bool:
        """Whether it does not go on by itself: paused, throttled to zero, or stopped."""
        executor = self._executor
        return executor.is_paused or executor.rows_per_second == 0 or executor.stopped is not None

    def tables(self) -> list[SourceTable]:
        """As it is at the newest epoch that was planned, or, where that is gone, now."""
        try:
            return [self._table.table(self._executor.needed_epoch)]
        except RetentionMiss:
            return [self._table.table(self._table.newest_epoch())]

    # -- offsets ---------------------------------------------------------------------------------------------------

    def start(self) -> QueryOffset:
        return self.newest()

    def newest_batch(self, delivered: QueryOffset) -> tuple[QueryOffset, QueryOffset]:
        return delivered, self.newest()

    def newest(self) -> QueryOffset:
        number = self._state.plan.number
        return QueryOffset(epoch_of_plan(number), number)

    def newest_epoch(self) -> int:
        return self._table.newest_epoch()

    def has_reached(self, upto: int) -> bool:
        """:raises RetentionMiss: it cannot come there."""
        stopped = self._executor.stopped
        if stopped is not None:
            raise type(stopped)(stopped.message, next_step=self._advice)
        return self.is_held or self._executor.consumed_epoch >= upto

    def deliver(self, start: QueryOffset) -> None:
        """The offset says it."""

    def forget(self, start: QueryOffset) -> None:
        if start != self._forgotten:
            self._hold()
            self._forgotten = start

    # -- planning --------------------------------------------------------------------------------------------------

    @property
    def wait(self) -> Wait:
        executor = self._executor
        limited = executor.is_paused or executor.rows_per_second is not None or executor.stopped is not None
        if limited or self._waits is not None:  # for something else than a new epoch
            return Wait(_LOOK_SECONDS)
        return Wait(_WAIT_SECONDS, self._wait_for_epoch)

    def _wait_for_epoch(self, seconds: float) -> None:
        with suppress(UpstreamWaits):
            self._table.wait_for_epoch(self._executor.consumed_epoch, seconds)

    def next(self, start: QueryOffset, max_rows: int | None, upto: int | None) -> QueryOffset:
        """The options of the query say how many rows; *max_rows* does not count."""
        if self._must_wait():
            return start
        if self._executor.stopped is None and self._has_news() and self._is_another():
            return start
        parts = self._barrier(None, upto=upto)
        if not parts:
            return start
        self._state.plan.number = self._state.plan.following
        self._state.put_plan()
        self._plan = UpstreamPlan(parts, self._record.replaces)
        self._record.replaces = False
        self._record.rows = max(self._record.rows, self._executor.snapshot_rows)
        self._records.put_plan(self._state.batch, self._plan)
        self._put_record()
        self.save()
        return self.newest()

    def _must_wait(self) -> bool:
        """Whether the table is being read once more itself: there is nothing to be had of it until it is done."""
        before, self._waits = self._waits, None
        try:
            if self._executor.stopped is None:
                self._table.newest_epoch()
        except UpstreamWaits as waits:
            self._waits = waits
        self.moved |= (before is None) != (self._waits is None)
        return self._waits is not None

    def _has_news(self) -> bool:
        executor = self._executor
        return not executor.has_snapshot or self._table.newest_epoch() > executor.consumed_epoch

    def _is_another(self) -> bool:
        """Whether the table was created again: then it stops as after a retention miss."""
        if self._table.identity == self._record.identity:
            return False
        self._executor.stop(
            EpochMismatch(
                f"Table {self._table.name} is not the one that the query began with: it was created again.",
                next_step=self._advice,
            )
        )
        return True

    def _barrier(
        self, mutation: Mutation | None, kind: BarrierKind = BarrierKind.CHECKPOINT, upto: int | None = None
    ) -> list[Part]:
        self._epochs = self._epochs.next(self._epochs.curr.next())
        # what a person asks holds at once: such a barrier has no rows before it
        barrier = Barrier(self._epochs, kind if mutation is None else BarrierKind.INITIAL, mutation)
        return self._executor.plan(barrier, self._clock.monotonic(), upto=upto)

    # -- units -----------------------------------------------------------------------------------------------------

    def units(self, start: QueryOffset, end: QueryOffset) -> list[UpstreamUnit]:
        """The same whenever they are asked for."""
        if start.plan not in (end.plan, end.plan - 1):
            raise QueryStateLost(
                f"The batch of query {self._options.query!r} begins at plan {start.plan} and ends at {end.plan}.",
                next_step="Restore the state, or begin anew with an empty checkpoint and sink.",
            )
        if start.plan == end.plan:
            return []
        parts = self._plan.parts
        try:
            self._check(parts)
        except RetentionMiss as miss:
            self._lose(miss)
            return []
        return [
            UpstreamUnit(
                self._table.table(part.epoch),
                part,
                end.plan,
                epoch_of_plan(end.plan),
                self._plan.replaces,
                self._table.commit_version(part.epoch),
                self._table.commit_time_us(part.epoch),
            )
            for part in cut_parts(parts, self._slots)
        ]

    def _check(self, parts: Sequence[Part]) -> None:
        """:raises RetentionMiss: a plan that was made before a crash, perhaps long ago, cannot be read any more."""
        for part in parts:
            if part.kind is PartKind.SNAPSHOT:
                self._table.check_snapshot(part.epoch)
            else:
                self._table.change_cuts(part.after, part.epoch, part.vnodes)
        if self._table.identity != self._record.identity:
            raise EpochMismatch(f"Table {self._table.name} was created again.", next_step=self._advice)

    def _lose(self, miss: RetentionMiss) -> None:
        """The newest plan is lost for good: nothing may follow it but a new snapshot, also after a restart."""
        self._record.lost, self._plan.parts = miss.message, []
        self._records.put_plan(self._state.batch, self._plan)
        self._put_record()
        self.save()
        self._executor.stop(miss)

    # -- requests --------------------------------------------------------------------------------------------------

    def apply(self, request_id: str, command: QueryCommand) -> Barrier:
        """:raises InvalidQuery: another table, or a part of it."""
        mutation = mutation_of(command)
        if command.table not in (None, self._table.name):
            raise InvalidQuery(f"This query delivers {self._table.name}, not {command.table}.")
        if isinstance(command, ResnapshotTable):
            if command.start or command.end or command.columns:
                raise InvalidQuery("An upstream table is read once more as a whole.", next_step="Name no range.")
            self._restart()
        self._barrier(mutation)
        match mutation:
            case Pause() | Resume():
                self._record.paused = isinstance(mutation, Pause)
            case Throttle(rows_per_second=limit):
                self._record.throttled, self._record.limit = True, limit
        self._put_record()
        return Barrier(self._epochs, BarrierKind.INITIAL, mutation)

    def _restart(self) -> None:
        """The table as it is now replaces what was delivered, with the next plan."""
        newest = self._held_newest()
        self._executor.restart(newest)
        record = self._record
        record.identity, record.snapshot, record.snapshots = self._table.identity, newest, record.snapshots + 1
        record.since, record.replaces, record.lost, record.rows = False, True, None, 0
        self._noted = None

    # -- what is durable -------------------------------------------------------------------------------------------

    def _put_record(self) -> None:
        self._records.put(self._state.batch, self._record)

    def _hold(self) -> None:
        """What is needed from now on stays; one that is gone is noticed when it is planned.

        The newest plan is read again until it is delivered: so it is needed, too.
        """
        needed, delivered = self._executor.needed_epoch, self._state.delivered
        if delivered is None or delivered.plan < self._state.plan.number:
            needed = min([needed, *(part.after for part in self._plan.parts)])
        failpoints.hit(BEFORE_HOLD)
        try:
            self._table.hold(self._options.query, needed)
        except (RetentionMiss, UpstreamWaits):
            pass
        failpoints.hit(AFTER_HOLD)

    def save(self) -> None:
        self._executor.save(self._state.batch)
        if self._state.batch:
            self._state.save()

    def status(self) -> dict[str, Any]:
        """A stopped table says why, and names the command that repairs it."""
        table, executor, waits = self._table, self._executor, self._waits
        stopped, consumed = executor.stopped, executor.consumed_epoch
        newest = table.newest_epoch() if stopped is None and waits is None else None
        return {
            "upstream": table.name,
            "phase": StreamPhase.STOPPED.value if stopped is not None else executor.phase.value,
            "snapshot_version": table.commit_version(executor.snapshot_epoch),
            "snapshot_done": executor.has_snapshot,
            "snapshot_rows": self._record.rows,
            "snapshot_vnodes": sum(row is not None and row.is_finished for _, row in executor.progress()),
            "vnodes": table.vnode_count,
            "consumed_version": table.commit_version(consumed) if consumed else None,
            "newest_version": None if newest is None else table.commit_version(newest),
            "paused": executor.is_paused,
            "limit": executor.rows_per_second,
            "problem": stopped.message if stopped is not None else None if waits is None else waits.message,
            "next_step": self._advice if stopped is not None else None if waits is None else waits.next_step,
        }

    @property
    def is_urgent(self) -> bool:
        """A stop is reported at once."""
        stopped = self._executor.stopped
        return stopped is not None and stopped.message != self._noted

    def reported(self) -> None:
        stopped = self._executor.stopped
        if stopped is not None and stopped.message != self._noted:
            self._noted = stopped.message
            self._note_stopped(stopped)

    def _note_stopped(self, stopped: RetentionMiss) -> None:
        """To the log, and to the journal beside the query's store; where that cannot be written, nobody stops."""
        _log.warning("Query %s stopped: %s %s", self._options.query, stopped.message, self._advice)
        engine, place = split_location(self._options.store)
        if engine != "embedded":
            return
        fields = {
            "event": "upstream_stopped",
            "query": self._options.query,
            "upstream": self._table.name,
            "error": type(stopped).__name__,
            "text": stopped.message,
            "next_step": self._advice,
        }
        journal = FsStore(Path(place) / "journal", durability="flush")
        try:
            RunLog.start(journal, self._options.query).record("notice", fields)
        except HeadwaterError as error:
            _log.warning("the journal of %s is not written: %s", self._options.query, error)
        finally:
            journal.close()


def epoch_of_plan(plan: int) -> int:
    """What a batch is called by sinks: plans in their order."""
    return int(Epoch.from_ms(plan))
