"""PartSession: a session that reads parts of a table in a snapshot, after making sure that it can.

Rows are shown as the snapshot has them, but a statement finds the table, its columns and its file as they are *now*:

* a file that TRUNCATE or a rewriting ALTER TABLE left behind is gone for old snapshots too: they see an empty table;
* a table that was dropped and made anew, a partition that came or went, columns that exchanged names, are others.

So the table is locked first, as every read of it does, and what the snapshot's catalog shows is compared with what the
server has now: until the lock is let go with the transaction, neither can change. Partitions can come meanwhile, so
this is asked again at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from psycopg import errors as pg
from psycopg import sql

from headwater.sources.errors import SnapshotExpired
from headwater.sources.postgres.binary import MOST_TEXT, TEXT, BinaryRows, compiled_decode
from headwater.sources.postgres.catalog import read_table
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.catalog_types import CatalogType, TypeKind
from headwater.sources.postgres.connection import Dsn, server_errors
from headwater.sources.postgres.key_columns import condition, read_key
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.snapshot import CsvRows, RowFormat, SnapshotSession, copy_statement
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceColumn, SourceTable

# pg_class and pg_inherits are read as the snapshot shows them; functions look at what is there now.
_CHANGED: Final = """
WITH RECURSIVE shown (oid) AS (
  SELECT %(oid)s::oid UNION ALL
  SELECT i.inhrelid FROM shown s JOIN pg_catalog.pg_inherits i ON i.inhparent = s.oid WHERE %(partitioned)s
), present (oid) AS (
  SELECT p.relid FROM pg_catalog.pg_partition_tree(%(oid)s::oid) p WHERE %(partitioned)s
  UNION SELECT pg_catalog.to_regclass(%(name)s)
)
SELECT shown.oid::bigint AS shown, present.oid::bigint AS present
FROM shown FULL JOIN present ON shown.oid = present.oid
LEFT JOIN pg_catalog.pg_class c ON c.oid = shown.oid
WHERE shown.oid IS NULL OR present.oid IS NULL
   OR COALESCE(pg_catalog.pg_relation_filenode(c.oid), 0) <> c.relfilenode
"""


_LOCK_TIMEOUT: Final = "SET lock_timeout = '20s'"


class PartSession(SnapshotSession):
    """A session for one read.

    :param snapshot: ``None`` reads as of its own beginning.
    :raises SnapshotExpired: it is gone.
    """

    def __init__(self, dsn: Dsn, snapshot: str | None) -> None:
        self._catalog: CatalogTable | None = None
        super().__init__(dsn, snapshot)
        with server_errors(dsn):
            self._session.execute(_LOCK_TIMEOUT)
            if snapshot is None:
                self._session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")

    def prepare(
        self, table: SourceTable, kind: SplitKind, part: KeyRange, columns: Sequence[SourceColumn]
    ) -> tuple[bytes, RowFormat]:
        """The statement that reads *columns* of *part*, and the format of what it gives.

        The table stays as it is until the session is closed.

        :raises SnapshotExpired: it is not what it was in the snapshot. :raises SourceNotFound: it was not there.
        """
        with server_errors(self._dsn):
            catalog = self._catalog = read_table(self._session, TableName(table.namespace, table.name))
            if table.source_id not in (None, catalog.oid):
                raise _changed(table, "was dropped and made anew")
            oids = self._lock(table, catalog, [column for column in columns if not column.dropped])
            self._require_same_files(table, catalog)
            key = read_key(self._session, catalog, table.key_columns) if kind is SplitKind.KEY and part != _ALL else ()
        where, form = condition(kind, part, key), _format(table, columns, oids)
        return copy_statement(table, form, where, partitioned=catalog.is_partitioned).as_bytes(self._session), form

    def require_unchanged(self, table: SourceTable) -> None:
        """After the read: that it was of what the snapshot shows. :raises SnapshotExpired: it was not."""
        assert self._catalog is not None
        with server_errors(self._dsn):
            self._require_same_files(table, self._catalog)

    def _lock(self, table: SourceTable, catalog: CatalogTable, columns: Sequence[SourceColumn]) -> list[int]:
        """By a read of no rows, whose description tells which columns the names mean now; the types that are sent."""
        statement = sql.SQL("SELECT {} FROM {} LIMIT 0").format(
            sql.SQL(", ").join(sql.Identifier(column.name) for column in columns), sql.SQL(catalog.from_sql)
        )
        try:
            result = self._session.execute(statement).pgresult
        except (pg.UndefinedTable, pg.UndefinedColumn):
            raise _changed(table, "was dropped, or lost a column") from None
        assert result is not None
        shown = {column.number: column for column in catalog.columns}
        for place, column in enumerate(columns):
            was = shown.get(column.field_id)
            if result.ftable(place) != catalog.oid or result.ftablecol(place) != column.field_id or was is None:
                raise _changed(table, f"has another column {column.name!r}")
            if was.type.kind is not TypeKind.DOMAIN and (result.ftype(place), result.fmod(place)) != (
                was.type.oid,
                was.typmod,
            ):
                raise _changed(table, f"has another type of column {column.name!r}")
        return [_sent_as(shown[column.field_id].type, result.ftype(place)) for place, column in enumerate(columns)]

    def _require_same_files(self, table: SourceTable, catalog: CatalogTable) -> None:
        facts = {"oid": catalog.oid, "partitioned": catalog.is_partitioned, "name": catalog.name.sql}
        with self._session.cursor() as cursor:
            if cursor.execute(_CHANGED.encode(), facts).fetchone() is not None:
                raise _changed(table, "was truncated, rewritten or made anew, or its partitions changed")


_ALL: Final = KeyRange()


def _sent_as(shown: CatalogType, oid: int) -> int:
    """The type *oid* as its values are sent: of an enum, the labels."""
    while shown.base is not None:
        shown = shown.base
    return TEXT if shown.kind is TypeKind.ENUM and shown.oid == oid else oid


def _format(table: SourceTable, columns: Sequence[SourceColumn], oids: Sequence[int]) -> RowFormat:
    """Binary where compiled code reads it and it costs less, else csv.

    :param oids: of the columns that were not dropped.
    """
    decode = compiled_decode()
    if decode is None:
        return CsvRows(table, columns)
    present = iter(oids)
    binary = BinaryRows(decode, table, columns, [None if column.dropped else next(present) for column in columns])
    return binary if binary.text_share <= MOST_TEXT else CsvRows(table, columns)


def _changed(table: SourceTable, what: str) -> SnapshotExpired:
    return SnapshotExpired(
        f"Table {table.full_name} {what} since the snapshot was taken, which no longer shows it as it was.",
        next_step="Take a new snapshot.",
    )
