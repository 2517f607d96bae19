"""Difference of two results, old and new: the changes that make the one the other, as rows of a log. Pure.

What comes is both results in one stream, ordered by key and then old before new (:data:`SIDE`), as a sort of Spark
gives it. A key that only the old one has is deleted, one that only the new one has is inserted, and one whose values
differ is updated; equal rows make nothing. What is held is one batch and the last key of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.derive.errors import KeyNotUnique
from headwater.log_store.columns import read_schema
from headwater.sinks.keys import same_rows
from headwater.sources.table import SourceTable
from headwater.stream.epoch import ORIGIN_UNIX_MS, PHYSICAL_SHIFT
from headwater.stream.op import Op

SIDE: Final = "_side"
OLD, NEW = 0, 1
POSITION: Final = pa.binary(16)

I64 = NDArray[np.int64]


def differences(table: SourceTable, batches: Iterable[pa.RecordBatch], epoch: int) -> Iterator[pa.RecordBatch]:
    """The changes of *epoch*, as the log of *table* would have them.

    :param batches: rows of the table's columns, and :data:`SIDE`.
    :raises KeyNotUnique: a result has a key twice.
    """
    names = table.schema.names
    held: pa.Table | None = None
    seq = 0
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        whole = rows if held is None else pa.concat_tables([held, rows])
        if not whole.num_rows:
            continue
        starts = _starts(whole, table.key_columns)
        done = int(starts[-1])
        held = whole.slice(done)
        if done:
            made = _changes(table, whole.slice(0, done), starts[:-1], names, epoch, seq)
            seq += made.num_rows
            yield made
        elif held.num_rows > 2:
            raise _not_unique(table)
    if held is not None and held.num_rows:
        yield _changes(table, held, np.zeros(1, np.int64), names, epoch, seq)


def logged(table: SourceTable, rows: pa.Table, ops: NDArray[np.int8], epoch: int, first_seq: int) -> pa.RecordBatch:
    """*rows* of *table* with the columns that its log adds."""
    count = rows.num_rows
    time = pa.scalar(time_us(epoch), pa.timestamp("us", tz="UTC"))
    columns: list[Any] = [_array(rows.column(name)).cast(table.column(name).type) for name in table.schema.names]
    columns += [
        pa.repeat(pa.scalar(position_of(epoch), POSITION), count),
        pa.repeat(time, count),
        pa.nulls(count, pa.string()),
        pa.array(ops, pa.int8()),
        pa.array(np.zeros(count, np.uint16)),
        pa.array(np.arange(first_seq, first_seq + count, dtype=np.uint32)),
        pa.array(np.full(count, epoch, np.uint64)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=read_schema(table.log_schema(POSITION)))


def position_of(epoch: int) -> bytes:
    """The position of a derived row: its epoch."""
    return epoch.to_bytes(8, "big") + bytes(8)


def time_us(epoch: int) -> int:
    """When *epoch* was, in microseconds since 1970."""
    return ((epoch >> PHYSICAL_SHIFT) + ORIGIN_UNIX_MS) * 1000


def _starts(rows: pa.Table, key_columns: Sequence[str]) -> I64:
    """Where a row begins another key than the row before."""
    if rows.num_rows == 1:
        return np.zeros(1, np.int64)
    same = same_rows(rows.slice(0, rows.num_rows - 1), rows.slice(1), key_columns)
    return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(~same).astype(np.int64) + 1])


def _changes(
    table: SourceTable, rows: pa.Table, starts: I64, names: Sequence[str], epoch: int, seq: int
) -> pa.RecordBatch:
    sizes = np.diff(np.append(starts, rows.num_rows))
    sides = _array(rows.column(SIDE)).to_numpy()
    pairs = starts[sizes == 2]
    if (sizes > 2).any() or (sides[pairs] != OLD).any() or (sides[pairs + 1] != NEW).any():
        raise _not_unique(table)
    ops = np.where(sides == OLD, np.int8(Op.DELETE), np.int8(Op.INSERT))
    ops[pairs], ops[pairs + 1] = Op.UPDATE_DELETE, Op.UPDATE_INSERT
    stays = np.ones(rows.num_rows, np.bool_)
    if pairs.size:
        same = same_rows(rows.take(pa.array(pairs)), rows.take(pa.array(pairs + 1)), names)
        stays[pairs[same]] = stays[pairs[same] + 1] = False
    left = np.flatnonzero(stays)
    return logged(table, rows.take(pa.array(left)), ops[left], epoch, seq)


def _not_unique(table: SourceTable) -> KeyNotUnique:
    return KeyNotUnique(
        f"The function of {table.full_name} gave two rows with one value of {', '.join(table.key_columns)}.",
        next_step="Name the columns that make a row of its result unique in key, or group by them in the function.",
    )


def _array(values: Any) -> Any:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
