"""ParquetSink: the changes of each table as Parquet files in ``<root>/<namespace>.<name>``, appended.

Readers that look at the directory alone (``spark.read.parquet``) see the files of committed batches only, one after the
other as they are moved there. :func:`committed_files` and :func:`read` go by the manifests (:mod:`headwater.sinks.
manifests`): a batch is there as a whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from headwater.sinks.batch import Batch, rows_after
from headwater.sinks.change_rows import change_rows, changes_schema, history_rows
from headwater.sinks.data_files import DataFile, FileWriter
from headwater.sinks.errors import SinkBusy, SinkInputError
from headwater.sinks.manifests import STAGING, Manifest, ManifestFile, Manifests
from headwater.sinks.sink import Capabilities, Committed, HistoryPart, Mode, Staged, Token
from headwater.sinks.staging import Part, Staging, stage_rows
from headwater.sinks.storage import Storage, directory_of
from headwater.sinks.types import conform, sink_schema
from headwater.sources.table import SourceTable

COMMIT_ATTEMPTS: Final = 20
FILE_BYTES: Final = 128 << 20

_STAGED = re.compile(r".*/(\d+)/[^/]+\.parquet")
_NAME = re.compile(r"(\d+)-(\d+)-\d+-[0-9a-f-]{36}\.parquet")


@dataclass(frozen=True)
class ParquetSink:
    """Parquet files in the directory *path*, which is on a file system. It can be pickled.

    :raises SinkInputError: another mode than ``CHANGES``, or an object store.
    """

    capabilities: ClassVar = Capabilities((Mode.CHANGES,))

    path: str
    mode: Mode = Mode.CHANGES
    file_bytes: int = FILE_BYTES

    def __post_init__(self) -> None:
        if self.mode is not Mode.CHANGES:
            raise SinkInputError(
                "Parquet files can only be appended to.", next_step="Use mode 'changes', or a Delta sink for a mirror."
            )
        if not self._root.is_local:
            raise SinkInputError(
                "A Parquet sink needs a file system, on which files can be moved.",
                next_step="Use a Delta sink for an object store.",
            )

    @property
    def name(self) -> str:
        return f"parquet:{self.path}"

    def check(self) -> None:
        """:raises SinkUnwritable: nothing can be written there."""
        self._root.check()

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What the newest manifest of *table* says."""
        return self._manifests(table).newest().committed(query, backfill)

    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
    ) -> Staged:
        """Every row; a truncation takes none of them away, the deletes that it means are not told."""
        own = sink_schema(table)
        after = max(token.after, self.committed(table, token.query, token.backfill).epoch)
        rows = (change_rows(rows_after(batch, after), own) for batch in batches)
        return self._stage(table, token, rows, is_snapshot=False, after=after)

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        """Each row as an insert at the position of *part*."""
        own = sink_schema(table)
        rows = (history_rows(batch, own, part) for batch in batches)
        return self._stage(table, token, rows, is_snapshot=True, after=token.epoch)

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """One manifest, then the files are moved to where they are seen.

        :raises OtherAttempt: the history of this plan, or a part of the changes, came from another process.
        :raises SinkBusy: others committed all the time.
        """
        if not staged:
            return False
        manifests = self._manifests(table)
        small: list[DataFile] | None = None
        for _ in range(COMMIT_ATTEMPTS):
            newest = manifests.newest()
            batch = Batch.left_of(staged, token, newest.committed(token.query, token.backfill))
            if batch is None:
                self._clean(table, token)
                return False
            if batch.is_empty:
                return True
            if small is None:
                small = self._write_small(table, token, batch)
            files = [*small, *(file for one in batch.all for file in one.detail["files"])]
            manifest = _following(newest, token, batch, files)
            if manifests.put(manifest):
                manifests.move(manifest)
                self._clean(table, token)
                return True
        raise SinkBusy(
            f"Others committed to the files of {table.full_name} {COMMIT_ATTEMPTS} times in a row.",
            next_step="Look for another query that delivers the same table there.",
        )

    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Remove the files in staging; what a manifest names is moved before."""
        self._manifests(table).newest()
        self._small(table, query).abort(generation)
        storage = self._root.within(directory_of(table))
        for info in storage.list(_staging(query)):
            found = _STAGED.fullmatch(info.path)
            if found and int(found[1]) < generation:
                storage.remove(info.path)

    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of all committed batches."""
        schema = changes_schema(sink_schema(table))
        for file in committed_files(self._root.within(directory_of(table)).address):
            rows = pq.read_table(file, columns=[name for name in columns if name in pq.read_schema(file).names])
            yield from conform(rows, pa.schema([schema.field(name) for name in columns])).to_batches()

    def _stage(
        self, table: SourceTable, token: Token, rows: Iterator[pa.Table], *, is_snapshot: bool, after: int
    ) -> Staged:
        writer = self._writer(table, token)
        files, parts = stage_rows(writer, self._small(table, token.query), token, rows)
        staged: list[DataFile | Part] = [*files, *parts]
        count, size = sum(one.rows for one in staged), sum(one.size for one in staged)
        detail = {"files": files, "parts": parts, "after": after}
        return Staged(table, token, is_snapshot, count, size, detail=detail)

    def _write_small(self, table: SourceTable, token: Token, batch: Batch) -> list[DataFile]:
        """The rows that came inside the answers of the tasks, as one file."""
        parts = [part for one in batch.all for part in one.detail["parts"]]
        return self._writer(table, token).write_all(self._small(table, token.query).gather(parts))

    def _writer(self, table: SourceTable, token: Token) -> FileWriter:
        prefix = f"{_staging(token.query)}/{token.generation}/{token.epoch}-{token.plan}-{token.attempt}-"
        schema = changes_schema(sink_schema(table))
        return FileWriter(self._root.within(directory_of(table)), schema, self.file_bytes, prefix)

    def _small(self, table: SourceTable, query: str) -> Staging:
        return Staging(self._root, directory_of(table), query)

    def _clean(self, table: SourceTable, token: Token) -> None:
        """Remove what this and earlier batches of the query staged and did not commit."""
        storage = self._root.within(directory_of(table))
        for info in storage.list(_staging(token.query)):
            found = _NAME.fullmatch(info.base_name)
            if found and int(found[1]) <= token.epoch and int(found[2]) <= token.plan:
                storage.remove(info.path)

    @property
    def _root(self) -> Storage:
        return Storage(self.path)

    def _manifests(self, table: SourceTable) -> Manifests:
        return Manifests(Path(self._root.within(directory_of(table)).address))


def committed_files(path: str | Path) -> list[Path]:
    """The files of all committed batches of the table in the directory *path*, in the order of the batches."""
    root = Path(path)
    manifests = Manifests(root)
    manifests.newest()
    return [root / file.name for manifest in manifests.all() for file in manifest.files]


def read(path: str | Path) -> pa.Table:
    """The rows of all committed batches; columns that came later are null before."""
    files = committed_files(path)
    if not files:
        return pa.table({})
    return pa.concat_tables([pq.read_table(file) for file in files], promote_options="permissive")


def _staging(query: str) -> str:
    return f"{STAGING}/{quote(query, safe='')}"


def _following(newest: Manifest, token: Token, batch: Batch, files: Sequence[DataFile]) -> Manifest:
    moved = tuple(ManifestFile(file.path, Path(file.path).name, file.rows, file.size) for file in files)
    changes = {**newest.changes, token.query: token.epoch} if batch.has_changes else newest.changes
    of_backfill = {f"{token.query}/{token.backfill}": (token.plan, token.attempt)} if batch.history else {}
    return Manifest(newest.number + 1, moved, changes, {**newest.history, **of_backfill})
