"""What is durable of every backfill, whichever its version; and all state tables of backfills.

Rows go by the full name of the table. The row of a backfill is there from its first save until the table is dropped
from the query; what a version keeps beside it (:mod:`.state_v1`, :mod:`.state_v2`) goes when the backfill is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from headwater.backfill.cdc.errors import BackfillStateCorrupt
from headwater.sources.splits import KeyRange, SplitKind
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch

BACKFILLS: Final = TableSchema(
    "cdc_backfills",
    1,
    key=(Field("table", FieldType.TEXT),),
    value=(
        Field("version", FieldType.INT),
        Field("source_id", FieldType.INT, nullable=True),
        Field("finished", FieldType.BOOL),
        Field("paused", FieldType.BOOL),
        Field("throttle", FieldType.JSON, nullable=True),
        Field("renewal", FieldType.JSON, nullable=True),
        Field("queued", FieldType.JSON),
        Field("kind", FieldType.TEXT, nullable=True),
        Field("rows", FieldType.INT),
        Field("total_rows", FieldType.INT, nullable=True),
        Field("total_size", FieldType.INT, nullable=True),
        Field("why", FieldType.TEXT),
        Field("truncated", FieldType.UINT, nullable=True),
    ),
)
SINGLE: Final = TableSchema(
    "cdc_backfill_v1",
    1,
    key=(Field("table", FieldType.TEXT),),
    value=(
        Field("pos", FieldType.JSON, nullable=True),
        Field("exhausted", FieldType.BOOL),
        Field("row_count", FieldType.INT),
        Field("settled", FieldType.BOOL),
        Field("pending", FieldType.JSON),
    ),
)
PARALLEL: Final = TableSchema(
    "cdc_backfill_v2",
    1,
    key=(Field("table", FieldType.TEXT),),
    value=(
        Field("splits", FieldType.INT),
        Field("free", FieldType.JSON),
        Field("mark", FieldType.TEXT, nullable=True),
        Field("next", FieldType.INT),
        Field("cursor", FieldType.JSON, nullable=True),
        Field("part_rows", FieldType.INT),
        Field("row_count", FieldType.INT),
        Field("settled", FieldType.JSON),
    ),
)
SPLITS: Final = TableSchema(
    "cdc_backfill_splits_v2",
    1,
    key=(Field("table", FieldType.TEXT), Field("first", FieldType.UINT)),
    value=(Field("splits", FieldType.JSON),),
)
PLANS: Final = TableSchema(
    "cdc_backfill_plans_v2",
    1,
    key=(Field("table", FieldType.TEXT), Field("plan", FieldType.UINT)),
    value=(Field("segment", FieldType.JSON),),
)


@dataclass(frozen=True, slots=True)
class Renewal:
    """A new snapshot of a table that the sink has already.

    :ivar id: names it: the same one is done once. :ivar range: of this part of the keys only.
    :ivar columns: of these columns only (and the key): their field ids, or names as earlier versions kept them.
    :ivar emptied: the sink has no row of it any more.
    """

    id: str
    range: KeyRange | None = None
    columns: tuple[int | str, ...] | None = None
    emptied: bool = False

    def to_json(self) -> dict[str, Any]:
        columns = None if self.columns is None else list(self.columns)
        part = self.range and self.range.to_json()
        return {"id": self.id, "range": part, "columns": columns, "emptied": self.emptied}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Renewal:
        part, columns = value["range"], value["columns"]
        wanted = None if columns is None else tuple(columns)
        return cls(value["id"], part and KeyRange.from_json(part), wanted, value.get("emptied", False))


@dataclass(slots=True)
class BackfillRecord:
    """The row of a backfill.

    :ivar version: 1 or 2. :ivar source_id: of the table: one made anew under the old name has another.
    :ivar throttled: a throttle was told, and :attr:`limit` is what it said.
    :ivar queued: renewals that begin when this one is done.
    :ivar kind: of its cuts, once planned.
    :ivar rows: about how many were handed out; never fewer than before.
    :ivar truncated: the epoch of a TRUNCATE that ends the backfill once it is delivered.
    """

    version: int
    source_id: int | None = None
    finished: bool = False
    paused: bool = False
    throttled: bool = False
    limit: int | None = None
    renewal: Renewal | None = None
    queued: list[Renewal] = field(default_factory=list)
    kind: SplitKind | None = None
    rows: int = 0
    total_rows: int | None = None
    total_size: int | None = None
    why: str = ""
    truncated: int | None = None

    @property
    def replacing(self) -> Renewal | None:
        """The renewal, if the sink has rows that are replaced by it."""
        return None if self.renewal is None or self.renewal.emptied else self.renewal

    def to_values(self) -> tuple[Any, ...]:
        return (
            self.version,
            self.source_id,
            self.finished,
            self.paused,
            {"rows_per_second": self.limit} if self.throttled else None,
            self.renewal and self.renewal.to_json(),
            [renewal.to_json() for renewal in self.queued],
            self.kind and self.kind.value,
            self.rows,
            self.total_rows,
            self.total_size,
            self.why,
            self.truncated,
        )

    @classmethod
    def from_values(cls, values: tuple[Any, ...]) -> BackfillRecord:
        """:raises BackfillStateCorrupt: they are not what :meth:`to_values` gave."""
        version, source_id, finished, paused, throttle, renewal, queued, kind, rows, *rest = values
        try:
            return cls(
                version,
                source_id,
                finished,
                paused,
                throttle is not None,
                None if throttle is None else throttle["rows_per_second"],
                None if renewal is None else Renewal.from_json(renewal),
                [Renewal.from_json(value) for value in queued],
                None if kind is None else SplitKind(kind),
                rows,
                *rest,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BackfillStateCorrupt("The stored row of a backfill cannot be read.") from error


class BackfillTables:
    """The state tables of backfills in the store of one query."""

    def __init__(self, catalog: Catalog, batch: WriteBatch) -> None:
        self.backfills: StateTable = catalog.open_or_create(BACKFILLS, batch)
        self.single: StateTable = catalog.open_or_create(SINGLE, batch)
        self.parallel: StateTable = catalog.open_or_create(PARALLEL, batch)
        self.splits: StateTable = catalog.open_or_create(SPLITS, batch)
        self.plans: StateTable = catalog.open_or_create(PLANS, batch)

    def record(self, view: Snapshot, table: str) -> BackfillRecord | None:
        """The row of *table*; ``None``: it has no backfill here."""
        values = self.backfills.get(view, 0, (table,))
        return None if values is None else BackfillRecord.from_values(values)

    def names(self, view: Snapshot) -> list[str]:
        """The tables that have a backfill here."""
        return [key[0] for key, _ in self.backfills.scan(view, 0)]

    def forget_parts(self, batch: WriteBatch, table: str) -> None:
        """What the versions keep of *table* goes; its row stays."""
        self.single.delete(batch, 0, (table,))
        self.parallel.delete(batch, 0, (table,))
        for parts in (self.splits, self.plans):
            parts.delete_range(batch, 0, (table,), (table + "\0",))

    def forget(self, batch: WriteBatch, table: str) -> None:
        """Nothing of *table* stays: it was dropped from the query, and begins anew if it comes back."""
        self.backfills.delete(batch, 0, (table,))
        self.forget_parts(batch, table)
