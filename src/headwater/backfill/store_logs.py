"""StoreLogs: the captured tables of a query, as the planner plans them: their logs in the store that the capture
writes, and the backfills beside them.

A batch is the changes of a range of epochs and, while history is being read, a plan: ranges of tables that are read
inside one snapshot. The order of the steps is what makes it exact:

1. the epoch *upto* which changes are taken is chosen first;
2. then a snapshot is exported: it has every change up to *upto* (when it does not show one yet, history waits);
3. ranges are handed out, and the plan is sealed with them; only then is the offset given away.

So a change up to *upto* is in the rows of the snapshot, and of a later one its position tells whether it is. A plan
whose offset nobody kept is rolled back; one whose snapshot was lost before its rows were committed is read again in
another (:meth:`StoreLogs.units`).

What it asks of others are calls of objects that are given: the export of a snapshot by the source, the tokens of the
sink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from headwater.backfill.backfill_plans import BackfillPlans
from headwater.backfill.cdc.state import Renewal
from headwater.backfill.errors import InvalidQuery, QueryStateLost
from headwater.backfill.keeping import Keeping
from headwater.backfill.log_ranges import LogRanges, TableChanges
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import PlanRecord, QueryState
from headwater.backfill.query import QueryOptions
from headwater.backfill.query_tables import CommittedOf, QueryTables
from headwater.backfill.table_backfill import TableBackfill
from headwater.backfill.tasks import Slots
from headwater.backfill.units import Unit
from headwater.capture.source_state import SourceRecord, SourceState
from headwater.control.command import QueryCommand, ResnapshotTable
from headwater.control.mutation import mutation_of
from headwater.log_store import KvLogStoreReader, ReadLimits
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import SnapshotSource, open_snapshots
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceTable
from headwater.state import open_reader
from headwater.stream import Barrier
from headwater.system.clock import Clock, Wait

_LOOK_SECONDS: Final = 0.05
_LOCK_SECONDS: Final = 2.0
"""Who plans for many tables does not wait longer for one that is locked."""
_COMMIT_SECONDS: Final = 1.0
_REST_SECONDS: Final = 0.1


class StoreLogs:
    """See :class:`~headwater.backfill.planner.QueryLogs`; the parameters are those of its planner.

    :raises StoreNotFound: no capture has written the store.
    """

    is_urgent = False

    def __init__(
        self,
        options: QueryOptions,
        committed: CommittedOf | None,
        parked: Callable[[], Mapping[str, str]],
        keeping: Keeping | None,
        slots: Slots,
        clock: Clock,
    ) -> None:
        self._options, self._committed, self._parked = options, committed, parked
        self._keeping, self._slots, self._clock = keeping, slots, clock
        self._source = open_snapshots(options.source, lock_seconds=_LOCK_SECONDS)
        self._at: QueryOffset | None = None
        self._seen = 0
        self._ranged: tuple[QueryOffset, QueryOffset, dict[str, TableChanges]] | None = None
        self._nothing: tuple[QueryOffset, int | None, int | None, int] | None = None
        self._forgotten: QueryOffset | None = None
        self._end: tuple[int, SourceRecord] | None = None
        self._truncated = 0.0
        self._recovering = self.moved = True
        self._rested = False
        self.returning: Sequence[str] = ()
        self._stack = ExitStack()
        self._reader = self._stack.enter_context(open_reader(options.store))

    def open(self, state: QueryState) -> None:
        """:raises TableNotCaptured: a table has no log."""
        options, self._state = self._options, state
        with self._reader.snapshot() as view:
            ranges = LogRanges(view, options.tables, keyed=options.keyed)
            self._logs = KvLogStoreReader(self._reader, state.store)
            self._tables = QueryTables(
                options, state, self._source, self._logs, view, ranges, self._parked(), self._clock
            )
        self._plans = BackfillPlans(
            options, state, self._tables, self._source, self._committed, self.save, self._slots, self._clock
        )
        self._stack.callback(self._plans.release)

    def begin(self) -> None:
        self._tables.begin(self._committed)

    def close(self) -> None:
        self._stack.close()

    @property
    def backfills(self) -> list[TableBackfill]:
        return [table.backfill for table in self._tables.values()]

    def tables(self) -> list[SourceTable]:
        return [table.table for table in self._tables.values()]

    # -- offsets ---------------------------------------------------------------------------------------------------

    def start(self) -> QueryOffset:
        delivered = min(int(table.consumer.delivered()) for table in self._tables.values())
        if self._tables.versioned:
            with self._reader.snapshot() as view:
                record, _ = SourceState.read(view)
                delivered = int(view.epoch)  # all up to it is in the versioned tables
            self._end = None if record is None else (delivered, record)
        start = QueryOffset(delivered, self._state.plan.number)
        self._state.put_planned(start, start)
        return start

    def newest_batch(self, delivered: QueryOffset) -> tuple[QueryOffset, QueryOffset]:
        if self._state.planned is None:
            raise QueryStateLost(
                f"An earlier release wrote the state of query {self._options.query!r}, and kept its offsets elsewhere.",
                next_step="Begin with an empty store and an empty sink.",
            )
        return self._state.planned

    def newest(self) -> QueryOffset:
        return QueryOffset(self.newest_epoch(), self._state.plan.number)

    def newest_epoch(self) -> int:
        return int(self._reader.committed_epoch())

    def has_reached(self, upto: int) -> bool:
        """What the logs have up to *upto* is planned whenever it is asked for: history alone can be left."""
        reading = [backfill for backfill in self.backfills if backfill.is_reading]
        return all(backfill.is_held for backfill in reading)

    def source_position(self) -> CdcOffset | None:
        """See :class:`~headwater.backfill.planner.QueryPlanner`."""
        if not self._options.source:
            return None
        snapshot = self._source.export()
        position = snapshot.mark.high
        snapshot.close()
        return position

    def lacks(self, position: CdcOffset | None) -> Wait | None:
        """See :class:`~headwater.backfill.planner.QueryPlanner`."""
        with self._reader.snapshot() as view:
            record, _ = SourceState.read(view)
            if position is None or (record is not None and record.offset >= position):
                return None
            return Wait(_COMMIT_SECONDS, partial(self._reader.wait_for_epoch, int(view.epoch)))

    # -- what is delivered -----------------------------------------------------------------------------------------

    def deliver(self, start: QueryOffset) -> None:
        self._nothing = None
        self._roll_back(start)
        self._plans.check_attempt()
        self._plans.release()
        self._recovering = False
        if self._end is not None and self._end[0] == start.epoch:
            for table in self._tables.values():
                table.settle(self._end[1].offset, start.epoch)
        self._at = start
        self._tables.park(self._parked())  # what the sink did not take of the batch before

    def _roll_back(self, start: QueryOffset) -> None:
        """A plan after *start* was never kept: nobody reads its rows. What the sink has of it all the same stays.

        Its number is not given again: the sink may yet get its rows from a process that was thought dead.
        """
        plan = self._state.plan
        is_newer = start.plan < plan.number
        for name, table in self._tables.items():
            is_committed = is_newer and name in plan.positions and self._plans.is_committed(name, plan)
            upto = plan.number if is_committed else start.plan
            table.backfill.roll_back(upto, start.epoch)
            table.backfill.deliver(upto, start.epoch)
        if is_newer:
            self._state.plan = PlanRecord(number=start.plan, issued=max(plan.number, plan.issued))
            self._state.put_plan()
        self.save()

    def forget(self, start: QueryOffset) -> None:
        now = self._clock.monotonic()
        if start != self._forgotten and now - self._truncated >= _COMMIT_SECONDS:
            self._truncated, self._forgotten = now, start
            self._state.put_delivered(start)
            self._tables.forget(start.epoch)  # both in one seal: a query never begins before what the logs hold

    # -- planning --------------------------------------------------------------------------------------------------

    def next(self, start: QueryOffset, max_rows: int | None, upto: int | None) -> QueryOffset:
        most, keeping, now = max_rows or self._options.max_rows, self._keeping, self._clock.monotonic()
        self._rested = upto is None and keeping is not None and keeping.is_resting(self._tables.values(), now)
        if self._rested or self._has_nothing(start, most, upto):
            return start
        return self._next(start, most, upto)

    @property
    def wait(self) -> Wait:
        if self._rested:
            return Wait(_REST_SECONDS)
        assert self._at is not None
        news = partial(self._reader.wait_for_epoch, max(self._at.epoch, self._seen))
        has_history = any(backfill.is_reading for backfill in self.backfills)
        return Wait(_LOOK_SECONDS if has_history else _COMMIT_SECONDS, news)

    def _next(self, start: QueryOffset, max_rows: int | None, upto: int | None) -> QueryOffset:
        if self._keeping is not None:
            self._keeping.before(self._tables.values(), self._state.id, start.epoch)
        end = self._planned(start, max_rows, upto)
        if self._keeping is not None and end != start:
            self._keeping.after(self._tables.values(), self._state.id, self._clock.monotonic())
        waits_for_epoch = (
            end == start and self._keeping is None and all(backfill.is_done for backfill in self.backfills)
        )
        self._nothing = (start, max_rows, upto, self._seen) if waits_for_epoch else None
        return end

    def _has_nothing(self, start: QueryOffset, max_rows: int | None, upto: int | None) -> bool:
        """Whether there was nothing to plan after *start*, and there can be nothing before the next epoch."""
        known = self._nothing
        return known is not None and known == (start, max_rows, upto, int(self._reader.committed_epoch()))

    def _planned(self, start: QueryOffset, max_rows: int | None, upto: int | None) -> QueryOffset:
        with self._reader.snapshot() as view:
            ranges = LogRanges(view, list(self._tables), keyed=self._options.keyed)
            self._seen = ranges.newest
            self.returning = self._tables.returning(ranges.captured)
            limit = ranges.newest if upto is None else min(upto, ranges.newest)
            limit = max(self._tables.readable_upto(limit), start.epoch)
            self._logs.start_from(start.epoch)
            limits = ReadLimits(limit, max_rows, self._options.max_epochs, one_shape=not self._options.keyed)
            sealed = self._logs.next_item(limits, views=ranges.views)
            end = start.epoch if sealed is None else int(sealed.end)
            if self._keeping is not None:
                end = self._keeping.choose(self._tables.values(), start.epoch, end)
            ranged = {name: ranges.changes(name, table.after(start.epoch), end) for name, table in self._tables.items()}
            observed = {
                name: table.observe(ranged[name], ranges.since(name, end), start.epoch, end)
                for name, table in self._tables.items()
            }
            for name, external in self._tables.external.items():
                if external.is_reading:
                    external.latest = ranges.latest(name)
            for versioned in self._tables.versioned.values():
                versioned.catch_up(ranges, end)
            if end == ranges.newest and ranges.record is not None:
                self._end = (end, ranges.record)
                for name, changes in observed.items():
                    if not changes:
                        self._tables[name].settle(ranges.record.offset, end)
            if self._keeping is not None:
                self._keeping.hold(self._tables.values())
            planned = self._plans.plan(ranges, end, observed, self._record_of(end, ranges))
        is_late = self._tables.is_late and end > start.epoch
        if not planned and not any(observed.values()) and not is_late:
            return start
        offset = QueryOffset(end, self._state.plan.number if planned else start.plan)
        self._ranged = (start, offset, ranged)
        self._state.put_planned(start, offset)
        self.save()  # what is dropped from now on is known to be shown by every later snapshot
        return offset

    def _record_of(self, epoch: int, ranges: LogRanges) -> SourceRecord | None:
        """Where *epoch* ends in the source's log, if that is known."""
        if epoch == ranges.newest and ranges.record is not None:
            return ranges.record
        return self._end[1] if self._end is not None and self._end[0] == epoch else None

    # -- units -----------------------------------------------------------------------------------------------------

    def units(self, start: QueryOffset, end: QueryOffset) -> list[Unit]:
        if self._ranged is not None and self._ranged[:2] == (start, end) and end.plan == start.plan:
            return self._log_units(self._ranged[2], end)
        with self._reader.snapshot() as view:
            return self._units(LogRanges(view, list(self._tables), keyed=self._options.keyed), start, end)

    def _units(self, ranges: LogRanges, start: QueryOffset, end: QueryOffset) -> list[Unit]:
        tables = self._tables
        changes = {name: ranges.changes(name, tables[name].after(start.epoch), end.epoch) for name in tables}
        units = self._log_units(changes, end)
        if end.plan > start.plan:
            for name, backfill in tables.external.items():
                backfill.latest = ranges.latest(name)
            units += self._plans.units(ranges, end, recovering=self._recovering)
        return units

    def _log_units(self, ranged: Mapping[str, TableChanges], end: QueryOffset) -> list[Unit]:
        """The units of what the logs have in a batch up to *end*."""
        units: list[Unit] = []
        for name, table in self._tables.items():
            changes = table.emptying(ranged[name], end.epoch)
            if changes:
                units += table.units(changes, end.epoch, end.plan, self._slots)
        return units

    # -- requests, status ------------------------------------------------------------------------------------------

    def apply(self, request_id: str, command: QueryCommand) -> Barrier:
        """:raises InvalidQuery: no such table. :raises SourceError: the source does not know such a range."""
        self._nothing = None
        name, tables = command.table, self._tables
        if name is not None and name not in tables:
            raise InvalidQuery(
                f"Table {name} is not of this query; its tables are {', '.join(tables)}.",
                next_step="Name one of them, or none for all.",
            )
        renewals: dict[str, Renewal] = {}
        if isinstance(command, ResnapshotTable):
            if not self._options.source:
                raise InvalidQuery("A stream writes the store: there is no database to read the table from once more.")
            wanted = list(tables) if name is None else [name]
            renewals = {each: _renewal(request_id, command, tables[each].table, self._source) for each in wanted}
        barrier = tables.mutate(mutation_of(command, name))
        for each, renewal in renewals.items():
            tables[each].renew(renewal)
        return barrier

    def save(self) -> None:
        self._tables.save()

    def status(self) -> dict[str, Any]:
        return {
            "backfill": self._state.id,
            "epoch": 0 if self._at is None else self._at.epoch,
            "newest_epoch": self._seen,
            "reader": asdict(self._logs.statistics),
            "problem": self._plans.problem,
            "tables": self._tables.status(),
        }

    def reported(self) -> None:
        """Nothing else is written."""


def _renewal(request_id: str, command: ResnapshotTable, table: SourceTable, source: SnapshotSource) -> Renewal:
    columns, names = command.columns, table.schema.names
    for column in columns:
        if column not in names:
            raise InvalidQuery(
                f"Table {table.full_name} has no column {column!r}.", next_step=f"It has {', '.join(names)}."
            )
    sides = ((command.start, False), (command.end, True))
    cuts = [Cut(values, after) if values else None for values, after in sides]
    part = None if cuts == [None, None] else source.key_range(table, KeyRange(*cuts))
    return Renewal(request_id, part, tuple(table.column(name).field_id for name in columns) if columns else None)
