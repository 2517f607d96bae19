"""QueryPlanner: what the next batch of a query delivers; one process, one thread.

It decides from the state of the query and a snapshot of the logs, and never waits: it says what is to be waited for,
and the loop around it (:mod:`headwater.backfill.loop`) does. Time and new ids are those of the ``clock`` it is given.
It seals each plan itself, so that none is given away that is not durable.

Each table of a query has a *log* and a *backfill*, the rows from before it. Whose they are the planner does not know:

=====================  =====================================  ==============================================
:class:`QueryLogs`     log                                    backfill
=====================  =====================================  ==============================================
``StoreLogs``       ours, which the capture writes         from the source, from a versioned table, or none
``UpstreamLog``        the change log of an upstream table    its snapshot, or none
=====================  =====================================  ==============================================

The next call says what was delivered: the offset that it starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, Protocol

from headwater.backfill.control import QueryRequests
from headwater.backfill.keeping import Keeping
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import QueryState
from headwater.backfill.query import QueryOptions
from headwater.backfill.query_tables import CommittedOf
from headwater.backfill.snapshot.consume_upstream.upstream_log import UpstreamLog
from headwater.backfill.store_logs import StoreLogs
from headwater.backfill.tasks import Slots
from headwater.backfill.units import Unit
from headwater.control.command import QueryCommand
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable
from headwater.state.query_store import QueryStore, open_query_store
from headwater.stream import Barrier
from headwater.system.clock import SYSTEM_CLOCK, Clock, Wait

_STATUS_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 5.0

Recover = Callable[[QueryStore, str, Sequence[SourceTable]], None]


class Backfill(Protocol):
    """What a planner asks the backfill of any table; see :class:`~headwater.backfill.table_backfill.TableBackfill`."""

    @property
    def is_reading(self) -> bool: ...

    @property
    def is_held(self) -> bool: ...

    @property
    def is_done(self) -> bool: ...


class QueryLogs(Protocol):
    """The tables of one query: their logs, and the backfills beside them. What changes is written with ``save``.

    The calls of one batch, in this order: ``deliver`` what is at the sink, ``apply`` what was asked, ``forget`` what is
    no longer needed, ``next``, ``units``.

    :ivar moved: the status is another one than was written last.
    :ivar returning: tables that need a planner that is opened later.
    """

    moved: bool
    returning: Sequence[str]

    def open(self, state: QueryState) -> None:
        """The state of the query is open; nothing was done yet. It is called once, before all others."""

    def begin(self) -> None:
        """What was pending at the sink is settled."""

    def close(self) -> None:
        """Let go of everything. It is called also where ``open`` was not, or has failed."""

    @property
    def backfills(self) -> Sequence[Backfill]:
        """Of all tables."""

    def tables(self) -> Sequence[SourceTable]:
        """As they are where the next batch begins."""

    def start(self) -> QueryOffset:
        """Where a query that is new begins."""

    def newest_batch(self, delivered: QueryOffset) -> tuple[QueryOffset, QueryOffset]:
        """Where the batch that was planned last begins and ends. :raises QueryStateLost: that is not known."""

    def newest(self) -> QueryOffset:
        """Of all that can be planned now, or was."""

    def newest_epoch(self) -> int:
        """The newest epoch that is committed."""

    def has_reached(self, upto: int) -> bool:
        """Whether nothing up to the epoch *upto* is left to be planned, or a person must act first."""

    def deliver(self, start: QueryOffset) -> None:
        """Everything up to *start* is at the sink, and nothing after it."""

    def forget(self, start: QueryOffset) -> None:
        """The logs need not keep what was delivered, up to *start*."""

    def next(self, start: QueryOffset, max_rows: int | None, upto: int | None) -> QueryOffset:
        """Where the batch after *start* ends, which is sealed; *start*: there is nothing to do."""

    @property
    def wait(self) -> Wait:
        """What to wait for when nothing was planned."""

    def units(self, start: QueryOffset, end: QueryOffset) -> Sequence[Unit]:
        """What tasks read for the batch from *start* to *end*."""

    def apply(self, request_id: str, command: QueryCommand) -> Barrier:
        """Do *command* with the next barrier. :raises HeadwaterError: it cannot be done."""

    def save(self) -> None:
        """Make durable what has changed, in one seal."""

    def status(self) -> dict[str, Any]:
        """What a person wants to know of the tables."""

    @property
    def is_urgent(self) -> bool:
        """Whether the status is written at once."""

    def reported(self) -> None:
        """The status was written."""


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
    :raises TableNotCaptured: a table has no log. :raises StoreOwned: another process plans this query.
    :raises SinceOutOfRange: an upstream table does not keep what the query is to begin at.
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
        self._options, self._clock = options, clock
        self._at: QueryOffset | None = None
        self._told = 0.0
        self._logs: QueryLogs
        if options.upstream is None:
            self._logs = StoreLogs(options, committed, parked or dict, keeping, slots, clock)
        else:
            self._logs = UpstreamLog(options, options.upstream, slots, clock)
        with ExitStack() as stack:
            stack.callback(self._logs.close)
            store = stack.enter_context(open_query_store(options.state_location, options.query, takeover=takeover))
            self._state = QueryState(store, clock)
            self._requests = QueryRequests(options.state_location, options.query, self._state)
            self._logs.open(self._state)
            self.generation = store.generation
            if recover is not None:
                recover(store, self.backfill_id, self._logs.tables())
            self._logs.begin()
            self._logs.save()
            self._stack = stack.pop_all()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def backfill_id(self) -> str:
        """Names the state of this query: plans of another state are other plans."""
        return self._state.id

    @property
    def returning(self) -> Sequence[str]:
        """Parked tables that were captured again: a planner that is opened once they are let back reads them again."""
        return self._logs.returning

    @property
    def has_history(self) -> bool:
        """Whether history is left to be read."""
        return any(backfill.is_reading for backfill in self._logs.backfills)

    def is_waiting(self) -> bool:
        """Whether history is left, and somebody must do something before it goes on."""
        reading = [backfill for backfill in self._logs.backfills if backfill.is_reading]
        return bool(reading) and all(backfill.is_held for backfill in reading)

    def is_history_done(self) -> bool:
        """Whether the history of all tables is read, and their logs have passed it."""
        return all(backfill.is_done for backfill in self._logs.backfills)

    def has_reached(self, upto: int) -> bool:
        """Whether nothing up to the epoch *upto* is left to be planned, or a person must act first.

        :raises RetentionMiss: an upstream table no longer has what comes next.
        """
        return self._logs.has_reached(upto)

    def source_position(self) -> CdcOffset | None:
        """A position of the source after all that it has committed; ``None``: there is no source.

        :raises SourceUnreachable: no answer.
        """
        return self._logs.source_position() if isinstance(self._logs, StoreLogs) else None

    def lacks(self, position: CdcOffset | None) -> Wait | None:
        """What to wait for until the log has all before *position* of the source; ``None``: it has."""
        return self._logs.lacks(position) if isinstance(self._logs, StoreLogs) else None

    # -- offsets ---------------------------------------------------------------------------------------------------

    def initial(self) -> QueryOffset:
        """Where the query stands when nobody remembers: after what was delivered.

        A plan whose rows nobody has delivered does not count, so that a first batch that is delivered again after a
        crash begins where it began.
        """
        if self._state.delivered is None:
            self._state.put_delivered(self._logs.start())
            self._logs.save()
        assert self._state.delivered is not None
        return self._state.delivered

    def resume(self, committed: Collection[QueryOffset]) -> tuple[QueryOffset, QueryOffset | None]:
        """Where the query stands, for who keeps no offsets: what was delivered, and the end of the batch after it that
        was planned, if it is not known to be delivered.

        :param committed: ends of batches that the sink has.
        :raises QueryStateLost: the state was written by a release that kept offsets elsewhere.
        """
        delivered = self.initial()
        begun, end = self._logs.newest_batch(delivered)
        return (end, None) if end in (begun, delivered, *committed) else (begun, end)

    def newest(self) -> QueryOffset:
        """Captured tables: the newest epoch that is sealed. An upstream table: the newest plan."""
        return self._logs.newest()

    def newest_epoch(self) -> int:
        """The newest epoch that is committed."""
        return self._logs.newest_epoch()

    # -- planning --------------------------------------------------------------------------------------------------

    def plan(self, start: QueryOffset, *, max_rows: int | None = None, upto: int | None = None) -> QueryOffset:
        """Where the batch after *start* ends; *start* itself when there is nothing to do now: see :attr:`wait`.

        Everything up to *start* counts as delivered. An offset after it is durable as a plan when it is returned.

        :param upto: no epochs after this one.
        :raises QueryStateLost: *start* is not of this state.
        """
        self._mark_delivered(start)
        if start.plan < self._state.plan.number:
            return self._logs.newest()  # planned, and not delivered: it is given again
        self._serve()
        self._logs.forget(start)
        end = self._logs.next(start, max_rows, upto)
        self._logs.moved |= end != start
        self._tell()
        return end

    @property
    def wait(self) -> Wait:
        """What to wait for when nothing was planned."""
        return self._logs.wait

    def _mark_delivered(self, start: QueryOffset) -> None:
        """*start* was delivered."""
        if start == self._at and start.plan == self._state.plan.number:
            return
        self._state.check_start(start)
        self._logs.deliver(start)
        self._at, self._logs.moved = start, True
        delivered = self._state.delivered
        if delivered is None or delivered.plan != start.plan:
            self._state.put_delivered(start)
            self._logs.save()

    def units(self, start: QueryOffset, end: QueryOffset) -> Sequence[Unit]:
        """What tasks read for the batch from *start* to *end*.

        A batch that is delivered again gives the same changes; its history comes from another snapshot if the first
        is gone, or not at all if the sink has it.

        :raises QueryStateLost: *end* is not of this state. :raises SourceUnreachable: no new snapshot can be had.
        :raises SourceBehind: one can be had that is older than the changes of the batch.
        :raises LogBehind: the columns have changed, and the capture has not come to that yet.
        """
        self._state.check_end(end)
        units = self._logs.units(start, end)
        if self._logs.is_urgent:
            self._tell()
        return units

    # -- requests, status, end -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Do what was asked of this query from outside, as mutations of the next barrier."""
        for request in self._requests.open():
            self._requests.serve(request, self._logs.apply)
            self._logs.moved = True
            self._logs.save()
            self._requests.finish(request)

    def status(self) -> dict[str, Any]:
        """What a person wants to know."""
        own = {"query": self._options.query, "plan": self._state.plan.number, "updated_ms": self._clock.unix_ms()}
        return own | self._logs.status()

    def _tell(self) -> None:
        """Write the status down, now and then."""
        now = self._clock.monotonic()
        if self._logs.is_urgent or now - self._told >= (_STATUS_SECONDS if self._logs.moved else _IDLE_SECONDS):
            self._told, self._logs.moved = now, False
            self._state.put_status(self.status())
            self._logs.save()
            self._logs.reported()

    def close(self) -> None:
        """Let go of everything; a plan whose rows are being read is read again when the query goes on."""
        self._stack.close()
