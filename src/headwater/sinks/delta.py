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
from typing import Any, ClassVar

import pyarrow as pa

from headwater.databases.secret_files import current_options
from headwater.sinks.batch import Batch, Held
from headwater.sinks.data_files import PartitionWriter, read_file
from headwater.sinks.delta_log import DeltaLog, delta_library
from headwater.sinks.lake import (
    RETENTION_HOURS,
    LakeSink,
    file_prefix,
    is_left,
    not_ours,
    of_another,
)
from headwater.sinks.partitions import PartitionBy, Partitioning, partition_texts
from headwater.sinks.rewrite import Rewrite
from headwater.sinks.sink import Capabilities, Committed, Mode, Token
from headwater.sinks.staging import Staging
from headwater.sinks.storage import Storage, endpoint_of, names_store_errors
from headwater.sinks.table_schema import ColumnMapping, DropPolicy, Evolution, RenamePolicy, evolve, holds
from headwater.sinks.types import sink_schema
from headwater.sinks.version_rewrite import VersionRewrite
from headwater.sinks.versions import IS_CURRENT
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
    format_name: ClassVar[str] = "Delta"

    path: str
    mode: Mode = Mode.MIRROR
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    file_bytes: int | None = None
    retention_hours: int = RETENTION_HOURS
    partition_by: PartitionBy = ()
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
    def target(self, table: SourceTable) -> str:
        """The directory of *table*."""
        return self._root.target_of(table)

    @names_store_errors
    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Remove what is staged, and files of the table that were never committed."""
        Staging(self._root, table, query).abort(generation)
        storage = self._root.of_table(table)
        left = [info.path for info in storage.list() if is_left(info.path, query, generation)]
        with self._opened(table) as log:
            known: frozenset[str] = frozenset()
            if log.open():
                known = log.paths()
                if self.adopt or self._is_ours(log, table, query):
                    self._fence(log, table, query, generation, must=not known.issuperset(left))
                    known |= log.paths()  # with what was committed until then
        for path in left:
            if path not in known:
                storage.remove(path)

    @names_store_errors
    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of the newest version."""
        fitting = self._fitting(table)
        there = self._schema(fitting.table)
        names = [fitting.names.get(name, name) for name in columns]
        own = sink_schema(table)
        fields = [there.field(name) if name in there.names else own.field(name) for name in names]
        with self._opened(table) as log:
            files = log.files(()) if log.open() else []
        for file in files:
            rows = read_file(self._root.of_table(table), file, pa.schema(fields))
            yield from rows.rename_columns(list(columns)).to_batches()

    @names_store_errors
    def clean(self, table: SourceTable, retention_hours: int = 168) -> list[str]:
        """Remove the files that no version of the last hours has, also those of attempts that failed.

        :param retention_hours: more than a batch can take, or its files go before they are committed.
        """
        with self._opened(table) as log:
            return log.vacuum(retention_hours, all_files=True) if log.open() else []

    def _opened(self, table: SourceTable) -> DeltaLog:
        return DeltaLog(self._root.of_table(table), table.full_name, self._partitioning(table).names)

    def _held(self, found: DeltaLog, table: SourceTable, query: str, backfill: str = "") -> Held:
        apps = _Apps(table, query, backfill)
        epoch, plan, attempt, upsert, generation = map(
            found.transaction, (apps.changes, apps.history, apps.attempt, apps.upsert, apps.generation)
        )
        return Held(Committed(epoch or 0, plan or 0, attempt or 0), upsert == 1, generation or 0, plan is not None)

    def _tokens(self, table: SourceTable, token: Token, batch: Batch, *, is_upsert: bool) -> dict[str, int]:
        apps = _Apps(table, token.query, token.backfill)
        return {
            **({apps.changes: token.epoch} if batch.has_changes else {}),
            **({apps.history: token.plan, apps.attempt: token.attempt} if batch.history else {}),
            **({apps.upsert: 1} if is_upsert else {}),
        }

    def _fence_token(self, table: SourceTable, query: str, generation: int) -> dict[str, int]:
        return {_Apps(table, query, "").generation: generation}

    def _create(self, found: DeltaLog, table: SourceTable) -> None:
        found.create(self._schema(table), _configuration(self.retention_hours))

    def _is_ours(self, found: DeltaLog, table: SourceTable, query: str) -> bool:
        apps = _Apps(table, query, "")
        return found.is_ours((apps.changes, apps.generation, apps.history))

    def _require_ours(self, found: DeltaLog, table: SourceTable, query: str) -> None:
        if self.adopt:
            return
        what = f"the Delta table at {found.storage.root}"
        if not self._is_ours(found, table, query):
            raise not_ours(table, what, "path")
        if found.owner not in (None, table.full_name):
            raise of_another(table, what, str(found.owner), "path")

    def _plan(self, found: DeltaLog, table: SourceTable, *, emptied: bool = False) -> Evolution:
        drops = self.on_drop is DropPolicy.DROP
        wanted = self._schema(table)
        return evolve(table.full_name, found.schema(), wanted, self.mode, drops=drops, emptied=emptied)

    def _extended(self, found: DeltaLog, plan: Evolution) -> bool:
        if plan.added and not plan.must_rewrite:
            if found.is_behind():
                return False
            found.add_columns(plan.added)
        return True

    def _rewrite(self, found: DeltaLog, table: SourceTable, token: Token, plan: Evolution | None) -> Rewrite:
        """In the mode ``CHANGES`` files are not listed: their number grows, and none is looked at."""
        only_adds = self.mode is Mode.CHANGES and (plan is None or not plan.must_rewrite)
        files = [] if only_adds else found.files(table.key_columns)
        kind = VersionRewrite if self.mode is Mode.HISTORY else Rewrite
        return kind(
            found.storage,
            files,
            found.schema() if plan is None else plan.schema,
            table.key_columns,
            self._target_bytes(files),
            file_prefix(token.query, token.generation),
            self._partitioning(table),
        )

    def _put(
        self,
        found: DeltaLog,
        query: str,
        generation: int,
        tokens: dict[str, Any],
        rewrite: Rewrite | None,
        plan: Evolution | None,
    ) -> bool:
        if rewrite is None:
            return found.commit([], [], tokens, is_data_change=False)
        if plan is not None and plan.must_rewrite:
            return found.commit(rewrite.files, rewrite.removed, tokens, schema=plan.schema)
        return found.commit(rewrite.added, rewrite.removed, tokens, is_data_change=plan is not None)

    def _fitted(self, table: SourceTable, found: DeltaLog) -> SourceTable:
        return self._fitting(table, found).table

    def _fitting(self, table: SourceTable, log: DeltaLog | None = None) -> ColumnMapping:
        existing: pa.Schema | None = None
        if self.on_rename is RenamePolicy.KEEP and log is None:
            with self._opened(table) as opened:
                existing = opened.schema() if opened.open() else None
        elif self.on_rename is RenamePolicy.KEEP and log is not None:
            existing = log.schema() if log.open() else None
        return ColumnMapping.of(table, existing, self.on_drop, self.on_rename)

    def _schema(self, fitted: SourceTable) -> pa.Schema:
        """The columns of the Delta table."""
        return self._partitioning(fitted).added(fitted.full_name, self._columns(fitted))

    def _partitioning(self, table: SourceTable) -> Partitioning:
        texts = partition_texts(self.partition_by, table.full_name)
        return Partitioning.parse(texts, *([IS_CURRENT] if self.mode is Mode.HISTORY else []))

    @property
    def _root(self) -> Storage:
        return Storage(self.path, current_options(self.storage_options))

    @property
    def object_store(self) -> tuple[str, str]:
        """The root, and the server that the options name."""
        return self.path, endpoint_of(self.storage_options)

    def _writer(self, table: SourceTable, token: Token, schema: pa.Schema) -> PartitionWriter:
        """Files with the types that the table has, where those hold the rows."""
        with self._opened(table) as log:
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
        return PartitionWriter(
            self._root.of_table(table), by.added(table.full_name, schema), by, self._file_bytes, prefix
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
        of_query, of_backfill = (f"headwater/{one}/{table.full_name}" for one in (query, f"{query}/{backfill}"))
        self.changes, self.generation = f"{of_query}/changes", f"{of_query}/generation"
        self.history, self.attempt, self.upsert = (f"{of_backfill}/{what}" for what in ("history", "attempt", "upsert"))
