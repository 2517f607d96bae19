"""LakeRows: how rows are staged for a table of Parquet files, and applied to its files.

Tasks write history as files of the table, which readers do not see before the commit. Changes are folded to one row per
key, or to versions, and staged separately; the commit rewrites those files that have one of the keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.sinks.batch import Batch, KnownRows, in_ranges, replaced_ranges, rows_after, truncated_us
from headwater.sinks.change_rows import change_rows, changes_schema, history_rows
from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.fold import DELETED, fold, folded_schema
from headwater.sinks.keys import KeySet
from headwater.sinks.rewrite import Rewrite
from headwater.sinks.sink import Committed, HistoryPart, Mode, Staged, Token
from headwater.sinks.staging import RowWriter, StagedFiles, Staging, files_of, parts_of, stage_rows
from headwater.sinks.storage import Storage, names_store_errors
from headwater.sinks.table_schema import ColumnMapping
from headwater.sinks.types import conform, sink_schema
from headwater.sinks.version_rewrite import VersionRewrite
from headwater.sinks.versions import VALID_FROM, as_staged, history_versions, version_pieces, versions_schema
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable

FILE_BYTES: Final = 4 << 20
LARGEST_FILE_BYTES: Final = 32 << 20
MANY_FILES: Final = 1000
CHANGES_FILE_BYTES: Final = 128 << 20


class LakeRows(ABC):
    """The rows of a sink of tables of files.

    :ivar file_bytes: how large a file gets: of a mirror small enough to be rewritten for a change. The files of a
        table with many of them grow larger.
    """

    mode: Mode
    file_bytes: int | None

    @abstractmethod
    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed: ...

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
