"""QueryPlanner: what the next batch of a query delivers; one process, one thread.

It decides from the state of the query and a snapshot of the logs, and never waits: it says what is to be waited for,
and the loop around it (:mod:`headwater.backfill.loop`) does. Time and new ids are those of the ``clock`` it is given.
What it asks of others are calls of objects that are given, too: the export of a snapshot by the source, the tokens of
the sink, requests. It seals each plan itself, so that none is given away that is not durable.

A batch is the changes of a range of epochs and, while history is being read, a plan: ranges of tables that are read
inside one snapshot. The order of the steps is what makes it exact:

1. the epoch *upto* which changes are taken is chosen first;
2. then a snapshot is exported: it has every change up to *upto* (when it does not show one yet, history waits);
3. ranges are handed out, and the plan is sealed with them; only then is the offset given away.

So a change up to *upto* is in the rows of the snapshot, and of a later one its position tells whether it is. What was
delivered is told by the next call: the offset that it starts from. A plan whose offset nobody kept is rolled back; one
whose snapshot was lost before its rows were committed is read again in another (:meth:`QueryPlanner.units`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from headwater.backfill.backfill_plans import BackfillPlans
from headwater.backfill.control import QueryRequests
from headwater.backfill.errors import QueryStateLost
from headwater.backfill.keeping import Keeping
from headwater.backfill.log_ranges import LogRanges, TableChanges
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import PlanRecord, QueryState
from headwater.backfill.query import QueryOptions
from headwater.backfill.query_tables import CommittedOf, QueryTables
from headwater.backfill.tasks import Slots
from headwater.backfill.units import Unit
from headwater.capture.source_state import SourceRecord, SourceState
from headwater.log_store import KvLogStoreReader, ReadLimits
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import open_snapshots
from headwater.sources.table import SourceTable
from headwater.state import open_reader
from headwater.state.query_store import QueryStore, open_query_store
from headwater.system.clock import SYSTEM_CLOCK, Clock, Wait

_LOOK_SECONDS: Final = 0.05
_LOCK_SECONDS: Final = 2.0
"""Who plans for many tables does not wait longer for one that is locked."""
_COMMIT_SECONDS: Final = 1.0
_REST_SECONDS: Final = 0.1
_STATUS_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 5.0

Recover = Callable[[QueryStore, str, Sequence[SourceTable]], None]


class QueryPlanner:
    """Plans the batches of one query.

    :param committed: what the sink has of a table, where the sink can tell: then a lost snapshot costs nothing.
    :param recover: called before anything is planned, with the state of the query, what names it, and the tables:
        what earlier ones left pending at the sink is settled.
    :param parked: the tables that the sink does not take, and why: they are left out. Those that come back are read
        once more.
    :param keeping: where the sink keeps tables of our own.
    :param takeover: another process that plans this query is fenced.
    :param slots: how many tasks run at a time; asked where a batch needs more than one.
    :ivar returning: parked tables that were captured again: with a planner that is opened once they are let back they
        are read once more.
    :raises TableNotCaptured: a table has no log. :raises StoreOwned: another process plans this query.
    """

    def __init__(
        self,
        options: QueryOptions,
        *,
        committed: CommittedOf | None = None,
        recover: Recover | None = None,
        parked: Callable[[], Mapping[str, str]] | None = None,
        keeping: Keeping | None = None,
        takeover: bool = False,
        slots: Slots = lambda: 2,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._options, self._slots, self._clock = options, slots, clock
        self._parked = parked or dict
        self._keeping = keeping
        self._source = open_snapshots(options.source, lock_seconds=_LOCK_SECONDS)
        self._at: QueryOffset | None = None
        self._ranged: tuple[QueryOffset, QueryOffset, dict[str, TableChanges]] | None = None
        self._nothing: tuple[QueryOffset, int | None, int | None, int] | None = None
        self._forgotten: QueryOffset | None = None
        self._end: tuple[int, SourceRecord] | None = None
        self._truncated = self._told = 0.0
        self._recovering = self._moved = True
        self._rested = False
        self.returning: Sequence[str] = ()
        with ExitStack() as stack:
            self._reader = stack.enter_context(open_reader(options.store))
            store = stack.enter_context(open_query_store(options.state_location, options.query, takeover=takeover))
            self._state = QueryState(store, clock)
            self._requests = QueryRequests(options, self._state, self._source)
            with self._reader.snapshot() as view:
                ranges = LogRanges(view, options.tables, keyed=options.keyed)
                self._logs = KvLogStoreReader(self._reader, store)
                self._tables = QueryTables(
                    options, self._state, self._source, self._logs, view, ranges, self._parked(), clock
                )
            self._plans = BackfillPlans(
                options, self._state, self._tables, self._source, committed, self._save, slots, clock
            )
            self.generation = store.generation
            if recover is not None:
                recover(store, self.backfill_id, [table.table for table in self._tables.values()])
            self._tables.begin(committed)
            self._save()
            self._stack = stack.pop_all()

    @property
    def backfill_id(self) -> str:
        """Names the state of this query: plans of another state are other plans."""
        return self._state.id

    @property
    def has_history(self) -> bool:
        """Whether history is left to be read."""
        return any(table.backfill.is_reading for table in self._tables.values())

    def is_waiting(self) -> bool:
        """Whether history is left, and somebody must do something before it goes on."""
        backfills = [table.backfill for table in self._tables.values()]
        return self.has_history and all(backfill.is_held for backfill in backfills if backfill.is_reading)

    def is_history_done(self) -> bool:
        """Whether the history of all tables is read, and their logs have passed it."""
        return all(table.backfill.is_done for table in self._tables.values())

    # -- offsets ---------------------------------------------------------------------------------------------------

    def initial(self) -> QueryOffset:
        """Where the query stands when nobody remembers: after what was delivered.

        A plan whose rows nobody has delivered does not count, so that a first batch that is delivered again after a
        crash begins where it began.
        """
        if self._state.delivered is None:
            delivered = min(int(table.consumer.delivered()) for table in self._tables.values())
            if self._tables.versioned:
                with self._reader.snapshot() as view:
                    record, _ = SourceState.read(view)
                    delivered = int(view.epoch)  # all up to it is in the versioned tables
                self._end = None if record is None else (delivered, record)
            start = QueryOffset(delivered, self._state.plan.number)
            self._state.put_delivered(start)
            self._state.put_planned(start, start)
            self._save()
        assert self._state.delivered is not None
        return self._state.delivered

    def resume(self, committed: Collection[QueryOffset]) -> tuple[QueryOffset, QueryOffset | None]:
        """Where the query stands, for who keeps no offsets: what was delivered, and the end of the batch after it that
        was planned, if it is not known to be delivered.

        :param committed: ends of batches that the sink has.
        :raises QueryStateLost: the state was written by a release that kept offsets elsewhere.
        """
        delivered = self.initial()
        if self._state.planned is None:
            raise QueryStateLost(
                f"An earlier release wrote the state of query {self._options.query!r}, and kept its offsets elsewhere.",
                next_step="Begin with an empty store and an empty sink.",
            )
        begun, end = self._state.planned
        return (end, None) if end in (begun, delivered, *committed) else (begun, end)

    def newest(self) -> QueryOffset:
        """The newest epoch that is sealed."""
        return QueryOffset(int(self._reader.committed_epoch()), self._state.plan.number)

    def source_position(self) -> CdcOffset | None:
        """A position of the source after all that it has committed; ``None``: there is no source.

        :raises SourceUnreachable: no answer.
        """
        if not self._options.source:
            return None
        snapshot = self._source.export()
        position = snapshot.mark.high
        snapshot.close()
        return position

    def lacks(self, position: CdcOffset | None) -> Wait | None:
        """What to wait for until the log has all before *position* of the source; ``None``: it has."""
        with self._reader.snapshot() as view:
            record, _ = SourceState.read(view)
            if position is None or (record is not None and record.offset >= position):
                return None
            return Wait(_COMMIT_SECONDS, partial(self._reader.wait_for_epoch, int(view.epoch)))

    def plan(self, start: QueryOffset, *, max_rows: int | None = None, upto: int | None = None) -> QueryOffset:
        """Where the batch after *start* ends; *start* itself when there is nothing to do now: see :attr:`wait`.

        Everything up to *start* counts as delivered. An offset after it is durable as a plan when it is returned.

        :param upto: no epochs after this one.
        :raises QueryStateLost: *start* is not of this state.
        """
        self._mark_delivered(start)
        self._serve()
        self._commit(start)
        self._rested = upto is None and self._rests()
        most = max_rows or self._options.max_rows
        end = start if self._rested or self._has_nothing(start, most, upto) else self._next(start, most, upto)
        self._moved |= end != start
        self._tell()
        return end

    @property
    def wait(self) -> Wait:
        """What to wait for when nothing was planned."""
        if self._rested:
            return Wait(_REST_SECONDS)
        assert self._at is not None
        news = partial(self._reader.wait_for_epoch, max(self._at.epoch, self._seen))
        return Wait(_LOOK_SECONDS if self.has_history else _COMMIT_SECONDS, news)

    def _mark_delivered(self, start: QueryOffset) -> None:
        """*start* was delivered."""
        plan = self._state.plan
        if start == self._at and start.plan == plan.number:
            return
        self._nothing = None
        self._state.check_start(start)
        self._roll_back(start)
        self._plans.check_attempt()
        self._plans.release()
        self._recovering = False
        if self._end is not None and self._end[0] == start.epoch:
            for table in self._tables.values():
                table.settle(self._end[1].offset, start.epoch)
        self._at, self._moved = start, True
        self._tables.park(self._parked())  # what the sink did not take of the batch before
        delivered = self._state.delivered
        if delivered is None or delivered.plan != start.plan:
            self._state.put_delivered(start)
            self._save()

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
        self._save()

    def _commit(self, start: QueryOffset) -> None:
        """Let the logs forget what was delivered."""
        now = self._clock.monotonic()
        if start != self._forgotten and now - self._truncated >= _COMMIT_SECONDS:
            self._truncated, self._forgotten = now, start
            self._state.put_delivered(start)
            self._tables.forget(start.epoch)  # both in one seal: a query never begins before what the logs hold

    # -- planning --------------------------------------------------------------------------------------------------

    _seen = 0

    def _rests(self) -> bool:
        return self._keeping is not None and self._keeping.is_resting(self._tables.values(), self._clock.monotonic())

    def _next(self, start: QueryOffset, max_rows: int | None, upto: int | None) -> QueryOffset:
        if self._keeping is not None:
            self._keeping.before(self._tables.values(), self.backfill_id, start.epoch)
        end = self._planned(start, max_rows, upto)
        if self._keeping is not None and end != start:
            self._keeping.after(self._tables.values(), self.backfill_id, self._clock.monotonic())
        waits_for_epoch = end == start and self._keeping is None and self.is_history_done()
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
        self._save()  # what is dropped from now on is known to be shown by every later snapshot
        return offset

    def _record_of(self, epoch: int, ranges: LogRanges) -> SourceRecord | None:
        """Where *epoch* ends in the source's log, if that is known."""
        if epoch == ranges.newest and ranges.record is not None:
            return ranges.record
        return self._end[1] if self._end is not None and self._end[0] == epoch else None

    # -- units -----------------------------------------------------------------------------------------------------

    def units(self, start: QueryOffset, end: QueryOffset) -> list[Unit]:
        """What tasks read for the batch from *start* to *end*.

        A batch that is delivered again gives the same changes; its history comes from another snapshot if the first
        is gone, or not at all if the sink has it.

        :raises QueryStateLost: *end* is not of this state. :raises SourceUnreachable: no new snapshot can be had.
        :raises SourceBehind: one can be had that is older than the changes of the batch.
        :raises LogBehind: the columns have changed, and the capture has not come to that yet.
        """
        self._state.check_end(end)
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

    # -- requests, status, end -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Do what was asked of this query from outside, as mutations of the next barrier."""
        for request in self._requests.open():
            self._nothing = None
            self._requests.serve(request, self._tables)
            self._save()
            self._requests.finish(request)

    def _save(self) -> None:
        """Make durable what has changed."""
        self._tables.save()

    def status(self) -> dict[str, Any]:
        """What a person wants to know."""
        return {
            "query": self._options.query,
            "backfill": self.backfill_id,
            "plan": self._state.plan.number,
            "epoch": 0 if self._at is None else self._at.epoch,
            "newest_epoch": self._seen,
            "reader": asdict(self._logs.statistics),
            "updated_ms": self._clock.unix_ms(),
            "problem": self._plans.problem,
            "tables": self._tables.status(),
        }

    def _tell(self) -> None:
        """Write the status down, now and then."""
        now = self._clock.monotonic()
        if now - self._told >= (_STATUS_SECONDS if self._moved else _IDLE_SECONDS):
            self._told, self._moved = now, False
            self._state.put_status(self.status())
            self._save()

    def close(self) -> None:
        """Let go of everything; a plan whose rows are being read is read again when the query goes on."""
        with self._stack:
            self._plans.release()
