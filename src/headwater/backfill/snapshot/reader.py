"""Reads the units of a snapshot backfill, in any process: the rows of a kept table at the epoch of the unit."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from headwater.backfill.units import SnapshotUnit
from headwater.versioned import VersionedTable


def read_snapshot(store: str, kept: str, unit: SnapshotUnit) -> Iterator[pa.RecordBatch]:
    """The rows of *unit*, by vnode and key: the columns of its table alone, or those that it names.

    :raises BaseGone: somebody released the pin of the epoch.
    """
    table = VersionedTable.open(store, unit.table.full_name, kept)
    try:
        for part in unit.parts:
            vnodes = (part.first, part.end)
            yield from table.snapshot(unit.epoch, vnodes, start=part.start, end=part.stop, columns=unit.columns)
    finally:
        table.close()
