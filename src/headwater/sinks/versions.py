"""Versions: the rows of a log as a sink in ``HISTORY`` mode has them: what each row was, from when, up to when. Pure.

The table's columns, then

===================  ==========================================================================================
``_valid_from``      the time of the commit that made the row what it is
``_valid_to``        the time of the commit that ended it; null while it is the row
``_is_current``      whether it is
``_commit_version``  the source's number of the commit that made it
===================  ==========================================================================================

Several changes of a row in one commit are one version: nobody saw the others. A delete ends a version and begins none.
A TRUNCATE ends all of them; what the same batch had before it is left out. A row of history begins a version at the
time of the last commit before its snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.log_store.columns import OP
from headwater.sinks.change_rows import COMMIT_VERSION, versions_of
from headwater.sinks.fold import DELETED, names_column, unavailable_names, unavailable_texts, valid_rows
from headwater.sinks.keys import KeySet
from headwater.sinks.sink import HistoryPart
from headwater.sinks.types import conform
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN, SourceTable
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


def version_rows(
    table: SourceTable, own: pa.Schema, batches: Iterable[pa.RecordBatch], truncated: tuple[int, int] | None = None
) -> pa.Table:
    """The versions that rows of a log begin, in the columns of :func:`staged_schema`, in the order of the log.

    The first row of each key ``_closes``; one that is ``_deleted`` only ends a version, at its ``_valid_from``. A value
    that the source did not tell comes from the version before it, where these rows have it; otherwise the column is
    named in ``_unavailable``, and the sink has it in the version that it closes.

    :param batches: rows of the table's log, in the order of the log for each key.
    """
    wanted = [*table.schema.names, OP, POSITION_COLUMN, COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN]
    found = [valid_rows(batch, truncated).select(wanted) for batch in batches]
    found = [batch for batch in found if batch.num_rows]
    if not found:
        return staged_schema(own).empty_table()
    rows = pa.Table.from_batches(found).combine_chunks()
    ops = _numpy(rows.column(OP))
    keep = np.flatnonzero(ops != Op.UPDATE_DELETE)
    rows = rows.take(pa.array(keep))
    keys = KeySet(rows, table.key_columns)
    commits = _numpy(versions_of(rows.column(POSITION_COLUMN)))
    order = np.lexsort((np.arange(len(keep)), keys.ids))  # by key, in the order of the log
    ids, of_commit = keys.ids[order], commits[order]
    ends_commit = np.append((ids[1:] != ids[:-1]) | (of_commit[1:] != of_commit[:-1]), True)
    rows, order = _told(rows, keys.ids, order), order[ends_commit]
    ids = ids[ends_commit]
    is_first = np.append(True, ids[1:] != ids[:-1])
    is_last = np.append(ids[1:] != ids[:-1], True)
    deleted = (ops[keep] == Op.DELETE)[order]
    begins = _numpy(rows.column(COMMIT_TIMESTAMP_COLUMN).cast(pa.int64()))[order]
    ends = np.append(begins[1:], 0)
    used = ~deleted | is_first
    made = conform(rows.take(pa.array(order)).select(table.schema.names), own)
    added: list[tuple[pa.Field, Any]] = [
        (_ADDED[0], pa.array(begins, pa.int64()).cast(_TIME)),
        (_ADDED[1], pa.array(ends, pa.int64(), mask=is_last | deleted).cast(_TIME)),
        (_ADDED[2], pa.array(is_last & ~deleted)),
        (_ADDED[3], pa.array(commits[order])),
        (_STAGED[0], pa.array(deleted)),
        (_STAGED[1], pa.array(is_first)),
        (_STAGED[2], rows.column(UNAVAILABLE_COLUMN).take(pa.array(order))),
    ]
    for field, values in added:
        made = made.append_column(field, values)
    shown = np.flatnonzero(used)
    return made.take(pa.array(shown[np.argsort(order[shown], kind="stable")]))


def history_versions(batch: pa.RecordBatch, own: pa.Schema, part: HistoryPart) -> pa.Table:
    """Rows of history as versions that are current."""
    rows = batch.num_rows
    version = int.from_bytes(part.position[:8], "big", signed=True)
    made = conform(pa.Table.from_batches([batch]), own)
    for field, value in zip(_ADDED, (part.commit_time_us, None, True, version), strict=True):
        made = made.append_column(field, pa.repeat(pa.scalar(value, field.type), rows))
    return made


def _told(rows: pa.Table, ids: NDArray[Any], order: NDArray[np.int64]) -> pa.Table:
    """*rows* with the values that an earlier row of their key tells, since its last delete."""
    told = rows.column(UNAVAILABLE_COLUMN)
    if told.null_count == len(told):
        return rows
    ops = _numpy(rows.column(OP))[order]
    by_key = ids[order]
    places = np.arange(len(order))
    begins = np.append(True, (by_key[1:] != by_key[:-1]) | (ops[:-1] == Op.DELETE))
    since = np.maximum.accumulate(np.where(begins, places, 0))
    after_delete = np.append(False, (by_key[1:] == by_key[:-1]) & (ops[:-1] == Op.DELETE))
    known_before = np.maximum.accumulate(np.where(begins, after_delete * 1 + places * 2, 0)) % 2 == 1
    left: dict[str, NDArray[np.bool_]] = {}
    for name in unavailable_names(told, rows.schema.names):
        lacks = names_column(told, name)[order]
        newest = np.maximum.accumulate(np.where(~lacks, places, -1))
        fills = lacks & (newest >= since)
        sources = np.empty(len(order), np.int64)
        sources[order] = order[np.where(fills, newest, places)]
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), rows.column(name).take(pa.array(sources)))
        mask = np.empty(len(order), np.bool_)
        mask[order] = lacks & ~fills & ~known_before
        left[name] = mask
    place = rows.schema.get_field_index(UNAVAILABLE_COLUMN)
    return rows.set_column(place, rows.schema.field(place), unavailable_texts(left, rows.num_rows))


def _numpy(values: Any) -> Any:
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return array.to_numpy(zero_copy_only=False)


def is_open(rows: pa.Table) -> Any:
    """Which of staged *rows* are versions that are current."""
    return pc.and_(rows.column(IS_CURRENT), pc.invert(rows.column(DELETED)))
