"""IcebergSink: each table of a query as an Iceberg table ``<namespace>.<name>`` of a catalog.

``MIRROR`` has the rows as they are now, one per key. ``CHANGES`` has every change, appended. ``HISTORY`` has every
version of every row. One batch of one table is one snapshot; its tokens are in the summary of the snapshot and, since
snapshots expire, by the same commit in properties of the table:

==============================================  =================================================================
``headwater.changes.<query>``                   the epoch up to which the table has the changes
``headwater.history.<query>.<backfill>``        ``<plan>/<attempt>`` up to which it has the history
``headwater.upsert.<query>.<backfill>``         1: there were rows before this backfill, its rows replace them
==============================================  =================================================================
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import pyarrow as pa

from headwater.sinks.batch import Batch, refuse_late
from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import SinkBusy, StagedLost
from headwater.sinks.iceberg_catalog import IcebergCatalog, iceberg_library, identifier_of, reaching
from headwater.sinks.lake import COMMIT_ATTEMPTS, RETENTION_HOURS, LakeSink, file_prefix, is_left, not_ours
from headwater.sinks.sink import Capabilities, Committed, Mode, Staged, Token
from headwater.sinks.staging import RowWriter, Staging
from headwater.sinks.storage import Storage, endpoint_of, names_store_errors
from headwater.sinks.types import conform
from headwater.sinks.versions import IS_CURRENT
from headwater.sources.secret_files import current, current_options
from headwater.sources.table import SourceTable
from headwater.sources.target_names import path_component
from headwater.system.retry import Backoff

if TYPE_CHECKING:
    from headwater.sinks.iceberg_files import ById
    from headwater.sinks.iceberg_schema import Plan
    from headwater.sinks.iceberg_table import IcebergTable

CATALOG: Final = "headwater"
COMMIT_BACKOFF: Final = Backoff(base=0.01, factor=2, maximum=0.5)
"""The slower committer waits before it tries again, or it would stay the slower one."""


@dataclass(frozen=True)
class IcebergSink(LakeSink):
    """Iceberg tables in the directory *warehouse*. It can be pickled.

    :param warehouse: a path, or the address of a directory in an object store: of the tables, and of rows on their way.
    :param catalog: the name of the catalog. :param catalog_uri: of a REST catalog, or of a SQL database; by default the
        catalog is a SQLite file in the warehouse. It may hold a password.
    :param catalog_options: of the catalog and of the object store, in pyiceberg's names; they may hold passwords. A
        value ``file:/path`` is read from that file for each batch, as is *catalog_uri*.
    :param namespace: of all tables; by default each has that of its source.
    :param partition_by: of new tables: columns, ``year(c)``, ``month(c)``, ``day(c)``, ``hour(c)``, ``bucket(16, c)``,
        ``truncate(8, c)``; of every table, or by the name of the table.
    :param file_bytes: how large a file gets: of a mirror small enough to be written anew for a change. The files of a
        table with many of them grow larger.
    :param retention_hours: how long files are kept that newer snapshots do not have: readers of an older one need them.
    :param adopt: write into tables that others created.
    """

    capabilities: ClassVar = Capabilities((Mode.MIRROR, Mode.CHANGES, Mode.HISTORY), connections=16)

    warehouse: str
    mode: Mode = Mode.MIRROR
    catalog: str = CATALOG
    catalog_uri: str | None = field(default=None, repr=False)
    catalog_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    namespace: str | None = None
    partition_by: tuple[str, ...] | Mapping[str, tuple[str, ...]] = ()
    file_bytes: int | None = None
    retention_hours: int = RETENTION_HOURS
    adopt: bool = False

    @property
    def name(self) -> str:
        return f"iceberg:{self.warehouse}"

    @names_store_errors
    def check(self) -> None:
        """:raises SinkError: the library is missing, nothing can be written there, or the catalog cannot be reached."""
        iceberg_library()
        self._root.check()
        catalog = self._catalog
        with reaching(catalog.label):
            catalog.open().list_namespaces()

    @names_store_errors
    def check_table(self, table: SourceTable, query: str) -> None:
        """:raises SinkSchemaError: others created its Iceberg table, and *adopt* is not set."""
        with self._opened(table) as found:
            if found.open():
                self._require_ours(found, table)

    def target(self, table: SourceTable) -> str:
        """The name of *table* in the catalog."""
        return "/".join(map(path_component, identifier_of(table, self.namespace)))

    @names_store_errors
    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What the Iceberg table of *table* has."""
        with self._opened(table) as found:
            return _Tokens(query, backfill).committed(found) if found.open() else Committed()

    @names_store_errors
    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """One snapshot of the Iceberg table, which is made before.

        :raises OtherAttempt: it has the history of this plan from another attempt.
        :raises SinkSchemaError: the columns became what the Iceberg table cannot become, or others created the table.
        :raises SinkBusy: others committed all the time. :raises StagedLost: a staged file is not as it was staged.
        """
        if not staged:
            return False
        with self._opened(table) as found:
            return self._deliver(found, table, token, staged)

    @names_store_errors
    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Remove what is staged, and files of the table that were never committed."""
        Staging(self._root, table, query).abort(generation)
        with self._opened(table) as found:
            if found.open():
                left = partial(is_left, query=query, generation=generation)
                if self.adopt or found.is_ours():
                    self._fence(found, table, query, generation, must=found.has_orphans(left))
                found.remove_orphans(left)
            elif not self._catalog.is_remote:
                storage = self._planned(table)
                for info in storage.list("data"):
                    if is_left(info.base_name, query, generation):
                        storage.remove(info.path)

    @names_store_errors
    def fence(self, table: SourceTable, query: str, generation: int) -> None:
        """A snapshot with the generation alone; the table is created if it does not exist."""
        with self._opened(table) as found:
            if not found.open():
                found.create(self._columns(table), self._partitions(table))
            if self.adopt or found.is_ours():
                self._fence(found, table, query, generation, must=True)

    def _fence(self, found: IcebergTable, table: SourceTable, query: str, generation: int, *, must: bool) -> None:
        """A process of an earlier generation that sleeps in its commit must not wake up to files that are removed.

        A generation that is higher than ours is of a query whose state was removed: it began anew.
        """
        key, prefix = _Tokens(query, "").generation, file_prefix(query, generation)
        for _ in range(COMMIT_ATTEMPTS):
            has = int(found.token(key) or 0)
            if has == generation or (has < generation and not must):
                return
            made = {key: str(generation)}
            if found.commit([], [], made, prefix, self.retention_hours, is_data_change=False):
                return
        raise _busy(table)

    @names_store_errors
    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of the newest snapshot."""
        there = self._columns(table)
        wanted = pa.schema([there.field(name) for name in columns])
        with self._opened(table) as found:
            if not found.open():
                return
            files, names, storage = found.files(()), found.layout.names, found.storage
        from headwater.sinks.iceberg_files import read_columns

        for file in files:
            yield from conform(read_columns(storage, file.path, names, columns), wanted).to_batches()

    def _deliver(self, found: IcebergTable, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        wanted = self._columns(table)
        if not found.open(newest=False):
            found.create(wanted, self._partitions(table))
        self._require_ours(found, table)
        tokens = _Tokens(token.query, token.backfill)
        for attempt in range(1, COMMIT_ATTEMPTS + 1):
            batch = Batch.left_of(staged, token, tokens.committed(found))
            if batch is None:
                self._staging(table, token).clean(token)
                return False
            refuse_late(table, token, int(found.token(tokens.generation) or 0))
            plan = found.plan(wanted, emptied=batch.is_truncated)
            if batch.is_empty and not plan.is_changed:
                return True
            if self._commit(found, table, token, tokens, batch, plan):
                self._staging(table, token).clean(token)
                self._tidy(found, table, token)
                return True
            time.sleep(COMMIT_BACKOFF.delay(attempt))
        raise _busy(table)

    def _require_ours(self, found: IcebergTable, table: SourceTable) -> None:
        if not self.adopt and not found.is_ours():
            name = ".".join(identifier_of(table, self.namespace))
            raise not_ours(table, f"the Iceberg table {name}", "namespace or warehouse")

    def _commit(
        self, found: IcebergTable, table: SourceTable, token: Token, tokens: _Tokens, batch: Batch, plan: Plan
    ) -> bool:
        try:
            self._prove(found.storage, table, token, batch)
        except StagedLost:
            before = tokens.committed(found)
            found.open()
            if tokens.committed(found) == before:
                raise
            return False  # another process committed the batch meanwhile, and its files
        rewrite = self._rewrite(found, table, token, plan)
        made = tokens.of(token, batch)
        overlaps = found.token(tokens.upsert) == "1"
        has_rows = bool(rewrite.files) and self.mode is not Mode.CHANGES
        if batch.history and found.token(tokens.history) is None and has_rows:
            overlaps = True
            made[tokens.upsert] = "1"
        try:
            if batch.is_truncated and self.mode is Mode.MIRROR:
                rewrite.truncate()
            if plan.must_rewrite:
                rewrite.recast({})
            batch, waste = _relaid(rewrite, batch)
            waste += self._apply(rewrite, table, token, batch, overlaps=overlaps)
        except BaseException:
            rewrite.discard()
            raise
        prefix = file_prefix(token.query, token.generation)
        if not found.commit(rewrite.added, rewrite.removed, made, prefix, self.retention_hours, plan=plan):
            rewrite.discard()
            return False
        rewrite.settle()
        for file in waste:
            found.storage.remove(file.path)
        return True

    def _tidy(self, found: IcebergTable, table: SourceTable, token: Token) -> None:
        """Join small files, and away with what nobody needs. The batch is committed, whatever happens here."""
        if self.mode is not Mode.CHANGES:
            rewrite = self._rewrite(found, table, token, found.plan(self._columns(table)))
            if rewrite.compact():
                prefix = file_prefix(token.query, token.generation)
                if found.commit(rewrite.added, rewrite.removed, {}, prefix, self.retention_hours, is_data_change=False):
                    rewrite.settle()
                else:
                    rewrite.discard()
        found.remove_waste(self.retention_hours)

    def _rewrite(self, found: IcebergTable, table: SourceTable, token: Token, plan: Plan) -> ById:
        from headwater.sinks.iceberg_files import DATA, IcebergRewrite, IcebergVersionRewrite

        files = [] if self.mode is Mode.CHANGES and not plan.must_rewrite else found.files(table.key_columns)
        kind = IcebergVersionRewrite if self.mode is Mode.HISTORY else IcebergRewrite
        made = kind(
            found.storage,
            files,
            plan.layout.arrow,
            table.key_columns,
            self._target_bytes(files),
            DATA + file_prefix(token.query, token.generation),
            replace(found.partitioning, schema=plan.layout.schema),
        )
        made.names = plan.names
        return made

    @property
    def _catalog(self) -> IcebergCatalog:
        uri = None if self.catalog_uri is None else current(self.catalog_uri)
        return IcebergCatalog(self.warehouse, self.catalog, uri, current_options(self.catalog_options))

    @property
    def object_store(self) -> tuple[str, str]:
        """The root, and the server that the options name."""
        return self.warehouse, endpoint_of(self.catalog_options)

    @property
    def _root(self) -> Storage:
        return self._catalog.storage()

    def _opened(self, table: SourceTable) -> IcebergTable:
        iceberg_library()
        from headwater.sinks.iceberg_table import IcebergTable

        return IcebergTable(self._catalog, identifier_of(table, self.namespace), table.full_name, self.mode)

    def _planned(self, table: SourceTable) -> Storage:
        """Where a table that is not there yet will be."""
        from headwater.sinks.iceberg_client import storage_of

        location = self._catalog.location(identifier_of(table, self.namespace))
        assert location is not None
        return storage_of(location, current_options(self.catalog_options))

    def _partitions(self, table: SourceTable) -> tuple[str, ...]:
        by = self.partition_by
        texts = by.get(table.full_name, ()) if isinstance(by, Mapping) else by
        return (*texts, *((IS_CURRENT,) if self.mode is Mode.HISTORY else ()))

    def _writer(self, table: SourceTable, token: Token, schema: pa.Schema) -> RowWriter:
        """Files with the ids that the columns have, or will have: :meth:`commit` looks at them again.

        A catalog that says by itself where its tables are has to make the table before.
        """
        from headwater.sinks.iceberg_files import IcebergPartitioning, IcebergWriter, partition_spec
        from headwater.sinks.iceberg_schema import new_layout

        with self._opened(table) as found:
            is_there = found.open()
            if not is_there and self._catalog.is_remote:
                found.create(schema, self._partitions(table))
                is_there = True
            if is_there:
                layout, storage = found.plan(schema).layout, found.storage
                spec = found.partitioning.spec
            else:
                layout, storage = new_layout(schema), self._planned(table)
                spec = partition_spec(table.full_name, self._partitions(table), layout.schema)
        by = IcebergPartitioning(spec=spec, schema=layout.schema)
        prefix = file_prefix(token.query, token.generation)
        return IcebergWriter(storage, layout.columns(schema.names), self._file_bytes, prefix, by)


def _busy(table: SourceTable) -> SinkBusy:
    return SinkBusy(
        f"The Iceberg table of {table.full_name} was committed to by others {COMMIT_ATTEMPTS} times in a row.",
        next_step="Look for another query or job that writes to it.",
    )


class _Tokens:
    """The keys of the tokens of one table."""

    def __init__(self, query: str, backfill: str) -> None:
        self.changes, self.generation = (f"headwater.{what}.{query}" for what in ("changes", "generation"))
        self.history, self.upsert = (f"headwater.{what}.{query}.{backfill}" for what in ("history", "upsert"))

    def committed(self, found: IcebergTable) -> Committed:
        plan, _, attempt = (found.token(self.history) or "0/0").partition("/")
        return Committed(int(found.token(self.changes) or 0), int(plan), int(attempt))

    def of(self, token: Token, batch: Batch) -> dict[str, str]:
        made = {self.changes: str(token.epoch)} if batch.has_changes else {}
        return {**made, self.history: f"{token.plan}/{token.attempt}"} if batch.history else made


def _relaid(rewrite: ById, batch: Batch) -> tuple[Batch, list[DataFile]]:
    """*batch* with files whose columns have the ids that they have now, and the files that this replaced."""
    waste: list[DataFile] = []

    def fitted(one: Staged) -> Staged:
        files: list[DataFile] = []
        for file in one.detail.files:
            made = rewrite.relaid(file)
            waste.extend([] if made == [file] else [file])
            files += made
        return replace(one, detail=replace(one.detail, files=tuple(files)))

    changes, history = (tuple(map(fitted, parts)) for parts in (batch.changes, batch.history))
    return replace(batch, changes=changes, history=history), waste
