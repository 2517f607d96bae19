"""KeySet: the distinct keys of some rows, and where they are found in others. Exact: by value, not by hash.

Null is a value, NaN is NaN and -0.0 is 0.0. Nothing here runs Python per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

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
