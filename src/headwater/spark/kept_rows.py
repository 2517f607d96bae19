"""Rows of a kept table for Spark: as of an epoch, or what changed between two; a range of vnodes at a time.

What a task reads depends on nothing but :class:`KeptRead`: the epoch is pinned by whoever planned it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from headwater.log_store.columns import OP
from headwater.sources.table import SourceTable
from headwater.spark.columns import CHANGE_TYPE_COLUMN
from headwater.spark.types import Shape, rebatched
from headwater.stream.op import change_types_of
from headwater.versioned import VersionedTable

PART_ROWS: Final = 20_000
"""A task for less than this is not worth its start."""
PARTS: Final = 2
"""So many tasks for each that runs at a time: vnodes have not all the same number of rows."""


@dataclass(frozen=True, slots=True)
class KeptPlace:
    """Where a kept table is."""

    store: str
    folder: str
    table: str

    def open(self) -> VersionedTable:
        """:raises VersionedError: there is none, or it is not complete yet."""
        return VersionedTable.open(self.store, self.table, Path(self.folder))


@dataclass(frozen=True, slots=True)
class KeptRead:
    """What is read of a kept table.

    :ivar epoch: the rows as of it. :ivar after: the net changes from this epoch up to *epoch* instead.
    :ivar places: for each column that is wanted, its name in the table; ``None``: null, or the type of the change.
    """

    place: KeptPlace
    epoch: int
    places: tuple[str | None, ...]
    after: int | None = None

    def batches(self, vnodes: tuple[int, int], more: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
        """The rows of a range of vnodes, with the columns of the table that are needed, and *more*."""
        needed = list(dict.fromkeys([*(name for name in self.places if name is not None), *more]))
        with closing(self.place.open()) as table:
            names = needed or list(table.table(self.epoch).key_columns)
            if self.after is None:
                yield from table.snapshot(self.epoch, vnodes, columns=names)
            else:
                yield from table.changes(self.after, self.epoch, vnodes, columns=names)

    def shaped(self, batches: Iterator[pa.RecordBatch], shape: Shape) -> Iterator[pa.RecordBatch]:
        """Batches as Spark wants them."""
        return rebatched(shape.batch(self._columns(batch, shape), batch.num_rows) for batch in batches)

    def _columns(self, batch: pa.RecordBatch, shape: Shape) -> list[Any]:
        return [
            batch.column(place)
            if place is not None
            else change_types_of(batch.column(OP)).dictionary_decode()
            if name == CHANGE_TYPE_COLUMN
            else None
            for name, place in zip(shape.schema.names, self.places, strict=True)
        ]


def places_of(wanted: SourceTable, table: SourceTable) -> tuple[str | None, ...]:
    """Where *table*, the same at another epoch, has the columns of *wanted*: by their field ids."""
    known = {column.field_id: column.name for column in table.columns}
    return tuple(known.get(column.field_id) for column in wanted.columns)


def vnode_cuts(table: VersionedTable, epoch: int, parallelism: int) -> list[int]:
    """Where the vnodes are cut into ranges, one for each task, of about as many rows each."""
    count = table.vnode_count
    rows = np.zeros(count, np.int64)
    for block in table.blocks(epoch, (0, count)):
        rows[block.vnode] += block.rows
    total = int(rows.sum())
    parts = max(1, min(count, PARTS * parallelism, total // PART_ROWS))
    reached = np.fromiter(accumulate(rows.tolist()), np.int64, count)
    cuts = np.searchsorted(reached, [total * part // parts for part in range(1, parts)]) + 1
    return sorted({0, *map(int, cuts), count})
