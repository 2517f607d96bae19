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

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from headwater import failpoints
from headwater.backfill.control import PAUSE, RESNAPSHOT, RESUME, THROTTLE
from headwater.backfill.errors import InvalidQuery, QueryStateLost
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import FOLDER, QueryState
from headwater.backfill.snapshot.consume_upstream.errors import ChangeLogGone, EpochMismatch, RetentionMiss
from headwater.backfill.snapshot.consume_upstream.executor import UpstreamTableExecutor
from headwater.backfill.snapshot.consume_upstream.query import UpstreamQuery, UpstreamUnit, cut_parts
from headwater.backfill.snapshot.consume_upstream.since import resolve_since
from headwater.backfill.snapshot.consume_upstream.stream import StreamPhase
from headwater.backfill.snapshot.consume_upstream.upstream_table import Part, PartKind
from headwater.backfill.snapshot.state import BackfillState, VnodeProgress
from headwater.capture.requests import Answers, Request, Requests
from headwater.errors import HeadwaterError
from headwater.journal import FsStore, RunLog
from headwater.sources.table import SourceTable
from headwater.state import Field, FieldType, StateTable, TableSchema
from headwater.state.beside import open_beside_writer
from headwater.state.location import split_location
from headwater.stream import Barrier, BarrierKind, Epoch, EpochPair, Mutation, Pause, Resume, Throttle, VnodeBitmap

BEFORE_HOLD = failpoints.register("upstream.before_hold")
AFTER_HOLD = failpoints.register("upstream.after_hold")

UPSTREAM: Final = TableSchema(
    "upstream_query", 1, key=(Field("part", FieldType.TEXT),), value=(Field("value", FieldType.JSON),)
)
_RECORD, _PLAN = "record", "plan"
_REQUESTS: Final = "query_requests"
_WAIT_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.05
_TRIES: Final = 5
_STATUS_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 5.0
_log = logging.getLogger(__name__)

Recover = Callable[[int, str, SourceTable], None]


def epoch_of_plan(plan: int) -> int:
    """What a batch is called by sinks: plans in their order."""
    return int(Epoch.from_ms(plan))


class UpstreamPlanner:
    """Plans the batches of one query.

    :param recover: called before anything is planned, with the generation of this planner, what names its state, and
        the table: what earlier ones left pending at the sink is settled.
    :param takeover: another process that plans this query is fenced.
    :raises StoreOwned: another process plans this query. :raises SinceOutOfRange: what it is to begin at is not kept.
    :raises InvalidQuery: the state is of another table.
    """

    def __init__(self, query: UpstreamQuery, *, recover: Recover | None = None, takeover: bool = False) -> None:
        self._query, self._table = query, query.upstream
        self._told = 0.0
        self._moved = True
        self._noted: str | None = None
        with ExitStack() as stack:
            self._state = QueryState(
                stack.enter_context(open_beside_writer(query.store, FOLDER, query.query, takeover=takeover))
            )
            self._states: StateTable = BackfillState.open_table(self._state.catalog, self._state.batch)
            self._rows: StateTable = self._state.catalog.open_or_create(UPSTREAM, self._state.batch)
            self._requests = Requests(query.store, _REQUESTS, query.query)
            stack.callback(self._requests.close)
            with self._state.store.snapshot() as view:
                self._answers = Answers(self._state.catalog, view, self._state.batch)
                found = {key[0]: values[0] for key, values in self._rows.scan(view, 0)}
                self._record: dict[str, Any] = found.get(_RECORD) or self._first_record()
                self._check_record()
                vnodes = VnodeBitmap.full(self._record["vnodes"])
                state = BackfillState.load(self._states, view, self._table.name, vnodes)
            self._plan: dict[str, Any] = found.get(_PLAN) or {"parts": [], "replaces": False}
            self._executor = UpstreamTableExecutor(
                self._table, state, self._record["snapshot"], query.options, paused=self._record["paused"]
            )
            self._backfill = state
            if self._record["lost"] is not None:
                self._executor.stop(ChangeLogGone(self._record["lost"], next_step=self._advice))
            owner = self._state.store.owner()
            assert owner is not None
            self.generation = owner.generation
            self._epochs = EpochPair(Epoch.from_ms(2), Epoch.from_ms(1))
            if _RECORD not in found:
                self._begin()
            self._barrier(None, BarrierKind.INITIAL)
            if self._record["throttled"]:
                self._barrier(Throttle(self._record["limit"]))
            self._hold()
            if recover is not None:
                recover(self.generation, self.backfill_id, self.table())
            self._save()
            self._stack = stack.pop_all()

    def _first_record(self) -> dict[str, Any]:
        query, table = self._query, self._table
        since = resolve_since(table, query.since, query.since_ms)
        chosen = self._held_newest() if since is None else since
        return {
            "table": table.name,
            "identity": table.identity,
            "vnodes": table.vnode_count,
            "snapshot": chosen,
            "snapshots": 1,
            "since": since is not None,
            "paused": False,
            "throttled": False,
            "limit": None,
            "lost": None,
        }

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
        if self._record["table"] != self._table.name or self._record["vnodes"] != self._table.vnode_count:
            raise InvalidQuery(
                f"Query {self._query.query!r} consumes {self._record['table']} with {self._record['vnodes']} vnodes,"
                f" not {self._table.name} with {self._table.vnode_count}.",
                next_step="Give this query another name, or consume the same table.",
            )

    def _begin(self) -> None:
        if self._record["since"]:
            for vnode in range(self._table.vnode_count):
                self._backfill.update(vnode, VnodeProgress(self._record["snapshot"], 0))
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

    @property
    def _advice(self) -> str:
        return f"Read the table once more: {self._query.resnapshot}"

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

    def newest(self) -> QueryOffset:
        """The newest plan."""
        return _offset(self._state.plan.number)

    def newest_epoch(self) -> int:
        """The newest epoch of the table."""
        return self._table.newest_epoch()

    def advance(self, start: QueryOffset, *, timeout: float = 0.0, upto: int | None = None) -> QueryOffset:
        """Where the batch after *start* ends; *start* itself when there was nothing to do for *timeout* seconds.

        Everything up to *start* counts as delivered. An offset after it is durable as a plan when it is returned.

        :param upto: no epochs of the table after this one.
        :raises QueryStateLost: *start* is not of this state.
        """
        self._came_to(start)
        if start.plan < self._state.plan.number:
            return _offset(self._state.plan.number)
        deadline = time.monotonic() + timeout
        while True:
            self._serve()
            made = self._next(upto)
            self._moved |= made
            self._tell()
            left = deadline - time.monotonic()
            if made or left <= 0:
                return _offset(self._state.plan.number)
            if self._is_held:
                time.sleep(min(left, _LOOK_SECONDS))
            else:
                self._table.wait_for_epoch(self._executor.consumed_epoch, min(left, _WAIT_SECONDS))

    def latest(self, start: QueryOffset, patience: float, upto: int | None) -> QueryOffset:
        """As :meth:`advance` for a stream: waits for *patience* seconds, and where it ends at *upto* until that.

        :raises RetentionMiss: it is to end at *upto*, and cannot come there.
        """
        end = self.advance(start, timeout=0.0 if upto is not None else patience, upto=upto)
        while upto is not None and end == start:
            if self.stopped is not None:
                raise self.stopped
            held = self._executor.is_paused or self._executor.rows_per_second == 0
            if held or self._executor.consumed_epoch >= upto:
                break
            end = self.advance(start, timeout=patience, upto=upto)
        return end

    @property
    def _is_held(self) -> bool:
        """Whether something else than a new epoch is waited for."""
        executor = self._executor
        return executor.is_paused or executor.rows_per_second is not None or executor.stopped is not None

    def _came_to(self, start: QueryOffset) -> None:
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
        if self._executor.stopped is None and self._has_news() and self._is_another():
            return False
        parts = self._barrier(None, upto=upto)
        if not parts:
            return False
        self._state.plan.number = self._state.plan.following
        self._state.put_plan()
        self._plan = {"parts": [part.to_json() for part in parts], "replaces": self._record.pop("replaces", False)}
        self._rows.put(self._state.batch, 0, (_PLAN,), (self._plan,))
        self._put_record()
        self._save()
        return True

    def _has_news(self) -> bool:
        executor = self._executor
        return not executor.has_snapshot or self._table.newest_epoch() > executor.consumed_epoch

    def _is_another(self) -> bool:
        """Whether the table was made anew: then it stops as after a retention miss."""
        if self._table.identity == self._record["identity"]:
            return False
        self._executor.stop(
            EpochMismatch(
                f"Table {self._table.name} is another one than was begun with: it was made anew.",
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
        return self._executor.plan(barrier, time.monotonic(), upto=upto)

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
        parts = [Part.from_json(value) for value in self._plan["parts"]]
        try:
            self._check(parts)
        except RetentionMiss as miss:
            self._lose(miss)
            return []
        made = []
        for part in cut_parts(parts, self._query.parallelism):
            made.append(
                UpstreamUnit(
                    self._table.table(part.epoch),
                    part,
                    end.plan,
                    epoch_of_plan(end.plan),
                    self._plan["replaces"],
                    self._table.commit_version(part.epoch),
                    self._table.commit_time_us(part.epoch),
                )
            )
        return made

    def _check(self, parts: list[Part]) -> None:
        """:raises RetentionMiss: a plan that was made before a crash, perhaps long ago, cannot be read any more."""
        for part in parts:
            if part.kind is PartKind.SNAPSHOT:
                self._table.check_snapshot(part.epoch)
            else:
                self._table.change_cuts(part.after, part.epoch, part.vnodes)
        if self._table.identity != self._record["identity"]:
            raise EpochMismatch(f"Table {self._table.name} was made anew.", next_step=self._advice)

    def _lose(self, miss: RetentionMiss) -> None:
        """The newest plan is lost for good: nothing may follow it but a new snapshot, also after a restart."""
        self._record["lost"] = miss.message
        self._plan["parts"] = []
        self._rows.put(self._state.batch, 0, (_PLAN,), (self._plan,))
        self._put_record()
        self._save()
        self._executor.stop(miss)
        self._tell()

    # -- requests --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        for request in self._requests.new(self._answers):
            problem: HeadwaterError | None = None
            try:
                self._do(request)
            except HeadwaterError as error:
                problem = error
            self._answers.put(self._state.batch, request.id, problem)
            self._moved = True
            self._save()

    def _do(self, request: Request) -> None:
        match request.kind:
            case kind if kind == PAUSE:
                self._barrier(Pause())
                self._record["paused"] = True
            case kind if kind == RESUME:
                self._barrier(Resume())
                self._record["paused"] = False
            case kind if kind == THROTTLE:
                limit = request.detail["rows_per_second"]
                self._barrier(Throttle(limit))
                self._record["throttled"], self._record["limit"] = True, limit
            case kind if kind == RESNAPSHOT:
                self._restart()
            case _:
                raise InvalidQuery(f"A query over an upstream table cannot do {request.kind!r}.")
        self._put_record()

    def _restart(self) -> None:
        """The table as it is now replaces what was delivered, with the next plan."""
        newest = self._held_newest()
        self._executor.restart(newest)
        self._record |= {
            "identity": self._table.identity,
            "snapshot": newest,
            "lost": None,
            "snapshots": self._record["snapshots"] + 1,
            "since": False,
            "replaces": True,
        }
        self._noted = None

    # -- what is durable -------------------------------------------------------------------------------------------

    def _put_record(self) -> None:
        self._rows.put(self._state.batch, 0, (_RECORD,), (self._record,))

    def _hold(self) -> None:
        """What is needed from now on stays; one that is gone is noticed when it is planned."""
        failpoints.hit(BEFORE_HOLD)
        try:
            self._table.hold(self._query.query, self._executor.needed_epoch)
        except RetentionMiss:
            pass
        failpoints.hit(AFTER_HOLD)

    def _save(self) -> None:
        self._executor.save(self._state.batch)
        if self._state.batch:
            self._state.save()

    def status(self) -> dict[str, Any]:
        """What a person wants to know."""
        executor, stopped = self._executor, self._executor.stopped
        newest = self._table.newest_epoch() if stopped is None else None
        consumed = executor.consumed_epoch
        return {
            "query": self._query.query,
            "upstream": self._table.name,
            "plan": self._state.plan.number,
            "phase": StreamPhase.STOPPED.value if stopped is not None else executor.phase.value,
            "snapshot_version": self._table.commit_version(executor.snapshot_epoch),
            "snapshot_done": executor.has_snapshot,
            "snapshot_rows": executor.snapshot_rows,
            "snapshot_vnodes": sum(row is not None and row.is_finished for _, row in executor.progress()),
            "vnodes": self._table.vnode_count,
            "consumed_version": self._table.commit_version(consumed) if consumed else None,
            "newest_version": None if newest is None else self._table.commit_version(newest),
            "paused": executor.is_paused,
            "limit": executor.rows_per_second,
            "problem": None if stopped is None else stopped.message,
            "next_step": None if stopped is None else self._advice,
            "updated_ms": time.time_ns() // 1_000_000,
        }

    def _tell(self) -> None:
        """Write the status down, now and then; a stop at once, and into the journal."""
        now, stopped = time.monotonic(), self._executor.stopped
        is_news = stopped is not None and stopped.message != self._noted
        if is_news or now - self._told >= (_STATUS_SECONDS if self._moved else _IDLE_SECONDS):
            self._told, self._moved = now, False
            self._state.put_status(self.status())
            self._save()
        if is_news:
            assert stopped is not None
            self._noted = stopped.message
            _log.warning("Query %s stopped: %s Run: %s", self._query.query, stopped.message, self._query.resnapshot)
            self._note(
                {"event": "upstream_stopped", "query": self._query.query, "upstream": self._table.name}
                | {"error": type(stopped).__name__, "text": stopped.message, "next_step": self._query.resnapshot}
            )

    def _note(self, fields: dict[str, Any]) -> None:
        """One entry in the journal beside the store; where it cannot be written, nobody stops."""
        engine, place = split_location(self._query.store)
        if engine != "embedded":
            return
        journal = FsStore(Path(place) / "journal", durability="flush")
        try:
            RunLog.start(journal, self._query.query).record("notice", fields)
        except HeadwaterError as error:
            _log.warning("the journal of %s is not written: %s", self._query.query, error)
        finally:
            journal.close()

    def close(self) -> None:
        """Let go of everything; what is held of the table stays held."""
        self._stack.close()


def _offset(plan: int) -> QueryOffset:
    return QueryOffset(epoch_of_plan(plan), plan)
