"""LakeSink: what all sinks of tables of Parquet files do: how rows are staged, and how they are applied to files.

Tasks write history as files of the table, which nobody sees before the commit. Changes are folded to one row per key
and staged apart; the commit writes those files anew that have one of the keys. What a commit is, and where the token is
kept, is up to the format of the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final
from zlib import crc32

import numpy as np
import pyarrow as pa

from headwater.sinks.batch import Batch, rows_after
from headwater.sinks.change_rows import change_rows, changes_schema, history_rows
from headwater.sinks.data_files import DataFile, FileWriter, read_rows
from headwater.sinks.errors import SinkInputError
from headwater.sinks.fold import DELETED, fold, folded_schema
from headwater.sinks.rewrite import Rewrite
from headwater.sinks.sink import Committed, HistoryPart, Mode, Staged, Token
from headwater.sinks.staging import PART_BYTES, Part, Staging, stage_rows
from headwater.sinks.storage import Storage, directory_of
from headwater.sinks.types import cast, conform, sink_schema
from headwater.sources.snapshots import KeyOrder
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.stream.vnode import hash_keys

COMMIT_ATTEMPTS: Final = 20
FILE_BYTES: Final = 4 << 20
LARGEST_FILE_BYTES: Final = 32 << 20
MANY_FILES: Final = 1000
CHANGES_FILE_BYTES: Final = 128 << 20
RETENTION_HOURS: Final = 1


class LakeSink(ABC):
    """Stages rows for tables of files. It can be pickled.

    :ivar file_bytes: how large a file gets: of a mirror small enough to be written anew for a change. The files of a
        table with many of them grow larger.
    """

    mode: Mode
    file_bytes: int | None

    @abstractmethod
    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed: ...

    @property
    @abstractmethod
    def _root(self) -> Storage:
        """Where rows are staged."""

    @abstractmethod
    def _table(self, table: SourceTable) -> Storage:
        """Where the files of *table* are."""

    @abstractmethod
    def _writer(self, table: SourceTable, token: Token, schema: pa.Schema) -> FileWriter:
        """Writes files of *table*."""

    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
    ) -> Staged:
        """Mirror: the folded rows, as parts. Changes: files of the table."""
        own = sink_schema(table)
        if self.mode is Mode.CHANGES:
            after = max(token.after, self.committed(table, token.query, token.backfill).epoch)
            rows = (change_rows(rows_after(batch, after), own) for batch in batches)
            files, parts = stage_rows(
                self._writer(table, token, changes_schema(own)), self._staging(table, token), token, rows
            )
            return _staged(table, token, False, files=files, parts=parts, after=after)
        folded = fold(table, batches, truncated)
        parts = [self._staging(table, token).put(token, conform(folded, folded_schema(own)))] if folded.num_rows else []
        return _staged(table, token, False, parts=parts, truncated=truncated)

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        """New rows: files of the table. Rows that it may have: parts."""
        own = sink_schema(table)
        if self.mode is Mode.CHANGES:
            rows = (history_rows(batch, own, part) for batch in batches)
            files, parts = stage_rows(
                self._writer(table, token, changes_schema(own)), self._staging(table, token), token, rows
            )
            return _staged(table, token, True, files=files, parts=parts)
        if part.columns is not None:
            others = [name for name in own.names if name not in {*part.columns, *table.key_columns}]
            parts = self._stage_parts(table, token, batches, ",".join(others) or None)
            return _staged(table, token, True, parts=parts, only_existing=True)
        apart = _Apart(table, part.changed)
        files = self._writer(table, token, own).write_all(conform(rows, own) for rows in apart.others(batches))
        parts = self._stage_parts(table, token, apart.taken, None)
        ranges = _replaced(table, part) if part.replaces else None
        return _staged(table, token, True, files=files, parts=parts, ranges=ranges, order=part.order)

    def _apply(
        self, rewrite: Rewrite, table: SourceTable, token: Token, batch: Batch, *, overlaps: bool
    ) -> list[DataFile]:
        """Changes, then history; the files that are not needed afterwards."""
        staging = self._staging(table, token)
        if batch.is_truncated:
            rewrite.truncate()
        for rows in staging.gather(parts_of(batch.changes)):
            rewrite.upsert(rows)
        waste: list[DataFile] = []
        for one in batch.history:
            ranges, files = one.detail["ranges"], one.detail["files"]
            if ranges is not None:
                rewrite.delete(partial(_in_ranges, table, one.detail["order"], ranges))
            if overlaps and ranges is None:
                for file in files:
                    rewrite.upsert(_upserts(read_rows(self._table(table), file.path), None))
                waste += files
            else:
                rewrite.append(files)
            for rows in staging.gather(one.detail["parts"]):
                rewrite.upsert(rows, only_existing=one.detail["only_existing"])
        return waste

    def _stage_parts(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], unavailable: str | None
    ) -> list[Part]:
        schema = folded_schema(sink_schema(table))
        staging = self._staging(table, token)
        parts: list[Part] = []
        held: list[pa.Table] = []
        size = 0
        for batch in batches:
            held.append(conform(_upserts(pa.Table.from_batches([batch]), unavailable), schema))
            size += held[-1].nbytes
            if size >= PART_BYTES:
                parts.append(staging.put(token, pa.concat_tables(held)))
                held, size = [], 0
        if held:
            parts.append(staging.put(token, pa.concat_tables(held)))
        return parts

    @property
    def _file_bytes(self) -> int:
        return self.file_bytes or (FILE_BYTES if self.mode is Mode.MIRROR else CHANGES_FILE_BYTES)

    def _target_bytes(self, files: Sequence[DataFile]) -> int:
        """How large new files of a table with *files* get."""
        share = min(sum(file.size for file in files) // MANY_FILES, LARGEST_FILE_BYTES)
        return max(self._file_bytes, share)

    def _staging(self, table: SourceTable, token: Token) -> Staging:
        return Staging(self._root, directory_of(table), token.query)


def file_prefix(query: str, generation: int) -> str:
    """Of the names of files that tasks of *query* write: they tell whose they are."""
    return f"part-{crc32(query.encode()):08x}-{generation}-"


def is_left(path: str, query: str, generation: int) -> bool:
    """Whether a task of *query* of an earlier generation wrote it."""
    start, found, rest = path.partition(f"part-{crc32(query.encode()):08x}-")
    number = rest.partition("-")[0]
    return bool(found) and not start and number.isdigit() and int(number) < generation


class _Apart:
    """Rows whose key may be in the table already, kept apart from the others."""

    def __init__(self, table: SourceTable, changed: Any) -> None:
        self._keys = table.key_columns
        self._changed = None if changed is None else np.sort(np.asarray(changed, np.uint64))
        self._taken: list[pa.RecordBatch] = []

    @property
    def taken(self) -> Iterator[pa.RecordBatch]:
        return iter(self._taken)

    def others(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in batches:
            if self._changed is not None and self._changed.size:
                hashes = hash_keys(batch, self._keys)
                places = np.minimum(np.searchsorted(self._changed, hashes), self._changed.size - 1)
                is_known = self._changed[places] == hashes
                if is_known.any():
                    self._taken.append(batch.filter(pa.array(is_known)))
                    batch = batch.filter(pa.array(~is_known))
            yield pa.Table.from_batches([batch])


def _staged(
    table: SourceTable,
    token: Token,
    is_snapshot: bool,
    *,
    files: Sequence[DataFile] = (),
    parts: Sequence[Part] = (),
    truncated: tuple[int, int] | None = None,
    after: int | None = None,
    ranges: tuple[KeyRange, ...] | None = None,
    order: KeyOrder | None = None,
    only_existing: bool = False,
) -> Staged:
    detail = {"files": list(files), "parts": list(parts), "ranges": ranges, "order": order, "truncated": truncated}
    staged: list[DataFile | Part] = [*files, *parts]
    return Staged(
        table,
        token,
        is_snapshot,
        rows=sum(one.rows for one in staged),
        size=sum(one.size for one in staged),
        truncated=truncated is not None,
        detail={**detail, "only_existing": only_existing, "after": token.epoch if after is None else after},
    )


def parts_of(staged: Sequence[Staged]) -> list[Part]:
    return [part for one in staged for part in one.detail["parts"]]


def _upserts(rows: pa.Table, unavailable: str | None) -> pa.Table:
    """Rows as folded ones."""
    gone = pa.repeat(pa.scalar(False), rows.num_rows)
    texts = pa.repeat(pa.scalar(unavailable, pa.string()), rows.num_rows)
    return rows.append_column(DELETED, gone).append_column(UNAVAILABLE_COLUMN, texts)


def _replaced(table: SourceTable, part: HistoryPart) -> tuple[KeyRange, ...]:
    is_all = any(one.start is None and one.end is None for one in part.ranges)
    if not is_all and (part.kind is not SplitKind.KEY or part.order is None):
        raise SinkInputError(
            f"Parts of {table.full_name} that are not ranges of its key cannot be replaced.",
            next_step="Take a new snapshot of the whole table.",
        )
    return part.ranges


def _in_ranges(table: SourceTable, order: KeyOrder | None, ranges: tuple[KeyRange, ...], keys: pa.Table) -> Any:
    """Which rows lie in *ranges*, given their key columns as the table of files has them."""
    inside = np.zeros(keys.num_rows, np.bool_)
    names = list(table.key_columns)
    typed = pa.table([cast(keys.column(name), table.column(name).type) for name in names], names)
    batches = typed.combine_chunks().to_batches()
    for part in ranges:
        cuts = [cut for cut in (part.start, part.end) if cut is not None]
        if not cuts:
            return np.ones(keys.num_rows, np.bool_)
        assert order is not None
        places = np.concatenate([order.places(batch, cuts) for batch in batches] or [np.zeros(0, np.int64)])
        inside |= places == (0 if part.start is None else 1)
    return inside
