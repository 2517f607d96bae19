"""KeptTables: the tables of a query as versioned tables of our own (:mod:`headwater.versioned`), in ``<path>``.

Tasks write what they read as sorted runs, which nobody sees; the commit is one manifest of the table that names them,
with the token. What comes later than the base is read from the log, for which the query's consumer holds it: so batches
may be few. A new downstream reads its history from here, and nothing is asked of the source.

The base does not go past an epoch that somebody has pinned (:meth:`KeptTables.choose`), and history of a table is not
read once more while one of its epochs is pinned (:meth:`KeptTables.may_read`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final
from zlib import crc32

import pyarrow as pa

from headwater.log_store.columns import valid_rows
from headwater.sinks.batch import Batch, in_ranges, refuse_late, replaced_ranges
from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.keys import KeySet
from headwater.sinks.sink import Capabilities, Committed, HistoryPart, Mode, Staged, Token
from headwater.sinks.staging import StagedRuns, prove_files
from headwater.sinks.storage import Storage
from headwater.sinks.table_schema import holds
from headwater.sinks.types import by_bytes, conform, sink_schema
from headwater.sources.table import SourceTable
from headwater.stream import vnodes_of
from headwater.versioned.compaction import MERGE_RUNS, compact_soon, merged_rows
from headwater.versioned.errors import TableBusy
from headwater.versioned.fitting import fitted
from headwater.versioned.folder import KEPT_SECONDS, TableFolder
from headwater.versioned.key_positions import check_key
from headwater.versioned.log_rows import PIECE_BYTES, VNODES, net_of
from headwater.versioned.manifest import Manifest
from headwater.versioned.net_rows import GONE, PATCH, ROW, net, of_log, of_rows
from headwater.versioned.pins import choose_folding, may_read
from headwater.versioned.run_file import RunInfo, RunWriter, is_plain
from headwater.versioned.version import READ_ATTEMPTS

HISTORY_BYTES: Final = 64 << 20
"""So much of history is sorted in memory at a time."""
INTERVAL_SECONDS: Final = 10.0


@dataclass(frozen=True)
class KeptTables:
    """Versioned tables in the directory *path*, which is on a file system. It can be pickled.

    :param interval_seconds: about how often changes are folded into the tables.
    :param merge_runs: so many runs of about one size are merged to one.
    :param retention_seconds: how long files that were replaced are kept for who reads them.
    """

    capabilities: ClassVar = Capabilities((Mode.MIRROR,))

    path: str
    mode: Mode = Mode.MIRROR
    interval_seconds: float = INTERVAL_SECONDS
    merge_runs: int = MERGE_RUNS
    retention_seconds: float = KEPT_SECONDS

    @property
    def name(self) -> str:
        return f"table:{self.path}"

    def check(self) -> None:
        """:raises SinkUnwritable: nothing can be written there."""
        Storage(self.path, is_private=True).check()

    def folder(self, table: SourceTable | str) -> TableFolder:
        """Where the files of *table* are."""
        return TableFolder(self.path, table if isinstance(table, str) else table.full_name)

    def target(self, table: SourceTable) -> str:
        """The folder of *table*."""
        return self.folder(table).path.name

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        return _committed(self.folder(table).newest(), query, backfill)

    # -- staging ---------------------------------------------------------------------------------------------------

    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
    ) -> Staged:
        """What the rows come to for each key, as one run."""
        _check(table)
        piece = net_of(table, _portions(table, batches, truncated))
        runs = [self._write(table, token, [piece.rows], plain=is_plain(piece.rows))] if len(piece) else []
        return Staged.of(table, token, False, StagedRuns(tuple(runs)), truncated=truncated)

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        """The rows as runs; of a new column: values for the rows that are there."""
        _check(table)
        kind, others = ROW, None
        if part.columns is not None:
            told = {*part.columns, *table.key_columns}
            kind, others = PATCH, ",".join(name for name in table.schema.names if name not in told)
        runs: list[RunInfo] = []
        for portion in by_bytes(batches, HISTORY_BYTES):
            rows = [_history_rows(batch, table, kind, others) for batch in portion]
            piece = net(rows, table.key_columns, table.schema)
            runs.append(self._write(table, token, [piece.rows], plain=kind == ROW))
        ranges = replaced_ranges(table, part) if part.replaces else None
        return Staged.of(table, token, True, StagedRuns(tuple(runs)), ranges=ranges, order=part.order)

    def _write(self, table: SourceTable, token: Token, batches: Sequence[pa.RecordBatch], *, plain: bool) -> RunInfo:
        path = self.folder(table).runs / f"{_prefix(token.query)}{token.generation}-{uuid.uuid4().hex}.run"
        made = RunWriter(path, table.schema, table.key_columns, plain=plain).write_all(batches)
        assert made is not None
        return made

    # -- commits ---------------------------------------------------------------------------------------------------

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """One manifest.

        :raises OtherAttempt: the history of this plan, or a part of the changes, came from another process.
        :raises TableBusy: others committed all the time. :raises StagedLost: a staged file is not as it was staged.
        """
        if not staged:
            return False
        folder = self.folder(table)
        outcome: list[bool] = []

        def following(newest: Manifest) -> Manifest | None:
            outcome.clear()
            batch = Batch.left_of(staged, token, _committed(newest, token.query, token.backfill))
            if batch is None:
                outcome.append(False)
                return None
            refuse_late(table, token, newest.generations.get(token.query, 0))
            runs = ((run.name, run.size) for one in batch.all for run in one.detail.runs)
            prove_files(Storage(str(folder.runs)), table, runs)
            outcome.append(True)
            return None if batch.is_empty else self._following(folder, newest, table, token, batch)

        made = folder.change(following)
        self._remove_rest(folder, made, staged)
        compact_soon(folder, self.merge_runs, self.retention_seconds)
        return outcome[0]

    def _following(
        self, folder: TableFolder, newest: Manifest, table: SourceTable, token: Token, batch: Batch
    ) -> Manifest:
        is_history = bool(batch.history)
        key = f"{token.query}/{token.backfill}"
        runs: tuple[RunInfo, ...] = () if batch.is_truncated else newest.runs
        if runs and newest.table is not None:
            _check_columns(newest.table, table)
        runs += tuple(run for one in batch.changes for run in one.detail.runs)
        for one in batch.history:
            if one.ranges is not None:
                runs += self._deletes(folder, runs, one)
            runs += one.detail.runs
        return newest.following(
            table=table,
            query=token.query,
            backfill=token.backfill,
            runs=runs,
            exact=None if is_history or newest.backfill != token.backfill else newest.exact,
            changes={**newest.changes, token.query: token.epoch} if batch.has_changes else newest.changes,
            history={**newest.history, key: (token.plan, token.attempt)} if is_history else newest.history,
        )

    def _deletes(self, folder: TableFolder, runs: Sequence[RunInfo], staged: Staged) -> tuple[RunInfo, ...]:
        """What says that the rows in the ranges of *staged* are gone which were not read there."""
        table = staged.table
        keys = pa.schema([table.schema.field(name) for name in table.key_columns])
        only = replace(table, columns=tuple(table.column(name) for name in table.key_columns))
        read = [batch for run in staged.detail.runs for batch in _keys_of(folder, run, only)]
        told = KeySet(pa.Table.from_batches(read, keys), table.key_columns)
        gone: list[pa.RecordBatch] = []
        for rows in merged_rows([folder.open(run) for run in runs], only, is_whole=True):
            found = pa.Table.from_batches([rows.select(keys.names)])
            mask = in_ranges(staged, found.columns) & (told.find(found) < 0)
            if mask.any():
                gone.append(rows.select(keys.names).filter(pa.array(mask)))
        if not gone:
            return ()
        wanted = [_history_rows(batch, table, GONE, None) for batch in gone]
        piece = net(wanted, table.key_columns, table.schema)
        return (self._write(table, staged.token, [piece.rows], plain=False),)

    def _remove_rest(self, folder: TableFolder, made: Manifest, staged: Sequence[Staged]) -> None:
        """What was staged for a batch that the table has from others."""
        named = {run.name for run in made.runs}
        if any(run.name not in named for one in staged for run in one.detail.runs):
            mine = {run.name for one in staged for run in one.detail.runs}
            folder.remove_unnamed(mine.__contains__)

    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        """A version with the generation alone."""

        def fenced(newest: Manifest) -> Manifest | None:
            if newest.generations.get(query, 0) == generation:
                return None
            return newest.following(generations={**newest.generations, query: generation})

        self.folder(table).change(fenced)

    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Remove the runs of earlier generations that no version names."""
        prefix = _prefix(query)

        def is_left(name: str) -> bool:
            number = name.removeprefix(prefix).partition("-")[0]
            return name.startswith(prefix) and number.isdigit() and int(number) < generation

        self.fence(table, query, generation)  # who sleeps in its commit must not wake up to files that are removed
        self.folder(table).remove_unnamed(is_left)

    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of the base."""
        folder = self.folder(table)
        for _ in range(READ_ATTEMPTS):
            with suppress(FileNotFoundError):  # merged into others meanwhile
                runs = [folder.open(run) for run in folder.newest().runs]
                break
        else:
            raise TableBusy(
                f"A file of {table.full_name} is not there, or its files change all the time.",
                next_step=f"Try again; if it stays so: headwater resnapshot {table.full_name}",
            )
        schema = sink_schema(table)
        wanted = pa.schema([schema.field(name) for name in columns])
        for rows in merged_rows(runs, table, is_whole=True):
            found = pa.Table.from_batches([rows.select(table.schema.names)])
            yield from conform(found, wanted).to_batches()

    # -- what the planner asks -------------------------------------------------------------------------------------

    def choose(self, tables: Sequence[str], upto: int) -> int:
        """Up to where the next batch may go, *upto* at most: no further than the lowest epoch that is pinned."""
        return choose_folding(Path(self.path), [self.folder(name).path for name in tables], upto)

    def may_read(self, table: str, *, wanted: bool) -> str | None:
        """Why history of *table* cannot be read now; from then on nobody pins it while it is *wanted*."""
        return may_read(Path(self.path), self.folder(table).path, table, wanted=wanted)

    def complete(self, table: SourceTable, query: str, backfill: str, epoch: int) -> None:
        """All of the table's history is here: it is as it was at *epoch*."""

        def following(newest: Manifest) -> Manifest | None:
            if newest.exact is not None and (newest.query, newest.backfill) == (query, backfill):
                return None
            return replace(_of_state(newest, table, query, backfill), exact=epoch)

        self.folder(table).change(following)

    def incomplete(self, table: SourceTable, query: str, backfill: str, progress: Mapping[str, Any]) -> None:
        """Some of its history is missing."""

        def following(newest: Manifest) -> Manifest | None:
            if newest.number and newest.exact is None and newest.backfill == backfill:
                return None
            return _of_state(newest, table, query, backfill)

        folder = self.folder(table)
        folder.put_progress(progress)
        folder.change(following)


def _of_state(newest: Manifest, table: SourceTable, query: str, backfill: str) -> Manifest:
    """The next version, of a query in this state; it is not complete.

    A query that lost its state, or whose sink was dropped, begins anew: what it had delivered goes, so that no row
    stays that went meanwhile.
    """
    made = newest.following(table=newest.table or table, query=query, backfill=backfill, exact=None)
    if newest.backfill in ("", backfill):
        return made
    return replace(made, runs=(), changes={name: epoch for name, epoch in newest.changes.items() if name != query})


def _committed(manifest: Manifest, query: str, backfill: str) -> Committed:
    plan, attempt = manifest.history.get(f"{query}/{backfill}", (0, 0))
    return Committed(manifest.changes.get(query, 0), plan, attempt)


def _check(table: SourceTable) -> None:
    """:raises UnsupportedKey: its key has no order here."""
    for name in table.key_columns:
        check_key(name, table.column(name).type)


def _check_columns(has: SourceTable, wanted: SourceTable) -> None:
    """:raises SinkSchemaError: rows that are kept do not fit into the new columns."""
    known = {column.field_id: column for column in has.columns}
    for column in wanted.columns:
        old = known.get(column.field_id)
        if old is not None and not holds(column.type, old.type):
            raise SinkSchemaError(
                wanted.full_name,
                f"column {column.name!r} is {old.type} there and became {column.type}.",
                next_step="Keep it in another directory, or remove the table there and take a new snapshot.",
            )


def _portions(
    table: SourceTable, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
) -> Iterator[list[pa.RecordBatch]]:
    left = (valid_rows(batch, truncated) for batch in batches)
    for portion in by_bytes(left, PIECE_BYTES):
        made: list[pa.RecordBatch] = []
        for batch in portion:
            own = fitted(batch, table.schema)
            rows = pa.RecordBatch.from_arrays(own, schema=table.schema)
            made.append(of_log(batch, own, table.schema, vnodes_of(rows, table.key_columns, VNODES)))
        yield made


def _history_rows(batch: pa.RecordBatch, table: SourceTable, kind: int, others: str | None) -> pa.RecordBatch:
    rows = pa.RecordBatch.from_arrays(fitted(batch, table.schema), schema=table.schema)
    return of_rows(rows, vnodes_of(rows, table.key_columns, VNODES), kind, others or None)


def _keys_of(folder: TableFolder, run: RunInfo, table: SourceTable) -> Iterator[pa.RecordBatch]:
    for rows in merged_rows([folder.open(run)], table, is_whole=False):
        yield rows.select(table.schema.names)


def _prefix(query: str) -> str:
    return f"staged-{crc32(query.encode()):08x}-"
