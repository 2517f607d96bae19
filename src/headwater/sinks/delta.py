"""DeltaSink: each table of a query as a Delta table in ``<root>/<namespace>.<name>``.

``MIRROR`` has the rows as they are now, one per key. ``CHANGES`` has every change, appended. ``HISTORY``
has every version of every row; it is parted by ``_is_current``. One batch of one table is one commit of the Delta log,
with up to four application transactions in it:

===============================================  ================================================================
``headwater/<query>/<table>/changes``            the epoch up to which the table has the changes
``headwater/<query>/<backfill>/<table>/history`` the plan up to which it has the history
``headwater/<query>/<backfill>/<table>/attempt`` the attempt of that plan
``headwater/<query>/<backfill>/<table>/upsert``  1: there were rows before this backfill, its rows replace them
``headwater/<query>/<table>/generation``         processes of earlier generations commit nothing any more
===============================================  ================================================================

Tasks write history as files of the table, which nobody sees before the commit. Changes are folded to one row per key,
or to versions, and staged apart; the commit writes those files anew that have one of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from headwater.sinks.batch import Batch, refuse_late
from headwater.sinks.data_files import DataFile, PartitionWriter, read_file
from headwater.sinks.delta_log import DeltaLog, delta_library
from headwater.sinks.errors import SinkBusy, StagedLost
from headwater.sinks.lake import (
    COMMIT_ATTEMPTS,
    RETENTION_HOURS,
    LakeSink,
    file_prefix,
    is_left,
    not_ours,
    of_another,
)
from headwater.sinks.partitions import Partitioning
from headwater.sinks.rewrite import Rewrite
from headwater.sinks.sink import Capabilities, Committed, Mode, Staged, Token
from headwater.sinks.staging import Staging
from headwater.sinks.storage import Storage, endpoint_of, names_store_errors
from headwater.sinks.table_schema import ColumnMapping, DropPolicy, Evolution, RenamePolicy, evolve, holds
from headwater.sinks.types import sink_schema
from headwater.sinks.version_rewrite import VersionRewrite
from headwater.sinks.versions import IS_CURRENT
from headwater.sources.secret_files import current_options
from headwater.sources.table import SourceTable


@dataclass(frozen=True)
class DeltaSink(LakeSink):
    """Delta tables in the directory *path*. It can be pickled.

    :param path: a path, or the address of a directory in an object store.
    :param storage_options: of the object store; they may hold passwords and are never shown. A value ``file:/path`` is
        read from that file for each batch.
    :param file_bytes: how large a file gets: of a mirror small enough to be written anew for a change. The files of a
        table with many of them grow larger.
    :param retention_hours: how long files are kept that newer versions do not have: readers of an older one need them.
    :param partition_by: columns, or ``year(c)``, ``month(c)``, ``day(c)``, by which rows are parted: of every table, or
        by the name of the table.
    :param on_drop: what becomes of columns that the source dropped. :param on_rename: … or gave another name.
    :param adopt: write into tables that others created.
    :raises SinkInputError: *partition_by* is not written so.
    """

    capabilities: ClassVar = Capabilities((Mode.MIRROR, Mode.CHANGES, Mode.HISTORY), connections=16)

    path: str
    mode: Mode = Mode.MIRROR
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    file_bytes: int | None = None
    retention_hours: int = RETENTION_HOURS
    partition_by: tuple[str, ...] | Mapping[str, tuple[str, ...]] = ()
    on_drop: DropPolicy = DropPolicy.KEEP
    on_rename: RenamePolicy = RenamePolicy.COPY
    adopt: bool = False

    def __post_init__(self) -> None:
        by = self.partition_by
        for texts in by.values() if isinstance(by, Mapping) else (by,):
            Partitioning.parse(texts)

    @property
    def name(self) -> str:
        return f"delta:{self.path}"

    @names_store_errors
    def check(self) -> None:
        """:raises SinkError: the library is missing, or nothing can be written there."""
        delta_library()
        self._root.check()

    @names_store_errors
    def check_table(self, table: SourceTable, query: str) -> None:
        """:raises SinkSchemaError: others created its Delta table, and *adopt* is not set."""
        with self._log(table) as log:
            if log.open():
                self._require_ours(log, table, _Apps(table, query, ""))

    @names_store_errors
    def target(self, table: SourceTable) -> str:
        """The directory of *table*."""
        return self._root.target_of(table)

    @names_store_errors
    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What the Delta table of *table* has."""
        with self._log(table) as log:
            return _Apps(table, query, backfill).committed(log) if log.open() else Committed()

    @names_store_errors
    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """One commit of the Delta log; the table is made or gets its new columns before.

        :raises OtherAttempt: it has the history of this plan from another attempt.
        :raises SinkSchemaError: the columns became what the Delta table cannot become, or others created the table.
        :raises SinkBusy: others committed all the time. :raises StagedLost: a staged file is not as it was staged.
        """
        if not staged:
            return False
        with self._log(table) as log:
            return self._deliver(log, table, token, staged)

    @names_store_errors
    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Remove what is staged, and files of the table that were never committed."""
        Staging(self._root, table, query).abort(generation)
        storage = self._table(table)
        left = [info.path for info in storage.list() if is_left(info.path, query, generation)]
        with self._log(table) as log:
            known: frozenset[str] = frozenset()
            if log.open():
                known = log.paths()
                if self.adopt or log.is_ours(_Apps(table, query, "").all):
                    self._fence(log, table, query, generation, must=not known.issuperset(left))
                    known |= log.paths()  # with what was committed until then
        for path in left:
            if path not in known:
                storage.remove(path)

    @names_store_errors
    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        """A commit of the generation alone; the table is created if it does not exist."""
        with self._log(table) as log:
            if not log.open():
                log.create(self._schema(self._fitting(table, log).table), _configuration(self.retention_hours))
            if self.adopt or log.is_ours(_Apps(table, query, "").all):
                self._fence(log, table, query, generation, must=True)

    def _fence(self, log: DeltaLog, table: SourceTable, query: str, generation: int, *, must: bool) -> None:
        """A process of an earlier generation that sleeps in its commit must not wake up to files that are removed.

        A generation that is higher than ours is of a query whose state was removed: it began anew.
        """
        app = _Apps(table, query, "").generation
        for _ in range(COMMIT_ATTEMPTS):
            has = log.transaction(app) or 0
            if has == generation or (has < generation and not must):
                return
            if log.commit([], [], {app: generation}, is_data_change=False):
                return
        raise _busy(table)

    @names_store_errors
    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of the newest version."""
        fitting = self._fitting(table)
        there = self._schema(fitting.table)
        names = [fitting.names.get(name, name) for name in columns]
        own = sink_schema(table)
        fields = [there.field(name) if name in there.names else own.field(name) for name in names]
        with self._log(table) as log:
            files = log.files(()) if log.open() else []
        for file in files:
            rows = read_file(self._table(table), file, pa.schema(fields))
            yield from rows.rename_columns(list(columns)).to_batches()

    @names_store_errors
    def clean(self, table: SourceTable, retention_hours: int = 168) -> list[str]:
        """Remove the files that no version of the last hours has, also those of attempts that failed.

        :param retention_hours: more than a batch can take, or its files go before they are committed.
        """
        with self._log(table) as log:
            return log.vacuum(retention_hours, all_files=True) if log.open() else []

    def _deliver(self, log: DeltaLog, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        fitted = self._fitting(table, log).table
        wanted = self._schema(fitted)
        if not log.open(newest=False):
            log.create(wanted, _configuration(self.retention_hours))
        apps = _Apps(table, token.query, token.backfill)
        self._require_ours(log, table, apps)
        since = log.version
        for _ in range(COMMIT_ATTEMPTS):
            batch = Batch.left_of(staged, token, apps.committed(log))
            if batch is None:
                self._staging(table, token).clean(token)
                return False
            refuse_late(table, token, log.transaction(apps.generation) or 0)
            evolution = self._evolution(log, fitted, wanted, emptied=batch.is_truncated)
            if evolution.added and not evolution.must_rewrite:
                if log.is_behind():
                    continue
                log.add_columns(evolution.added)
            if batch.is_empty and not evolution.must_rewrite:
                return True
            if self._commit(log, fitted, token, apps, batch, evolution):
                self._staging(table, token).clean(token)
                self._tidy(log, fitted, token, since)
                return True
        raise _busy(table)

    def _require_ours(self, log: DeltaLog, table: SourceTable, apps: _Apps) -> None:
        if not self.adopt and not log.is_ours(apps.all):
            raise not_ours(table, f"the Delta table at {self._table(table).root}", "path")
        if not self.adopt and log.owner not in (None, table.full_name):
            raise of_another(table, f"the Delta table at {self._table(table).root}", str(log.owner), "path")

    def _commit(
        self, log: DeltaLog, fitted: SourceTable, token: Token, apps: _Apps, batch: Batch, evolution: Evolution
    ) -> bool:
        try:
            self._prove(self._table(fitted), fitted, token, batch)
        except StagedLost:
            before = apps.committed(log)
            log.open()
            if apps.committed(log) == before:
                raise
            return False  # another process committed the batch meanwhile, and its files
        rewrite = self._rewrite(log, fitted, token, evolution.schema, only_adds=not evolution.must_rewrite)
        transactions = apps.of(token, batch)
        overlaps = log.transaction(apps.upsert) == 1
        if batch.history and log.transaction(apps.history) is None and rewrite.files and self.mode is not Mode.CHANGES:
            overlaps = True
            transactions[apps.upsert] = 1
        waste: list[DataFile] = []
        try:
            if batch.is_truncated and self.mode is Mode.MIRROR:
                rewrite.truncate()
            if evolution.must_rewrite:
                rewrite.recast(evolution.renamed)
            waste = self._apply(rewrite, fitted, token, batch, overlaps=overlaps)
        except BaseException:
            rewrite.discard()
            raise
        schema = evolution.schema if evolution.must_rewrite else None
        added = rewrite.files if evolution.must_rewrite else rewrite.added
        if not log.commit(added, rewrite.removed, transactions, schema=schema):
            rewrite.discard()
            return False
        rewrite.settle()
        for file in waste:
            self._table(fitted).remove(file.path)
        return True

    def _tidy(self, log: DeltaLog, fitted: SourceTable, token: Token, since: int) -> None:
        """Join small files, and away with what nobody needs. The batch is committed, whatever happens here."""
        if self.mode is not Mode.CHANGES:
            rewrite = self._rewrite(log, fitted, token, log.schema())
            if rewrite.compact():
                if log.commit(rewrite.added, rewrite.removed, {}, is_data_change=False):
                    rewrite.settle()
                else:
                    rewrite.discard()
        log.tidy(since, self.retention_hours)

    def _rewrite(
        self, log: DeltaLog, fitted: SourceTable, token: Token, schema: pa.Schema, *, only_adds: bool = False
    ) -> Rewrite:
        """:param only_adds: in the mode ``CHANGES`` files are not listed: their number grows, and none is looked at."""
        files = [] if only_adds and self.mode is Mode.CHANGES else log.files(fitted.key_columns)
        prefix = file_prefix(token.query, token.generation)
        kind = VersionRewrite if self.mode is Mode.HISTORY else Rewrite
        return kind(
            self._table(fitted),
            files,
            schema,
            fitted.key_columns,
            self._target_bytes(files),
            prefix,
            self._partitioning(fitted),
        )

    def _evolution(self, log: DeltaLog, fitted: SourceTable, wanted: pa.Schema, *, emptied: bool) -> Evolution:
        return evolve(
            fitted.full_name,
            log.schema(),
            wanted,
            self.mode,
            drops=self.on_drop is DropPolicy.DROP,
            emptied=emptied,
        )

    def _fitting(self, table: SourceTable, log: DeltaLog | None = None) -> ColumnMapping:
        existing: pa.Schema | None = None
        if self.on_rename is RenamePolicy.KEEP and log is None:
            with self._log(table) as opened:
                existing = opened.schema() if opened.open() else None
        elif self.on_rename is RenamePolicy.KEEP and log is not None:
            existing = log.schema() if log.open() else None
        return ColumnMapping.of(table, existing, self.on_drop, self.on_rename)

    def _schema(self, fitted: SourceTable) -> pa.Schema:
        """The columns of the Delta table."""
        return self._partitioning(fitted).added(fitted.full_name, self._columns(fitted))

    def _partitioning(self, table: SourceTable) -> Partitioning:
        by = self.partition_by
        texts = by.get(table.full_name, ()) if isinstance(by, Mapping) else by
        return Partitioning.parse(texts, *([IS_CURRENT] if self.mode is Mode.HISTORY else []))

    @property
    def _root(self) -> Storage:
        return Storage(self.path, current_options(self.storage_options))

    @property
    def object_store(self) -> tuple[str, str]:
        """The root, and the server that the options name."""
        return self.path, endpoint_of(self.storage_options)

    def _table(self, table: SourceTable) -> Storage:
        return self._root.of_table(table)

    def _log(self, table: SourceTable) -> DeltaLog:
        return DeltaLog(self._table(table), table.full_name, self._partitioning(table).names)

    def _writer(self, table: SourceTable, token: Token, schema: pa.Schema) -> PartitionWriter:
        """Files with the types that the table has, where those hold the rows."""
        with self._log(table) as log:
            there = log.schema() if log.open() else pa.schema([])
        kinds = {one.name: one.type for one in there}
        schema = pa.schema(
            [
                one.with_type(kinds[one.name]) if one.name in kinds and holds(kinds[one.name], one.type) else one
                for one in schema
            ]
        )
        prefix = file_prefix(token.query, token.generation)
        by = self._partitioning(table)
        return PartitionWriter(self._table(table), by.added(table.full_name, schema), by, self._file_bytes, prefix)


def _busy(table: SourceTable) -> SinkBusy:
    return SinkBusy(
        f"The Delta table of {table.full_name} was committed to by others {COMMIT_ATTEMPTS} times in a row.",
        next_step="Look for another query or job that writes to it.",
    )


def _configuration(retention_hours: int) -> dict[str, str]:
    """The log remembers removals an hour longer than files are kept, so that none is forgotten before its file goes."""
    return {
        "delta.checkpointInterval": "100",
        "delta.logRetentionDuration": f"interval {retention_hours + 1} hours",
        "delta.deletedFileRetentionDuration": f"interval {retention_hours + 1} hours",
    }


class _Apps:
    """The application transactions of one table."""

    def __init__(self, table: SourceTable, query: str, backfill: str) -> None:
        self.changes, self.generation = (
            f"headwater/{query}/{table.full_name}/{what}" for what in ("changes", "generation")
        )
        of_backfill = f"headwater/{query}/{backfill}/{table.full_name}"
        self.history, self.attempt, self.upsert = (f"{of_backfill}/{what}" for what in ("history", "attempt", "upsert"))

    @property
    def all(self) -> tuple[str, ...]:
        return self.changes, self.generation, self.history

    def committed(self, log: DeltaLog) -> Committed:
        found = [log.transaction(app) or 0 for app in (self.changes, self.history, self.attempt)]
        return Committed(*found)

    def of(self, token: Token, batch: Batch) -> dict[str, int]:
        made = {self.changes: token.epoch} if batch.has_changes else {}
        return {**made, self.history: token.plan, self.attempt: token.attempt} if batch.history else made
