"""Compaction: what the changes of a chunk, or of the chunks of one epoch, come to for each key.

=================================  ===================================  ============================================
the first row of a key             the last row adds                    the last row removes
=================================  ===================================  ============================================
an insert                          an insert of the last row            nothing (a delete, if vanished keys are kept)
an update that tells no old row    such an update with the last row     a delete of the last row
one that removes                   an update pair of first and last     a delete of the first row
=================================  ===================================  ============================================

A row removes if its op is a delete or the old half of an update, and adds otherwise. So insert and update are an
insert, delete and insert are an update, and an update that changes the key is a delete of one key and an insert of
another. An update pair is kept whole or turned into a delete and an insert, never cut. Both halves of a pair have the
vnode of the new row: the old row may have had another where rows are compacted by another key than the log's.

Nothing here runs Python per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.stream.chunk import Chunk
from headwater.stream.errors import KeyColumnError
from headwater.stream.key_column import key_column, plain
from headwater.stream.op import Op
from headwater.stream.vnode import key_columns_of, uint16_array

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


def compact(
    chunks: Chunk | Iterable[Chunk],
    key_columns: Sequence[str],
    *,
    keep_unchanged: bool = False,
    keep_vanished: bool = False,
    deletes_first: bool = False,
) -> Chunk:
    """The net change of each key, ordered by the last row of the key.

    :param chunks: one chunk, or the chunks of one epoch in their order.
    :param keep_unchanged: keep an update whose old and new row are the same. A nested column counts as changed.
    :param keep_vanished: leave a delete for a key that came and went. With *keep_unchanged* it makes the result right
        also for a stream that may tell a change twice, as one that overlaps a snapshot does.
    :param deletes_first: deletes before update pairs and inserts.
    :raises ChunkError: no chunk, or chunks with different schemas.
    :raises KeyColumnError: no key column, an unknown one, or one of a type that has no vnode.
    """
    chunk = chunks if isinstance(chunks, Chunk) else Chunk.concat(chunks)
    ids, count = _key_ids(chunk.rows, key_columns)
    codes = chunk.ops.to_numpy()
    adds, lone = _adds(codes), lone_updates(codes)
    if count == chunk.num_rows and codes.max(initial=0) <= Op.DELETE and not (deletes_first and not adds.all()):
        return chunk
    rows = np.arange(chunk.num_rows)
    first, last = np.full(count, chunk.num_rows), np.zeros(count, np.int64)
    np.minimum.at(first, ids, rows)
    np.maximum.at(last, ids, rows)
    was_told, is_there = ~adds[first], adds[last]
    kept = was_told | lone[first] | is_there | keep_vanished
    if not keep_unchanged:
        pairs = np.flatnonzero(was_told & is_there)
        kept[pairs[_unchanged(chunk.rows, first[pairs], last[pairs])]] = False
    order = last - np.where(is_there, 0, chunk.num_rows) if deletes_first else last
    keys = np.flatnonzero(kept)
    keys = keys[np.argsort(order[keys])]
    added = np.where(lone[first], np.int8(Op.UPDATE_INSERT), np.int8(Op.INSERT))
    return _net(chunk, first[keys], last[keys], was_told[keys], np.where(is_there, added, Op.DELETE)[keys])


def deletes_before_inserts(chunk: Chunk) -> Chunk:
    """Everything that removes, then everything that adds, each in the order of *chunk*; an update pair becomes both."""
    if chunk.is_inserts_only:
        return chunk
    codes = chunk.ops.to_numpy()
    adds, lone = _adds(codes), lone_updates(codes)
    ops = np.where(lone, np.int8(Op.UPDATE_INSERT), np.where(adds, np.int8(Op.INSERT), np.int8(Op.DELETE)))
    order = np.argsort(adds, kind="stable")
    return _with_ops(chunk._take(order), ops[order])


def force_append_only(chunk: Chunk) -> Chunk:
    """The rows that add, as inserts: deletes and the old halves of updates are left out."""
    if chunk.is_inserts_only:
        return chunk
    places = np.flatnonzero(_adds(chunk.ops.to_numpy()))
    return _with_ops(chunk._take(places), np.full(places.size, Op.INSERT, np.int8))


def lone_updates(codes: NDArray[np.int8]) -> Mask:
    """Where the ops of a chunk have the new row of an update without its old row."""
    found: Mask = codes == Op.UPDATE_INSERT
    found[1:] &= codes[:-1] != Op.UPDATE_DELETE
    return found


def _net(chunk: Chunk, first: I64, last: I64, was_told: Mask, ops: NDArray[np.int8]) -> Chunk:
    """One change for each key, in the order in which they are given; *ops* of a pair is that of an insert."""
    is_there = ops != Op.DELETE
    is_pair = was_told & is_there
    ends = np.cumsum(np.where(is_pair, 2, 1))
    places = np.empty(int(ends[-1]) if ends.size else 0, np.int64)
    codes = np.empty(places.size, np.int8)
    places[ends - 1] = np.where(was_told & ~is_there, first, last)
    codes[ends - 1] = np.where(is_pair, np.int8(Op.UPDATE_INSERT), ops)
    places[ends[is_pair] - 2] = first[is_pair]
    codes[ends[is_pair] - 2] = Op.UPDATE_DELETE
    vnodes = chunk.vnodes.to_numpy()[places]
    vnodes[ends[is_pair] - 2] = vnodes[ends[is_pair] - 1]
    return Chunk(chunk._take(places).rows, pa.array(codes, pa.int8()), uint16_array(vnodes))


def _with_ops(chunk: Chunk, codes: NDArray[np.int8]) -> Chunk:
    return Chunk(chunk.rows, pa.array(codes, pa.int8()), chunk.vnodes)


def _adds(codes: NDArray[np.int8]) -> Mask:
    found: Mask = (codes == Op.INSERT) | (codes == Op.UPDATE_INSERT)
    return found


def _key_ids(rows: pa.RecordBatch, key_columns: Sequence[str]) -> tuple[I64, int]:
    """A number from 0 for each row, the same for rows of the same key, and how many keys there are."""
    ids: I64 | None = None
    count = 0
    for name, column in key_columns_of(rows, key_columns).items():
        encoded = _encode(column, name)
        own = encoded.indices.to_numpy().astype(np.int64)
        if ids is None:
            ids, count = own, len(encoded.dictionary)
            continue
        both = pa.array(ids * max(len(encoded.dictionary), 1) + own).dictionary_encode()
        ids, count = both.indices.to_numpy().astype(np.int64), len(both.dictionary)
    if ids is None:
        raise KeyColumnError("Received no key column.", column="", next_step="Name the columns to compact by.")
    return ids, count


def _encode(column: Any, name: str) -> Any:
    """Dictionary-encoded by value: null is a value, NaN is NaN, -0.0 is 0.0."""
    values = plain(column)
    kind = values.type
    if pa.types.is_floating(kind):
        values = pc.add(values.cast(pa.float64()), 0.0)
    elif pa.types.is_decimal(kind) and kind.bit_width < 128:
        values = values.cast(pa.decimal128(kind.precision, kind.scale))
    try:
        return values.dictionary_encode(null_encoding="encode")
    except pa.ArrowNotImplementedError:
        key_column(column, name)  # which says what is wrong
        raise


def _unchanged(rows: pa.RecordBatch, old: I64, new: I64) -> Mask:
    """For each pair of places, whether all columns have the same value there."""
    same = np.ones(old.size, np.bool_)
    for column in rows.columns:
        left = np.flatnonzero(same)
        if not left.size:
            break
        same[left] = _same(column, old[left], new[left])
    return same


def _same(column: Any, old: I64, new: I64) -> Mask:
    values = plain(column)
    if pa.types.is_floating(values.type):
        # By their bits: NaN stays NaN, and 0.0 is another value than -0.0.
        width = values.type.bit_width
        values = values.view({16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[width])
    if pa.types.is_null(values.type):
        return np.ones(old.size, np.bool_)
    was, now = values.take(pa.array(old)), values.take(pa.array(new))
    try:
        equal = pc.equal(was, now)
    except pa.ArrowNotImplementedError:
        return np.zeros(old.size, np.bool_)
    if equal.null_count:
        equal = pc.or_(pc.fill_null(equal, False), pc.and_(was.is_null(), now.is_null()))
    found: Mask = equal.to_numpy(zero_copy_only=False)
    return found
