"""Versions: the rows of a log as a sink in ``HISTORY`` mode has them: what each row was, from when, up to when. Pure.

The table's columns, then

===================  ==========================================================================================
``_valid_from``      the time of the commit that made the row what it is
``_valid_to``        the time of the commit that ended it; null while it is the row
``_is_current``      whether it is
``_commit_version``  the source's number of the commit that made it
===================  ==========================================================================================

Several changes of a row in one commit are one version: nobody saw the others. A delete ends a version and begins none.
A version never begins before the one that it ends: where the source's clock stepped back, it begins with it.
A TRUNCATE ends all of them; what the same batch had before it is left out. A row of history begins a version at the
time of the last commit before its snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.log_store.columns import EPOCH, OP, valid_rows
from headwater.sinks import fold
from headwater.sinks.change_rows import COMMIT_VERSION, versions_of
from headwater.sinks.fold import DELETED
from headwater.sinks.keys import KeySet
from headwater.sinks.sink import HistoryPart
from headwater.sinks.types import array_of, conform
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN, SourceTable
from headwater.sources.unavailable import names_column, unavailable_names, unavailable_texts
from headwater.stream.op import Op

VALID_FROM: Final = "_valid_from"
VALID_TO: Final = "_valid_to"
IS_CURRENT: Final = "_is_current"
CLOSES: Final = "_closes"
"""Of staged rows: the version of this key that the sink has as current ends where this one begins."""

_TIME = pa.timestamp("us", tz="UTC")
_ADDED = (
    pa.field(VALID_FROM, _TIME),
    pa.field(VALID_TO, _TIME),
    pa.field(IS_CURRENT, pa.bool_()),
    pa.field(COMMIT_VERSION, pa.int64()),
)
ADDED_NAMES: Final = frozenset(field.name for field in _ADDED)
_STAGED = (
    pa.field(DELETED, pa.bool_(), False),
    pa.field(CLOSES, pa.bool_(), False),
    pa.field(UNAVAILABLE_COLUMN, pa.string()),
)


def versions_schema(own: pa.Schema) -> pa.Schema:
    """The columns of versions of a table with the columns *own*."""
    return pa.schema([*own, *_ADDED])


def staged_schema(own: pa.Schema) -> pa.Schema:
    """The columns of versions on their way: whether it is none but ends one, ends one, and what is not known of it."""
    return pa.schema([*own, *_ADDED, *_STAGED])


def version_pieces(
    table: SourceTable, own: pa.Schema, batches: Iterable[pa.RecordBatch], truncated: tuple[int, int] | None = None
) -> Iterator[pa.Table]:
    """As :func:`version_rows`, in pieces that are applied one after the other.

    A piece ends with an epoch, and so with a commit; it has :data:`~headwater.sinks.fold.FOLD_BYTES` and one epoch of
    rows, and the first row of a key in it ``_closes`` what the piece before left current.
    """
    held: list[pa.RecordBatch] = []
    size = newest = 0
    for batch in batches:
        left = valid_rows(batch, truncated)
        if not left.num_rows:
            continue
        epochs = left.column(EPOCH).to_numpy()
        if size >= fold.FOLD_BYTES and int(epochs.min()) > newest:
            yield version_rows(table, own, held)
            held, size = [], 0
        held.append(left)
        size += left.nbytes
        newest = max(newest, int(epochs.max()))
    if held:
        yield version_rows(table, own, held)


def version_rows(
    table: SourceTable, own: pa.Schema, batches: Iterable[pa.RecordBatch], truncated: tuple[int, int] | None = None
) -> pa.Table:
    """The versions that rows of a log begin, in the columns of :func:`staged_schema`, in the order of the log.

    The first row of each key ``_closes``; one that is ``_deleted`` only ends a version, at its ``_valid_from``. A value
    that the source did not tell comes from the version before it, where these rows have it; otherwise the column is
    named in ``_unavailable``, and the sink has it in the version that it closes.

    :param batches: rows of the table's log, in the order of the log for each key, whole commits.
    """
    wanted = [*table.schema.names, OP, POSITION_COLUMN, COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN]
    found = [valid_rows(batch, truncated).select(wanted) for batch in batches]
    found = [batch for batch in found if batch.num_rows]
    if not found:
        return staged_schema(own).empty_table()
    rows = pa.Table.from_batches(found).combine_chunks()
    keys = KeySet(rows, table.key_columns)
    by_key = _by_key(keys.ids, _numpy(rows.column(OP)))
    rows = _told(rows, by_key)
    commits = _numpy(versions_of(rows.column(POSITION_COLUMN)))
    ends_commit = by_key.is_last | np.append(np.diff(commits[by_key.order]) != 0, True)
    by_key = by_key.filter(ends_commit)
    order, deleted = by_key.order, by_key.deleted
    begins = _rising(by_key.ids, _numpy(rows.column(COMMIT_TIMESTAMP_COLUMN).cast(pa.int64()))[order])
    ends = np.append(begins[1:], 0)
    made = conform(rows.take(pa.array(order)).select(table.schema.names), own)
    added: list[tuple[pa.Field, Any]] = [
        (_ADDED[0], pa.array(begins, pa.int64()).cast(_TIME)),
        (_ADDED[1], pa.array(ends, pa.int64(), mask=by_key.is_last | deleted).cast(_TIME)),
        (_ADDED[2], pa.array(by_key.is_last & ~deleted)),
        (_ADDED[3], pa.array(commits[order])),
        (_STAGED[0], pa.array(deleted)),
        (_STAGED[1], pa.array(by_key.is_first)),
        (_STAGED[2], rows.column(UNAVAILABLE_COLUMN).take(pa.array(order))),
    ]
    for field, values in added:
        made = made.append_column(field, values)
    shown = np.flatnonzero(~deleted | by_key.is_first)
    return made.take(pa.array(shown[np.argsort(order[shown], kind="stable")]))


def as_staged(rows: pa.Table, unavailable: str | None = None) -> pa.Table:
    """Versions that are current, on their way; *unavailable*: the columns that they do not tell."""
    for field, value in zip(_STAGED, (False, True, unavailable), strict=True):
        rows = rows.append_column(field, pa.repeat(pa.scalar(value, field.type), rows.num_rows))
    return rows


def history_versions(batch: pa.RecordBatch, own: pa.Schema, part: HistoryPart) -> pa.Table:
    """Rows of history as versions that are current."""
    rows = batch.num_rows
    version = int.from_bytes(part.position[:8], "big", signed=True)
    made = conform(pa.Table.from_batches([batch]), own)
    for field, value in zip(_ADDED, (part.commit_time_us, None, True, version), strict=True):
        made = made.append_column(field, pa.repeat(pa.scalar(value, field.type), rows))
    return made


@dataclass(frozen=True, slots=True)
class _ByKey:
    """Rows by key, and of each key in the order of the log.

    :ivar order: where they are. :ivar ids: of their keys. :ivar deleted: whether the key is gone after them.
    """

    order: NDArray[np.int64]
    ids: NDArray[np.int64]
    deleted: NDArray[np.bool_]

    @property
    def is_first(self) -> NDArray[np.bool_]:
        return np.append(True, self.ids[1:] != self.ids[:-1])

    @property
    def is_last(self) -> NDArray[np.bool_]:
        return np.append(self.ids[1:] != self.ids[:-1], True)

    def filter(self, kept: NDArray[np.bool_]) -> _ByKey:
        return _ByKey(self.order[kept], self.ids[kept], self.deleted[kept])


def _by_key(ids: NDArray[np.int64], ops: NDArray[np.int8]) -> _ByKey:
    """All rows but the old halves of updates; one whose new half has another key is a delete."""
    order = np.argsort(ids, kind="stable")
    codes = ops[order]
    made = _ByKey(order, ids[order], (codes == Op.DELETE) | (codes == Op.UPDATE_DELETE))
    is_old_half = (codes == Op.UPDATE_DELETE) & ~made.is_last & (np.append(codes[1:], 0) == Op.UPDATE_INSERT)
    return made.filter(~is_old_half)


def _rising(ids: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """*times*, of each key never before one that came earlier: the clock of a source may step back."""
    distinct, ranks = np.unique(times, return_inverse=True)
    highest = np.maximum.accumulate(ids * distinct.size + ranks)
    return distinct[highest - ids * distinct.size]


def _told(rows: pa.Table, by_key: _ByKey) -> pa.Table:
    """*rows* with the values that an earlier row of their key tells, since its last delete."""
    told = rows.column(UNAVAILABLE_COLUMN)
    if told.null_count == len(told):
        return rows
    order = by_key.order
    places = np.arange(order.size)
    after_delete = ~by_key.is_first & np.append(False, by_key.deleted[:-1])
    since = np.maximum.accumulate(np.where(by_key.is_first | after_delete, places, 0))
    left: dict[str, NDArray[np.bool_]] = {}
    for name in unavailable_names(told, rows.schema.names):
        lacks = names_column(told, name)[order]
        newest = np.maximum.accumulate(np.where(~lacks, places, -1))
        fills = lacks & (newest >= since)
        sources = np.arange(rows.num_rows)
        sources[order] = order[np.where(fills, newest, places)]
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), rows.column(name).take(pa.array(sources)))
        left[name] = np.zeros(rows.num_rows, np.bool_)
        left[name][order] = lacks & ~fills & ~after_delete[since] & ~by_key.deleted
    place = rows.schema.get_field_index(UNAVAILABLE_COLUMN)
    return rows.set_column(place, rows.schema.field(place), unavailable_texts(left, rows.num_rows))


def _numpy(values: Any) -> Any:
    array = array_of(values)
    return array.to_numpy(zero_copy_only=False)


def is_open(rows: pa.Table) -> Any:
    """Which of staged *rows* are versions that are current."""
    return pc.and_(rows.column(IS_CURRENT), pc.invert(rows.column(DELETED)))
