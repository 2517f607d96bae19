"""Reads units, in any process: what a unit gives depends on the unit and the stored bytes alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.backfill.cdc.columns_now import as_planned, check_columns, columns_now, names_now
from headwater.backfill.cdc.mark import apply_filter, needs_order
from headwater.backfill.cdc.rewind import read_rewound
from headwater.backfill.cdc.upstream_table.external import ExternalStorageTable
from headwater.backfill.cdc.upstream_table.snapshot import SnapshotReader
from headwater.backfill.errors import LogBehind
from headwater.backfill.query import QueryOptions
from headwater.backfill.snapshot.reader import read_snapshot
from headwater.backfill.units import LogUnit, SnapshotUnit, SplitUnit
from headwater.capture.requests import remark
from headwater.capture.source_state import SourceState
from headwater.errors import HeadwaterError
from headwater.log_store import LogView
from headwater.log_store.columns import EPOCH, OP, SEQ, VNODE
from headwater.sources.errors import SpecialValue
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import (
    KeyOrder,
    RemarkingSnapshots,
    SnapshotMark,
    SnapshotSource,
    UnsharedSnapshots,
    mark_from_json,
    open_snapshots,
)
from headwater.sources.special_values import as_policy
from headwater.sources.table import (
    COMMIT_TIMESTAMP_COLUMN,
    FIELD_ID,
    POSITION_COLUMN,
    UNAVAILABLE_COLUMN,
    SourceTable,
    SpecialValues,
)
from headwater.sources.unavailable import with_parked
from headwater.state import StateReader, open_reader
from headwater.stream import VnodeBitmap, hash_keys

LOG_COLUMNS = (POSITION_COLUMN, COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN, OP, VNODE, SEQ, EPOCH)
"""What a change has after the table's own columns."""

_log = logging.getLogger(__name__)

LOG_SECONDS = 120.0
"""How long a task waits for the capture to come to its snapshot."""

_stores: dict[str, StateReader] = {}
_lock = threading.Lock()


def read_changes(
    options: QueryOptions, unit: LogUnit, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The changes of a unit that are to be emitted: the columns of its table, then :data:`LOG_COLUMNS`.

    :param columns: only these of the table's own.
    :raises EpochGone: the log no longer holds them: they were delivered before.
    """
    table = unit.table
    order = _order(options.source, table) if unit.filter is not None and needs_order(unit.filter) else None
    with _store(options.store).snapshot() as view:
        log = LogView.open(view, table.full_name)
        wanted = VnodeBitmap.from_ranges([range(unit.first_vnode, unit.end_vnode)], log.log.vnode_count)
        for stored in log.read_range(unit.after, unit.upto, wanted):
            batch = conform(stored, table)
            if unit.filter is not None:
                batch = apply_filter(batch, unit.filter, order, table.key_columns, unit.truncated)
            if batch.num_rows:
                yield batch if columns is None else batch.select([*columns, *LOG_COLUMNS])


def parked_history(options: QueryOptions, unit: SplitUnit | SnapshotUnit) -> pa.Table | None:
    """The keys of the rows of a unit that special values park, and ``_unavailable``; ``None``: there are none.

    Columns that park are read before the others; where they have special values, once more as text: such a value is
    null, and its text is not.

    :raises SpecialValue: one is in columns that are read again: the rows that the sink has would stay.
    """
    if isinstance(unit, SnapshotUnit):
        return None
    names = [one.name for one in unit.table.parking if unit.columns is None or one.name in unit.columns]
    if not names:
        return None
    keys = list(unit.table.key_columns)
    some = replace(unit, columns=(*keys, *(name for name in names if name not in keys)))
    try:
        for _ in read_history(options, some, SpecialValues.STOP):
            pass
        return None
    except SpecialValue:
        if unit.columns is not None:
            raise

    def read(policy: SpecialValues, test: Callable[[Any], Any]) -> pa.Table:
        found = pa.Table.from_batches(read_history(options, some, policy))
        tested = {f"{name} {policy.value}": test(found.column(name)) for name in names}
        return pa.table({name: found.column(name) for name in keys} | tested)

    nulls = read(SpecialValues.PARK, lambda values: values.is_null())
    texts = read(SpecialValues.TEXT, lambda values: pc.fill_null(pc.not_equal(values, "null"), False))
    both = nulls.join(texts, keys, join_type="inner").combine_chunks()
    masks = {name: pc.and_(both.column(f"{name} park"), both.column(f"{name} text")).to_numpy() for name in names}
    parked = with_parked(pa.nulls(both.num_rows, pa.string()), masks)
    return both.select(keys).append_column(UNAVAILABLE_COLUMN, parked).filter(parked.is_valid())


def read_history(
    options: QueryOptions, unit: SplitUnit | SnapshotUnit, parking: SpecialValues = SpecialValues.PARK
) -> Iterator[pa.RecordBatch]:
    """The rows of a unit as its snapshot has them: the columns of its table alone.

    :param parking: what becomes of values that park their rows; where that is nothing else, they are null.
    :raises SnapshotExpired: it must be planned anew.
    :raises LogBehind: the capture has not come to what was read. :raises OldRowsMissing: see :class:`Rewind`.
    """
    if isinstance(unit, SnapshotUnit):
        assert options.kept is not None
        yield from read_snapshot(options.store, options.kept, unit)
        return
    external = _external(options.source, unit.table)
    if not isinstance(external.source, UnsharedSnapshots):
        yield from SnapshotReader(external).read(replace(unit, table=as_policy(unit.table, parking)))
        if isinstance(external.source, RemarkingSnapshots):
            for text in external.source.take_remarks(unit.table):
                try:
                    remark(options.store, unit.table.full_name, text, unit.snapshot or "")
                except (HeadwaterError, OSError) as error:  # the rows are read: they do not fail over this
                    _log.warning("%s: %s It could not be noted (%s).", unit.table.full_name, text, type(error).__name__)
        return
    mark = mark_from_json(unit.snapshot)
    with _store(options.store).snapshot() as view:
        table = columns_now(unit.table, LogView.open(view, unit.table.full_name).log.schema)
    read, planned = as_policy(table, parking), as_policy(unit.table, parking)
    for batch in read_rewound(
        external.source,
        read,
        unit.ranges,
        mark,
        lambda high: _changes_up_to(options, unit, table, read, mark, high),
        lambda: _order(options.source, table),
        names_now(unit.table, table, unit.columns),
    ):
        yield batch if table == unit.table else as_planned(batch, planned, unit.columns)


def changed_keys(options: QueryOptions, unit: SplitUnit) -> NDArray[np.uint64] | None:
    """Hashes of the keys that changes may have brought to the sink already, ascending; ``None``: there are none."""
    if unit.changed_since is None:
        return None
    table, store = unit.table, _store(options.store)
    _wait_for(store, table, unit.until)
    with store.snapshot() as view:
        log = LogView.open(view, table.full_name)
        found = [
            np.unique(hash_keys(conform(batch, table), table.key_columns))
            for batch in log.read_range(unit.changed_since, view.epoch)
        ]
    return np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)


def _changes_up_to(
    options: QueryOptions, unit: SplitUnit, table: SourceTable, read: SourceTable, mark: SnapshotMark, high: CdcOffset
) -> Iterator[pa.RecordBatch]:
    """The changes of *table* since its rows were planned at *mark*, at least those that committed before *high*.

    :param read: the table as its rows are read.

    :raises SnapshotExpired: a column that was planned is another one by now, which has its name.
    """
    store = _store(options.store)
    _wait_for(store, table, high)
    with store.snapshot() as view:
        log = LogView.open(view, table.full_name)
        check_columns(table, log.log.schema)
        if not high > mark.high:
            return
        for batch in log.read_range(unit.upto, view.epoch):
            yield conform(batch, read)


def _wait_for(store: StateReader, table: SourceTable, until: CdcOffset | None) -> None:
    """Until the log has all changes that committed before *until*.

    :raises LogBehind: it has not for a long time.
    """
    end = time.monotonic() + LOG_SECONDS
    while True:
        with store.snapshot() as view:
            record, _ = SourceState.read(view)
            epoch = view.epoch
        if until is None or (record is not None and record.offset.has_passed(until)):
            return
        if time.monotonic() > end:
            raise LogBehind(
                f"The capture has not come to the snapshot of {table.full_name} within {LOG_SECONDS:g} s.",
                next_step="Look whether it runs: headwater status",
            )
        store.wait_for_epoch(epoch, 0.5)


def conform(batch: pa.RecordBatch, table: SourceTable) -> pa.RecordBatch:
    """*batch* of a log, perhaps of an earlier schema, with the columns that *table* has; what it had not is null."""
    if (
        batch.schema.names[: len(table.columns)] == table.schema.names
        and batch.schema.field(len(table.columns)).name == POSITION_COLUMN
    ):
        wanted = pa.schema([*table.schema, *list(batch.schema)[len(table.columns) :]])
        if batch.schema.types == wanted.types:
            return batch
    places = {
        field.metadata[FIELD_ID]: place
        for place, field in enumerate(batch.schema)
        if field.metadata and FIELD_ID in field.metadata
    }
    arrays, fields = [], []
    for field in table.schema:
        place = places.get(field.metadata[FIELD_ID])
        array = pa.nulls(batch.num_rows, field.type) if place is None else batch.column(place).cast(field.type)
        arrays.append(array)
        fields.append(field)
    for name in LOG_COLUMNS:
        arrays.append(batch.column(name))
        fields.append(batch.schema.field(name))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _store(location: str) -> StateReader:
    """The store of this process: opened once, tasks come and go."""
    with _lock:
        if location not in _stores:
            _stores[location] = open_reader(location)
        return _stores[location]


@lru_cache(maxsize=8)
def _snapshots(dsn: str) -> SnapshotSource:
    return open_snapshots(dsn)


@lru_cache(maxsize=1024)
def _external(dsn: str, table: SourceTable) -> ExternalStorageTable:
    return ExternalStorageTable(table, _snapshots(dsn))


def _order(dsn: str, table: SourceTable) -> KeyOrder:
    return _external(dsn, table).order
