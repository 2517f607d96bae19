"""A table as a batch: as it is in the database right now, or its changes in a range of epochs from the log; kept tables
have a reader of their own (:mod:`headwater.spark.kept_reader`).

Of a log that a stream writes there is no table in a database: it is what the log holds.

All tasks of one action see one snapshot of the database, whenever they run (:mod:`headwater.spark.action_snapshots`).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.types as pt
from pyspark.sql import types as st

from headwater.backfill.log_ranges import LogRanges
from headwater.backfill.reader import read_changes
from headwater.backfill.units import LogUnit
from headwater.log_store import LogView
from headwater.sources.errors import SnapshotExpired, UnsupportedTable
from headwater.sources.snapshots import ExportedSnapshot, open_snapshots
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceColumn, SourceTable
from headwater.spark.columns import Columns
from headwater.spark.data_source_api import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from headwater.spark.errors import NoCapture, TableChanged
from headwater.spark.options import SPLIT_ROWS, STOP, SourceOptions
from headwater.spark.rows import Rows
from headwater.spark.session import hot
from headwater.spark.snapshot_keeper import KeptFrame, keep
from headwater.spark.stream_reader import UnitPartition, truncated
from headwater.spark.tables import logged_table, source_table
from headwater.spark.types import rebatched
from headwater.state import open_reader
from headwater.system.read_ahead import ahead


@dataclass(frozen=True, slots=True)
class Bounds:
    """From *low* up to *high*, both included; ``None``: no bound."""

    low: int | None = None
    high: int | None = None

    def within(self, low: int | None, high: int | None) -> Bounds:
        """The part of it from *low* up to *high*."""
        lows = [bound for bound in (self.low, low) if bound is not None]
        highs = [bound for bound in (self.high, high) if bound is not None]
        return Bounds(max(lows, default=None), min(highs, default=None))


def bounds_for(table: SourceTable, filters: Sequence[Filter]) -> Bounds:
    """What *filters* say about the first key column of *table*, where that is a whole number.

    They narrow the ranges that are read, so the statement of each task asks for fewer rows and whole splits fall away.
    Spark applies every filter once more: what is read may be more than was asked for, never less.
    """
    column = table.column(table.key_columns[0])
    if not pt.is_integer(column.type):
        return Bounds()
    found, limit = bounds_of(filters, column.name), 1 << (column.type.bit_width - 1)
    low, high = (
        bound if bound is not None and -limit <= bound < limit else None for bound in (found.low, found.high)
    )  # the database would refuse to compare with others
    return Bounds(low, high)


def bounds_of(filters: Sequence[Filter], column: str) -> Bounds:
    """What *filters* say about *column*; those that say something else are passed over."""
    made = Bounds()
    for one in filters:
        if getattr(one, "attribute", None) != (column,):
            continue
        if isinstance(one, In):
            if one.value and all(type(value) is int for value in one.value):
                made = made.within(min(one.value), max(one.value))
            continue
        value = getattr(one, "value", None)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if isinstance(one, EqualTo):
            made = made.within(value, value)
        elif isinstance(one, GreaterThan):
            made = made.within(value + 1, None)
        elif isinstance(one, GreaterThanOrEqual):
            made = made.within(value, None)
        elif isinstance(one, LessThan):
            made = made.within(None, value - 1)
        elif isinstance(one, LessThanOrEqual):
            made = made.within(None, value)
    return made


def narrowed(part: KeyRange, bounds: Bounds) -> KeyRange | None:
    """*part* within *bounds* of the first key column; ``None`` when nothing is left of it."""
    low, high = bounds.low, bounds.high
    try:
        start = None if part.start is None else int(part.start.values[0])
        end = None if part.end is None else int(part.end.values[0])
    except ValueError:  # a key of another type than its column
        return part
    if (
        (low is not None and high is not None and low > high)
        or (high is not None and start is not None and start > high)
        or (low is not None and end is not None and end < low)
    ):
        return None
    first, last = part.start, part.end
    if low is not None and (start is None or start < low):
        first = Cut((str(low),))
    if high is not None and (end is None or end > high):
        last = Cut((str(high),), after=True)
    return KeyRange(first, last)


_PARTS: Final = 8
"""So many parts for each task that runs at a time, where there are rows enough: a part costs a tenth of a second."""
_MOST_ROWS: Final = 1_000_000
"""A part that is read again after a failure should not be larger."""


def planned_parts(
    snapshot: ExportedSnapshot, table: SourceTable, bounds: Bounds | None, split_rows: int | None, parallelism: int
) -> tuple[tuple[KeyRange, ...], SplitKind]:
    """What tasks read, the largest part first: together all rows that the table has now or in a later snapshot.

    :param bounds: of the first key column: splits are made by key, and only within them, where keys order the rows.
    :param split_rows: about how many rows a part has; ``None``: as many as suit.
    """
    plan, rows = None, split_rows or SPLIT_ROWS
    if bounds is not None and bounds != Bounds():
        with suppress(UnsupportedTable):  # keys do not order its rows: all are read, and Spark filters them
            plan = snapshot.plan(table, split_rows=rows, kind=SplitKind.KEY)
    if plan is None:
        bounds, plan = None, _whole(snapshot, table, rows)
    splits = _without_empty(plan.splits)
    if split_rows is None:
        splits = _joined(splits, max(_PARTS * parallelism, plan.rows // _MOST_ROWS))
    ranges = [split.range for split in sorted(splits, key=lambda split: -split.rows)]
    if bounds is not None:
        ranges = [part for part in (narrowed(part, bounds) for part in ranges) if part is not None]
    return tuple(ranges), plan.kind


def _whole(snapshot: ExportedSnapshot, table: SourceTable, split_rows: int) -> SplitPlan:
    """By heap where there is one: all is read in one snapshot, so that nothing but the cost of a scan matters."""
    try:
        return snapshot.plan(table, split_rows=split_rows, kind=SplitKind.HEAP)
    except UnsupportedTable:
        return snapshot.plan(table, split_rows=split_rows)


def _without_empty(splits: Sequence[Split]) -> list[Split]:
    """All that they cover, because there can be rows later; empty ones are joined with a neighbour."""
    found: list[Split] = []
    for split in splits or [Split(0, KeyRange(), 0)]:
        last = found[-1] if found else None
        if last is not None and (last.empty or split.empty):
            covered = KeyRange(last.range.start, split.range.end)
            found[-1] = Split(last.number, covered, last.rows + split.rows, last.empty and split.empty)
        else:
            found.append(split)
    return found


def _joined(splits: Sequence[Split], most: int) -> list[Split]:
    """Neighbours joined until there are at most *most*."""
    count = min(most, len(splits))
    cuts = [len(splits) * number // count for number in range(count + 1)] if count else []
    return [
        Split(
            number, KeyRange(splits[low].range.start, splits[high - 1].range.end), sum(s.rows for s in splits[low:high])
        )
        for number, (low, high) in enumerate(pairwise(cuts))
    ]


_SMALL_ROWS: Final = 20_000
"""Changes up to this many are read by one task."""
_LOCK_SECONDS: Final = 60.0
"""How long a snapshot waits for a locked table; tasks wait twice as long for the snapshot."""


def batch_reader(options: SourceOptions, schema: st.StructType) -> DataSourceReader:
    """The reader for what the options ask for."""
    if options.reads_kept:
        from headwater.spark.kept_reader import KeptReader

        return KeptReader(options, schema)
    if options.reads_changes or not options.source:
        return ChangesReader(options, schema)
    return FilteredTableReader(options, schema) if options.pushdown else TableReader(options, schema)


@dataclass(frozen=True, slots=True)
class TableMoments:
    """Snapshots of a database in which *table* has the columns that it had when the read was planned."""

    kind: ClassVar[str] = "table"

    source: str = field(repr=False)
    table: SourceTable
    fixed: bool = False

    def open(self) -> tuple[Callable[[], None], dict[str, Any]]:
        """:raises TableChanged: it has other columns now."""
        snapshot = open_snapshots(self.source, lock_seconds=_LOCK_SECONDS).export()
        try:
            if snapshot.table(self.table) != self.table:
                raise TableChanged(
                    f"The columns of table {self.table.full_name} have changed since this DataFrame was loaded.",
                    next_step="Load the table again.",
                )
        except BaseException:
            snapshot.close()
            raise
        position = snapshot.mark.high.position_after(None).hex()
        return snapshot.close, {"snapshot": snapshot.name, "position": position, "time_us": time.time_ns() // 1000}

    def to_json(self) -> dict[str, Any]:
        table = self.table
        return {
            "source": self.source,
            "namespace": table.namespace,
            "name": table.name,
            "schema": base64.b64encode(table.schema.serialize()).decode(),
            "nullable": [column.nullable for column in table.columns],
            "key": table.key_columns,
            "source_id": table.source_id,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TableMoments:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(fields["schema"])))
        columns = map(SourceColumn.of_field, schema)
        table = SourceTable(
            fields["namespace"],
            fields["name"],
            tuple(replace(column, nullable=it) for column, it in zip(columns, fields["nullable"], strict=True)),
            tuple(fields["key"]),
            fields["source_id"],
        )
        return cls(fields["source"], table)


@dataclass(frozen=True, slots=True)
class SplitPartition(InputPartition):
    """One part of a table, read in the snapshot of each action. :ivar places: see :class:`Rows`."""

    number: int
    part: KeyRange
    table: SourceTable
    kind: SplitKind
    frame: KeptFrame
    places: tuple[str | None, ...]


class TableReader(DataSourceReader):
    """The rows of a table as they are when an action begins to read."""

    def __init__(self, options: SourceOptions, schema: st.StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """:raises SourceBusy: somebody keeps the table locked."""
        options = self._options
        known = source_table(options)
        columns = Columns.of(self._schema, known, options.columns)
        with closing(open_snapshots(options.source, lock_seconds=_LOCK_SECONDS).export()) as snapshot:
            table = snapshot.table(known)
            bounds = self._bounds(known)
            parts, kind = planned_parts(snapshot, table, bounds, options.split_rows, options.parallelism)
        places = columns.places(table, stops=options.on_schema_change == STOP)
        frame = keep(TableMoments(options.source, table), len(parts), options.snapshot_seconds)
        return [SplitPartition(number, part, table, kind, frame, places) for number, part in enumerate(parts)]

    def _bounds(self, table: SourceTable) -> Bounds | None:
        return None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        hot()
        if not isinstance(partition, SplitPartition):
            return iter(())  # Spark's own, for a table without rows
        return ahead(rebatched(self._rows_of(partition)))

    def _rows_of(self, partition: SplitPartition) -> Iterator[pa.RecordBatch]:
        table, rows = partition.table, Rows(self._schema, partition.places)
        needed = rows.needed or list(table.key_columns)
        source = open_snapshots(self._options.source)
        with partition.frame.reading(partition.number) as moment:
            position, time_us = bytes.fromhex(moment["position"]), moment["time_us"]
            try:
                for batch in source.read(table, partition.kind, partition.part, moment["snapshot"], columns=needed):
                    yield rows.of_history(batch, position, time_us)
            except SnapshotExpired as error:
                raise SnapshotExpired(
                    error.message, next_step=f"Load the table again. {error.next_step or ''}".rstrip()
                ) from None


class FilteredTableReader(TableReader):
    """The same, of fewer rows. Spark refuses it unless ``spark.sql.python.filterPushdown.enabled`` is set."""

    def __init__(self, options: SourceOptions, schema: st.StructType) -> None:
        super().__init__(options, schema)
        self._filters: list[Filter] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """All of them are left for Spark to apply again."""
        self._filters = list(filters)
        return filters

    def _bounds(self, table: SourceTable) -> Bounds | None:
        return bounds_for(table, self._filters)


class ChangesReader(DataSourceReader):
    """The changes of the epochs in ``(startEpoch, endEpoch]``, from the log."""

    def __init__(self, options: SourceOptions, schema: st.StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """:raises EpochGone: the log no longer holds a part of it. :raises InvalidOffset: it is not sealed yet."""
        options = self._options
        newest = logged_table(options)
        if newest is None:
            raise NoCapture(
                f"Table {options.table} has no log in {options.store}: there are no changes to read.",
                next_step=f"Run: headwater capture … --store {options.store} --table {options.table}",
            )
        columns = Columns.of(self._schema, newest, options.columns)
        name = newest.full_name
        with open_reader(options.store) as reader, reader.snapshot() as view:
            log = LogView.open(view, name)
            after = log.bounds().gone if options.start_epoch is None else options.start_epoch
            upto = int(log.sealed) if options.end_epoch is None else options.end_epoch
            log.check_range(after, upto)
            changes = LogRanges(view, [name]).changes(name, after, upto)
            vnodes = log.log.vnode_count
        places = columns.places(changes.table, stops=options.on_schema_change == STOP)
        parts = options.parallelism if changes.rows > _SMALL_ROWS else 1
        cuts = [vnodes * part // parts for part in range(parts + 1)]
        units = [
            LogUnit(changes.table, after, upto, low, high, 0, None, changes.truncated) for low, high in pairwise(cuts)
        ]
        if changes.truncated is not None and options.on_truncate == STOP:
            raise truncated(units[0])
        return [UnitPartition(options.for_query(name), unit, places) for unit in units]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        hot()
        assert isinstance(partition, UnitPartition)
        assert isinstance(partition.unit, LogUnit)
        rows = Rows(self._schema, partition.places)
        changes = read_changes(partition.query, partition.unit, rows.needed)
        return rebatched(rows.of_changes(batch, preimages=self._options.preimages) for batch in changes)
