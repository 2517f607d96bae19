"""PostgresSnapshot: a snapshot that others read in, kept by an open transaction; it plans what they read.

Each question has a savepoint of its own and is rolled back to it: a question that fails would otherwise end the
transaction, and the snapshot with it, and the tables that it read would stay locked against changes of their columns.

On a standby ``pg_current_snapshot()`` does not tell which transactions are running. But a standby shows commits in the
order in which it replays them, so the place up to which it has replayed tells all: it is asked before and after, until
nothing came between. (A commit that is being replayed in that very instant counts as not contained: it comes once more
from the log, and is never lost.)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, Self

import psycopg

from headwater.sources.errors import SourceBusy
from headwater.sources.postgres.catalog import read_table
from headwater.sources.postgres.catalog_table import CatalogTable, Generated, ReplicaIdentity
from headwater.sources.postgres.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.postgres.mark import PostgresMark
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.snapshot import settle
from headwater.sources.postgres.splitting import page_end, plan_splits
from headwater.sources.postgres.types import source_column
from headwater.sources.splits import Cut, KeyRange, SplitKind, SplitPlan
from headwater.sources.table import SourceTable, SpecialValues

STANDBY_TRIES: Final = 200
_PAUSE_SECONDS: Final = 0.002

_BEGIN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_IS_STANDBY: Final = "SELECT pg_catalog.pg_is_in_recovery() AS standby"
_INSERTED: Final = "SELECT (pg_catalog.pg_current_wal_insert_lsn() - '0/0'::pg_catalog.pg_lsn)::bigint AS lsn"
_REPLAYED: Final = "SELECT (pg_catalog.pg_last_wal_replay_lsn() - '0/0'::pg_catalog.pg_lsn)::bigint AS lsn"
_EXPORT: Final = "SELECT pg_catalog.pg_export_snapshot() AS name, pg_catalog.pg_current_snapshot()::text AS running"
_FILES: Final = """
SELECT pg_catalog.string_agg(c.oid || '/' || c.relfilenode, ' ' ORDER BY c.oid) AS files
FROM pg_catalog.pg_class c WHERE c.oid = ANY (%s)
"""
_OPENED: Final = "SELECT pg_catalog.pg_relation_size(o) FROM unnest(%s::pg_catalog.oid[]) o"
"""Waits for a lock that would hold up whoever reads the tables."""
_PUBLISHED: Final = """
SELECT DISTINCT a.name::text FROM pg_catalog.pg_publication_tables p CROSS JOIN unnest(p.attnames) a (name)
WHERE p.schemaname = %s AND p.tablename = %s
"""


class PostgresSnapshot:
    """An exported snapshot. One thread.

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused. :raises SourceBusy: see above, of a standby.
    """

    def __init__(self, dsn: Dsn, lock_seconds: float | None = None) -> None:
        self._dsn = dsn
        self._catalogs: dict[TableName, CatalogTable] = {}
        self._session = connect(dsn)
        try:
            with server_errors(dsn):
                settle(self._session)
                if lock_seconds is not None:
                    self._session.execute(f"SET lock_timeout = {int(lock_seconds * 1000)}".encode())
                standby = ask(self._session, _IS_STANDBY)[0].standby
                self._name, self._mark = self._exported_by_standby() if standby else self._exported()
        except BaseException:
            self._session.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """For ``SET TRANSACTION SNAPSHOT``."""
        return self._name

    @property
    def mark(self) -> PostgresMark:
        """What it contains."""
        return self._mark

    def is_open(self) -> bool:
        """Whether the server still keeps it."""
        try:
            self._session.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def table(self, table: SourceTable) -> SourceTable:
        """*table* with the columns that it has in this snapshot, those that came new at the end.

        :raises SourceNotFound: the database has no such table.
        """
        with self._asked() as session:
            catalog = self._catalog(table)
            known = {column.field_id for column in table.columns}
            new = [column for column in catalog.columns if column.number not in known]
            if new:
                new = _captured(session, catalog, new)
        now = {column.number: column for column in catalog.columns}
        special = {column.field_id: column.special_values for column in table.columns}
        kept = [now[column.field_id] for column in table.columns if column.field_id in now]
        columns = tuple(
            source_column(
                column.name,
                column.type,
                column.typmod,
                column.type_text,
                column.number,
                nullable=not column.not_null,
                special_values=special.get(column.number, SpecialValues.STOP),
            )
            for column in (*kept, *new)
        )
        places = {column.field_id: column for column in columns}
        gone = [column for column in table.columns if column.dropped and column.field_id not in now]
        ordered = [places.pop(c.field_id, c) for c in table.columns if c.field_id in places or c in gone]
        return replace(
            table,
            columns=(*ordered, *places.values()),
            key_columns=catalog.key_columns([*kept, *new]),
            source_id=catalog.oid,
        )

    def has_key(self, table: SourceTable) -> bool:
        """Whether it has a primary key or an index as its identity; with all columns as identity it may have none."""
        with self._asked() as session:
            catalog = read_table(session, TableName(table.namespace, table.name))
        return bool(catalog.primary_key) or catalog.identity is ReplicaIdentity.INDEX

    def files(self, table: SourceTable) -> str:
        """Names the files of its blocks; VACUUM FULL, CLUSTER and an ALTER TABLE that rewrites it make others."""
        with self._asked() as session:
            catalog = self._catalog(table)
            oids = [leaf.oid for leaf in catalog.leaves] if catalog.is_partitioned else [catalog.oid]
            return ask(session, _FILES, [oids])[0].files or ""

    def plan(self, table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        """Splits of about *split_rows* rows; see :func:`~headwater.sources.postgres.splitting.plan_splits`.

        :raises UnsupportedTable: it cannot be split in that way. :raises SourceNotFound: there is no such table.
        """
        with self._asked() as session:
            return plan_splits(session, table, self._catalog(table), split_rows=split_rows, kind=kind)

    def page_end(self, table: SourceTable, kind: SplitKind, part: KeyRange, rows: int) -> Cut | None:
        """The cut after the first *rows* rows of *part* (of the heap: after their blocks); ``None`` where it ends."""
        with self._asked() as session:
            return page_end(session, table, self._catalog(table), kind, part, rows)

    def close(self) -> None:
        """Let it go: nobody can begin to read in it any more. Closing twice is fine."""
        self._session.close()

    def _catalog(self, table: SourceTable) -> CatalogTable:
        """What the catalog says of it in this snapshot, which stays the same. :raises LockNotAvailable: of a lock."""
        name = TableName(table.namespace, table.name)
        if name not in self._catalogs:
            catalog = read_table(self._session, name)
            ask(self._session, _OPENED, [[catalog.oid, *(leaf.oid for leaf in catalog.leaves)]])
            self._catalogs[name] = catalog
        return self._catalogs[name]

    @contextlib.contextmanager
    def _asked(self) -> Iterator[Connection]:
        with server_errors(self._dsn):
            self._session.execute("SAVEPOINT question")
            try:
                yield self._session
            finally:
                if not self._session.closed:
                    self._session.execute("ROLLBACK TO SAVEPOINT question")
                    self._session.execute("RELEASE SAVEPOINT question")

    def _exported(self) -> tuple[str, PostgresMark]:
        # Which transactions it shows is told by their numbers alone: one that is not listed as running may have its
        # commit in the log and not be shown yet, so that no place in the log is a safe lower bound.
        self._session.execute(_BEGIN)
        row = ask(self._session, _EXPORT)[0]
        return row.name, PostgresMark.parse(row.running, 0, ask(self._session, _INSERTED)[0].lsn)

    def _exported_by_standby(self) -> tuple[str, PostgresMark]:
        for _ in range(STANDBY_TRIES):
            before = ask(self._session, _REPLAYED)[0].lsn
            self._session.execute(_BEGIN)
            row: Any = ask(self._session, _EXPORT)[0]
            if ask(self._session, _REPLAYED)[0].lsn == before:
                return row.name, PostgresMark.parse(row.running, before, before)
            self._session.execute("ROLLBACK")
            time.sleep(_PAUSE_SECONDS)
        raise SourceBusy(
            f"The standby {self._dsn} replays its log without a pause: no snapshot of it has a known place.",
            next_step="Read from the primary, or try again when it has caught up.",
        )


def _captured(session: Connection, catalog: CatalogTable, columns: list[Any]) -> list[Any]:
    """Those of *columns* that a publication sends, or where none has the table, that one would send."""
    published = {row.name for row in ask(session, _PUBLISHED, [catalog.name.namespace, catalog.name.name])}
    sent = {Generated.NO, Generated.STORED} if published and session.info.server_version >= 180000 else {Generated.NO}
    return [column for column in columns if column.generated in sent and (not published or column.name in published)]
