"""RowBatch: what a sink that is given rows writes in one commit, step by step in this order. Pure.

=============  ==========  ========================================================================================
step           mode        the sink
=============  ==========  ========================================================================================
:class:`Clear`   mirror    removes every row of the table
:class:`Delete`  mirror    removes the rows with these keys; some may not be there
:class:`Upsert`  mirror    writes these columns of these rows; other columns of a row that is there stay as they are
:class:`Update`  mirror    the same, but only of rows that are there
:class:`Append`  changes   adds these rows
=============  ==========  ========================================================================================

Within one step no key comes twice, except in an :class:`Append`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from headwater.log_store.columns import EPOCH
from headwater.sinks.batch import Batch, in_ranges, is_all
from headwater.sinks.fold import DELETED
from headwater.sinks.sink import Committed, Mode, Staged
from headwater.sinks.staging import Part
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable


@dataclass(frozen=True, slots=True)
class Clear:
    """Every row of the table goes."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Rows go. :ivar keys: their key columns."""

    keys: pa.Table


@dataclass(frozen=True, slots=True)
class Upsert:
    """Rows come, or become these. :ivar rows: the key and every column whose value is known."""

    rows: pa.Table


@dataclass(frozen=True, slots=True)
class Update:
    """Rows that are there become these. :ivar rows: the key and the columns that are written."""

    rows: pa.Table


@dataclass(frozen=True, slots=True)
class Append:
    """Changes. :ivar rows: as :mod:`headwater.sinks.change_rows` has them. :ivar is_history: rows that were read."""

    rows: pa.Table
    is_history: bool = False


Step = Clear | Delete | Upsert | Update | Append


@dataclass(frozen=True)
class RowBatch:
    """What is left to write of one batch of *table*.

    :ivar has: what the sink had when the batch was looked at. If it has something else when it writes, another process
        was faster: the sink raises :class:`~headwater.sinks.row_sink.Overtaken`.
    :ivar after: what it has once it has written this; to be kept in the same transaction.
    """

    table: SourceTable
    mode: Mode
    has: Committed
    after: Committed
    batch: Batch
    gather: Callable[[Sequence[Part]], Iterator[pa.Table]]
    keys: Callable[[SourceTable], Iterator[pa.Table]]

    @property
    def rows(self) -> int:
        """How many were staged for it."""
        return sum(one.rows for one in self.batch.all)

    def steps(self) -> Iterator[Step]:
        """Changes, then history."""
        return self._changes_steps() if self.mode is Mode.CHANGES else self._mirror_steps()

    def _changes_steps(self) -> Iterator[Step]:
        for one in self.batch.all:
            for rows in self.gather(one.detail.parts):
                if not one.is_snapshot:
                    rows = rows.filter(pc.greater(rows.column(EPOCH), pa.scalar(self.has.epoch, pa.uint64())))
                    rows = rows.drop_columns([EPOCH])
                if rows.num_rows:
                    yield Append(rows, one.is_snapshot)

    def _mirror_steps(self) -> Iterator[Step]:
        if self.batch.is_truncated:
            yield Clear()
        for one in self.batch.changes:
            for rows in self.gather(one.detail.parts):
                yield from _folded_steps(self.table, rows)
        for one in self.batch.history:
            yield from self._history_steps(one)

    def _history_steps(self, one: Staged) -> Iterator[Step]:
        if one.ranges is not None and is_all(one.ranges):
            yield Clear()
        elif one.ranges is not None:
            for keys in self._keys_there():
                columns = [keys.column(name) for name in self.table.key_columns]
                gone = keys.filter(pa.array(in_ranges(one, columns)))
                if gone.num_rows:
                    yield Delete(gone)
        for rows in self.gather(one.detail.parts):
            for names, known in by_known_columns(self.table, rows):
                made = known.select(names)
                yield Update(made) if one.detail.only_existing else Upsert(made)

    def _keys_there(self) -> Iterator[pa.Table]:
        """Of the table, with those that the changes of this batch may have added."""
        names = list(self.table.key_columns)
        yield from (keys.select(names) for keys in self.keys(self.table))
        for one in self.batch.changes:
            yield from (rows.select(names) for rows in self.gather(one.detail.parts))


def by_known_columns(table: SourceTable, rows: pa.Table) -> Iterator[tuple[list[str], pa.Table]]:
    """*rows* apart by which of their columns are known, with the names of these."""
    names = [name for name in rows.schema.names if name not in (DELETED, UNAVAILABLE_COLUMN)]
    texts = rows.column(UNAVAILABLE_COLUMN)
    if texts.null_count == len(texts):
        if rows.num_rows:
            yield names, rows
        return
    for text in pc.unique(texts).to_pylist():
        same = pc.is_null(texts) if text is None else pc.equal(texts, text)
        unknown = set((text or "").split(",")) - set(table.key_columns)
        yield [name for name in names if name not in unknown], rows.filter(pc.fill_null(same, False))


def _folded_steps(table: SourceTable, rows: pa.Table) -> Iterator[Step]:
    gone = rows.filter(rows.column(DELETED))
    if gone.num_rows:
        yield Delete(gone.select(list(table.key_columns)))
    for names, known in by_known_columns(table, rows.filter(pc.invert(rows.column(DELETED)))):
        yield Upsert(known.select(names))
