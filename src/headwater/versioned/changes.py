"""Net changes: what became of rows, from how they were and how they are. Pure, nothing per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log_store.columns import OP, VNODE
from headwater.stream.op import Op
from headwater.versioned.merge import place_of
from headwater.versioned.net_rows import KIND, ROW, VNODE_FIELD, Piece, merge

_OP_FIELD = pa.field(OP, pa.int8(), False)


def changes_schema(own: pa.Schema, columns: Sequence[str] | None = None) -> pa.Schema:
    """The columns of net changes."""
    fields = own if columns is None else [own.field(name) for name in columns]
    return pa.schema([*fields, _OP_FIELD, VNODE_FIELD])


def paired(old: Iterator[Piece], fresh: Piece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The net changes that *fresh*, net rows of a range of epochs, makes of the *old* rows of before.

    :param old: whole rows in order; those that *fresh* does not have are deleted.
    """
    done = 0
    for piece in old:
        upto = place_of(fresh.positions, piece.positions[-1].as_py() + b"\x00")
        yield _changes(piece, fresh.slice(done, upto), schema)
        done = upto
    if done < len(fresh):
        yield _changes(None, fresh.slice(done, len(fresh)), schema)


def _changes(old: Piece | None, fresh: Piece, schema: pa.Schema) -> pa.RecordBatch:
    names = [*schema.names[:-2], VNODE]
    if old is None or not len(old):
        there = _inserts(fresh)
        return _with_ops(there.select(names), np.full(there.num_rows, Op.INSERT, np.int8), schema)
    before = _numbers(old.positions, fresh.positions)
    full = _completed(old, fresh, before)
    is_there = full.rows.column(KIND).to_numpy() == ROW
    known = before >= 0
    is_updated = np.zeros(len(old), np.bool_)
    is_updated[known] = is_there[before[known]]
    old_ops = np.where(is_updated, np.int8(Op.UPDATE_DELETE), np.int8(Op.DELETE))
    was_there = np.zeros(len(fresh), np.bool_)
    was_there[before[known]] = True
    new_ops = np.where(was_there, np.int8(Op.UPDATE_INSERT), np.int8(Op.INSERT))
    chosen = np.flatnonzero(is_there)
    rows = pa.concat_batches([old.rows.select(names), full.rows.take(pa.array(chosen)).select(names)])
    places = pa.concat_arrays([old.positions, fresh.positions.take(pa.array(chosen))])
    ops = np.concatenate((old_ops, new_ops[chosen]))
    order = pc.array_sort_indices(places)  # stable: the old row of an update comes first
    return _with_ops(rows.take(order), ops[order.to_numpy()], schema)


def _completed(old: Piece, fresh: Piece, before: Any) -> Piece:
    """*fresh* with the values that it does not tell from *old*."""
    is_known = before >= 0
    older = Piece(old.rows.filter(pa.array(is_known)), old.positions.filter(pa.array(is_known)))
    return merge([older, fresh]) if len(older) else fresh


def _inserts(fresh: Piece) -> pa.RecordBatch:
    return fresh.rows.filter(pc.equal(fresh.rows.column(KIND), ROW))


def _numbers(places: pa.BinaryArray, among: pa.BinaryArray) -> Any:
    """For each of *places* its number *among* others; -1 where it is none of them."""
    return pc.fill_null(pc.index_in(places, value_set=among), -1).to_numpy()


def _with_ops(rows: pa.RecordBatch, ops: Any, schema: pa.Schema) -> pa.RecordBatch:
    columns = [*rows.columns[:-1], pa.array(ops, pa.int8()), rows.columns[-1]]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
