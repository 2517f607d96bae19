"""Keys: which rows have the same key, and which values are the same. Pure; exact: by value, not by hash.

Null is a value, NaN is NaN and -0.0 is 0.0. Nothing here runs Python per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from headwater.sinks.types import array_of

I64 = NDArray[np.int64]


class KeySet:
    """The distinct keys of *rows*, numbered from 0.

    :ivar ids: the number of each row's key. :ivar count: how many keys there are.
    """

    def __init__(self, rows: pa.Table | pa.RecordBatch, key_columns: Sequence[str]) -> None:
        self._names = tuple(key_columns)
        self._values: list[Any] = []
        self._codes: list[Any] = []
        ids: I64 | None = None
        for name in self._names:
            values = _comparable(rows.column(name))
            distinct = pc.unique(values)
            own = _numbers(values, distinct)
            if ids is None:
                ids = own
            else:
                both = pa.array(ids * max(len(distinct), 1) + own)
                codes = pc.unique(both)
                ids = _numbers(both, codes)
                self._codes.append(codes)
            self._values.append(distinct)
        assert ids is not None
        self.ids = ids
        self.count = int(ids.max(initial=-1)) + 1

    def find(self, rows: pa.Table | pa.RecordBatch) -> I64:
        """For each row of *rows* the number of its key; -1 if it is none of these."""
        found: I64 | None = None
        for place, name in enumerate(self._names):
            values = _comparable(rows.column(name).cast(self._values[place].type))
            own = _numbers(values, self._values[place])
            if found is None:
                found = own
            else:
                missing = (found < 0) | (own < 0)
                both = found * max(len(self._values[place]), 1) + own
                found = _numbers(pa.array(both), self._codes[place - 1])
                found[missing] = -1
        assert found is not None
        return found


def last_rows(ids: I64, count: int, rows: I64 | None = None) -> I64:
    """For each number below *count* the last of *rows* (all rows) that has it; -1 where there is none."""
    last = np.full(count, -1, np.int64)
    if rows is None:
        last[ids] = np.arange(ids.size)
    else:
        last[ids[rows]] = rows
    return last


def _numbers(values: Any, distinct: Any) -> I64:
    places = pc.index_in(values, value_set=distinct)
    if isinstance(places, pa.ChunkedArray):
        places = places.combine_chunks()
    found: I64 = pc.fill_null(places, -1).to_numpy().astype(np.int64)
    return found


def _comparable(values: Any) -> Any:
    if pa.types.is_floating(values.type):
        return pc.add(values.cast(pa.float64()), 0.0)
    return values


Mask = NDArray[np.bool_]


def same_rows(one: pa.Table, other: pa.Table, columns: Iterable[str]) -> Mask:
    """Where the rows of both tables, which are of one length, have the same values in *columns*."""
    same = np.ones(one.num_rows, np.bool_)
    for name in columns:
        same &= same_values(array_of(one.column(name)), array_of(other.column(name)))
    return same


def same_values(one: Any, other: Any) -> Mask:
    """Where two arrays of one type and length have the same value."""
    is_there, is_other = _valid(one), _valid(other)
    same: Mask = is_there == is_other
    both = np.flatnonzero(is_there & is_other)
    if both.size:
        places = pa.array(both)
        same[both] = _same(one.take(places), other.take(places))
    return same


def _same(one: Any, other: Any) -> Mask:
    """Of values none of which is null."""
    kind = one.type
    if pt.is_struct(kind):
        same = np.ones(len(one), np.bool_)
        for mine, theirs in zip(one.flatten(), other.flatten(), strict=True):
            same &= same_values(mine, theirs)
        return same
    if pt.is_map(kind):
        entries = pa.list_(pa.struct([kind.key_field, kind.item_field]))
        return _same(one.cast(entries), other.cast(entries))
    if pt.is_list(kind):
        return _same_lists(one, other)
    if pt.is_floating(kind):
        mine, theirs = (values.to_numpy(zero_copy_only=False) for values in (one, other))
        found: Mask = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
        return found
    equal: Mask = array_of(pc.equal(one, other)).to_numpy(zero_copy_only=False)
    return equal


def _same_lists(one: Any, other: Any) -> Mask:
    lengths = pc.list_value_length(one).to_numpy()
    same: Mask = lengths == pc.list_value_length(other).to_numpy()
    places = np.flatnonzero(same & (lengths > 0))
    if places.size:
        mine, theirs = (values.take(pa.array(places)).flatten() for values in (one, other))
        starts = np.concatenate([[0], np.cumsum(lengths[places])[:-1]])
        same[places] = np.logical_and.reduceat(same_values(mine, theirs), starts)
    return same


def _valid(values: Any) -> Mask:
    found: Mask = values.is_valid().to_numpy(zero_copy_only=False)
    return found
