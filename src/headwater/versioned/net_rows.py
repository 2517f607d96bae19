"""Net rows: what rows of several ages come to for each key. Pure, nothing per row.

A row is of one of three kinds: ``ROW``, the row as it is; ``GONE``, there is none; ``PATCH``, values for a row if there
is one. (``OLD`` is one more on the way: the old row of an update, which counts as gone unless the new one follows it
right away.) A column that ``_unavailable`` names has no value of its own: it keeps that of the next older row of its
key that has one. Where none is known yet the name stays, and an older run tells; after a delete there is nothing to
keep.

A :class:`Piece` is rows with the columns of their table, then ``_vnode``, ``_kind`` and ``_unavailable``, sorted by
position, one for each key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.log_store.columns import OP, VNODE
from headwater.sources.table import UNAVAILABLE_COLUMN
from headwater.sources.unavailable import Mask, names_column, unavailable_names, unavailable_texts
from headwater.stream.op import Op
from headwater.versioned.fitting import fitted_names
from headwater.versioned.key_positions import positions

KIND: Final = "_kind"
ROW, GONE, PATCH, OLD = 0, 1, 2, 3

VNODE_FIELD: Final = pa.field(VNODE, pa.uint16(), False)
KIND_FIELD: Final = pa.field(KIND, pa.int8(), False)
UNAVAILABLE_FIELD: Final = pa.field(UNAVAILABLE_COLUMN, pa.string())
MARKS: Final = (VNODE, KIND, UNAVAILABLE_COLUMN)

_KINDS = np.full(8, GONE, np.int8)
_KINDS[[Op.INSERT, Op.UPDATE_INSERT]] = ROW
_KINDS[Op.UPDATE_DELETE] = OLD

I64 = NDArray[np.int64]


def piece_schema(own: pa.Schema) -> pa.Schema:
    """The columns of a piece of a table with the columns *own*."""
    return pa.schema([*own, VNODE_FIELD, KIND_FIELD, UNAVAILABLE_FIELD])


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and their positions, in order; one row for each position."""

    rows: pa.RecordBatch
    positions: pa.BinaryArray

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def slice(self, start: int, stop: int) -> Piece:
        return Piece(self.rows.slice(start, stop - start), self.positions.slice(start, stop - start))

    def finished(self) -> pa.RecordBatch:
        """The rows that are there, if there are no older ones; their columns are as before."""
        kinds = self.rows.column(KIND)
        if pc.max(kinds).as_py() in (None, ROW):
            return self.rows
        return self.rows.filter(pc.equal(kinds, ROW))


def of_rows(rows: pa.RecordBatch, vnodes: Any, kind: int, unavailable: str | None = None) -> pa.RecordBatch:
    """*rows* with the columns of a piece, in any order."""
    count = rows.num_rows
    marks = [
        vnodes,
        pa.array(np.full(count, kind, np.int8)),
        pa.nulls(count, pa.string()) if unavailable is None else pa.repeat(pa.scalar(unavailable), count),
    ]
    return pa.RecordBatch.from_arrays([*rows.columns, *marks], schema=piece_schema(rows.schema))


def of_log(batch: pa.RecordBatch, own: Sequence[pa.Array], schema: pa.Schema, vnodes: Any) -> pa.RecordBatch:
    """Rows of a log with the columns of a piece, in their order; *own* are the table's columns of them."""
    kinds = _KINDS[batch.column(OP).to_numpy()]
    marks = [vnodes, pa.array(kinds), fitted_names(batch.column(UNAVAILABLE_COLUMN), batch.schema, schema)]
    return pa.RecordBatch.from_arrays([*own, *marks], schema=piece_schema(schema))


def net(batches: Iterable[pa.RecordBatch], key_columns: Sequence[str], schema: pa.Schema) -> Piece:
    """The piece that *batches* with the columns of a piece come to: later rows of a key are newer."""
    rows = _whole(list(batches), piece_schema(schema))
    return sorted_net(_without_old(Piece(rows, positions(rows, key_columns))))


def _without_old(rows: Piece) -> Piece:
    """Of update pairs the new rows alone; an old row whose new one has another key is gone."""
    kinds = rows.rows.column(KIND).to_numpy()
    old = np.flatnonzero(kinds == OLD)
    if not old.size:
        return rows
    following = np.minimum(old + 1, len(rows) - 1)
    is_same = pc.equal(rows.positions.take(pa.array(old)), rows.positions.take(pa.array(following)))
    paired = is_same.to_numpy(zero_copy_only=False) & (kinds[following] == ROW)
    left = np.ones(len(rows), np.bool_)
    left[old[paired]] = False
    made = np.where(kinds == OLD, np.int8(GONE), kinds)
    place = rows.rows.schema.get_field_index(KIND)
    changed = rows.rows.set_column(place, KIND_FIELD, pa.array(made))
    mask = pa.array(left)
    return Piece(changed.filter(mask), rows.positions.filter(mask))


def merge(pieces: Sequence[Piece]) -> Piece:
    """Pieces, the oldest first, as one."""
    if len(pieces) == 1:
        return pieces[0]
    rows = _whole([piece.rows for piece in pieces], pieces[0].rows.schema)
    return sorted_net(Piece(rows, pa.concat_arrays([piece.positions for piece in pieces])))


def sorted_net(unsorted: Piece) -> Piece:
    """Sort, and keep one row for each key; of those of one key the last is the newest."""
    rows = unsorted.rows
    if not len(unsorted):
        return unsorted
    order: I64 = pc.array_sort_indices(unsorted.positions).to_numpy().astype(np.int64)
    places = unsorted.positions.take(pa.array(order))
    is_last = np.ones(order.size, np.bool_)
    is_last[:-1] = pc.not_equal(places[:-1], places[1:]).to_numpy(zero_copy_only=False)
    if not is_last.all():
        kept = order[is_last]
        places = places.filter(pa.array(is_last))
    else:
        kept = order
    is_untold = rows.column(UNAVAILABLE_COLUMN).null_count < rows.num_rows
    has_patch = bool(pc.any(pc.equal(rows.column(KIND), PATCH)).as_py())
    made = rows.take(pa.array(kept))
    if not is_last.all() and (is_untold or has_patch):
        made = _completed(rows, made, order, is_last)
    return Piece(made, places)


def _completed(rows: pa.RecordBatch, newest: pa.RecordBatch, order: I64, is_last: Mask) -> pa.RecordBatch:
    """*newest*, the last rows of their keys, with what the older rows of their keys tell."""
    kinds = rows.column(KIND).to_numpy()[order]
    told = rows.column(UNAVAILABLE_COLUMN).take(pa.array(order))
    last = np.flatnonzero(is_last)
    first = np.concatenate(([0], last[:-1] + 1))
    deleted = _last_before(kinds == GONE, last, first)
    there = _last_before(kinds == ROW, last, first)
    is_patch = kinds[last] == PATCH
    lives = is_patch & (there > deleted)
    dies = is_patch & (deleted > there)
    made_kinds = np.where(lives, ROW, np.where(dies, GONE, kinds[last])).astype(np.int8)
    columns = list(newest.columns)
    untold: dict[str, Mask] = {}
    for name in unavailable_names(told, [one for one in rows.schema.names if one not in MARKS]):
        place = rows.schema.get_field_index(name)
        missing = names_column(told, name)
        known = _last_before((kinds != GONE) & ~missing, last, first)
        lacks = missing[last] & (kinds[last] != GONE)
        fills = lacks & (known > deleted)
        sources = np.where(fills, order[np.maximum(known, 0)], order[last])
        columns[place] = rows.column(place).take(pa.array(sources))
        untold[name] = lacks & ~fills & (deleted < 0)
    columns[-2] = pa.array(made_kinds)
    columns[-1] = unavailable_texts(untold, last.size)
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _last_before(chosen: Mask, last: I64, first: I64) -> I64:
    """For each group of neighbours from *first* to *last*: the place of its last chosen row; -1 where there is none."""
    places = np.maximum.accumulate(np.where(chosen, np.arange(chosen.size), -1))[last]
    made: I64 = np.where(places >= first, places, -1)
    return made


def _whole(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
    return pa.concat_batches(batches)
