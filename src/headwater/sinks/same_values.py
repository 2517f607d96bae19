"""Same values: which values of two columns are one and the same, of any type. Pure.

Null is null, NaN is NaN, -0.0 is 0.0. Nothing here runs Python per row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def same_rows(one: pa.Table, other: pa.Table, columns: Iterable[str]) -> Mask:
    """Where the rows of both tables, which are of one length, have the same values in *columns*."""
    same = np.ones(one.num_rows, np.bool_)
    for name in columns:
        same &= same_values(_array(one.column(name)), _array(other.column(name)))
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
    equal: Mask = _array(pc.equal(one, other)).to_numpy(zero_copy_only=False)
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


def _array(values: Any) -> Any:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
