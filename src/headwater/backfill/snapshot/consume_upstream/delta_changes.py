"""The change data feed of one version of a Delta table as net changes: one record for each key. Pure.

A version may tell that a row went and that one with its key came: an overwrite, a merge, a file written anew. Such two
are an update pair, or nothing where the rows are equal. The old row and the new one are found side by side after a sort
by vnode and key; nothing is done per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from headwater.backfill.snapshot.consume_upstream.errors import InvalidUpstream, KeyNotUnique
from headwater.backfill.snapshot.consume_upstream.upstream_table import VnodeRange
from headwater.log_store.columns import OP, VNODE
from headwater.sources.table import SourceTable
from headwater.stream import Op, vnodes_of
from headwater.versioned.key_positions import positions

CHANGE_TYPE = "_change_type"
_NEW = pa.array(["insert", "update_postimage"])

Mask = NDArray[np.bool_]


def in_vnodes(batch: pa.RecordBatch, table: SourceTable, count: int, vnodes: VnodeRange) -> pa.RecordBatch:
    """The rows of *batch* that are in *vnodes*, with the columns of *table*, then ``_vnode``.

    :raises InvalidUpstream: a key is null.
    """
    found = _with_vnodes(batch, table, count)
    return found if vnodes == (0, count) else found.filter(pa.array(_are_in(found, vnodes)))


def _with_vnodes(batch: pa.RecordBatch, table: SourceTable, count: int) -> pa.RecordBatch:
    found = _of_table(batch, table)
    for name in table.key_columns:
        if found.column(name).null_count:
            raise InvalidUpstream(
                f"Column {name!r} of the key of table {table.full_name} has nulls.",
                next_step="Name other columns with option 'key', or remove these rows.",
            )
    numbers = vnodes_of(found, table.key_columns, count)
    return found.append_column(pa.field(VNODE, pa.uint16(), False), numbers)


def _are_in(rows: pa.RecordBatch, vnodes: VnodeRange) -> Mask:
    numbers = rows.column(VNODE).to_numpy()
    mask: Mask = (numbers >= vnodes[0]) & (numbers < vnodes[1])
    return mask


def _of_table(batch: pa.RecordBatch, table: SourceTable) -> pa.RecordBatch:
    names = batch.schema.names
    arrays = [
        _cast(batch.column(field.name), field.type) if field.name in names else pa.nulls(batch.num_rows, field.type)
        for field in table.schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)


def _cast(values: Any, kind: pa.DataType) -> Any:
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    return values if values.type == kind else values.cast(kind)


def net_changes(
    batches: Iterable[pa.RecordBatch], table: SourceTable, count: int, vnodes: VnodeRange
) -> Iterator[pa.RecordBatch]:
    """The changes of one version in *vnodes*: the columns of *table*, then ``_op`` and ``_vnode``; by vnode and key.

    :raises KeyNotUnique: two rows that came, or two that went, have one key.
    """
    rows: list[pa.RecordBatch] = []
    news: list[Mask] = []
    for batch in batches:
        placed = _with_vnodes(batch, table, count)
        kept = _are_in(placed, vnodes)
        types = _cast(batch.column(CHANGE_TYPE), pa.string())
        rows.append(placed.filter(pa.array(kept)))
        news.append(pc.is_in(types, value_set=_NEW).to_numpy(zero_copy_only=False)[kept])
    if not rows:
        return
    whole = pa.concat_batches(rows)
    if not whole.num_rows:
        return
    is_new = np.concatenate(news)
    places = positions(whole, table.key_columns)
    keys = pa.table({"place": places, "new": pa.array(is_new.astype(np.int8))})
    order = pc.sort_indices(keys, sort_keys=[("place", "ascending"), ("new", "ascending")])
    whole, places, is_new = whole.take(order), places.take(order), is_new[order.to_numpy()]
    has_next = np.zeros(whole.num_rows, np.bool_)
    has_next[:-1] = pc.equal(places[:-1], places[1:]).to_numpy(zero_copy_only=False)
    _require_unique(has_next, is_new, table)
    first = np.flatnonzero(has_next)
    ops = np.where(is_new, np.int8(Op.INSERT), np.int8(Op.DELETE))
    ops[first], ops[first + 1] = Op.UPDATE_DELETE, Op.UPDATE_INSERT
    same = first[_equal(whole.take(pa.array(first)), whole.take(pa.array(first + 1)), table)]
    differs = np.ones(whole.num_rows, np.bool_)
    differs[same] = differs[same + 1] = False
    made = whole.drop_columns([VNODE])
    made = made.append_column(pa.field(OP, pa.int8(), False), pa.array(ops))
    made = made.append_column(pa.field(VNODE, pa.uint16(), False), whole.column(VNODE))
    made = made.filter(pa.array(differs)) if same.size else made
    if made.num_rows:
        yield made


def _require_unique(has_next: Mask, is_new: Mask, table: SourceTable) -> None:
    """Of neighbours with one key the first went and the second came."""
    pairs = np.flatnonzero(has_next)
    if (is_new[pairs] | ~is_new[pairs + 1]).any():
        raise KeyNotUnique(
            f"Two rows of table {table.full_name} have the same key ({', '.join(table.key_columns)}).",
            next_step="Name the columns that tell rows apart with option 'key', and begin anew.",
        )


def _equal(old: pa.RecordBatch, new: pa.RecordBatch, table: SourceTable) -> Mask:
    """Where two rows are the same; a column of a type that cannot be compared counts as changed."""
    same: Mask = np.ones(old.num_rows, np.bool_)
    for column in table.columns:
        left, right = old.column(column.name), new.column(column.name)
        if left.equals(right):
            continue
        try:
            found = pc.equal(left, right)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            return np.zeros(old.num_rows, np.bool_)
        nulls = pc.and_(left.is_null(), right.is_null())
        same &= pc.or_(pc.fill_null(found, False), nulls).to_numpy(zero_copy_only=False)
    return same
