"""What is durable of a query beside its offsets: its newest plan, and what it knows of each table.

It is a part of the query's state (:mod:`headwater.state.query_store`), written by the one process that plans. A plan is
sealed before its offset is given away: an offset that somebody holds always has its plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from headwater import failpoints
from headwater.backfill.cdc.state import BackfillTables
from headwater.backfill.errors import QueryStateLost
from headwater.backfill.offset import QueryOffset
from headwater.backfill.snapshot.consume_upstream.upstream_table import Part
from headwater.backfill.snapshot.record import SnapshotTables
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch
from headwater.state.query_store import QueryStore
from headwater.system.clock import SYSTEM_CLOCK, Clock

BEFORE_SAVE = failpoints.register("query.before_save")
AFTER_SAVE = failpoints.register("query.after_save")

QUERY = TableSchema("query", 1, key=(Field("part", FieldType.TEXT),), value=(Field("value", FieldType.JSON),))
QUERY_TABLES = TableSchema(
    "query_tables", 1, key=(Field("table", FieldType.TEXT),), value=(Field("value", FieldType.JSON),)
)
UPSTREAM = TableSchema(
    "upstream_query", 1, key=(Field("part", FieldType.TEXT),), value=(Field("value", FieldType.JSON),)
)
_UPSTREAM = "record"
_PLAN, _STATUS, _ID, _DELIVERED, _PLANNED = "plan", "status", "id", "delivered", "planned"


@dataclass(slots=True)
class PlanRecord:
    """The newest plan of a query.

    :ivar number: 0 before the first. :ivar issued: the greatest that was ever given.
    :ivar attempt: counts the snapshots that were taken for it.
    :ivar upto: the epoch that its offset has. :ivar commit_time_us: of that epoch's last commit.
    :ivar marks: of each attempt, as JSON.
    :ivar positions: by table: the ``_position`` of the rows that it hands out.
    """

    number: int = 0
    issued: int = 0
    attempt: int = 0
    upto: int = 0
    commit_time_us: int = 0
    marks: list[str] = field(default_factory=list)
    positions: dict[str, str] = field(default_factory=dict)

    @property
    def following(self) -> int:
        """The number of the next plan."""
        return max(self.number, self.issued) + 1

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PlanRecord.__slots__}


@dataclass(slots=True)
class TableRecord:
    """What the query knows of a table beside its backfill.

    :ivar last_position: of its newest change that was planned to be delivered.
    :ivar unseen: positions of changes that were dropped, and that no snapshot has shown yet.
    :ivar heap_since: with heap splits: the epoch of the first hand-out.
    :ivar heap_files: … and the files that its blocks were in.
    :ivar whole: it has no key at the source: its history is read in one snapshot.
    :ivar left: the query had no such table for a while: changes of that time are missing.
    :ivar unread: the query delivered changes of it without its history.
    :ivar since: where its log began when it was planned last: when that moves, the log has a gap.
    :ivar origin: where its history comes from, chosen once: ``source``, or ``tables`` that we keep.
    :ivar queued: what is to be read once more when its history from our own table is over, as JSON.
    :ivar empties: it was parked: the mirror of it is emptied by the batch that ends at this epoch; 0: by the next one.
    """

    last_position: str | None = None
    unseen: list[str] = field(default_factory=list)
    heap_since: int | None = None
    heap_files: str | None = None
    whole: bool = False
    left: bool = False
    unread: bool = False
    since: str | None = None
    origin: str | None = None
    queued: list[dict[str, Any]] = field(default_factory=list)
    empties: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in TableRecord.__slots__}


class QueryState:
    """The durable state of one query. :param clock: names one that is new."""

    def __init__(self, store: QueryStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self.store = store
        self.batch = WriteBatch()
        self.catalog = store.catalog
        with store.snapshot() as view:
            self._query: StateTable = self.catalog.open_or_create(QUERY, self.batch)
            self._tables: StateTable = self.catalog.open_or_create(QUERY_TABLES, self.batch)
            self.backfills = BackfillTables(self.catalog, self.batch)
            self.snapshots = SnapshotTables(self.catalog, self.batch)
            found = {key[0]: values[0] for key, values in self._query.scan(view, 0)}
            self.tables = {key[0]: TableRecord(**values[0]) for key, values in self._tables.scan(view, 0)}
        self.plan = PlanRecord(**found.get(_PLAN, {}))
        self.delivered: QueryOffset | None = None
        if _DELIVERED in found:
            self.delivered = QueryOffset.from_json(found[_DELIVERED])
        self.planned: tuple[QueryOffset, QueryOffset] | None = None
        if _PLANNED in found:
            start, end = map(QueryOffset.from_json, found[_PLANNED])
            self.planned = start, end
        self.id: str = found.get(_ID) or clock.new_id()[:12]
        if _ID not in found:
            self._query.put(self.batch, 0, (_ID,), (self.id,))

    def table(self, name: str) -> TableRecord:
        return self.tables.setdefault(name, TableRecord())

    def put_table(self, name: str) -> None:
        """Write the record of a table with the next save."""
        self._tables.put(self.batch, 0, (name,), (self.table(name).to_json(),))

    def put_plan(self) -> None:
        """Write the plan with the next save."""
        self._query.put(self.batch, 0, (_PLAN,), (self.plan.to_json(),))

    def put_delivered(self, offset: QueryOffset) -> None:
        """Write with the next save that everything up to *offset* is delivered."""
        self.delivered = offset
        self._query.put(self.batch, 0, (_DELIVERED,), (offset.to_json(),))

    def put_planned(self, start: QueryOffset, end: QueryOffset) -> None:
        """Write with the next save that the newest batch goes from *start* to *end*; the same: there is none."""
        self.planned = start, end
        self._query.put(self.batch, 0, (_PLANNED,), ([start.to_json(), end.to_json()],))

    def put_status(self, value: dict[str, Any]) -> None:
        """Write the status with the next save."""
        self._query.put(self.batch, 0, (_STATUS,), (value,))

    def check_start(self, start: QueryOffset) -> None:
        """A batch may begin at *start*.

        :raises QueryStateLost: *start* is of another state, or older than what was delivered.
        """
        query, plan, delivered = self.store.query, self.plan.number, self.delivered
        if start.plan > plan:
            raise QueryStateLost(
                f"The checkpoint of query {query!r} is at plan {start.plan}, its state at {plan}: "
                "the state beside the store was lost or replaced.",
                next_step="Restore it, or begin anew with an empty checkpoint and an empty sink.",
            )
        if delivered is not None and (start.plan < delivered.plan or start.epoch < delivered.epoch):
            raise QueryStateLost(
                f"The checkpoint of query {query!r} is older than what was delivered: it is at plan {start.plan} "
                f"and epoch {start.epoch}, its state at plan {delivered.plan} and epoch {delivered.epoch}.",
                next_step="Use the newest checkpoint; or begin anew with another query name, an empty checkpoint and"
                " an empty sink: what lies between would be missing.",
            )

    def check_end(self, end: QueryOffset) -> None:
        """A batch ends at *end*. :raises QueryStateLost: that is not of the newest plan."""
        if end.plan != self.plan.number:
            raise QueryStateLost(
                f"The batch is of plan {end.plan}, the state of query {self.store.query!r} at {self.plan.number}.",
                next_step="Restore the state beside the store, or begin anew with an empty checkpoint and sink.",
            )

    def save(self) -> None:
        """Make durable what was written since the last time."""
        failpoints.hit(BEFORE_SAVE)
        self.store.seal(self.batch)
        self.batch = WriteBatch()
        failpoints.hit(AFTER_SAVE)

    @staticmethod
    def read_status(view: Snapshot) -> dict[str, Any] | None:
        """For other processes: the newest status."""
        catalog = Catalog.load(view)
        if QUERY.name not in catalog.names():
            return None
        found = catalog.open(QUERY).get(view, 0, (_STATUS,))
        status: dict[str, Any] | None = None if found is None else found[0]
        return status

    @staticmethod
    def read_tables(view: Snapshot) -> list[str]:
        """For other processes: the tables that the query has or had."""
        catalog = Catalog.load(view)
        if QUERY_TABLES.name not in catalog.names():
            return []
        return [key[0] for key, _ in catalog.open(QUERY_TABLES).scan(view, 0)]


@dataclass(slots=True)
class UpstreamRecord:
    """What a query knows of its upstream table beside the rows of its vnodes.

    :ivar table: the name of the upstream table. :ivar identity: of the very table. :ivar vnodes: how many it has.
    :ivar snapshot: the epoch of the snapshot. :ivar snapshots: how many were begun.
    :ivar since: there is no snapshot, only what follows it.
    :ivar limit: rows per second, where *throttled*.
    :ivar replaces: the next plan voids what was delivered before.
    :ivar lost: why the newest plan cannot be read any more: only a new snapshot may follow.
    :ivar rows: of the snapshot that were planned, about.
    """

    table: str
    identity: str
    vnodes: int
    snapshot: int
    snapshots: int = 1
    since: bool = False
    paused: bool = False
    throttled: bool = False
    limit: int | None = None
    replaces: bool = False
    lost: str | None = None
    rows: int = 0


@dataclass(slots=True)
class UpstreamPlan:
    """The newest plan over an upstream table: the parts that its batch reads, whenever it is read.

    :ivar replaces: what was delivered before it is void.
    """

    parts: list[Part] = field(default_factory=list)
    replaces: bool = False


class UpstreamRecords:
    """The record and the plan in the store of a query."""

    def __init__(self, catalog: Catalog, batch: WriteBatch) -> None:
        self._rows: StateTable = catalog.open_or_create(UPSTREAM, batch)

    def read(self, view: Snapshot) -> tuple[UpstreamRecord | None, UpstreamPlan]:
        """``None``: the query was never begun."""
        found: dict[str, Any] = {key[0]: values[0] for key, values in self._rows.scan(view, 0)}
        record = UpstreamRecord(**found[_UPSTREAM]) if _UPSTREAM in found else None
        plan = found.get(_PLAN, {"parts": [], "replaces": False})
        return record, UpstreamPlan([Part.from_json(part) for part in plan["parts"]], plan["replaces"])

    def put(self, batch: WriteBatch, record: UpstreamRecord) -> None:
        self._rows.put(batch, 0, (_UPSTREAM,), (asdict(record),))

    def put_plan(self, batch: WriteBatch, plan: UpstreamPlan) -> None:
        value = {"parts": [part.to_json() for part in plan.parts], "replaces": plan.replaces}
        self._rows.put(batch, 0, (_PLAN,), (value,))
