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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pyarrow as pa

from headwater.databases.secret_files import current, current_options
from headwater.sinks.batch import Batch, Held
from headwater.sinks.data_files import DataFile
from headwater.sinks.iceberg_catalog import IcebergCatalog, iceberg_library, identifier_of, reaching
from headwater.sinks.lake import RETENTION_HOURS, LakeSink, file_prefix, is_left, not_ours
from headwater.sinks.partitions import PartitionBy, partition_texts
from headwater.sinks.rewrite import Rewrite
from headwater.sinks.sink import Capabilities, Committed, Mode, Staged, Token
from headwater.sinks.staging import RowWriter, Staging
from headwater.sinks.storage import Storage, endpoint_of, names_store_errors
from headwater.sinks.types import conform
from headwater.sinks.versions import IS_CURRENT
from headwater.sources.table import SourceTable
from headwater.sources.target_names import path_component

if TYPE_CHECKING:
    from headwater.sinks.iceberg_files import ById
    from headwater.sinks.iceberg_schema import Plan
    from headwater.sinks.iceberg_table import IcebergTable

CATALOG: Final = "headwater"


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
    format_name: ClassVar[str] = "Iceberg"

    warehouse: str
    mode: Mode = Mode.MIRROR
    catalog: str = CATALOG
    catalog_uri: str | None = field(default=None, repr=False)
    catalog_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    namespace: str | None = None
    partition_by: PartitionBy = ()
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

    def target(self, table: SourceTable) -> str:
        """The name of *table* in the catalog."""
        return "/".join(map(path_component, identifier_of(table, self.namespace)))

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

    def _opened(self, table: SourceTable) -> IcebergTable:
        iceberg_library()
        from headwater.sinks.iceberg_table import IcebergTable

        return IcebergTable(self._catalog, identifier_of(table, self.namespace), table.full_name, self.mode)

    def _held(self, found: IcebergTable, table: SourceTable, query: str, backfill: str = "") -> Held:
        changes, generation, history, upsert = map(found.token, _keys(query, backfill))
        plan, _, attempt = (history or "0/0").partition("/")
        committed = Committed(int(changes or 0), int(plan), int(attempt))
        return Held(committed, upsert == "1", int(generation or 0), history is not None)

    def _tokens(self, table: SourceTable, token: Token, batch: Batch, *, is_upsert: bool) -> dict[str, str]:
        changes, _, history, upsert = _keys(token.query, token.backfill)
        return {
            **({changes: str(token.epoch)} if batch.has_changes else {}),
            **({history: f"{token.plan}/{token.attempt}"} if batch.history else {}),
            **({upsert: "1"} if is_upsert else {}),
        }

    def _fence_token(self, table: SourceTable, query: str, generation: int) -> dict[str, str]:
        return {_keys(query, "")[1]: str(generation)}

    def _create(self, found: IcebergTable, table: SourceTable) -> None:
        found.create(self._columns(table), self._partitions(table))

    def _is_ours(self, found: IcebergTable, table: SourceTable, query: str) -> bool:
        return found.is_ours()

    def _require_ours(self, found: IcebergTable, table: SourceTable, query: str) -> None:
        if not self.adopt and not found.is_ours():
            name = ".".join(identifier_of(table, self.namespace))
            raise not_ours(table, f"the Iceberg table {name}", "namespace or warehouse")

    def _plan(self, found: IcebergTable, table: SourceTable, *, emptied: bool = False) -> Plan:
        return found.plan(self._columns(table), emptied=emptied)

    def _rewrite(self, found: IcebergTable, table: SourceTable, token: Token, plan: Plan | None) -> Rewrite:
        from headwater.sinks.iceberg_files import DATA, IcebergRewrite, IcebergVersionRewrite

        plan = plan or self._plan(found, table)
        files = [] if self.mode is Mode.CHANGES and not plan.must_rewrite else found.files(table.key_columns)
        kind = IcebergVersionRewrite if self.mode is Mode.HISTORY else IcebergRewrite
        rewrite = kind(
            found.storage,
            files,
            plan.layout.arrow,
            table.key_columns,
            self._target_bytes(files),
            DATA + file_prefix(token.query, token.generation),
            replace(found.partitioning, schema=plan.layout.schema),
        )
        rewrite.names = plan.names
        return rewrite

    def _put(
        self,
        found: IcebergTable,
        query: str,
        generation: int,
        tokens: dict[str, Any],
        rewrite: Rewrite | None,
        plan: Plan | None,
    ) -> bool:
        added, removed = ([], []) if rewrite is None else (rewrite.added, rewrite.removed)
        prefix, is_data_change = file_prefix(query, generation), plan is not None
        return found.commit(
            added, removed, tokens, prefix, self.retention_hours, plan=plan, is_data_change=is_data_change
        )

    def _relaid(self, rewrite: ById, batch: Batch) -> tuple[Batch, list[DataFile]]:
        """*batch* with files whose columns have the ids that they have now, and the files that this replaced."""
        waste: list[DataFile] = []

        def fitted(one: Staged) -> Staged:
            files: list[DataFile] = []
            for file in one.detail.files:
                relaid = rewrite.relaid(file)
                waste.extend([] if relaid == [file] else [file])
                files += relaid
            return replace(one, detail=replace(one.detail, files=tuple(files)))

        changes, history = (tuple(map(fitted, parts)) for parts in (batch.changes, batch.history))
        return replace(batch, changes=changes, history=history), waste

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

    def _planned(self, table: SourceTable) -> Storage:
        """Where a table that is not there yet will be."""
        from headwater.sinks.iceberg_client import storage_of

        location = self._catalog.location(identifier_of(table, self.namespace))
        assert location is not None
        return storage_of(location, current_options(self.catalog_options))

    def _partitions(self, table: SourceTable) -> tuple[str, ...]:
        texts = partition_texts(self.partition_by, table.full_name)
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


def _keys(query: str, backfill: str) -> tuple[str, str, str, str]:
    """The keys of the tokens of one table: changes, generation, history, upsert."""
    of_backfill = (f"headwater.{what}.{query}.{backfill}" for what in ("history", "upsert"))
    return f"headwater.changes.{query}", f"headwater.generation.{query}", *of_backfill  # type: ignore[return-value]
