"""Reads units, in any process: what a unit gives depends on the unit and the stored bytes alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.backfill.cdc.external import external_table
from headwater.backfill.cdc.mark import apply_filter, needs_order
from headwater.backfill.errors import LogBehind
from headwater.backfill.query import QueryOptions
from headwater.backfill.snapshot.consume_upstream.upstream_table import UpstreamTable
from headwater.backfill.snapshot.mark import apply_mark
from headwater.backfill.snapshot.vnode_stream import VnodeStream
from headwater.backfill.units import ChangeFilter, LogUnit, SnapshotUnit, SplitUnit, Unit, UpstreamUnit
from headwater.capture.source_state import SourceState
from headwater.control.request import leave_note
from headwater.errors import HeadwaterError
from headwater.log_store import LogView
from headwater.log_store.columns import EPOCH, OP, SEQ, VNODE
from headwater.sources.errors import SpecialValue
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import RemarkingSnapshots
from headwater.sources.special_values import as_policy
from headwater.sources.table import (
    COMMIT_TIMESTAMP_COLUMN,
    POSITION_COLUMN,
    UNAVAILABLE_COLUMN,
    SourceTable,
    SpecialValues,
)
from headwater.sources.unavailable import with_parked
from headwater.sources.written import POSITION_DTYPE, POSITION_TYPE
from headwater.state import StateReader, open_reader
from headwater.stream import Op, VnodeBitmap, hash_keys
from headwater.versioned import VersionedTable
from headwater.versioned.fitting import fitted

LOG_COLUMNS = (POSITION_COLUMN, COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN, OP, VNODE, SEQ, EPOCH)
"""What a change has after the table's own columns."""

_TIME = pa.timestamp("us", tz="UTC")

_log = logging.getLogger(__name__)

LOG_SECONDS = 120.0
"""How long a task waits for the capture to come to its snapshot."""

_stores: dict[str, StateReader] = {}
_lock = threading.Lock()


def read_unit(options: QueryOptions, unit: Unit) -> Iterator[pa.RecordBatch]:
    """What a sink is given of *unit*: changes with :data:`LOG_COLUMNS`, rows of history without."""
    if isinstance(unit, UpstreamUnit):
        assert options.upstream is not None
        rows = read_upstream(options.upstream, unit)
        return (batch.select(unit.table.schema.names) for batch in rows) if unit.is_history else rows
    return read_changes(options, unit) if isinstance(unit, LogUnit) else read_history(options, unit)


def read_changes(
    options: QueryOptions, unit: LogUnit, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The changes of a unit that are to be emitted: the columns of its table, then :data:`LOG_COLUMNS`.

    :param columns: only these of the table's own.
    :raises EpochGone: the log no longer holds them: they were delivered before.
    """
    table = unit.table
    order = None
    if isinstance(unit.filter, ChangeFilter) and needs_order(unit.filter):
        order = external_table(options.source, table).order
    with _store(options.store).snapshot() as view:
        log = LogView.open(view, table.full_name)
        wanted = VnodeBitmap.from_ranges([range(unit.first_vnode, unit.end_vnode)], log.log.vnode_count)
        for stored in log.read_range(unit.after, unit.upto, wanted):
            batch = _fitted(stored, table)
            if isinstance(unit.filter, ChangeFilter):
                batch = apply_filter(batch, unit.filter, order, table.key_columns, unit.truncated)
            elif unit.filter is not None:
                batch = apply_mark(batch, unit.filter, log.log.vnode_count, table.key_columns)
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
        schema = pa.schema([as_policy(unit.table, policy).schema.field(name) for name in some.columns or ()])
        found = pa.Table.from_batches((one.cast(schema) for one in read_history(options, some, policy)), schema)
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
        yield from _read_vnodes(VersionedTable.open(options.store, unit.table.full_name, options.kept), unit)
        return
    external = external_table(options.source, unit.table)
    yield from external.read(unit, CapturedLog(options.store, unit.table), parking)
    if isinstance(external.source, RemarkingSnapshots):
        for text in external.source.take_remarks(unit.table):
            try:
                leave_note(options.store, unit.table.full_name, text, unit.snapshot or "")
            except (HeadwaterError, OSError) as error:  # the rows are read: they do not fail over this
                _log.warning("%s: %s It could not be noted (%s).", unit.table.full_name, text, type(error).__name__)


def _read_vnodes(table: VersionedTable, unit: SnapshotUnit) -> Iterator[pa.RecordBatch]:
    names = unit.table.schema.names if unit.columns is None else unit.columns
    columns = [*names, *(key for key in unit.table.key_columns if key not in names)]
    try:
        for part in unit.parts:
            vnodes = (part.first, part.end)
            stream = VnodeStream(table, unit.epoch, vnodes, start=part.start, end=part.stop, columns=columns)
            for batch in stream:
                yield batch if len(columns) == len(names) else batch.select(names)
    finally:
        table.close()


def changed_keys(options: QueryOptions, unit: SplitUnit) -> NDArray[np.uint64] | None:
    """Hashes of the keys that changes may have brought to the sink already, ascending; ``None``: there are none."""
    if unit.changed_since is None:
        return None
    table, log = unit.table, CapturedLog(options.store, unit.table)
    log.wait_for(unit.until)
    hashes = [np.unique(hash_keys(batch, table.key_columns)) for batch in log.changes(unit.changed_since, table)]
    return np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)


def read_upstream(upstream: UpstreamTable, unit: UpstreamUnit) -> Iterator[pa.RecordBatch]:
    """The rows of *unit*: the columns of its table, then :data:`LOG_COLUMNS`; rows of a snapshot are inserts.

    ``_position`` is the version as the table calls it (8 bytes), the number of the row in its unit (4) and 0 (4), big
    endian; ``_epoch`` is that of the plan, by which sinks know what they have.

    :raises RetentionMiss: they went after the unit was planned.
    """
    part, seq = unit.part, 0
    if unit.is_history:
        rows = upstream.snapshot(part.epoch, part.vnodes, start=part.start, end=part.end)
    else:
        rows = upstream.change_log(part.after, part.epoch, part.vnodes, start=part.start, end=part.end)
    known: dict[int, tuple[int, int]] = {part.epoch: (unit.commit_version, unit.commit_time_us)}
    for batch in rows:
        yield _as_log(upstream, unit, batch, seq, known)
        seq += batch.num_rows


def _as_log(
    upstream: UpstreamTable, unit: UpstreamUnit, batch: pa.RecordBatch, seq: int, known: dict[int, tuple[int, int]]
) -> pa.RecordBatch:
    count = batch.num_rows
    names = batch.schema.names
    if EPOCH in names:
        epochs = batch.column(EPOCH).to_numpy()
        ops = batch.column(OP)
    else:
        epochs = np.full(count, unit.part.epoch, np.uint64)
        ops = pa.array(np.full(count, Op.INSERT, np.int8))
    versions, times = np.zeros(count, np.uint64), np.zeros(count, np.int64)
    for epoch in np.unique(epochs).tolist():
        if epoch not in known:
            known[epoch] = (upstream.commit_version(epoch), upstream.commit_time_us(epoch))
        mask = epochs == epoch
        versions[mask], times[mask] = known[epoch]
    places = np.zeros(count, POSITION_DTYPE)
    places["epoch"], places["row"] = versions, np.arange(seq + 1, seq + count + 1)
    own = [_own(batch, field, names) for field in unit.table.schema]
    added = {
        POSITION_COLUMN: pa.Array.from_buffers(POSITION_TYPE, count, [None, pa.py_buffer(places)]),
        COMMIT_TIMESTAMP_COLUMN: pa.array(times, pa.int64()).cast(_TIME),
        UNAVAILABLE_COLUMN: pa.nulls(count, pa.string()),
        OP: ops,
        VNODE: batch.column(VNODE),
        SEQ: pa.array(np.arange(seq, seq + count, dtype=np.uint32)),
        EPOCH: pa.array(np.full(count, unit.epoch, np.uint64)),
    }
    fields = [pa.field(name, column.type) for name, column in added.items()]
    return pa.RecordBatch.from_arrays([*own, *added.values()], schema=pa.schema([*unit.table.schema, *fields]))


def _own(batch: pa.RecordBatch, field: pa.Field, names: list[str]) -> pa.Array:
    if field.name not in names:
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(field.name)
    return column if column.type == field.type else pc.cast(column, field.type)


class CapturedLog:
    """The log of *table* in the store at *location*."""

    def __init__(self, location: str, table: SourceTable) -> None:
        self._store, self._name = _store(location), table.full_name

    def schema(self) -> pa.Schema:
        """As it is now."""
        with self._store.snapshot() as view:
            return LogView.open(view, self._name).log.schema

    def changes(self, after: int, table: SourceTable) -> Iterator[pa.RecordBatch]:
        """The changes after the epoch *after*, with the columns of *table*."""
        with self._store.snapshot() as view:
            for batch in LogView.open(view, self._name).read_range(after, view.epoch):
                yield _fitted(batch, table)

    def wait_for(self, until: CdcOffset | None) -> None:
        """Until the log has all changes that committed before *until*.

        :raises LogBehind: it has not for a long time.
        """
        end = time.monotonic() + LOG_SECONDS
        while True:
            with self._store.snapshot() as view:
                record, _ = SourceState.read(view)
                epoch = view.epoch
            if until is None or (record is not None and record.offset.has_passed(until)):
                return
            if time.monotonic() > end:
                raise LogBehind(
                    f"The log did not reach the snapshot of {self._name} within {LOG_SECONDS:g} s.",
                    next_step="Check that the capture runs: headwater status",
                )
            self._store.wait_for_epoch(epoch, 0.5)


def _fitted(batch: pa.RecordBatch, table: SourceTable) -> pa.RecordBatch:
    """*batch* of a log, perhaps of an earlier schema, with the columns that *table* has; what it had not is null."""
    own, added = table.schema, [batch.schema.field(name) for name in LOG_COLUMNS]
    wanted = pa.schema([*own, *added])
    if batch.schema.names == wanted.names and batch.schema.types == wanted.types:
        return batch
    return pa.RecordBatch.from_arrays([*fitted(batch, own), *map(batch.column, LOG_COLUMNS)], schema=wanted)


def _store(location: str) -> StateReader:
    """The store of this process: opened once, tasks come and go."""
    with _lock:
        if location not in _stores:
            _stores[location] = open_reader(location)
        return _stores[location]
