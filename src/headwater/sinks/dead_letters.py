"""DeadLetters: rows that a sink refuses, kept with the reason until they are delivered again.

They are in a directory of Parquet files for each table (:class:`~headwater.sinks.parquet.ParquetSink`), each row once:
the table's columns, ``_reason``, and what every change has. A row is parked before the batch that it is left out of is
committed, so none is ever in neither place. A batch that is delivered again may leave out other rows than before, or
read its history anew: every generation parks its own, and rows that two of them parked are shown once.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from headwater.log_store.columns import OP
from headwater.sinks.parquet import ParquetSink, read
from headwater.sinks.sink import HistoryPart, Staged, Token
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream.op import Op

REASON: Final = "_reason"
_REPLAYED: Final = "_replayed"
_PLACE: Final = "_place"
_PIECE_ROWS: Final = 8192


class Refusing(Protocol):
    """A sink that can tell which rows it refuses."""

    def refused(self, table: SourceTable, rows: pa.Table) -> list[tuple[int, str]]:
        """The places of the rows that it refuses, and why; nothing is written."""
        ...


@dataclass
class Sieve:
    """Lets the rows of *table* through that *sink* takes.

    :ivar refused: the others, with ``_reason`` after the table's columns.
    """

    sink: Refusing
    table: SourceTable
    refused: list[pa.RecordBatch] = field(default_factory=list)

    def through(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows that are taken, and deletes, which bring no values. An update stays or goes with its old row."""
        for batch in batches:
            ops = batch.column(OP).to_numpy() if OP in batch.schema.names else None
            start = 0
            while start < batch.num_rows:
                end = min(start + _PIECE_ROWS, batch.num_rows)
                if ops is not None and end < batch.num_rows and ops[end - 1] == Op.UPDATE_DELETE:
                    end += 1
                taken = self._taken(batch.slice(start, end - start))
                start = end
                if taken.num_rows:
                    yield taken

    def _taken(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        names = [name for name in self.table.schema.names if name in rows.schema.names]
        ops = rows.column(OP).to_numpy() if OP in rows.schema.names else np.full(rows.num_rows, Op.INSERT, np.int8)
        places = np.flatnonzero((ops == Op.INSERT) | (ops == Op.UPDATE_INSERT))
        tried = pa.Table.from_batches([rows.select(names).take(pa.array(places))])
        found = {int(places[place]): reason for place, reason in self.sink.refused(self.table, tried)}
        if not found:
            return rows
        self.refused.append(_with_reason(rows.take(pa.array(sorted(found))), found, len(names)))
        taken = np.ones(rows.num_rows, np.bool_)
        taken[list(found)] = False
        opens = np.append((ops[:-1] == Op.UPDATE_DELETE) & (ops[1:] == Op.UPDATE_INSERT) & ~taken[1:], False)
        taken &= ~opens  # the row stays as it was before
        return rows.filter(pa.array(taken))


def _with_reason(rows: pa.RecordBatch, found: dict[int, str], place: int) -> pa.RecordBatch:
    reasons = pa.array([found[row] for row in sorted(found)], pa.string())
    arrays, fields = list(rows.columns), list(rows.schema)
    arrays.insert(place, reasons)
    fields.insert(place, _reason_column().field)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _reason_column() -> SourceColumn:
    return SourceColumn(REASON, pa.string(), "text", 1 << 30)


@dataclass(frozen=True)
class DeadLetters:
    """Those of one sink, in the directory *path*."""

    path: str

    def stage_changes(self, table: SourceTable, token: Token, rows: Sequence[pa.RecordBatch]) -> Staged:
        """Stage refused changes."""
        return self._sink.stage_changes(_kept(table), _of_generation(token), iter(rows), None)

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, rows: Sequence[pa.RecordBatch]
    ) -> Staged:
        """Stage refused rows of history."""
        return self._sink.stage_history(_kept(table), _of_generation(token), replace(part, columns=None), iter(rows))

    def commit(self, staged: Sequence[Staged]) -> None:
        """Make them visible, once."""
        for table in {one.table for one in staged}:
            parts = [one for one in staged if one.table == table]
            self._sink.commit(table, max((one.token for one in parts), key=lambda one: one.attempt), parts)

    def tables(self) -> list[str]:
        """The directories of tables that have some."""
        root = Path(self.path)
        return sorted(one.name for one in root.glob("*") if one.is_dir() and not one.name.startswith("_"))

    def rows(self, directory: str) -> pa.Table:
        """The rows of the table in *directory*, the oldest first."""
        return _once(read(Path(self.path) / directory))

    def counts(self) -> dict[str, int]:
        """How many each table has."""
        return {name: self.rows(name).num_rows for name in self.tables()}

    def put_away(self, directory: str) -> None:
        """They are delivered again: keep them apart."""
        place = Path(self.path) / _REPLAYED
        place.mkdir(exist_ok=True)
        shutil.move(Path(self.path) / directory, place / f"{directory}-{time.time_ns()}")

    @property
    def _sink(self) -> ParquetSink:
        return ParquetSink(self.path)


def _of_generation(token: Token) -> Token:
    return replace(token, query=f"{token.query}#{token.generation}")


def _once(rows: pa.Table) -> pa.Table:
    """*rows*, the first of those that are equal but for the reason. Nested columns tell nothing that a key does not."""
    names = [field.name for field in rows.schema if field.name != REASON and not pa.types.is_nested(field.type)]
    places = pa.array(np.arange(rows.num_rows))
    kept = rows.select(names).append_column(_PLACE, places).group_by(names).aggregate([(_PLACE, "min")])
    return rows.take(kept.column(f"{_PLACE}_min").sort()) if kept.num_rows < rows.num_rows else rows


def _kept(table: SourceTable) -> SourceTable:
    return replace(table, columns=(*table.columns, _reason_column()))
