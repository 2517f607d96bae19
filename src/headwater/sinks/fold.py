"""Fold: what the rows of a log come to for each key: the row as it is at the end, or that it is gone.

A column that ``_unavailable`` names is one whose value the source did not tell because it did not change. If an earlier
row of the same key in the same rows has it, it comes from there. Otherwise it stays unavailable: the sink keeps what it
has. After a delete of the key in these rows there is nothing to keep, and the value is null.

Nothing here runs Python per row; what is held is the folded rows and :data:`FOLD_BYTES` of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.log_store.columns import OP, valid_rows
from headwater.sinks.keys import KeySet, last_rows
from headwater.sinks.types import array_of, by_bytes
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.sources.unavailable import Mask, names_column, unavailable_names, unavailable_texts
from headwater.stream.op import Op

DELETED: Final = "_deleted"
FOLD_BYTES: Final = 64 << 20

_DELETED_FIELD = pa.field(DELETED, pa.bool_(), False)
_UNAVAILABLE_FIELD = pa.field(UNAVAILABLE_COLUMN, pa.string())


def folded_schema(own: pa.Schema) -> pa.Schema:
    """The columns of folded rows: the table's own, whether the row is gone, and what is not known of it."""
    return pa.schema([*own, _DELETED_FIELD, _UNAVAILABLE_FIELD])


def fold(table: SourceTable, batches: Iterable[pa.RecordBatch], truncated: tuple[int, int] | None = None) -> pa.Table:
    """One row per key, ordered by when it changed last.

    :param batches: rows of the table's log, in the order of the log for each key.
    :param truncated: rows before this epoch and seq are void.
    """
    names = table.schema.names
    state = _net(pa.schema([*table.schema, _op_field(), _UNAVAILABLE_FIELD]).empty_table(), table.key_columns)
    valid = (valid_rows(batch, truncated).select([*names, OP, UNAVAILABLE_COLUMN]) for batch in batches)
    for group in by_bytes(valid, FOLD_BYTES):
        state = _net(_joined(state, pa.Table.from_batches(group)), table.key_columns)
    deleted = pc.equal(state.column(OP), int(Op.DELETE))
    made = state.select(names).append_column(_DELETED_FIELD, deleted)
    return made.append_column(_UNAVAILABLE_FIELD, state.column(UNAVAILABLE_COLUMN))


def _op_field() -> pa.Field:
    return pa.field(OP, pa.int8(), False)


def _joined(state: pa.Table, rows: pa.Table) -> pa.Table:
    return pa.concat_tables([state, rows.cast(state.schema)]) if state.num_rows else rows.cast(state.schema)


def _net(rows: pa.Table, key_columns: Sequence[str]) -> pa.Table:
    """One row per key, its op ``DELETE`` or ``INSERT``, or ``UPDATE_INSERT`` where the sink may know more of it."""
    keys = KeySet(rows, key_columns)
    ops = array_of(rows.column(OP)).to_numpy()
    adds = (ops == Op.INSERT) | (ops == Op.UPDATE_INSERT)
    last = last_rows(keys.ids, keys.count)
    order = np.sort(last)
    is_there = adds[order]
    net = rows.take(pa.array(order))
    if rows.column(UNAVAILABLE_COLUMN).null_count < rows.num_rows:
        net = _completed(rows, net, keys, order, ops, adds)
    codes = np.where(is_there, np.int8(Op.UPDATE_INSERT), np.int8(Op.DELETE))
    return net.set_column(net.schema.get_field_index(OP), _op_field(), pa.array(codes, pa.int8()))


def _completed(
    rows: pa.Table, net: pa.Table, keys: KeySet, order: NDArray[np.int64], ops: NDArray[np.int8], adds: Mask
) -> pa.Table:
    """*net*, the last rows of the keys, with the values that earlier rows of their keys tell."""
    told = rows.column(UNAVAILABLE_COLUMN)
    ids = keys.ids[order]
    was_deleted = last_rows(keys.ids, keys.count, np.flatnonzero(ops == Op.DELETE))[ids]
    left: dict[str, Mask] = {}
    for name in unavailable_names(told, rows.schema.names):
        missing = names_column(told, name)
        known = last_rows(keys.ids, keys.count, np.flatnonzero(adds & ~missing))[ids]
        lacks = missing[order] & adds[order]
        fills = lacks & (known > was_deleted)
        sources = np.where(fills, known, order)
        place = net.schema.get_field_index(name)
        net = net.set_column(place, net.schema.field(place), rows.column(name).take(pa.array(sources)))
        left[name] = lacks & ~fills & (was_deleted < 0)
    place = net.schema.get_field_index(UNAVAILABLE_COLUMN)
    return net.set_column(place, _UNAVAILABLE_FIELD, unavailable_texts(left, net.num_rows))
