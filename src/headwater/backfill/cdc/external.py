"""ExternalStorageTable: a table of a database, and the way to it: its splits, its rows, the order of its keys.

Servers that know a column by its name alone cannot tell whether it is the one that was planned: it may have been
renamed, or dropped and another one created under its name. The log knows columns by numbers. So what was planned is
read under the names, and in the types, that the log has last, and given as it was planned. The reader then checks, at
the position that it reads at, that the log has called the columns so up to there (:func:`check_columns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Protocol

import pyarrow as pa

from headwater.backfill.cdc.rewind import read_rewound
from headwater.backfill.units import SplitUnit
from headwater.sources.errors import SnapshotExpired, SourceProtocolError
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import (
    ExportedSnapshot,
    KeyOrder,
    SnapshotSource,
    UnsharedSnapshots,
    mark_from_json,
    open_snapshots,
)
from headwater.sources.special_values import as_policy
from headwater.sources.splits import SplitKind, SplitPlan
from headwater.sources.table import FIELD_ID, SourceColumn, SourceTable, SpecialValues


class TableLog(Protocol):
    """The log of the table, for reads that are later than the snapshot that they were planned in."""

    def schema(self) -> pa.Schema:
        """As it is now."""

    def wait_for(self, until: CdcOffset | None) -> None:
        """Until the log has all changes that committed before *until*.

        :raises LogBehind: it has not for a long time.
        """

    def changes(self, after: int, table: SourceTable) -> Iterator[pa.RecordBatch]:
        """The changes after the epoch *after*, with the columns of *table*."""


class ExternalStorageTable:
    """One table and where it is. It can be pickled; it holds no connection."""

    def __init__(self, table: SourceTable, source: SnapshotSource) -> None:
        self.table = table
        self.source = source

    @cached_property
    def order(self) -> KeyOrder:
        """The order of its keys, asked for once. :raises UnsupportedTable: it cannot be had."""
        return self.source.order(self.table)

    def split(self, snapshot: ExportedSnapshot, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        """Splits of about *split_rows* rows that cover the table, as *snapshot* has it.

        :param kind: ``None``: the source chooses.
        :raises UnsupportedTable: it cannot be split in that way.
        :raises SourceProtocolError: the splits do not cover all keys, each once.
        """
        plan = snapshot.plan(self.table, split_rows=split_rows, kind=kind)
        splits = plan.splits
        touch = all(one.range.end is not None and one.range.end == two.range.start for one, two in pairwise(splits))
        if not splits or splits[0].range.start is not None or splits[-1].range.end is not None or not touch:
            raise SourceProtocolError("The splits of a table do not touch from its beginning to its end.")
        return plan

    def read(
        self, unit: SplitUnit, log: TableLog, parking: SpecialValues = SpecialValues.PARK
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *unit* as its snapshot has them, in no order.

        Where readers cannot enter the snapshot they read later, and undo with *log* what changed since.

        :param parking: what becomes of values that park their rows.
        :raises SnapshotExpired: it must be planned again. :raises SourceUnreachable: no connection.
        :raises LogBehind: the log does not reach what was read. :raises OldRowsMissing: it lacks old versions of rows.
        """
        source = self.source
        if not isinstance(source, UnsharedSnapshots):
            table = as_policy(unit.table, parking)
            for part in unit.ranges:
                yield from source.read(table, unit.kind, part, unit.snapshot, columns=unit.columns)
            return
        mark = mark_from_json(unit.snapshot)
        current = columns_now(unit.table, log.schema())
        read, planned = as_policy(current, parking), as_policy(unit.table, parking)

        now = self if current == self.table else ExternalStorageTable(current, source)

        def changes(high: CdcOffset) -> Iterator[pa.RecordBatch]:
            log.wait_for(high)
            check_columns(current, log.schema())
            return log.changes(unit.upto, read) if high > mark.high else iter(())

        columns = names_now(unit.table, current, unit.columns)
        for batch in read_rewound(source, read, unit.ranges, mark, changes, lambda: now.order, columns):
            yield batch if current == unit.table else as_planned(batch, planned, unit.columns)


@lru_cache(maxsize=1024)
def external_table(dsn: str, table: SourceTable) -> ExternalStorageTable:
    """*table* of the database at *dsn*; one per process, so that the order of its keys is asked for once."""
    return ExternalStorageTable(table, _snapshots(dsn))


@lru_cache(maxsize=8)
def _snapshots(dsn: str) -> SnapshotSource:
    return open_snapshots(dsn)


def columns_now(table: SourceTable, schema: pa.Schema) -> SourceTable:
    """*table* with the names and types that *schema*, that of its log, has for its columns."""
    now = _by_number(schema)
    columns = tuple(
        column if column.dropped else now.get(column.field_id, replace(column, dropped=True))
        for column in table.columns
    )
    names = {was.name: column.name for was, column in zip(table.columns, columns, strict=True)}
    return replace(table, columns=columns, key_columns=tuple(names[name] for name in table.key_columns))


def names_now(table: SourceTable, now: SourceTable, columns: Sequence[str] | None) -> list[str] | None:
    """*columns* of *table* as *now* calls them."""
    if columns is None:
        return None
    names = {was.name: column.name for was, column in zip(table.columns, now.columns, strict=True)}
    return [names[name] for name in columns]


def as_planned(rows: pa.RecordBatch, table: SourceTable, columns: Sequence[str] | None) -> pa.RecordBatch:
    """*rows*, read by the columns of :func:`columns_now`, as rows of *table*."""
    wanted = table.schema if columns is None else pa.schema([table.schema.field(name) for name in columns])
    arrays = [column.cast(field.type) for column, field in zip(rows.columns, wanted, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def check_columns(table: SourceTable, schema: pa.Schema) -> None:
    """Check that *schema*, that of the log at the position of a read, has the columns of *table* by their names.

    :raises SnapshotExpired: one was dropped or renamed meanwhile.
    """
    now = _by_number(schema)
    for column in table.columns:
        found = now.get(column.field_id)
        if not column.dropped and (found is None or found.name != column.name or found.type != column.type):
            raise SnapshotExpired(
                f"Column {column.name!r} of table {table.full_name} was dropped or changed since it was planned.",
                next_step="Take a new snapshot.",
            )


def _by_number(schema: pa.Schema) -> dict[int, SourceColumn]:
    fields = [field for field in schema if field.metadata and FIELD_ID in field.metadata]
    columns = [SourceColumn.of_field(field) for field in fields]
    return {column.field_id: column for column in columns if not column.dropped}
