"""DeadLetters: rows that a sink refuses, or a special value parks, kept with the reason until they are delivered.

They are in a directory of Parquet files for each table (:class:`~headwater.sinks.parquet.ParquetSink`), each row once:
the table's columns, ``_reason``, and what every change has. A row is parked before the batch that it is left out of is
committed, so none is ever in neither place. A batch that is delivered again may leave out other rows than before, or
read its history anew: every generation parks its own, and rows that two of them parked are shown once.

What a special value parked is resolved by a later row of its key that is good, or gone: that is kept as a row without a
reason. Where nothing is left, the table's directory is put away.
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
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.log_store.columns import EPOCH, OP, SEQ
from headwater.sinks.change_rows import COMMIT_VERSION
from headwater.sinks.parquet import ParquetSink, read
from headwater.sinks.sink import HistoryPart, Staged, Token
from headwater.sinks.storage import Storage
from headwater.sources.table import POSITION_COLUMN, UNAVAILABLE_COLUMN, SourceColumn, SourceTable, log_fields
from headwater.sources.target_names import OWN_DIRECTORIES
from headwater.sources.unavailable import is_parked, parked_reason
from headwater.stream import hash_keys
from headwater.stream.op import Op
from headwater.system.files import make_private

REASON: Final = "_reason"
RESOLVED: Final = ""
"""The reason of a row that resolves those of its key before it."""
_KEY: Final = "_letter_key"
_REPLAYED: Final = "_replayed"
_LONGEST_REPLAYED: Final = 230
"""Characters of the directory in the name of what was put away, which has a time, too."""
_PLACE: Final = "_place"
_PIECE_ROWS: Final = 8192


class RejectsRows(Protocol):
    """A sink that can tell which rows it refuses."""

    def refused(self, table: SourceTable, rows: pa.Table) -> list[tuple[int, str]]:
        """The places of the rows that it refuses, and why; nothing is written."""
        ...


@dataclass
class RowFilter:
    """Lets the rows of *table* through that *sink* takes.

    :ivar refused: the others, with ``_reason`` after the table's columns.
    """

    sink: RejectsRows
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


@dataclass
class ParkedRows:
    """Takes the rows of *table* out that special values park; a version that the sink has is deleted there.

    :param letters: where they go. :param history: of history: which are parked, and ``_unavailable`` of each.
    :param truncated: of changes: epoch and seq of the last TRUNCATE, before which rows are void.
    """

    table: SourceTable
    letters: DeadLetters
    history: pa.Table | None = None
    truncated: tuple[int, int] | None = None
    _last: dict[int, pa.RecordBatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._unresolved = self.letters.unresolved(self.letters.directory_of(self.table))
        self._watched = set(self._unresolved)
        if self.truncated is not None and self._unresolved:
            self._last = self.letters.emptied(self.table, self.truncated[0])

    def through(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows that are taken."""
        parked: dict[int, str] = {}
        if self.history is not None:
            keys = hash_keys(self.history, self.table.key_columns).tolist()
            parked = dict(zip(keys, self.history.column(UNAVAILABLE_COLUMN).to_pylist(), strict=True))
        for batch in batches:
            hashes = hash_keys(batch, self.table.key_columns)
            if OP in batch.schema.names:
                texts = batch.column(UNAVAILABLE_COLUMN).to_pylist()
                held = is_parked(batch.column(UNAVAILABLE_COLUMN))
            else:
                texts = [parked.get(key) for key in hashes.tolist()] if parked else [None] * len(hashes)
                held = np.array([text is not None for text in texts], np.bool_)
            if self.truncated is not None:
                held &= _after(batch, self.truncated)
            self._watched.update(hashes[held].tolist())
            if self._watched:
                self._see(batch, hashes, {row: parked_reason(texts[row]) for row in np.flatnonzero(held).tolist()})
            taken = _without_parked(batch, held) if held.any() else batch
            if taken.num_rows:
                yield taken

    def _see(self, batch: pa.RecordBatch, hashes: NDArray[np.uint64], reasons: dict[int, str]) -> None:
        """Keep the last row of each key that is of interest."""
        own = sum(name in batch.schema.names for name in self.table.schema.names)
        watched = np.isin(hashes, np.fromiter(self._watched, np.uint64, len(self._watched)))
        if self.truncated is not None:
            watched &= _after(batch, self.truncated)
        for row in np.flatnonzero(watched).tolist():
            key = int(hashes[row])
            self._last[key] = _with_reason(batch.slice(row, 1), {0: reasons.get(row, RESOLVED)}, own, key)

    @property
    def rows(self) -> list[pa.RecordBatch]:
        """The last row of each key that is parked, or resolves what was."""
        return [
            row
            for key, row in self._last.items()
            if key in self._unresolved or row.column(REASON)[0].as_py() != RESOLVED
        ]


def _after(rows: pa.RecordBatch, truncated: tuple[int, int]) -> NDArray[np.bool_]:
    """Which changes are not void."""
    epochs, seqs = rows.column(EPOCH).to_numpy(), rows.column(SEQ).to_numpy()
    found: NDArray[np.bool_] = (epochs > truncated[0]) | ((epochs == truncated[0]) & (seqs >= truncated[1]))
    return found


def _without_parked(rows: pa.RecordBatch, held: NDArray[np.bool_]) -> pa.RecordBatch:
    """Rows of history without them; of changes, what they replace is deleted."""
    if OP not in rows.schema.names:
        return rows.filter(pa.array(~held))
    ops = rows.column(OP).to_numpy().copy()
    follows = np.append(False, ops[:-1] == Op.UPDATE_DELETE) & held
    ops[held] = Op.DELETE
    ops[np.flatnonzero(follows) - 1] = Op.DELETE
    texts = pc.if_else(pa.array(held), pa.scalar(None, pa.string()), rows.column(UNAVAILABLE_COLUMN))
    for name, values in ((OP, pa.array(ops)), (UNAVAILABLE_COLUMN, texts)):
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), values)
    return rows.filter(pa.array(~follows))


def _with_reason(rows: pa.RecordBatch, found: dict[int, str], place: int, key: int | None = None) -> pa.RecordBatch:
    """:param key: the hash of it, of rows that special values park."""
    reasons = pa.array([found[row] for row in sorted(found)], pa.string())
    keys = pa.repeat(pa.scalar(None if key is None else f"{key:016x}", pa.string()), rows.num_rows)
    arrays, fields = list(rows.columns), list(rows.schema)
    arrays[place:place] = [reasons, keys]
    fields[place:place] = [column.field for column in _ADDED]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


_ADDED: Final = (
    SourceColumn(REASON, pa.string(), "text", 1 << 30),
    SourceColumn(_KEY, pa.string(), "text", (1 << 30) + 1),
)


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
            if not self._left(self.directory_of(table)).num_rows:
                self.put_away(self.directory_of(table))

    def directory_of(self, table: SourceTable) -> str:
        """The name of the directory of *table*."""
        return Storage(self.path).directory_of(table)

    def tables(self) -> list[str]:
        """The directories of tables that have some."""
        root = Path(self.path)
        return sorted(one.name for one in root.glob("*") if one.is_dir() and one.name not in OWN_DIRECTORIES)

    def rows(self, directory: str) -> pa.Table:
        """The rows of the table in *directory* that are not resolved, the oldest first."""
        found = self._left(directory)
        return found.drop_columns(_KEY) if _KEY in found.schema.names else found

    def unresolved(self, directory: str) -> frozenset[int]:
        """The hashes of the keys of rows in *directory* that special values parked."""
        if not (Path(self.path) / directory).is_dir():
            return frozenset()
        found = self._left(directory)
        keys = found.column(_KEY).drop_null().to_pylist() if _KEY in found.schema.names else []
        return frozenset(int(key, 16) for key in keys)

    def emptied(self, table: SourceTable, epoch: int) -> dict[int, pa.RecordBatch]:
        """Rows that resolve all of *table* that special values parked, by the hashes of their keys."""
        found = self._left(self.directory_of(table))
        found = found.filter(found.column(_KEY).is_valid())
        made: dict[int, pa.RecordBatch] = {}
        for row in found.to_pylist():
            beside = {
                REASON: RESOLVED,
                POSITION_COLUMN: row[COMMIT_VERSION].to_bytes(8, "big", signed=True) + bytes(8),
                UNAVAILABLE_COLUMN: None,
                OP: int(Op.DELETE),
                EPOCH: epoch,
            }
            schema = pa.schema([*_kept(table).schema, *_LOG_FIELDS])
            columns = [pa.array([(row | beside).get(one.name)], one.type) for one in schema]
            made[int(row[_KEY], 16)] = pa.RecordBatch.from_arrays(columns, schema=schema)
        return made

    def _left(self, directory: str) -> pa.Table:
        rows = _once(read(Path(self.path) / directory))
        if not rows.num_rows or _KEY not in rows.schema.names:
            return rows
        order = np.argsort(rows.column(COMMIT_VERSION).to_numpy(), kind="stable")
        keys, reasons = rows.column(_KEY).to_pylist(), rows.column(REASON).to_pylist()
        last = {keys[row]: row for row in order.tolist()}
        left = [row for row, key in enumerate(keys) if key is None or (last[key] == row and reasons[row] != RESOLVED)]
        return rows.take(pa.array(left, pa.int64()))

    def counts(self) -> dict[str, int]:
        """How many each table has."""
        return {name: self.rows(name).num_rows for name in self.tables()}

    def put_away(self, directory: str) -> None:
        """They are delivered again: keep them apart."""
        place = Path(self.path) / _REPLAYED
        make_private(place)
        shutil.move(Path(self.path) / directory, place / f"{directory[:_LONGEST_REPLAYED]}-{time.time_ns()}")

    @property
    def _sink(self) -> ParquetSink:
        return _PrivateFiles(self.path)


class _PrivateFiles(ParquetSink):
    is_private = True


_LOG_FIELDS: Final = (
    *log_fields(pa.binary(16)),
    pa.field(OP, pa.int8()),
    pa.field(EPOCH, pa.uint64()),
)


def _of_generation(token: Token) -> Token:
    return replace(token, query=f"{token.query}#{token.generation}")


def _once(rows: pa.Table) -> pa.Table:
    """*rows*, the first of those that are equal but for the reason. Nested columns tell nothing that a key does not."""
    names = [field.name for field in rows.schema if field.name != REASON and not pa.types.is_nested(field.type)]
    places = pa.array(np.arange(rows.num_rows))
    kept = rows.select(names).append_column(_PLACE, places).group_by(names).aggregate([(_PLACE, "min")])
    return rows.take(kept.column(f"{_PLACE}_min").sort()) if kept.num_rows < rows.num_rows else rows


def _kept(table: SourceTable) -> SourceTable:
    return replace(table, columns=(*table.columns, *_ADDED))
