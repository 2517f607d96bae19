"""Rows of a capture instance as rows of a log: positions, times, operations, and updates as pairs. Pure but for asking.

A change table has a row for each change, two for an update: the old row (3) and the new one (4). They are a pair where
they stand together and have one key; otherwise they are a delete and an insert, which is the same. Long values are not
in every old row: those that did not change are taken from the new row, others are named in ``_unavailable``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.errors import RefusedValue, SchemaStopped
from headwater.sources.events import Changes
from headwater.sources.special_values import told_before
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.followed import Stretch
from headwater.sources.sqlserver.lsn import Lsn
from headwater.sources.sqlserver.offset import POSITION_TYPE, positions_of
from headwater.sources.sqlserver.server import Commit
from headwater.sources.sqlserver.ticks import Ticks
from headwater.sources.sqlserver.types import SqlType, selected
from headwater.sources.sqlserver.values import broken_texts_named, column_of, forgiven_texts
from headwater.sources.table import SourceColumn, SpecialValues
from headwater.sources.unavailable import Mask, unavailable_texts, with_parked
from headwater.stream import Op

BLOCK_ROWS: Final = 8_192
_DELETED, _OLD, _NEW = 1, 3, 4
_OPS: Final = np.array([0, Op.DELETE, Op.INSERT, Op.UPDATE_DELETE, Op.UPDATE_INSERT], np.int8)
_NEVER_OLD: Final = ("text", "ntext", "image")
"""Change tables have none of their old values."""
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
    """The rows of a stretch, a block at a time, no update in two blocks.

    :raises SpecialValue: see :mod:`.values`.
    """
    table = stretch.projection.table
    asked = [*(None for _ in _LOG), *stretch.columns]
    held: list[pa.Array] | None = None
    with broken_texts_named(table, asked):
        for block in session.columns(statement_of(stretch), BLOCK_ROWS, forgiven_texts(table, asked)):
            if held is not None:
                block = [_joined(one, other) for one, other in zip(held, block, strict=True)]
                held = None
            last = len(block[2]) - 1
            if block[2][last].as_py() == _OLD:
                held = [column.slice(last) for column in block]
                block = [column.slice(0, last) for column in block]
            if len(block[2]):
                yield from _told(stretch, block, interval, ticks)
    if held is not None:
        yield from _told(stretch, held, interval, ticks)


def _told(stretch: Stretch, block: list[pa.Array], interval: Interval, ticks: Ticks) -> Iterator[Changes]:
    """The rows of *block*. :raises SpecialValue: after those of the commits before it."""

    def changes(end: int) -> Changes:
        return changes_of(stretch, [column.slice(0, end) for column in block], interval, ticks)

    try:
        yield changes(len(block[0]))
    except (RefusedValue, SchemaStopped):
        end = told_before([0, *(np.flatnonzero(~_same(block[0])) + 1).tolist()], changes)
        if end:
            yield changes(end)
        raise


def _joined(one: pa.Array, other: pa.Array) -> pa.Array:
    """Two parts of a column; of one that is null throughout, the library's rows tell no type."""
    if pa.types.is_null(one.type):
        one = one.cast(other.type)
    elif pa.types.is_null(other.type):
        other = other.cast(one.type)
    return pa.concat_arrays([one, other])


def statement_of(stretch: Stretch) -> str:
    """What asks for the rows of a stretch, in the order of the changes."""
    asked = [f"[{name}]" for name in _LOG]
    asked += [f"{selected(column)} AS [c{place}]" for place, column in enumerate(stretch.columns)]
    ordinals = {column.number: ordinal for ordinal, column in enumerate(stretch.instance.columns, 1)}
    asked += [
        f"sys.fn_cdc_is_bit_set({ordinals[column.field_id]}, [__$update_mask]) AS [m{place}]"
        for place, column in _long(stretch)
    ]
    # the number of a change alone may have the insert of an update before its delete
    order = ("__$start_lsn", *(["__$command_id"] if stretch.instance.has_commands else []), *_LOG[1:])
    return (
        f"SELECT {', '.join(asked)} FROM {stretch.instance.between(stretch.first, stretch.last)}"
        f" ORDER BY {', '.join(f'[{name}]' for name in order)}"
    )


def _is_long(column: SourceColumn) -> bool:
    kind = SqlType.parse(column.source_type)
    return kind.size < 0 or kind.name in ("xml", "json", *_NEVER_OLD)


def _long(stretch: Stretch) -> list[tuple[int, SourceColumn]]:
    return [(place, column) for place, column in enumerate(stretch.columns) if _is_long(column)]


def _with_long_values(
    stretch: Stretch, columns: list[pa.Array], are_set: Sequence[pa.Array], operations: NDArray[np.int8], same: Mask
) -> dict[str, Mask]:
    """Put what did not change into old rows of *columns*; what they lack then, by name.

    :param same: for each row, whether the next one is of the same change.
    """
    names = {column.field_id: column.name for column in stretch.projection.table.columns if not column.dropped}
    paired = (operations == _OLD) & same & (np.append(operations[1:], 0) == _NEW)
    missing: dict[str, Mask] = {}
    for (place, column), is_set in zip(_long(stretch), are_set, strict=True):
        is_null = columns[place].is_null().to_numpy(zero_copy_only=False)
        was_set = is_set.cast(pa.bool_()).fill_null(True).to_numpy(zero_copy_only=False)
        copied = paired & is_null & ~was_set
        lacks = (operations == _OLD) & is_null & ~copied
        if SqlType.parse(column.source_type).name in _NEVER_OLD:
            lacks |= (operations == _DELETED) & is_null
        else:
            lacks &= ~was_set
        if copied.any():
            columns[place] = columns[place].take(pa.array(np.arange(len(operations)) + copied))
        if lacks.any() and column.field_id in names:
            missing[names[column.field_id]] = lacks
    return missing


def changes_of(stretch: Stretch, told: Sequence[pa.Array], interval: Interval, ticks: Ticks) -> Changes:
    """The columns that the server tells, as rows of the captured table's log."""
    table = stretch.projection.table
    start_lsns, changes, operations, *values = told
    are_set = values[len(stretch.columns) :]
    del values[len(stretch.columns) :]
    rows = len(start_lsns)
    columns = [column_of(table, column, given, ticks) for column, given in zip(stretch.columns, values, strict=True)]
    ops = operations.to_numpy(zero_copy_only=False).astype(np.int8)
    parked = {
        column.name: (ops != _DELETED)
        & (ops != _OLD)
        & pc.and_(made.is_null(), given.is_valid()).to_numpy(zero_copy_only=False)
        for column, made, given in zip(stretch.columns, columns, values, strict=True)
        if column.special_values is SpecialValues.PARK
    }
    missing = {name: np.ones(rows, np.bool_) for name in stretch.missing}
    if are_set:
        same = np.append(_same(start_lsns) & _same(changes), False)
        missing |= _with_long_values(stretch, columns, are_set, ops, same)
    projected = stretch.projection.apply(columns, rows)
    keys = [projected[place] for place in table.key_places]
    made_ops = ops_of(ops, start_lsns, changes, keys)
    places, seq, times = interval.place(start_lsns)
    batch = pa.RecordBatch.from_arrays(
        [
            *projected,
            positions_of(places, seq),
            pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), rows, [None, pa.py_buffer(times)]),
            with_parked(unavailable_texts(missing, rows), parked),
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
            pairs &= _same(column)
    opens, closes = np.append(pairs, False), np.append(False, pairs)
    ops[(operations == _OLD) & ~opens] = Op.DELETE
    ops[(operations == _NEW) & ~closes] = Op.INSERT
    return ops


def _same(column: pa.Array) -> Mask:
    """For each value but the last, whether the next one is the same."""
    same = pc.equal(column.slice(0, len(column) - 1), column.slice(1)).fill_null(False)
    made: Mask = same.to_numpy(zero_copy_only=False)
    return made
