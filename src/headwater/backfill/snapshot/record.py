"""What is durable of a backfill from a table of ours, beside the rows of its vnodes.

One row for each table. ``pending`` is what plans handed out that may still be rolled back: the newest one, as a rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from headwater.backfill.snapshot.errors import VnodeStateCorrupt
from headwater.backfill.snapshot.parts import VnodePart
from headwater.backfill.snapshot.state import BackfillState
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch

RECORDS: Final = TableSchema(
    "snapshot_backfills",
    1,
    key=(Field("table", FieldType.TEXT), Field("owner", FieldType.TEXT)),
    value=(Field("value", FieldType.JSON),),
)

_OWNER: Final = ""
"""A query has all vnodes."""


class SnapshotPhase(StrEnum):
    """The life of a backfill from a table of ours.

    ==============  ===========================================================  =================================
    phase           meaning                                                      goes to
    ==============  ===========================================================  =================================
    ``waiting``     nothing is handed out yet; changes are left out              snapshot (a plan is handed out)
    ``snapshot``    parts are read; changes of keys that are read are delivered  change_log (all is delivered)
    ``change_log``  all changes are delivered; the query is behind the log       live (the log has no more)
    ``live``        as any other table                                           waiting (begins again)
    ==============  ===========================================================  =================================
    """

    WAITING = "waiting"
    SNAPSHOT = "snapshot"
    CHANGE_LOG = "change_log"
    LIVE = "live"


@dataclass(slots=True)
class SnapshotPlan:
    """The parts that a plan reads at *epoch*."""

    epoch: int
    parts: list[VnodePart]


@dataclass(slots=True)
class SnapshotRecord:
    """The row of a backfill.

    :ivar epoch: at which the newest plan reads; 0 before the first.
    :ivar consumed: the epoch up to which changes are delivered, at least.
    :ivar position: the ``_position`` of its rows, as hex. :ivar commit_time_us: … and their time.
    :ivar limit: what a throttle said last, where :attr:`throttled`.
    :ivar rows: how many were handed out; never fewer than before. :ivar total_rows: about how many there are.
    """

    phase: SnapshotPhase = SnapshotPhase.WAITING
    epoch: int = 0
    consumed: int = 0
    position: str = ""
    commit_time_us: int = 0
    paused: bool = False
    throttled: bool = False
    limit: int | None = None
    rows: int = 0
    total_rows: int | None = None
    total_size: int | None = None
    pending: dict[int, SnapshotPlan] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in SnapshotRecord.__slots__ if name not in ("phase", "pending")}
        pending = {
            str(number): [plan.epoch, [part.to_json() for part in plan.parts]] for number, plan in self.pending.items()
        }
        return values | {"phase": self.phase.value, "pending": pending}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SnapshotRecord:
        """:raises VnodeStateCorrupt: it is not what was written."""
        try:
            pending = {
                int(number): SnapshotPlan(epoch, [VnodePart.from_json(part) for part in parts])
                for number, (epoch, parts) in value["pending"].items()
            }
            return cls(**{**value, "phase": SnapshotPhase(value["phase"]), "pending": pending})
        except (KeyError, TypeError, ValueError) as error:
            raise VnodeStateCorrupt("The stored row of a backfill from a table of ours cannot be read.") from error


class SnapshotTables:
    """The state tables of backfills from tables of ours, in the store of one query."""

    def __init__(self, catalog: Catalog, batch: WriteBatch) -> None:
        self.records: StateTable = catalog.open_or_create(RECORDS, batch)
        self.vnodes: StateTable = BackfillState.open_table(catalog, batch)

    def record(self, view: Snapshot, table: str) -> SnapshotRecord | None:
        """``None``: the table has no backfill of this kind."""
        values = self.records.get(view, 0, (table, _OWNER))
        return None if values is None else SnapshotRecord.from_json(values[0])

    def put(self, batch: WriteBatch, table: str, record: SnapshotRecord) -> None:
        self.records.put(batch, 0, (table, _OWNER), (record.to_json(),))

    def forget(self, batch: WriteBatch, table: str) -> None:
        """Nothing of *table* stays."""
        self.records.delete_range(batch, 0, (table,), (table + "\0",))
        BackfillState.forget(self.vnodes, batch, table)
