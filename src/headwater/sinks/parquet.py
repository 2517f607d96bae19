"""ParquetSink: the changes of each table as Parquet files in ``<root>/<namespace>.<name>``, appended.

Readers that look at the directory alone (``spark.read.parquet``) see the files of committed batches only, one after the
other as they are moved there. :func:`committed_files` and :func:`read` go by the manifests (:mod:`headwater.sinks.
manifests`): a batch is there as a whole or not at all.

Many small files of about one size are joined to one. By the manifests that is one step. In the directory the small ones
go first: for a moment their rows are missing there, and never twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from headwater.sinks.batch import Batch, refuse_late, rows_after
from headwater.sinks.change_rows import change_rows, changes_schema, history_rows
from headwater.sinks.data_files import DataFile, FileWriter, PartitionWriter, write_empty
from headwater.sinks.errors import SinkBusy, SinkInputError, StagedLost
from headwater.sinks.lake import of_another
from headwater.sinks.manifests import STAGING, Manifest, ManifestFile, Manifests
from headwater.sinks.partitions import PartitionBy, Partitioning, Values, partition_texts
from headwater.sinks.sink import Capabilities, Committed, HistoryPart, Mode, Staged, Token
from headwater.sinks.staging import StagedFiles, Staging, files_of, parts_of, prove_files, stage_rows
from headwater.sinks.storage import Storage
from headwater.sinks.types import conform, sink_schema
from headwater.sources.table import SourceTable

COMMIT_ATTEMPTS: Final = 20
FILE_BYTES: Final = 128 << 20
SMALL_FILES: Final = 16
LOOK_EVERY: Final = 8
"""After so many commits it is looked whether files are to be joined."""
RETENTION_HOURS: Final = 1

_NULL = "__HIVE_DEFAULT_PARTITION__"
_STAGED = re.compile(r".*/(\d+)/[^/]+\.parquet")
_NAME = re.compile(r"(\d+)-(\d+)-\d+-[0-9a-f-]{36}\.parquet")


@dataclass(frozen=True)
class ParquetSink:
    """Parquet files in the directory *path*, which is on a file system. It can be pickled.

    :param join_files: so many files of about one size, each below an eighth of *file_bytes*, are joined (16); 0: never.
    :param retention_hours: how long files that were joined to others are kept for who reads them.
    :param partition_by: ``year(c)``, ``month(c)``, ``day(c)``: files are in directories ``c_day=2024-05-31``; of every
        table, or by the name of the table.
    :raises SinkInputError: another mode than ``CHANGES``, an object store, or *partition_by* is not written so.
    """

    capabilities: ClassVar = Capabilities((Mode.CHANGES,))
    is_private: ClassVar[bool] = False

    path: str
    mode: Mode = Mode.CHANGES
    file_bytes: int = FILE_BYTES
    join_files: int | None = None
    retention_hours: int = RETENTION_HOURS
    partition_by: PartitionBy = ()

    def __post_init__(self) -> None:
        by = self.partition_by
        for texts in by.values() if isinstance(by, Mapping) else (by,):
            plain = next((one.column for one in Partitioning.parse(texts).columns if one.unit is None), None)
            if plain is not None:
                raise SinkInputError(
                    f"Parquet files can be partitioned by year, month or day of a column, not by {plain!r} itself.",
                    next_step=f"Use day({plain}), or a Delta sink.",
                )
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

    def target(self, table: SourceTable) -> str:
        """The directory of *table*."""
        return self._root.target_of(table)

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What the newest manifest of *table* says."""
        newest = self._manifests(table).newest()
        return newest.committed(query, backfill) if newest.table in ("", table.full_name) else Committed()

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
        return self._stage(table, token, rows, is_snapshot=True)

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """One manifest, then the files are moved to where they are seen.

        :raises OtherAttempt: the history of this plan, or a part of the changes, came from another process.
        :raises SinkBusy: others committed all the time. :raises StagedLost: a staged file is not as it was staged.
        """
        if not staged:
            return False
        manifests = self._manifests(table)
        small: list[DataFile] | None = None
        for _ in range(COMMIT_ATTEMPTS):
            newest = manifests.newest()
            if newest.table not in ("", table.full_name):
                raise of_another(table, f"the directory {self._root.of_table(table).root}", newest.table, "path")
            batch = Batch.left_of(staged, token, newest.committed(token.query, token.backfill))
            if batch is None:
                self._clean(table, token)
                return False
            refuse_late(table, token, newest.generations.get(token.query, 0))
            if batch.is_empty:
                return True
            try:
                self._prove(table, token, batch)
            except StagedLost:
                if manifests.newest() == newest:
                    raise
                continue  # another process committed the batch meanwhile, and moved its files
            if small is None:
                small = self._write_small(table, token, batch)
                is_empty = not small and not any(files_of(batch.all))
                if is_empty and not manifests.files() and not self._partitioning(table).names:
                    schema = changes_schema(sink_schema(table))
                    small = [write_empty(self._root.of_table(table), schema, _prefix(token))]
            files = [*small, *files_of(batch.all)]
            manifest = _following(newest, table, token, batch, files)
            if manifests.put(manifest):
                manifests.settle(manifest)
                self._clean(table, token)
                self._tidy(table, token, manifests, manifest.number)
                return True
        raise _busy(table)

    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Remove the files in staging; what a manifest names is moved before."""
        self._small(table, query).abort(generation)
        manifests, storage = self._manifests(table), self._root.of_table(table)
        manifests.newest()
        staged = ((info.path, _STAGED.fullmatch(info.path)) for info in storage.list(_staging(query)))
        left = [path for path, found in staged if found and int(found[1]) < generation]
        self._fence(manifests, table, query, generation, must=bool(left))
        for path in left:
            storage.remove(path)

    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        """A manifest with the generation alone."""
        manifests = self._manifests(table)
        if manifests.newest().table in ("", table.full_name):
            self._fence(manifests, table, query, generation, must=True)

    def _fence(self, manifests: Manifests, table: SourceTable, query: str, generation: int, *, must: bool) -> None:
        """A process of an earlier generation that sleeps in its commit must not wake up to files that are removed.

        A generation that is higher than ours is of a query whose state was removed: it began anew.
        """
        for _ in range(COMMIT_ATTEMPTS):
            newest = manifests.newest()
            has = newest.generations.get(query, 0)
            if has == generation or (has < generation and not must):
                return
            if manifests.put(newest.following((), generations={**newest.generations, query: generation})):
                return
        raise _busy(table)

    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of all committed batches."""
        schema = changes_schema(sink_schema(table))
        manifests = self._manifests(table)
        for file in manifests.files():
            rows = _rows(manifests, file, columns)
            yield from conform(rows, pa.schema([schema.field(name) for name in columns])).to_batches()

    def _stage(
        self, table: SourceTable, token: Token, rows: Iterator[pa.Table], *, is_snapshot: bool, after: int | None = None
    ) -> Staged:
        writer = self._writer(table, token)
        files, parts = stage_rows(writer, self._small(table, token.query), token, rows)
        return Staged.of(table, token, is_snapshot, StagedFiles(tuple(files), tuple(parts)), after=after)

    def _prove(self, table: SourceTable, token: Token, batch: Batch) -> None:
        """:raises StagedLost: a staged file is not as its task left it."""
        prove_files(self._root.of_table(table), table, ((file.path, file.size) for file in files_of(batch.all)))
        self._small(table, token.query).prove(parts_of(batch.all))

    def _write_small(self, table: SourceTable, token: Token, batch: Batch) -> list[DataFile]:
        """The rows that came inside the answers of the tasks, as one file."""
        return self._writer(table, token).write_all(self._small(table, token.query).gather(parts_of(batch.all)))

    def _tidy(self, table: SourceTable, token: Token, manifests: Manifests, number: int) -> None:
        """Join small files, and away with what nobody needs. The batch is committed, whatever happens here."""
        if number % LOOK_EVERY:
            return
        newest = manifests.newest()
        count = SMALL_FILES if self.join_files is None else self.join_files
        small = _to_join(manifests, self.file_bytes, count) if count else []
        if small:
            storage = self._root.of_table(table)
            schema = pq.read_schema(manifests.place(small[0]))
            writer = FileWriter(storage, schema, self.file_bytes, _prefix(token))
            made = writer.write_all(_rows(manifests, file) for file in small)
            directory = str(PurePosixPath(small[0].name).parent)
            joined = newest.following(
                [_manifest_file(file, "" if directory == "." else f"{directory}/") for file in made],
                [file.name for file in small],
            )
            if manifests.put(manifests.complete(joined)):
                manifests.settle(joined)
            else:
                for file in made:
                    storage.remove(file.path)
        manifests.forget(self.retention_hours * 3600)

    def _writer(self, table: SourceTable, token: Token) -> PartitionWriter:
        by = self._partitioning(table)
        schema = by.added(table.full_name, changes_schema(sink_schema(table)))
        return PartitionWriter(self._root.of_table(table), schema, by, self.file_bytes, _prefix(token))

    def _partitioning(self, table: SourceTable) -> Partitioning:
        return Partitioning.parse(partition_texts(self.partition_by, table.full_name))

    def _small(self, table: SourceTable, query: str) -> Staging:
        return Staging(self._root, table, query)

    def _clean(self, table: SourceTable, token: Token) -> None:
        """Remove what this and earlier batches of the query staged and did not commit."""
        storage = self._root.of_table(table)
        for info in storage.list(_staging(token.query)):
            found = _NAME.fullmatch(info.base_name)
            if found and int(found[1]) <= token.epoch and int(found[2]) <= token.plan:
                storage.remove(info.path)

    @property
    def _root(self) -> Storage:
        return Storage(self.path, is_private=self.is_private)

    def _manifests(self, table: SourceTable) -> Manifests:
        return Manifests(Path(self._root.of_table(table).address), is_private=self.is_private)


def committed_files(path: str | Path) -> list[Path]:
    """The files of all committed batches of the table in the directory *path*, in the order of the batches.

    When they are joined to others they are elsewhere: who does not find one asks again.
    """
    manifests = Manifests(Path(path))
    return [manifests.place(file) for file in manifests.files()]


def read(path: str | Path) -> pa.Table:
    """The rows of all committed batches; columns that came later are null before."""
    manifests = Manifests(Path(path))
    found = [_rows(manifests, file) for file in manifests.files()]
    return pa.concat_tables(found, promote_options="permissive") if found else pa.table({})


def _rows(manifests: Manifests, file: ManifestFile, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a committed file, also if it is moved meanwhile; those of *columns* that it has."""
    while True:
        try:
            with pq.ParquetFile(manifests.place(file)) as opened:
                has = opened.schema_arrow.names
                return opened.read(None if columns is None else [name for name in columns if name in has])
        except FileNotFoundError:
            continue


def _to_join(manifests: Manifests, file_bytes: int, count: int) -> list[ManifestFile]:
    """Files of one directory, of about one size and of the same columns, that are to be one; none: there are too few.

    Of about one size, so that a row is written anew a few times only until it is in a large file.
    """
    classes: dict[tuple[PurePosixPath, int], list[ManifestFile]] = {}
    for file in manifests.files():
        if file.size * 8 < file_bytes:
            place = (PurePosixPath(file.name).parent, file.size.bit_length() // 2)
            classes.setdefault(place, []).append(file)
    for small in classes.values():
        if len(small) >= count:
            alike: dict[str, list[ManifestFile]] = {}
            for file in small:
                alike.setdefault(str(pq.read_schema(manifests.place(file))), []).append(file)
            found = max(alike.values(), key=len)
            if len(found) >= count:
                return found
    return []


def _busy(table: SourceTable) -> SinkBusy:
    return SinkBusy(
        f"Others committed to the files of {table.full_name} {COMMIT_ATTEMPTS} times in a row.",
        next_step="Look for another query that delivers the same table there.",
    )


def _staging(query: str) -> str:
    return f"{STAGING}/{quote(query, safe='')}"


def _prefix(token: Token) -> str:
    return f"{_staging(token.query)}/{token.generation}/{token.epoch}-{token.plan}-{token.attempt}-"


def _manifest_file(file: DataFile, directory: str) -> ManifestFile:
    return ManifestFile(file.path, directory + Path(file.path).name, file.rows, file.size)


def _following(newest: Manifest, table: SourceTable, token: Token, batch: Batch, files: Sequence[DataFile]) -> Manifest:
    moved = [_manifest_file(file, _directory(file.parted)) for file in files]
    changes = {**newest.changes, token.query: token.epoch} if batch.has_changes else newest.changes
    of_backfill = {f"{token.query}/{token.backfill}": (token.plan, token.attempt)} if batch.history else {}
    history = {**newest.history, **of_backfill}
    return newest.following(moved, changes=changes, history=history, table=table.full_name)


def _directory(parted: Values) -> str:
    """As Hive names them, which other readers know."""
    return "".join(f"{name}={_NULL if text is None else quote(text, safe=' -')}/" for name, text in parted.items())
