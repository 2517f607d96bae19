"""Reads parts of tables where tasks read later than the snapshot, over connections that may break.

See :class:`~headwater.sources.snapshots.UnsharedSnapshots`: a read that broke goes on after the last key that it gave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Final

import pyarrow as pa

from headwater.errors import TransientError
from headwater.sources.errors import SnapshotExpired
from headwater.sources.snapshots import LaterParts
from headwater.sources.splits import KeyRange
from headwater.sources.table import SourceTable

PAUSES: Final = (0.05, 0.2, 1.0, 3.0)
"""Seconds before each new try; the count begins anew when rows came."""


def read_later(
    open_parts: Callable[[Sequence[KeyRange]], LaterParts], parts: Sequence[KeyRange]
) -> Iterator[pa.RecordBatch]:
    """The rows of *parts* as they are now; after a break those that follow as they are then.

    :raises SourceUnreachable: the connection broke again and again. :raises SnapshotExpired: another table.
    """
    tries = 0
    while True:
        reached = None
        try:
            with closing(open_parts(parts)) as reading:
                for batch in reading.batches():
                    yield batch
                    tries, reached = 0, reading
            return
        except SnapshotExpired:
            raise
        except TransientError:
            if tries == len(PAUSES):
                raise
            time.sleep(PAUSES[tries])
            tries += 1
            if reached is not None:
                parts = reached.progress.rest


def table_changed(table: SourceTable, what: str) -> SnapshotExpired:
    """*table* is not what it was when its parts were planned."""
    return SnapshotExpired(
        f"Table {table.full_name} {what} since the snapshot was taken.", next_step="Take a new snapshot."
    )
