"""Reads parts of tables where tasks read later than the snapshot, over connections that may break.

See :class:`~headwater.sources.snapshots.UnsharedSnapshots`: a read that broke goes on after the last key that it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pyarrow as pa

from headwater.errors import TransientError
from headwater.sources.errors import SnapshotExpired
from headwater.sources.snapshots import LaterParts
from headwater.sources.splits import KeyRange
from headwater.sources.table import SourceTable
from headwater.system.retry import Retries


def read_later(
    open_parts: Callable[[Sequence[KeyRange]], LaterParts], parts: Sequence[KeyRange]
) -> Iterator[pa.RecordBatch]:
    """The rows of *parts* as they are now; after a break those that follow as they are then.

    :raises SourceUnreachable: the connection broke again and again. :raises SnapshotExpired: another table.
    """
    retries = Retries()
    while True:
        reached = None
        try:
            with closing(open_parts(parts)) as reading:
                for batch in reading.batches():
                    yield batch
                    retries.progressed()
                    reached = reading
            return
        except SnapshotExpired:
            raise
        except TransientError as error:
            retries.wait_after(error)
            if reached is not None:
                parts = reached.progress.rest


def table_changed(table: SourceTable, what: str) -> SnapshotExpired:
    """*table* is not what it was when its parts were planned."""
    return SnapshotExpired(
        f"Table {table.full_name} {what} since the snapshot was taken.", next_step="Take a new snapshot."
    )
