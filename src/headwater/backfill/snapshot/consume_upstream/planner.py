"""UpstreamPlanner: what the next batch of a query over an upstream table delivers; one process, one thread.

A batch is a plan: parts of the snapshot, or of the change log. It is sealed together with the progress of the vnodes
that it moves, before its offset is given away; so an offset that somebody holds always has its plan, and a batch that
is delivered again is the same plan. A plan whose offset nobody kept is given again: its rows were not delivered.

What was delivered is told by the next call: the offset that it starts from. The table is held from the oldest epoch
that is needed on, where it can be held.

A table that no longer keeps what comes next stops the query where it is: no batch follows, it does not fail and nothing
is tried again and again. Its status says so, with the command that reads the table once more, the metric
``upstream_stopped`` is 1, and the journal has an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from headwater import failpoints
from headwater.backfill.control import effect_of, query_command
from headwater.backfill.errors import InvalidQuery, QueryStateLost
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import QueryState
from headwater.backfill.query import UpstreamQuery
from headwater.backfill.snapshot.consume_upstream.errors import (
    ChangeLogGone,
    EpochMismatch,
    RetentionMiss,
    UpstreamWaits,
)
from headwater.backfill.snapshot.consume_upstream.executor import UpstreamTableExecutor
from headwater.backfill.snapshot.consume_upstream.record import UpstreamPlan, UpstreamRecord, UpstreamRecords
from headwater.backfill.snapshot.consume_upstream.since import resolve_since
from headwater.backfill.snapshot.consume_upstream.told import status_of, tell_stopped
from headwater.backfill.snapshot.consume_upstream.upstream_table import Part, PartKind
from headwater.backfill.snapshot.state import BackfillState
from headwater.backfill.tasks import Slots, tasks_of
from headwater.backfill.units import UpstreamUnit
from headwater.control.command import QueryCommand, ResnapshotTable
from headwater.control.mutation import mutation_of
from headwater.control.request import Answers, inbox_of
from headwater.errors import HeadwaterError
from headwater.sources.table import SourceTable
from headwater.state.query_store import QueryStore, open_query_store
from headwater.stream import Barrier, BarrierKind, Epoch, EpochPair, Mutation, Pause, Resume, Throttle, VnodeBitmap
from headwater.system.clock import SYSTEM_CLOCK, Clock, Wait

BEFORE_HOLD = failpoints.register("upstream.before_hold")
AFTER_HOLD = failpoints.register("upstream.after_hold")

_WAIT_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.05
_TRIES: Final = 5
_STATUS_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 5.0

Recover = Callable[[QueryStore, str, Sequence[SourceTable]], None]


def epoch_of_plan(plan: int) -> int:
    """What a batch is called by sinks: plans in their order."""
    return int(Epoch.from_ms(plan))


class UpstreamPlanner:
    """Plans the batches of one query.

    :param recover: called before anything is planned, with the state of the query, what names it, and the table:
        what earlier ones left pending at the sink is settled.
    :param takeover: another process that plans this query is fenced.
    :param slots: how many tasks run at a time; by default as the query says.
    :raises StoreOwned: another process plans this query. :raises SinceOutOfRange: what it is to begin at is not kept.
    :raises InvalidQuery: the state is of another table.
    """

    returning: Sequence[str] = ()

    def __init__(
        self,
        query: UpstreamQuery,
        *,
        recover: Recover | None = None,
        takeover: bool = False,
        slots: Slots | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._query, self._table = query, query.upstream
        self._slots, self._clock = slots or (lambda: query.parallelism), clock
        self._told = 0.0
        self._moved = True
        self._noted: str | None = None
        self._waits: UpstreamWaits | None = None
        with ExitStack() as stack:
            store = stack.enter_context(open_query_store(query.state_location, query.query, takeover=takeover))
            self._state = QueryState(store, clock)
            states = BackfillState.open_table(self._state.catalog, self._state.batch)
            self._records = UpstreamRecords(self._state.catalog, self._state.batch)
            self._inbox = inbox_of(query.state_location)
            self._answers = Answers(self._state.catalog, store, self._state.batch)
            with self._state.store.snapshot() as view:
                known, self._plan = self._records.read(view)
                self._record = known or self._first_record()
                self._check_record()
                state = BackfillState.load(states, view, self._table.name, VnodeBitmap.full(self._record.vnodes))
            record = self._record
            self._executor = UpstreamTableExecutor(
                self._table, state, record.snapshot, query.options, paused=record.paused
            )
            if record.lost is not None:
                self._executor.stop(ChangeLogGone(record.lost, next_step=query.advice))
            self.generation = store.generation
            self._epochs = EpochPair(Epoch.from_ms(2), Epoch.from_ms(1))
            if known is None:
                self._begin(state)
            self._barrier(None, BarrierKind.INITIAL)
            if record.throttled:
                self._barrier(Throttle(record.limit))
            self._hold()
            if recover is not None:
                recover(store, self.backfill_id, [self.table()])
            self._save()
            self._stack = stack.pop_all()

    def _first_record(self) -> UpstreamRecord:
        query, table = self._query, self._table
        since = resolve_since(table, query.since, query.since_ms)
        chosen = self._held_newest() if since is None else since
        return UpstreamRecord(table.name, table.identity, table.vnode_count, chosen, since=since is not None)

    def _held_newest(self) -> int:
        """The newest epoch, held: what folds the table may be faster, and is asked again then."""
        for _ in range(_TRIES):
            newest = self._table.newest_epoch()
            try:
                self._table.hold(self._query.query, newest)
                break
            except RetentionMiss:
                continue
        return newest

    def _check_record(self) -> None:
        record, table = self._record, self._table
        if (record.table, record.vnodes) != (table.name, table.vnode_count):
            raise InvalidQuery(
                f"Query {self._query.query!r} consumes {record.table} with {record.vnodes} vnodes, not {table.name}"
                f" with {table.vnode_count}.",
                next_step="Give this query another name, or consume the same table.",
            )

    def _begin(self, state: BackfillState) -> None:
        if self._record.since:
            state.finish(self._record.snapshot)
        self._put_record()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def backfill_id(self) -> str:
        """Names the state of this query: plans of another state are other plans."""
        return self._state.id

    @property
    def stopped(self) -> RetentionMiss | None:
        """Why no batch follows any more."""
        return self._executor.stopped

    def table(self) -> SourceTable:
        """As it is at the newest epoch that was planned, or, where that is gone, now."""
        try:
            return self._table.table(self._executor.needed_epoch)
        except RetentionMiss:
            return self._table.table(self._table.newest_epoch())

    # -- offsets ---------------------------------------------------------------------------------------------------

    def initial(self) -> QueryOffset:
        """Where the query stands when nobody remembers: after what was delivered."""
        if self._state.delivered is None:
            self._state.put_delivered(_offset(self._state.plan.number))
            self._save()
        assert self._state.delivered is not None
        return self._state.delivered

    def resume(self, committed: Collection[QueryOffset]) -> tuple[QueryOffset, QueryOffset | None]:
        """Where the query stands, for who keeps no offsets: what was delivered, and the plan after it, if it is open.

        :param committed: ends of batches that the sink has.
        """
        delivered, newest = self.initial(), self.newest()
        return (newest, None) if newest in (delivered, *committed) else (delivered, newest)

    def newest(self) -> QueryOffset:
        """The newest plan."""
        return _offset(self._state.plan.number)

    def newest_epoch(self) -> int:
        """The newest epoch of the table."""
        return self._table.newest_epoch()

    def plan(self, start: QueryOffset, *, upto: int | None = None) -> QueryOffset:
        """Where the batch after *start* ends; *start* itself when there is nothing to do now: see :attr:`wait`.

        Everything up to *start* counts as delivered. An offset after it is durable as a plan when it is returned.

        :param upto: no epochs of the table after this one.
        :raises QueryStateLost: *start* is not of this state.
        """
        self._mark_delivered(start)
        if start.plan == self._state.plan.number:
            self._serve()
            self._moved |= self._next(upto)
            self._tell()
        return self.newest()

    @property
    def wait(self) -> Wait:
        """What to wait for when nothing was planned."""
        if self._is_held or self._waits is not None:
            return Wait(_LOOK_SECONDS)
        return Wait(_WAIT_SECONDS, self._wait_for_epoch)

    def _wait_for_epoch(self, seconds: float) -> None:
        with suppress(UpstreamWaits):
            self._table.wait_for_epoch(self._executor.consumed_epoch, seconds)

    def has_reached(self, upto: int) -> bool:
        """Whether nothing up to *upto* is left to plan, or somebody holds it up.

        :raises RetentionMiss: it cannot come there.
        """
        if self.stopped is not None:
            raise type(self.stopped)(self.stopped.message, next_step=self._query.advice)
        held = self._executor.is_paused or self._executor.rows_per_second == 0
        return held or self._executor.consumed_epoch >= upto

    @property
    def _is_held(self) -> bool:
        """Whether something else than a new epoch is waited for."""
        executor = self._executor
        return executor.is_paused or executor.rows_per_second is not None or executor.stopped is not None

    def _mark_delivered(self, start: QueryOffset) -> None:
        """*start* was delivered."""
        number, known = self._state.plan.number, self._state.delivered
        if start.plan > number:
            raise QueryStateLost(
                f"The checkpoint of query {self._query.query!r} is at plan {start.plan}, its state at {number}: the"
                f" state in {self._query.store} was lost or replaced.",
                next_step="Restore it, or begin anew with an empty checkpoint and an empty sink.",
            )
        if start.plan < number - 1 or (known is not None and start.plan < known.plan):
            raise QueryStateLost(
                f"The checkpoint of query {self._query.query!r} is older than what was delivered: it is at plan"
                f" {start.plan}, its state at {number}.",
                next_step="Use the newest checkpoint; or begin anew with another query name and an empty sink.",
            )
        if known is None or known.plan != start.plan:
            self._state.put_delivered(start)
            self._save()
            self._hold()

    def _next(self, upto: int | None) -> bool:
        """Make a plan, if there is something to read."""
        if self._must_wait():
            return False
        if self._executor.stopped is None and self._has_news() and self._is_another():
            return False
        parts = self._barrier(None, upto=upto)
        if not parts:
            return False
        self._state.plan.number = self._state.plan.following
        self._state.put_plan()
        self._plan = UpstreamPlan(parts, self._record.replaces)
        self._record.replaces = False
        self._record.rows = max(self._record.rows, self._executor.snapshot_rows)
        self._records.put_plan(self._state.batch, self._plan)
        self._put_record()
        self._save()
        return True

    def _must_wait(self) -> bool:
        """Whether the table is being read once more itself: there is nothing to be had of it until it is done."""
        before, self._waits = self._waits, None
        try:
            if self._executor.stopped is None:
                self._table.newest_epoch()
        except UpstreamWaits as waits:
            self._waits = waits
        self._moved |= (before is None) != (self._waits is None)
        return self._waits is not None

    def _has_news(self) -> bool:
        executor = self._executor
        return not executor.has_snapshot or self._table.newest_epoch() > executor.consumed_epoch

    def _is_another(self) -> bool:
        """Whether the table was made anew: then it stops as after a retention miss."""
        if self._table.identity == self._record.identity:
            return False
        self._executor.stop(
            EpochMismatch(
                f"Table {self._table.name} is another one than was begun with: it was made anew.",
                next_step=self._query.advice,
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
        """What tasks read for the batch from *start* to *end*; the same whenever it is asked for.

        :raises QueryStateLost: *end* is not of this state.
        """
        if end.plan != self._state.plan.number or start.plan not in (end.plan, end.plan - 1):
            raise QueryStateLost(
                f"The batch is of plan {end.plan}, the state of query {self._query.query!r} at"
                f" {self._state.plan.number}.",
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
        made = []
        for part in _cut(parts, self._slots):
            made.append(
                UpstreamUnit(
                    self._table.table(part.epoch),
                    part,
                    end.plan,
                    epoch_of_plan(end.plan),
                    self._plan.replaces,
                    self._table.commit_version(part.epoch),
                    self._table.commit_time_us(part.epoch),
                )
            )
        return made

    def _check(self, parts: Sequence[Part]) -> None:
        """:raises RetentionMiss: a plan that was made before a crash, perhaps long ago, cannot be read any more."""
        for part in parts:
            if part.kind is PartKind.SNAPSHOT:
                self._table.check_snapshot(part.epoch)
            else:
                self._table.change_cuts(part.after, part.epoch, part.vnodes)
        if self._table.identity != self._record.identity:
            raise EpochMismatch(f"Table {self._table.name} was made anew.", next_step=self._query.advice)

    def _lose(self, miss: RetentionMiss) -> None:
        """The newest plan is lost for good: nothing may follow it but a new snapshot, also after a restart."""
        self._record.lost, self._plan.parts = miss.message, []
        self._records.put_plan(self._state.batch, self._plan)
        self._put_record()
        self._save()
        self._executor.stop(miss)
        self._tell()

    # -- requests --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        for request in self._inbox.open(self._answers, self._query.query):
            problem: HeadwaterError | None = None
            effect: dict[str, Any] = {}
            try:
                effect = self._apply(query_command(request))
            except HeadwaterError as error:
                problem = error
            self._answers.put(self._state.batch, request.id, problem, effect)
            self._moved = True
            self._save()
            self._inbox.finish(request, self._answers)

    def _apply(self, command: QueryCommand) -> dict[str, Any]:
        """Do *command* with the next barrier; what is answered."""
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
        return effect_of(Barrier(self._epochs, BarrierKind.INITIAL, mutation))

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
            self._table.hold(self._query.query, needed)
        except (RetentionMiss, UpstreamWaits):
            pass
        failpoints.hit(AFTER_HOLD)

    def _save(self) -> None:
        self._executor.save(self._state.batch)
        if self._state.batch:
            self._state.save()

    def status(self) -> dict[str, Any]:
        """What a person wants to know."""
        return status_of(self._query, self._executor, self._state.plan.number, self._record.rows, self._waits)

    def _tell(self) -> None:
        """Write the status down, now and then; a stop at once, and into the journal."""
        now, stopped = self._clock.monotonic(), self._executor.stopped
        is_news = stopped is not None and stopped.message != self._noted
        if is_news or now - self._told >= (_STATUS_SECONDS if self._moved else _IDLE_SECONDS):
            self._told, self._moved = now, False
            self._state.put_status(self.status())
            self._save()
        if is_news:
            assert stopped is not None
            self._noted = stopped.message
            tell_stopped(self._query, stopped)

    def close(self) -> None:
        """Let go of everything; what is held of the table stays held."""
        self._stack.close()


def _cut(parts: Sequence[Part], slots: Slots) -> Iterator[Part]:
    """The same, cut where they are large, or of unknown size, and have more than one vnode."""
    for part in parts:
        vnodes = part.end_vnode - part.first_vnode
        pieces = min(tasks_of(part.rows, 0, slots) if part.rows else slots(), vnodes)
        cuts = [part.first_vnode + vnodes * piece // pieces for piece in range(pieces + 1)]
        for first, end in pairwise(cuts):
            yield replace(part, first_vnode=first, end_vnode=end, rows=part.rows // pieces)


def _offset(plan: int) -> QueryOffset:
    return QueryOffset(epoch_of_plan(plan), plan)
