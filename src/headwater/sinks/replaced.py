"""The ranges of keys that a part of history replaces: what a sink has there and was not read again is gone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sinks.errors import SinkInputError
from headwater.sinks.sink import HistoryPart
from headwater.sinks.types import cast
from headwater.sources.snapshots import KeyOrder
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable


def is_all(ranges: Sequence[KeyRange]) -> bool:
    """One of them has every key."""
    return any(one.start is None and one.end is None for one in ranges)


def replaced_ranges(table: SourceTable, part: HistoryPart) -> tuple[KeyRange, ...]:
    """The ranges that *part* replaces. :raises SinkInputError: nobody can tell which rows lie in them."""
    if not is_all(part.ranges) and (part.kind is not SplitKind.KEY or part.order is None):
        raise SinkInputError(
            f"Parts of {table.full_name} that are not ranges of its key cannot be replaced.",
            next_step="Take a new snapshot of the whole table.",
        )
    return part.ranges


def rows_in_ranges(
    table: SourceTable, order: KeyOrder | None, ranges: Sequence[KeyRange], keys: Sequence[pa.ChunkedArray]
) -> NDArray[np.bool_]:
    """Which rows lie in *ranges*, given their *keys*: a column for each key column of *table*, as the sink has it."""
    rows = len(keys[0])
    if is_all(ranges):
        return np.ones(rows, np.bool_)
    assert order is not None
    names = list(table.key_columns)
    columns = zip(names, keys, strict=True)
    typed = pa.table([cast(values, table.column(name).type) for name, values in columns], names)
    batches = typed.combine_chunks().to_batches()
    found = np.zeros(rows, np.bool_)
    for one in ranges:
        cuts = [cut for cut in (one.start, one.end) if cut is not None]
        places = np.concatenate([order.places(batch, cuts) for batch in batches] or [np.zeros(0, np.int64)])
        found |= places == (0 if one.start is None else 1)
    return found
