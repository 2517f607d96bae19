"""LakeSink: the commit of all sinks of tables of Parquet files: what is left of a batch is proved, applied, swapped in.

Tasks write history as files of the table, which readers do not see before the commit. Changes are folded to one row per
key, or to versions, and staged separately; the commit rewrites those files that have one of the keys.

A format (Delta, Iceberg) gives a handle of a table: what was read of it, and one commit at a time on top of that. What
a commit is, and where the tokens are kept, depends on the format.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, zip_longest
from typing import Any, ClassVar, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.sinks.batch import (
    Batch,
    Held,
    KnownRows,
    in_ranges,
    refuse_late,
    replaced_ranges,
    rows_after,
    truncated_us,
)
from headwater.sinks.change_rows import change_rows, changes_schema, history_rows
from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import SinkBusy, SinkSchemaError, StagedLost
from headwater.sinks.fold import DELETED, fold, folded_schema
from headwater.sinks.keys import KeySet
from headwater.sinks.rewrite import Rewrite
from headwater.sinks.sink import Committed, HistoryPart, Mode, Staged, Token
from headwater.sinks.staging import RowWriter, StagedFiles, Staging, files_of, parts_of, prove_files, stage_rows
from headwater.sinks.storage import Storage, names_store_errors
from headwater.sinks.table_schema import ColumnMapping
from headwater.sinks.types import conform, sink_schema
from headwater.sinks.version_rewrite import VersionRewrite
from headwater.sinks.versions import VALID_FROM, as_staged, history_versions, version_pieces, versions_schema
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.system.retry import Backoff

FILE_BYTES: Final = 4 << 20
LARGEST_FILE_BYTES: Final = 32 << 20
MANY_FILES: Final = 1000
CHANGES_FILE_BYTES: Final = 128 << 20
COMMIT_ATTEMPTS: Final = 20
CONFLICT: Final = Backoff(base=0.01, factor=2, maximum=0.5)
"""The process that was slower waits before it tries again, or it would stay the slower one."""
RETENTION_HOURS: Final = 1


class LakeSink(ABC):
    """Stages rows for tables of files, and commits them. It can be pickled.

    :ivar file_bytes: how large a file gets: of a mirror small enough to be rewritten for a change. The files of a
        table with many of them grow larger.
    """

    mode: Mode
    file_bytes: int | None
    retention_hours: int
    adopt: bool
    format_name: ClassVar[str]

    # -- given by the format ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def object_store(self) -> tuple[str, str]:
        """The root of its object store, and the server that its options name; for messages."""

    @property
    @abstractmethod
    def _root(self) -> Storage:
        """Where rows are staged."""

    @abstractmethod
    def _writer(self, table: SourceTable, token: Token, schema: pa.Schema) -> RowWriter:
        """Writes files of *table*."""

    @abstractmethod
    def _opened(self, table: SourceTable) -> AbstractContextManager[Any]:
        """A handle of *table*."""

    @abstractmethod
    def _held(self, found: Any, table: SourceTable, query: str, backfill: str = "") -> Held:
        """What its tokens say."""

    @abstractmethod
    def _tokens(self, table: SourceTable, token: Token, batch: Batch, *, is_upsert: bool) -> dict[str, Any]:
        """What the commit of *batch* writes. :param is_upsert: there were rows before this backfill, noted now."""

    @abstractmethod
    def _fence_token(self, table: SourceTable, query: str, generation: int) -> dict[str, Any]: ...

    @abstractmethod
    def _create(self, found: Any, table: SourceTable) -> None: ...

    @abstractmethod
    def _is_ours(self, found: Any, table: SourceTable, query: str) -> bool:
        """Whether Headwater created the table or has written to it."""

    @abstractmethod
    def _require_ours(self, found: Any, table: SourceTable, query: str) -> None:
        """:raises SinkSchemaError: others created the table, and *adopt* is not set."""

    @abstractmethod
    def _plan(self, found: Any, table: SourceTable, *, emptied: bool = False) -> Any:
        """What becomes of its columns. :param emptied: no row of before counts any more."""

    @abstractmethod
    def _rewrite(self, found: Any, table: SourceTable, token: Token, plan: Any) -> Rewrite:
        """Its files. :param plan: ``None``: its columns stay as they are."""

    @abstractmethod
    def _put(
        self, found: Any, query: str, generation: int, tokens: dict[str, Any], rewrite: Rewrite | None, plan: Any
    ) -> bool:
        """Commit on top of what was read; ``False``: another commit was faster, and nothing is changed.

        :param plan: ``None``: no row changes.
        """

    def _fitted(self, table: SourceTable, found: Any) -> SourceTable:
        """*table* with the columns that it has here."""
        return table

    def _extended(self, found: Any, plan: Any) -> bool:
        """Give the table columns apart from the commit, where its format needs that; ``False``: look at it again."""
        return True

    def _relaid(self, rewrite: Any, batch: Batch) -> tuple[Batch, list[DataFile]]:
        """*batch* with files that fit the columns, and those that are not needed any more."""
        return batch, []

    # -- rows that are staged ----------------------------------------------------------------------------------------

    def _fitting(self, table: SourceTable) -> ColumnMapping:
        """How *table* is fitted to what the sink has of it."""
        return ColumnMapping(table)

    def _columns(self, table: SourceTable) -> pa.Schema:
        """The columns of rows of *table*, as it is fitted, in this mode."""
        own = sink_schema(table)
        schemas = {Mode.MIRROR: lambda own: own, Mode.CHANGES: changes_schema, Mode.HISTORY: versions_schema}
        made: pa.Schema = schemas[self.mode](own)
        added = set(made.names[len(own) :])
        clash = next((name for name in own.names if name.lower() in added), None)
        if clash is not None:
            raise SinkSchemaError(
                table.full_name,
                f"its column {clash!r} is one that this mode adds.",
                next_step="Rename the column, leave it out of the capture, or use mode 'mirror'.",
            )
        return made

    @names_store_errors
    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
    ) -> Staged:
        """Mirror: the folded rows, as parts. Changes: files of the table. History: versions, as parts."""
        fitting = self._fitting(table)
        fitted, rows = fitting.table, map(fitting.batch, batches)
        own, staging = sink_schema(fitted), self._staging(table, token)
        if self.mode is Mode.MIRROR:
            folded = fold(fitted, rows, truncated)
            parts = staging.put_all(token, [conform(folded, folded_schema(own))])
            return Staged.of(table, token, False, StagedFiles(parts=tuple(parts)), truncated=truncated)
        after = max(token.after, self.committed(table, token.query, token.backfill).epoch)
        later = (rows_after(batch, after) for batch in rows)
        if self.mode is Mode.HISTORY:
            since: list[int] = []
            parts = []
            for piece in version_pieces(fitted, own, later, truncated):
                parts.append(staging.put(token, piece))
                since.append(pc.min(piece.column(VALID_FROM)).cast(pa.int64()).as_py())
            detail = StagedFiles(parts=tuple(parts), since_us=min(since, default=None))
            return Staged.of(table, token, False, detail, truncated=truncated, after=after)
        writer = self._writer(table, token, self._columns(fitted))
        files, parts = stage_rows(writer, staging, token, (change_rows(batch, own) for batch in later))
        return Staged.of(table, token, False, StagedFiles(tuple(files), tuple(parts)), after=after)

    @names_store_errors
    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        """New rows: files of the table. Rows that it may have: parts."""
        fitting = self._fitting(table)
        fitted, rows = fitting.table, map(fitting.batch, batches)
        own, staging = sink_schema(fitted), self._staging(table, token)
        writer = self._writer(table, token, self._columns(fitted))
        if self.mode is Mode.CHANGES:
            made = (history_rows(batch, own, part) for batch in rows)
            files, parts = stage_rows(writer, staging, token, made)
            return Staged.of(table, token, True, StagedFiles(tuple(files), tuple(parts)))
        if part.columns is not None:
            told = {*(fitting.names.get(name, name) for name in part.columns), *fitted.key_columns}
            others = ",".join(name for name in own.names if name not in told)
            parts = staging.put_all(token, (self._staged_rows(batch, own, part, others) for batch in rows))
            detail = StagedFiles((), tuple(parts), only_existing=True, since_us=part.commit_time_us)
            return Staged.of(table, token, True, detail)
        known = KnownRows(fitted.key_columns, part.changed)
        files = writer.write_all(self._new_rows(batch, own, part) for batch in known.others(rows))
        parts = staging.put_all(token, (self._staged_rows(batch, own, part) for batch in known.rows))
        detail = StagedFiles(tuple(files), tuple(parts), since_us=part.commit_time_us)
        ranges = replaced_ranges(table, part) if part.replaces else None
        return Staged.of(table, token, True, detail, ranges=ranges, order=part.order)

    def _new_rows(self, batch: pa.RecordBatch, own: pa.Schema, part: HistoryPart) -> pa.Table:
        """Rows of history as files of the table have them."""
        if self.mode is Mode.HISTORY:
            return history_versions(batch, own, part)
        return conform(pa.Table.from_batches([batch]), own)

    def _staged_rows(self, batch: pa.RecordBatch, own: pa.Schema, part: HistoryPart, unavailable: str = "") -> pa.Table:
        """Rows of history that the sink may have, as they are staged."""
        rows = self._new_rows(batch, own, part)
        return (
            as_staged(rows, unavailable or None) if self.mode is Mode.HISTORY else _upserts(rows, unavailable or None)
        )

    def _apply(
        self, rewrite: Rewrite, table: SourceTable, token: Token, batch: Batch, *, overlaps: bool
    ) -> list[DataFile]:
        """Changes, then history; the files that are not needed afterwards."""
        staging = self._staging(table, token)
        if self.mode is Mode.CHANGES:
            rewrite.append(files_of(batch.all))
            for rows in staging.gather(parts_of(batch.all)):
                rewrite.insert(rows)
            return []
        if self.mode is Mode.HISTORY:
            assert isinstance(rewrite, VersionRewrite)
            return self._apply_versions(rewrite, table, staging, batch, overlaps=overlaps)
        if batch.is_truncated:
            rewrite.truncate()
        for rows in staging.gather(parts_of(batch.changes)):
            rewrite.upsert(rows)
        waste: list[DataFile] = []
        for one in batch.history:
            files = one.detail.files
            if one.ranges is not None:
                rewrite.delete(partial(_is_replaced, one))
            if overlaps and one.ranges is None:
                for file in files:
                    rewrite.upsert(_upserts(rewrite.read(file), None))
                waste += files
            else:
                rewrite.append(files)
            for rows in staging.gather(one.detail.parts):
                rewrite.upsert(rows, only_existing=one.detail.only_existing)
        return waste

    def _apply_versions(
        self, rewrite: VersionRewrite, table: SourceTable, staging: Staging, batch: Batch, *, overlaps: bool
    ) -> list[DataFile]:
        if batch.is_truncated:
            at_us = truncated_us(batch.changes, (one.detail.since_us for one in batch.changes))
            rewrite.close(lambda keys: np.ones(keys.num_rows, np.bool_), at_us)
        for layer in zip_longest(*(one.detail.parts for one in batch.changes)):  # a key's are in one task, in order
            for rows in staging.gather([part for part in layer if part is not None]):
                rewrite.put(rows)
        waste: list[DataFile] = []
        versions = self._columns(self._fitting(table).table)
        for one in batch.history:
            files, parts = one.detail.files, one.detail.parts
            if one.ranges is not None:
                tables = chain(map(rewrite.read_keys, files), map(staging.get, parts))
                told = KeySet(rewrite.keys_of(tables), rewrite.key_columns)
                rewrite.close(partial(_is_gone, one, told), one.detail.since_us)
            if overlaps or one.ranges is not None:
                for file in files:
                    rewrite.put(as_staged(conform(rewrite.read(file), versions)), only_changed=True)
                waste += files
            else:
                rewrite.append(files)
            for rows in staging.gather(parts):
                rewrite.put(rows, only_changed=True, only_existing=one.detail.only_existing)
        return waste

    @property
    def _file_bytes(self) -> int:
        return self.file_bytes or (CHANGES_FILE_BYTES if self.mode is Mode.CHANGES else FILE_BYTES)

    def _target_bytes(self, files: Sequence[DataFile]) -> int:
        """How large new files of a table with *files* get."""
        share = min(sum(file.size for file in files) // MANY_FILES, LARGEST_FILE_BYTES)
        return max(self._file_bytes, share)

    def _staging(self, table: SourceTable, token: Token) -> Staging:
        return Staging(self._root, table, token.query)

    # -- commits -----------------------------------------------------------------------------------------------------

    @names_store_errors
    def check_table(self, table: SourceTable, query: str) -> None:
        """:raises SinkSchemaError: others created the table, and *adopt* is not set."""
        with self._opened(table) as found:
            if found.open():
                self._require_ours(found, table, query)

    @names_store_errors
    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What the table has."""
        with self._opened(table) as found:
            return self._held(found, table, query, backfill).committed if found.open() else Committed()

    @names_store_errors
    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """One commit of the table, which is created or gets its new columns before.

        :raises OtherAttempt: it has the history of this plan from another attempt.
        :raises SinkSchemaError: the columns became what the table cannot become, or others created the table.
        :raises SinkBusy: others committed all the time. :raises StagedLost: a staged file is not as it was staged.
        """
        if not staged:
            return False
        with self._opened(table) as found:
            return self._deliver(found, self._fitted(table, found), token, staged)

    @names_store_errors
    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        """A commit of the generation alone; the table is created if it does not exist."""
        with self._opened(table) as found:
            if not found.open():
                self._create(found, self._fitted(table, found))
            if self.adopt or self._is_ours(found, table, query):
                self._fence(found, table, query, generation, must=True)

    def _fence(self, found: Any, table: SourceTable, query: str, generation: int, *, must: bool) -> None:
        """A process of an earlier generation that sleeps in its commit must not wake up to files that are removed.

        A generation that is higher than ours is of a query whose state was removed: it began again.
        """
        for _ in range(COMMIT_ATTEMPTS):
            has = self._held(found, table, query).generation
            if has == generation or (has < generation and not must):
                return
            if self._put(found, query, generation, self._fence_token(table, query, generation), None, None):
                return
        raise self._busy(table)

    def _deliver(self, found: Any, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        if not found.open(newest=False):
            self._create(found, table)
        self._require_ours(found, table, token.query)
        for attempt in range(COMMIT_ATTEMPTS):
            held = self._held(found, table, token.query, token.backfill)
            batch = Batch.left_of(staged, token, held.committed)
            if batch is None:
                self._staging(table, token).clean(token)
                return False
            refuse_late(table, token, held.generation)
            plan = self._plan(found, table, emptied=batch.is_truncated)
            if not self._extended(found, plan):
                continue
            if batch.is_empty and not plan.is_changed:
                return True
            if self._commit_batch(found, table, token, held, batch, plan):
                self._staging(table, token).clean(token)
                self._tidy(found, table, token)
                return True
            time.sleep(CONFLICT.delay(attempt + 1))
        raise self._busy(table)

    def _commit_batch(self, found: Any, table: SourceTable, token: Token, held: Held, batch: Batch, plan: Any) -> bool:
        try:
            prove_files(found.storage, table, ((file.path, file.size) for file in files_of(batch.all)))
            self._staging(table, token).prove(parts_of(batch.all))
        except StagedLost:
            found.open()
            if self._held(found, table, token.query, token.backfill).committed == held.committed:
                raise
            return False  # another process committed the batch meanwhile, and its files
        rewrite = self._rewrite(found, table, token, plan)
        has_rows = bool(rewrite.files) and self.mode is not Mode.CHANGES
        is_upsert = bool(batch.history) and has_rows and not held.has_history
        values = self._tokens(table, token, batch, is_upsert=is_upsert)
        overlaps = is_upsert or held.is_upsert
        try:
            if batch.is_truncated and self.mode is Mode.MIRROR:
                rewrite.truncate()
            if plan.must_rewrite:
                rewrite.recast(plan.renamed)
            batch, waste = self._relaid(rewrite, batch)
            waste += self._apply(rewrite, table, token, batch, overlaps=overlaps)
        except BaseException:
            rewrite.discard()
            raise
        if not self._put(found, token.query, token.generation, values, rewrite, plan):
            rewrite.discard()
            return False
        rewrite.settle()
        for file in waste:
            found.storage.remove(file.path)
        return True

    def _tidy(self, found: Any, table: SourceTable, token: Token) -> None:
        """Join small files, and remove what no reader needs. The batch is committed, whatever happens here."""
        if self.mode is not Mode.CHANGES:
            rewrite = self._rewrite(found, table, token, None)
            if rewrite.compact():
                if self._put(found, token.query, token.generation, {}, rewrite, None):
                    rewrite.settle()
                else:
                    rewrite.discard()
        found.tidy(self.retention_hours)

    def _busy(self, table: SourceTable) -> SinkBusy:
        return SinkBusy(
            f"The {self.format_name} table of {table.full_name} was committed to by others {COMMIT_ATTEMPTS} times in "
            "a row.",
            next_step="Look for another query or job that writes to it.",
        )


def _upserts(rows: pa.Table, unavailable: str | None) -> pa.Table:
    """Rows as folded ones."""
    gone = pa.repeat(pa.scalar(False), rows.num_rows)
    texts = pa.repeat(pa.scalar(unavailable, pa.string()), rows.num_rows)
    return rows.append_column(DELETED, gone).append_column(UNAVAILABLE_COLUMN, texts)


def _is_replaced(staged: Staged, keys: pa.Table) -> Any:
    return in_ranges(staged, keys.columns)


def _is_gone(staged: Staged, read: KeySet, keys: pa.Table) -> Any:
    """Which rows lie in the ranges of *staged* and are not among those that were read there."""
    return in_ranges(staged, keys.columns) & (read.find(keys) < 0)


def file_prefix(query: str, generation: int) -> str:
    """Of the names of files that tasks of *query* write: they tell whose they are."""
    return f"part-{crc32(query.encode()):08x}-{generation}-"


def is_left(path: str, query: str, generation: int) -> bool:
    """Whether a task of *query* of an earlier generation wrote it."""
    start, found, rest = path.partition(f"part-{crc32(query.encode()):08x}-")
    number = rest.partition("-")[0]
    return bool(found) and not start and number.isdigit() and int(number) < generation


def of_another(table: SourceTable, what: str, owner: str, option: str) -> SinkSchemaError:
    """The error of a target that has the rows of another table."""
    return SinkSchemaError(
        table.full_name,
        f"{what} has the rows of {owner}.",
        next_step=f"Set another {option} in [[sink]], or move what is there away; then restart.",
    )


def not_ours(table: SourceTable, what: str, option: str) -> SinkSchemaError:
    """The error of a table that others created. :param option: of the sink, that names where its tables are."""
    return SinkSchemaError(
        table.full_name,
        f"{what} was not created by Headwater.",
        next_step=f"Move it away; or set adopt = true (to write into it) or another {option} in [[sink]], and restart.",
    )
