"""Rewind: the rows of a table at a place in its log, made of rows that were read later and of the log.

Where no task can enter the snapshot that a plan was made in, each reads in a transaction of its own, later. Of a key
that did not change between the place and that transaction, the row is the same. Of one that did, the first change since
the place tells what the row was: its old version, or that there was none. So what is given is exactly the table at the
place, however late it is read and however often; whether the transaction already showed a change makes no difference.

The log must have come to the transaction first, and its changes must have the old versions of rows whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.backfill.errors import OldRowsMissing
from headwater.errors import TransientError
from headwater.log_store.columns import EPOCH, SEQ
from headwater.sources.errors import SnapshotExpired
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import KeyOrder, SnapshotMark, UnsharedSnapshots
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import POSITION_COLUMN, UNAVAILABLE_COLUMN, SourceTable
from headwater.stream import OP_COLUMN, Op, hash_keys
from headwater.system.retry import Retries

ChangesUpTo: TypeAlias = Callable[[CdcOffset], Iterator[pa.RecordBatch]]
"""The changes of the table since the plan, once the log has all that committed before a place."""


def read_rewound(
    source: UnsharedSnapshots,
    table: SourceTable,
    parts: Sequence[KeyRange],
    mark: SnapshotMark,
    changes: ChangesUpTo,
    order: Callable[[], KeyOrder],
    columns: Sequence[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of *parts* at *mark*, in no order: read at one moment, so that the log is waited for once.

    A connection that breaks is made anew, and the read goes on after the last row that was given.

    :raises SnapshotExpired: the table is not what it was. :raises SourceUnreachable: also new connections broke.
    :raises LogBehind: the log does not come to what was read. :raises OldRowsMissing: it lacks old versions of rows.
    """
    names = list(columns) if columns is not None else [column.name for column in table.columns]
    retries = Retries()
    while True:
        try:
            reading = source.open_parts(table, parts, columns=columns)
        except SnapshotExpired:
            raise
        except TransientError as error:
            retries.wait_after(error)
            continue
        try:
            rewind = Rewind(table, mark, changes(reading.high))
            broken: TransientError | None = None
            try:
                for batch in reading.batches():
                    kept = rewind.unchanged(batch)
                    if kept.num_rows:
                        yield kept
                    retries.progressed()
            except SnapshotExpired:
                raise
            except TransientError as error:
                broken = error
        finally:
            reading.close()
        for part in reading.progress.given:
            for old in rewind.old_rows(part, order):
                yield old.select(names)
        if broken is None:
            return
        retries.wait_after(broken)
        parts = reading.progress.rest


class Rewind:
    """Undoes the changes of a table since *mark*.

    :param changes: batches of its log, in any order; those before *mark* are passed over.
    :raises OldRowsMissing: a change does not tell what the row was.
    """

    def __init__(self, table: SourceTable, mark: SnapshotMark, changes: Iterable[pa.RecordBatch]) -> None:
        self._table = table
        since = []
        for batch in changes:
            later = ~mark.contains(batch.column(POSITION_COLUMN))
            if later.any():
                since.append(batch if later.all() else batch.filter(pa.array(later)))
        self._hashes: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._keys: set[tuple[object, ...]] = set()
        self._old: list[pa.RecordBatch] = []
        if since:
            self._keep(since)

    def _keep(self, changes: Sequence[pa.RecordBatch]) -> None:
        # never as one batch: the texts of many changes are too long for one column
        hashes = np.concatenate([hash_keys(batch, self._table.key_columns) for batch in changes])
        epochs, seqs = (np.concatenate([batch.column(name).to_numpy() for batch in changes]) for name in (EPOCH, SEQ))
        order = np.lexsort((seqs, epochs))
        self._hashes, firsts = np.unique(hashes[order], return_index=True)
        is_first = np.zeros(len(hashes), np.bool_)
        is_first[order[firsts]] = True
        begin = 0
        for batch in changes:
            chosen = is_first[begin : begin + batch.num_rows]
            begin += batch.num_rows
            if chosen.any():
                self._keep_first(batch if chosen.all() else batch.filter(pa.array(chosen)))

    def _keep_first(self, first: pa.RecordBatch) -> None:
        """Changes that are each the first of its key."""
        table = self._table
        ops = first.column(OP_COLUMN).to_numpy()
        unknown = ops == Op.UPDATE_INSERT
        is_old = (ops == Op.DELETE) | (ops == Op.UPDATE_DELETE)
        old = first if is_old.all() else first.filter(pa.array(is_old))
        if unknown.any() or old.column(UNAVAILABLE_COLUMN).null_count < old.num_rows:
            raise OldRowsMissing(
                f"The log of {table.full_name} does not have the whole old versions of rows that changed while its"
                " history was read: the source logs only parts of them.",
                next_step="Have whole old rows logged (MySQL, MariaDB: SET GLOBAL binlog_row_image = FULL; SQL Server:"
                f" no text, ntext or image, but their (max) types), then run: headwater resnapshot {table.full_name}",
            )
        self._keys.update(zip(*(first.column(name).to_pylist() for name in table.key_columns), strict=True))
        if old.num_rows:
            self._old.append(old.select([column.name for column in table.columns]))

    def unchanged(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Those of *rows* that no change since the mark has touched."""
        if not len(self._hashes) or not rows.num_rows:
            return rows
        hashes = hash_keys(rows, self._table.key_columns)
        found = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        suspects = np.flatnonzero(self._hashes[found] == hashes)
        if not suspects.size:
            return rows
        some = rows.select(list(self._table.key_columns)).take(pa.array(suspects))
        keys = zip(*(column.to_pylist() for column in some.columns), strict=True)
        touched = suspects[np.fromiter((key in self._keys for key in keys), np.bool_, len(suspects))]
        keep = np.ones(rows.num_rows, np.bool_)
        keep[touched] = False
        return rows.filter(pa.array(keep))

    def old_rows(self, part: KeyRange, order: Callable[[], KeyOrder]) -> Iterator[pa.RecordBatch]:
        """The rows of *part* that changes since the mark replaced or deleted, as they were at the mark."""
        cuts: list[Cut] = [cut for cut in (part.start, part.end) if cut is not None]
        for old in self._old:
            if cuts:
                places = order().places(old.select(list(self._table.key_columns)), cuts)
                old = old.filter(pc.equal(pa.array(places), int(part.start is not None)))
            if old.num_rows:
                yield old
