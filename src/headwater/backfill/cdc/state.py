"""CdcBackfillState: what is durable of the backfill of one table.

A table has one row, from the first save until it is dropped from the query: its format, whether it is finished, paused
or throttled, and what is to be read again. Beside it format 1 keeps a cursor and format 2 keeps splits; both are
removed when the backfill is done. Rows are found by the full name of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Generic, TypeAlias, TypeVar

from headwater.backfill.cdc.errors import BackfillStateCorrupt
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import SnapshotMark, mark_from_json
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind
from headwater.sources.table import SourceTable
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
BLOCK: Final = 2_000
"""Splits in one stored row."""
UNKNOWN: Final = -1
"""The rows of a split without an estimate: it is handed out in pages."""
Piece: TypeAlias = tuple[int, Cut | None, int]
"""A part of a split that was handed out: the number of the split, the end of the part, its rows."""


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
class Segment:
    """What one plan handed out of a table.

    Segments touch: each begins where the one before it ends, in key order. What lies after the last one was not handed
    out.

    :ivar rows: about how many.
    :ivar mark: of the snapshot that its changes are filtered by.
    :ivar until: once the log has passed it, the log alone tells everything about these keys.
    :ivar first: the number of the first split. :ivar stop: the number of the split that it ends before or in.
    :ivar pieces: the parts of those splits that were not handed out as a whole.
    """

    plan: int
    range: KeyRange
    rows: int
    mark: SnapshotMark
    until: CdcOffset
    first: int = 0
    stop: int = 0
    pieces: tuple[Piece, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "range": self.range.to_json(),
            "rows": self.rows,
            "mark": self.mark.to_json(),
            "until": self.until.to_json(),
            "first": self.first,
            "stop": self.stop,
            "pieces": [[number, end and end.to_json(), rows] for number, end, rows in self.pieces],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Segment:
        pieces = tuple((number, None if end is None else Cut.from_json(end), n) for number, end, n in value["pieces"])
        return cls(
            value["plan"],
            KeyRange.from_json(value["range"]),
            value["rows"],
            mark_from_json(value["mark"]),
            CdcOffset.from_json(value["until"]),
            value["first"],
            value["stop"],
            pieces,
        )


@dataclass(slots=True)
class BackfillRecord:
    """The row of a backfill.

    :ivar version: 1 or 2. :ivar source_id: of the table: one that was created again under the old name has another.
    :ivar throttled: :attr:`limit` is what the last throttle said.
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
        except (LookupError, TypeError, ValueError) as error:
            raise BackfillStateCorrupt("The stored row of a backfill cannot be read.") from error


@dataclass(slots=True)
class SingleState:
    """Format 1: where one reader is, in one row.

    :ivar pos: everything before this cut was handed out; ``None``: nothing was.
    :ivar exhausted: … and everything after it.
    :ivar row_count: about how many rows that were.
    :ivar settled: the log has passed the snapshots of what was handed out before *pending*.
    :ivar pending: what plans handed out whose snapshots the log has not passed.
    """

    pos: Cut | None = None
    exhausted: bool = False
    row_count: int = 0
    settled: bool = False
    pending: list[Segment] = field(default_factory=list)

    @classmethod
    def load(cls, tables: BackfillTables, view: Snapshot, table: str) -> SingleState | None:
        """``None``: nothing is stored. :raises BackfillStateCorrupt: it cannot be read."""
        values = tables.single.get(view, 0, (table,))
        if values is None:
            return None
        pos, exhausted, row_count, settled, pending = values
        try:
            cut = None if pos is None else Cut.from_json(pos)
            return cls(cut, exhausted, row_count, settled, [Segment.from_json(value) for value in pending])
        except (LookupError, TypeError, ValueError) as error:
            raise BackfillStateCorrupt("The stored cursor of a backfill cannot be read.") from error

    def save(self, tables: BackfillTables, batch: WriteBatch, table: str) -> None:
        pos = None if self.pos is None else self.pos.to_json()
        pending = [segment.to_json() for segment in self.pending]
        tables.single.put(batch, 0, (table,), (pos, self.exhausted, self.row_count, self.settled, pending))


@dataclass(slots=True)
class ParallelState:
    """Format 2: splits, and what each plan handed out of them.

    Splits never change once they are planned, so they are stored once, many to a row, and are handed out in key order:
    how far that is, is a number and a cursor in the split that was handed out in part. A plan has a row of its own
    until the log has passed its snapshot.

    :ivar splits: in key order; they touch.
    :ivar free: how many at the beginning and at the end had no row when they were planned: they need no reading.
    :ivar mark: of the snapshot that they were planned in; ``None`` once the log has passed it.
    :ivar next: the first split that was not handed out as a whole. :ivar cursor: … and how far it was.
    :ivar part_rows: about how many rows of it.
    :ivar row_count: about how many rows were handed out.
    :ivar settled: everything before this cut was handed out, and the log has passed its snapshots; empty: nothing.
    :ivar pending: what plans handed out whose snapshots the log has not passed.
    :ivar changed: the plans of which something is not saved. :ivar gone: … and those that are to be deleted.
    :ivar has_new_splits: the splits are not saved.
    """

    splits: Sequence[Split]
    free: tuple[int, int] = (0, 0)
    mark: SnapshotMark | None = None
    next: int = 0
    cursor: Cut | None = None
    part_rows: int = 0
    row_count: int = 0
    settled: tuple[Cut | None, ...] = ()
    pending: list[Segment] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    has_new_splits: bool = True

    @property
    def stop(self) -> int:
        """The number after the last split that is read."""
        return len(self.splits) - self.free[1]

    @classmethod
    def load(cls, tables: BackfillTables, view: Snapshot, table: str) -> ParallelState | None:
        """``None``: nothing is stored. :raises BackfillStateCorrupt: it cannot be read."""
        values = tables.parallel.get(view, 0, (table,))
        if values is None:
            return None
        count, free, mark, following, cursor, part_rows, row_count, settled = values
        try:
            blocks = tables.splits.scan_prefix(view, 0, (table,))
            splits = list(chain.from_iterable(_unpacked(first, packed) for (_, first), (packed,) in blocks))
            if len(splits) != count:
                raise BackfillStateCorrupt(f"A backfill of {count} splits has {len(splits)} stored.")
            return cls(
                splits,
                (free[0], free[1]),
                None if mark is None else mark_from_json(mark),
                following,
                None if cursor is None else Cut.from_json(cursor),
                part_rows,
                row_count,
                tuple(None if cut is None else Cut.from_json(cut) for cut in settled),
                [Segment.from_json(value[0]) for _, value in tables.plans.scan_prefix(view, 0, (table,))],
                has_new_splits=False,
            )
        except (LookupError, TypeError, ValueError) as error:
            raise BackfillStateCorrupt("The stored splits of a backfill cannot be read.") from error

    @classmethod
    def continuing(cls, old: SingleState, part: KeyRange) -> ParallelState:
        """Where *old* is, which read *part*: what it handed out is one split, the rest is split as it is handed out."""
        if old.exhausted:
            splits, following = [Split(0, part, old.row_count)], 1
        elif old.pos is None:
            splits, following = [Split(0, part, UNKNOWN)], 0
        else:
            read = Split(0, KeyRange(part.start, old.pos), old.row_count)
            splits, following = [read, Split(1, KeyRange(old.pos, part.end), UNKNOWN)], 1
        settled: tuple[Cut | None, ...] = ()
        if old.settled:
            settled = (old.pending[0].range.start if old.pending else old.pos,)
        for segment in old.pending:
            segment.first, segment.stop = 0, 1
            segment.pieces = ((0, segment.range.end, segment.rows),)
        plans = {segment.plan for segment in old.pending}
        return cls(
            splits,
            next=following,
            row_count=old.row_count,
            settled=settled,
            pending=old.pending,
            changed=plans,
        )

    def save(self, tables: BackfillTables, batch: WriteBatch, table: str) -> None:
        values = (
            len(self.splits),
            list(self.free),
            None if self.mark is None else self.mark.to_json(),
            self.next,
            None if self.cursor is None else self.cursor.to_json(),
            self.part_rows,
            self.row_count,
            [cut and cut.to_json() for cut in self.settled],
        )
        tables.parallel.put(batch, 0, (table,), values)
        if self.has_new_splits:
            for first in range(0, len(self.splits), BLOCK):
                tables.splits.put(batch, 0, (table, first), (_packed(self.splits[first : first + BLOCK]),))
            self.has_new_splits = False
        for plan in sorted(self.gone):
            tables.plans.delete(batch, 0, (table, plan))
        for segment in self.pending:
            if segment.plan in self.changed:
                tables.plans.put(batch, 0, (table, segment.plan), (segment.to_json(),))
        self.gone.clear()
        self.changed.clear()


P = TypeVar("P", SingleState, ParallelState)


class CdcBackfillState(Generic[P]):
    """The state of the backfill of *table*: of format 1 or 2, as its record says.

    :ivar record: its row. :ivar parts: what the format keeps beside it.
    """

    def __init__(self, tables: BackfillTables, table: str, record: BackfillRecord, parts: P | None = None) -> None:
        self._tables, self._table = tables, table
        self.record = record
        self.parts: P = _empty(record) if parts is None else parts
        self.is_changed = self._begins = False

    @classmethod
    def load(
        cls, tables: BackfillTables, view: Snapshot, table: str
    ) -> CdcBackfillState[SingleState] | CdcBackfillState[ParallelState] | None:
        """``None``: it has no backfill here. :raises BackfillStateCorrupt: what is stored cannot be read."""
        record = tables.record(view, table)
        if record is None:
            return None
        if record.version == 1:
            single = None if record.finished else SingleState.load(tables, view, table)
            return CdcBackfillState(tables, table, record, single)
        parallel = None if record.finished else ParallelState.load(tables, view, table)
        return CdcBackfillState(tables, table, record, parallel)

    @classmethod
    def open(
        cls, tables: BackfillTables, view: Snapshot, table: SourceTable, version: int
    ) -> CdcBackfillState[SingleState] | CdcBackfillState[ParallelState]:
        """The state of the backfill of *table*, or a new one of *version*.

        =============================================  ==============================================
        stored                                         opened
        =============================================  ==============================================
        nothing                                        a new one
        of a deleted table with that name              a new one; pause and throttle stay
        unfinished, of version 1, and 2 is wanted      goes on as version 2
        anything else                                  goes on as it is
        =============================================  ==============================================

        :raises BackfillStateCorrupt: what is stored cannot be read.
        """
        name = table.full_name
        state = cls.load(tables, view, name)
        if state is None:
            return CdcBackfillState(tables, name, BackfillRecord(version, table.source_id))
        if state.record.source_id != table.source_id:
            state.record.version = version
            state.restart(table.source_id, None)
        elif not state.record.finished and state.record.version < version:
            return state.as_parallel()
        return state

    def change(self) -> None:
        """Something is to be saved."""
        self.is_changed = True

    def finish(self) -> None:
        """Everything is read, and the log has passed it."""
        self.record.finished, self.record.truncated = True, None
        self.is_changed = self._begins = True

    def restart(self, source_id: int | None, renewal: Renewal | None) -> None:
        """Begin again, with *renewal*; a pause, a throttle and what waits in the queue stay."""
        before = self.record
        self.record = BackfillRecord(
            before.version,
            source_id,
            paused=before.paused,
            throttled=before.throttled,
            limit=before.limit,
            renewal=renewal,
            queued=before.queued,
        )
        self.parts = _empty(self.record)
        self.is_changed = self._begins = True

    def as_parallel(self) -> CdcBackfillState[ParallelState]:
        """This one goes on in format 2."""
        assert isinstance(self.parts, SingleState)
        renewal = self.record.renewal
        part = KeyRange() if renewal is None or renewal.range is None else renewal.range
        self.record.version = 2
        has_begun = self.record.kind is not None
        parts = ParallelState.continuing(self.parts, part) if has_begun else ParallelState(())
        made = CdcBackfillState(self._tables, self._table, self.record, parts)
        made.is_changed = made._begins = has_begun
        return made

    def save(self, batch: WriteBatch) -> None:
        """Write what changed since the last time."""
        if not self.is_changed:
            return
        if self._begins:
            self._tables.forget_parts(batch, self._table)
        self._tables.backfills.put(batch, 0, (self._table,), self.record.to_values())
        if not self.record.finished and self.record.kind is not None:
            self.parts.save(self._tables, batch, self._table)
        self.is_changed = self._begins = False

    def forget(self, batch: WriteBatch) -> None:
        """Nothing of it stays: the table was dropped from the query."""
        self._tables.forget(batch, self._table)


def _empty(record: BackfillRecord) -> Any:
    return SingleState() if record.version == 1 else ParallelState(())


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


def _packed(splits: Sequence[Split]) -> dict[str, Any]:
    """Splits that touch, each cut once."""
    cuts = [splits[0].range.start, *(split.range.end for split in splits)]
    return {
        "cuts": [cut and [*cut.values, cut.after] for cut in cuts],
        "rows": [split.rows for split in splits],
        "empty": [place for place, split in enumerate(splits) if split.empty],
    }


def _unpacked(first: int, packed: dict[str, Any]) -> list[Split]:
    cuts = [None if cut is None else Cut(tuple(cut[:-1]), cut[-1]) for cut in packed["cuts"]]
    empty = set(packed["empty"])
    return [
        Split(first + place, KeyRange(cuts[place], cuts[place + 1]), rows, place in empty)
        for place, rows in enumerate(packed["rows"])
    ]
