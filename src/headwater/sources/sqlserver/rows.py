"""Rows of a capture instance as rows of a log: positions, times, operations, and updates as pairs. Pure but for asking.

The function of an instance gives a row for each change, two for an update: the old row (3) and the new one (4). They
are a pair where they stand together and have one key; otherwise they are a delete and an insert, which is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.events import Changes
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.followed import Stretch
from headwater.sources.sqlserver.lsn import Lsn
from headwater.sources.sqlserver.offset import POSITION_TYPE, positions_of
from headwater.sources.sqlserver.server import Commit
from headwater.sources.sqlserver.ticks import Ticks
from headwater.sources.sqlserver.types import selected
from headwater.sources.sqlserver.values import column_of
from headwater.sources.unavailable import unavailable_texts
from headwater.stream import Op

BLOCK_ROWS: Final = 8_192
_OLD, _NEW = 3, 4
_OPS: Final = np.array([0, Op.DELETE, Op.INSERT, Op.UPDATE_DELETE, Op.UPDATE_INSERT], np.int8)
_LOG: Final = ("__$start_lsn", "__$seqval", "__$operation")


class Interval:
    """Some commits, and how many rows of each were told so far, over all tables."""

    def __init__(self, commits: Sequence[Commit]) -> None:
        self.commits = commits
        self._times = {commit.lsn: commit.time_us for commit in commits}
        self._told: dict[int, int] = {}

    @property
    def last(self) -> Lsn:
        return self.commits[-1].lsn

    def place(self, starts: pa.Array) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.int64]]:
        """Place, number in the commit, and time, for each row: *starts* are in order, as the server tells them."""
        encoded = starts.dictionary_encode()
        lsns = [Lsn.parse(value) for value in encoded.dictionary.to_pylist()]
        codes = encoded.indices.to_numpy().astype(np.int64)
        begins = np.searchsorted(codes, np.arange(len(lsns)))
        bases = np.array([self._told.get(lsn, 0) for lsn in lsns], np.int64)
        for lsn, count in zip(lsns, np.bincount(codes, minlength=len(lsns)), strict=True):
            self._told[lsn] = self._told.get(lsn, 0) + int(count)
        seq = np.arange(len(codes)) - begins[codes] + bases[codes]
        last = self.commits[-1].time_us
        places = np.array([lsn.place for lsn in lsns], np.uint64)[codes]
        times = np.array([self._times.get(lsn, last) for lsn in lsns], np.int64)[codes]
        return places, seq.astype(np.uint32), times


def read_stretch(session: Session, stretch: Stretch, interval: Interval, ticks: Ticks) -> Iterator[Changes]:
    """The rows of a stretch, a block at a time, no update in two blocks."""
    held: list[pa.Array] | None = None
    for block in session.columns(statement_of(stretch), BLOCK_ROWS):
        if held is not None:
            block = [_joined(one, other) for one, other in zip(held, block, strict=True)]
            held = None
        last = len(block[2]) - 1
        if block[2][last].as_py() == _OLD:
            held = [column.slice(last) for column in block]
            block = [column.slice(0, last) for column in block]
        if len(block[2]):
            yield changes_of(stretch, block, interval, ticks)
    if held is not None:
        yield changes_of(stretch, held, interval, ticks)


def _joined(one: pa.Array, other: pa.Array) -> pa.Array:
    """Two parts of a column; of one that is null throughout, the library's rows tell no type."""
    if pa.types.is_null(one.type):
        one = one.cast(other.type)
    elif pa.types.is_null(other.type):
        other = other.cast(one.type)
    return pa.concat_arrays([one, other])


def statement_of(stretch: Stretch) -> str:
    """What asks for the rows of a stretch, in the order of the changes."""
    columns = ", ".join(f"{selected(column)} AS [c{place}]" for place, column in enumerate(stretch.columns))
    log = ", ".join(f"[{name}]" for name in _LOG)
    return (
        f"SELECT {log}, {columns} FROM {stretch.instance.function}({stretch.first.hex}, {stretch.last.hex},"
        f" N'all update old') ORDER BY {log}"
    )


def changes_of(stretch: Stretch, told: Sequence[pa.Array], interval: Interval, ticks: Ticks) -> Changes:
    """The columns that the server tells, as rows of the captured table's log."""
    table = stretch.projection.table
    start_lsns, changes, operations, *values = told
    rows = len(start_lsns)
    columns = [column_of(table, column, given, ticks) for column, given in zip(stretch.columns, values, strict=True)]
    projected = stretch.projection.apply(columns, rows)
    ops = operations.to_numpy(zero_copy_only=False).astype(np.int8)
    keys = [projected[place] for place in table.key_places]
    made_ops = ops_of(ops, start_lsns, changes, keys)
    places, seq, times = interval.place(start_lsns)
    missing = {name: np.ones(rows, np.bool_) for name in stretch.missing}
    batch = pa.RecordBatch.from_arrays(
        [
            *projected,
            positions_of(places, seq),
            pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), rows, [None, pa.py_buffer(times)]),
            unavailable_texts(missing, rows),
        ],
        schema=table.log_schema(POSITION_TYPE),
    )
    return Changes(table, batch, pa.array(made_ops))


def ops_of(
    operations: NDArray[np.int8], starts: pa.Array, changes: pa.Array, keys: Sequence[pa.Array]
) -> NDArray[np.int8]:
    """The op of each row; halves of an update that do not stand together, or whose key changed, stand alone."""
    ops: NDArray[np.int8] = _OPS[operations]
    if len(operations) < 1:
        return ops
    pairs = (operations[:-1] == _OLD) & (operations[1:] == _NEW)
    if pairs.any():
        for column in (starts, changes, *keys):
            same = pc.equal(column.slice(0, len(column) - 1), column.slice(1)).fill_null(False)
            pairs &= same.to_numpy(zero_copy_only=False)
    opens, closes = np.append(pairs, False), np.append(False, pairs)
    ops[(operations == _OLD) & ~opens] = Op.DELETE
    ops[(operations == _NEW) & ~closes] = Op.INSERT
    return ops
