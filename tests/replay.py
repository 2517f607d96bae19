"""Replay: the table that a log tells of, at an epoch: every change applied in order, truncations and new columns too.

It holds all rows of the log in memory. The log must reach back to when the table
was empty, or to a snapshot that is given.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.log_store.log_events import SCHEMA, TRUNCATE, LogEvent, events_of
from headwater.log_store.log_view import LogView
from headwater.sinks.keys import KeySet, last_rows
from headwater.sources.table import FIELD_ID, RESERVED_COLUMNS
from headwater.state import Snapshot
from headwater.stream import Op

_OP, _SEQ, _EPOCH = "_op", "_seq", "_epoch"


def replay(view: Snapshot, log: str, upto: int | None = None) -> pa.Table:
    """The rows of the table behind *log* after epoch *upto* (the newest by default), in no order.

    :raises EpochGone: the log no longer begins with the table.
    """
    shown = LogView.open(view, log)
    end = shown.sealed if upto is None else upto
    events = list(events_of(view, log, 0, end))
    wanted = pa.schema([field for field in shown.log.schema if field.name not in RESERVED_COLUMNS])
    parts = [_part(batch, wanted, events) for batch in shown.read_range(0, end)]
    empty = (
        wanted.append(pa.field(_OP, pa.int8()))
        .append(pa.field(_SEQ, pa.uint32()))
        .append(pa.field(_EPOCH, pa.uint64()))
    )
    rows = pa.concat_tables([empty.empty_table(), *parts]).combine_chunks()
    order = np.lexsort((rows.column(_SEQ).to_numpy(), rows.column(_EPOCH).to_numpy()))
    truncated = max(((event.epoch, event.seq) for event in events if event.kind == TRUNCATE), default=None)
    if truncated is not None:
        order = order[~_before(rows.column(_EPOCH).to_numpy()[order], rows.column(_SEQ).to_numpy()[order], *truncated)]
    ordered = rows.take(pa.array(order)).combine_chunks()
    if not ordered.num_rows:
        return wanted.empty_table()
    keys = KeySet(ordered, shown.log.key_columns)
    last = np.sort(last_rows(keys.ids, keys.count))
    adds = np.isin(ordered.column(_OP).to_numpy()[last], (Op.INSERT, Op.UPDATE_INSERT))
    return ordered.select(wanted.names).take(pa.array(last[adds]))


def _before(epochs: NDArray[np.uint64], seqs: NDArray[np.uint32], epoch: int, seq: int) -> NDArray[np.bool_]:
    earlier: NDArray[np.bool_] = (epochs < epoch) | ((epochs == epoch) & (seqs < seq))
    return earlier


def _part(batch: pa.RecordBatch, wanted: pa.Schema, events: list[LogEvent]) -> pa.Table:
    """*batch* in the columns of now: found by field id, cast to the wider type, filled with what came by default."""
    places = {field.metadata[FIELD_ID]: place for place, field in enumerate(batch.schema) if _is_own(field)}
    columns = []
    for field in wanted:
        place = places.get(field.metadata[FIELD_ID])
        if place is not None:
            columns.append(batch.column(place).cast(field.type))
        else:
            columns.append(_default(batch, field, events))
    columns += [batch.column(name) for name in (_OP, _SEQ, _EPOCH)]
    return pa.table(columns, names=[*wanted.names, _OP, _SEQ, _EPOCH])


def _is_own(field: pa.Field) -> bool:
    return bool(field.metadata) and FIELD_ID in field.metadata


def _default(batch: pa.RecordBatch, field: pa.Field, events: list[LogEvent]) -> pa.Array:
    for row in _defaults(events):
        for place, found in enumerate(row.schema):
            if found.metadata[FIELD_ID] == field.metadata[FIELD_ID]:
                return pa.repeat(row.column(place).cast(field.type)[0], batch.num_rows)
    return pa.nulls(batch.num_rows, field.type)


def _defaults(events: list[LogEvent]) -> Iterator[pa.RecordBatch]:
    for event in events:
        if event.kind == SCHEMA and event.detail["defaults"] is not None:
            yield pa.ipc.open_stream(base64.b64decode(event.detail["defaults"])).read_next_batch()
