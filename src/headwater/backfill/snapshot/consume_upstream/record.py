"""UpstreamRecord: what is durable of a query over an upstream table beside its offsets and the rows of its vnodes.

Its newest plan is kept with it: the parts that the batch of that number reads, whenever it is read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from headwater.backfill.snapshot.consume_upstream.upstream_table import Part
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch

UPSTREAM: Final = TableSchema(
    "upstream_query", 1, key=(Field("part", FieldType.TEXT),), value=(Field("value", FieldType.JSON),)
)
_RECORD, _PLAN = "record", "plan"


@dataclass(slots=True)
class UpstreamRecord:
    """One query.

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
    """The newest plan. :ivar replaces: what was delivered before it is void."""

    parts: list[Part] = field(default_factory=list)
    replaces: bool = False


class UpstreamRecords:
    """The record and the plan in the store of a query."""

    def __init__(self, catalog: Catalog, batch: WriteBatch) -> None:
        self._rows: StateTable = catalog.open_or_create(UPSTREAM, batch)

    def read(self, view: Snapshot) -> tuple[UpstreamRecord | None, UpstreamPlan]:
        """``None``: the query was never begun."""
        found: dict[str, Any] = {key[0]: values[0] for key, values in self._rows.scan(view, 0)}
        record = UpstreamRecord(**found[_RECORD]) if _RECORD in found else None
        plan = found.get(_PLAN, {"parts": [], "replaces": False})
        return record, UpstreamPlan([Part.from_json(part) for part in plan["parts"]], plan["replaces"])

    def put(self, batch: WriteBatch, record: UpstreamRecord) -> None:
        self._rows.put(batch, 0, (_RECORD,), (asdict(record),))

    def put_plan(self, batch: WriteBatch, plan: UpstreamPlan) -> None:
        value = {"parts": [part.to_json() for part in plan.parts], "replaces": plan.replaces}
        self._rows.put(batch, 0, (_PLAN,), (value,))
