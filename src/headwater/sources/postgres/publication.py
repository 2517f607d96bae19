"""The publication: which tables the server sends to us, and how.

It is made before the slot: what was logged before a publication existed cannot be decoded with it. All changes of a
partitioned table come under its root (``publish_via_partition_root``), so that a new partition needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import errors as pg

from headwater.errors import InputError
from headwater.sources.errors import AccessDenied, SourceBusy, SourceMisconfigured, SourceNotFound, UnsupportedTable
from headwater.sources.postgres.catalog_table import CatalogColumn, CatalogTable
from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.postgres.names import TableName, quoted

LOCK_TIMEOUT = "30s"

GENERATED_SINCE = 180000
"""The server version that can publish generated columns that are stored."""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table under whose name changes are sent.

    :ivar columns: its column list; ``None`` where all columns are sent.
    :ivar filtered: only rows that fulfil a condition are sent.
    """

    oid: int
    name: TableName
    columns: tuple[str, ...] | None
    filtered: bool


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as the server has it.

    :ivar via_root: changes of partitions are sent under the root.
    :ivar operations: of ``insert``, ``update``, ``delete`` and ``truncate``, those that are sent.
    :ivar stored_generated: generated columns that are stored are sent.
    """

    name: str
    all_tables: bool
    via_root: bool
    operations: frozenset[str]
    stored_generated: bool
    owned: bool
    tables: dict[int, PublishedTable]

    def problems(self, tables: Iterable[CatalogTable]) -> list[tuple[str, str]]:
        """Why it does not send all changes of *tables* as they are needed, each with the statement that mends it."""
        found = []
        left_out = sorted({"insert", "update", "delete", "truncate"} - self.operations)
        if left_out:
            found.append(
                (
                    f"The publication {self.name!r} does not send {', '.join(left_out)}.",
                    f"ALTER PUBLICATION {quoted(self.name)} SET (publish = 'insert, update, delete, truncate');",
                )
            )
        for table in tables:
            sent = self.tables.get(table.oid)
            if sent is None:
                found.append(self._not_sent(table))
            elif sent.filtered:
                found.append(
                    (
                        f"The publication {self.name!r} sends only some rows of {table.name}: it has a row filter.",
                        f"ALTER PUBLICATION {quoted(self.name)} DROP TABLE {table.name.sql}; "
                        f"ALTER PUBLICATION {quoted(self.name)} ADD TABLE {table.name.sql};",
                    )
                )
        return found

    def _not_sent(self, table: CatalogTable) -> tuple[str, str]:
        if table.is_partitioned and not self.via_root:
            return (
                f"The publication {self.name!r} sends the changes of {table.name} under the names of its partitions.",
                f"ALTER PUBLICATION {quoted(self.name)} SET (publish_via_partition_root = true);",
            )
        names = {sent.name for sent in self.tables.values()}
        above = next((name for name in table.ancestors if name in names), None)
        if above is not None:
            return (
                f"The publication {self.name!r} sends the changes of {table.name} under {above}, its root.",
                f"ALTER PUBLICATION {quoted(self.name)} DROP TABLE {above.sql};",
            )
        return (
            f"The publication {self.name!r} does not have the table {table.name}.",
            f"ALTER PUBLICATION {quoted(self.name)} ADD TABLE {table.name.sql};",
        )


_PUBLICATION = """
SELECT p.pubname AS name, p.puballtables AS all_tables, p.pubviaroot AS via_root, p.pubinsert AS insert,
       p.pubupdate AS update, p.pubdelete AS delete, p.pubtruncate AS truncate,
       COALESCE(pg_catalog.to_jsonb(p) ->> 'pubgencols', 'n') AS generated,
       pg_catalog.pg_has_role(p.pubowner, 'USAGE') AS owned
FROM pg_catalog.pg_publication p WHERE p.pubname = %s
"""

# The view pg_publication_tables opens every table, and one that is locked would hold up all others. This gives the
# same: a partitioned table stands for its partitions where changes are sent under the root, else they stand for it. A
# list of columns or a row filter counts only where neither all tables nor its schema are published.
_TABLES = """
WITH RECURSIVE p AS (
  SELECT p.oid, p.puballtables, p.pubviaroot FROM pg_catalog.pg_publication p WHERE p.pubname = %s
), named (relid) AS (
  SELECT r.prrelid FROM p JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid WHERE NOT p.puballtables
  UNION
  SELECT c.oid
  FROM p JOIN pg_catalog.pg_publication_namespace s ON s.pnpubid = p.oid
  JOIN pg_catalog.pg_class c ON c.relnamespace = s.pnnspid
  WHERE NOT p.puballtables AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
  UNION
  SELECT c.oid FROM p JOIN pg_catalog.pg_class c ON p.puballtables
  WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
), below (relid, above) AS (
  SELECT n.relid, NULL::oid FROM named n
  UNION
  SELECT i.inhrelid, COALESCE(b.above, b.relid)
  FROM below b
  JOIN pg_catalog.pg_class c ON c.oid = b.relid AND c.relkind = 'p'
  JOIN pg_catalog.pg_inherits i ON i.inhparent = b.relid AND NOT i.inhdetachpending
)
SELECT c.oid::bigint, s.nspname AS namespace, c.relname AS name,
       (SELECT pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum = ANY(r.prattrs::int2[]) AND NOT a.attisdropped) AS columns,
       r.prattrs IS NOT NULL AS listed, r.prqual IS NOT NULL AS filtered
FROM p
JOIN pg_catalog.pg_class c ON c.oid IN (SELECT b.relid FROM below b)
JOIN pg_catalog.pg_namespace s ON s.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid AND NOT p.puballtables
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_publication_namespace o
                  WHERE o.pnpubid = p.oid AND o.pnnspid = c.relnamespace)
WHERE CASE WHEN p.pubviaroot
  THEN c.oid IN (SELECT b.relid FROM below b WHERE b.above IS NULL)
    AND c.oid NOT IN (SELECT b.relid FROM below b WHERE b.above IS NOT NULL)
  ELSE c.relkind <> 'p' END
"""

# A server that can leave tables out of all tables is asked itself.
_SINCE_EXCEPT = 190000
# attnames always names the columns; a list that was given is in pg_publication_rel.
_TABLES_OF_VIEW = """
SELECT c.oid::bigint, t.schemaname AS namespace, t.tablename AS name, t.attnames::text[] AS columns,
       EXISTS (SELECT FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
               WHERE p.pubname = t.pubname AND r.prrelid = c.oid AND r.prattrs IS NOT NULL) AS listed,
       t.rowfilter IS NOT NULL AS filtered
FROM pg_catalog.pg_publication_tables t
JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
WHERE t.pubname = %s
"""


def read_publication(session: Connection, name: str) -> Publication | None:
    """The publication of that name; ``None`` where there is none."""
    rows = ask(session, _PUBLICATION, [name])
    if not rows:
        return None
    row = rows[0]
    version = session.info.server_version
    tables = {
        table.oid: PublishedTable(
            table.oid,
            TableName(table.namespace, table.name),
            tuple(table.columns or ()) if table.listed else None,
            table.filtered,
        )
        for table in ask(session, _TABLES if version < _SINCE_EXCEPT else _TABLES_OF_VIEW, [name])
    }
    operations = [word for word in ("insert", "update", "delete", "truncate") if getattr(row, word)]
    return Publication(
        row.name, row.all_tables, row.via_root, frozenset(operations), row.generated == "s", row.owned, tables
    )


def sent_columns(table: CatalogTable, publication: Publication | None, server_version: int) -> list[CatalogColumn]:
    """The columns of *table* whose values the log has; without a publication: as the one that we make sends them."""
    stored = server_version >= GENERATED_SINCE if publication is None else publication.stored_generated
    sent = None if publication is None else publication.tables.get(table.oid)
    return table.captured_columns(None if sent is None else sent.columns, stored_generated=stored)


def creation(name: str, tables: Sequence[CatalogTable], server_version: int) -> str:
    """The statement that makes the publication."""
    options = ["publish = 'insert, update, delete, truncate'", "publish_via_partition_root = true"]
    if server_version >= GENERATED_SINCE:
        options.append("publish_generated_columns = stored")
    named = f" FOR TABLE {', '.join(table.name.sql for table in tables)}" if tables else ""
    return f"CREATE PUBLICATION {quoted(name)}{named} WITH ({', '.join(options)});"


def ensure_publication(
    session: Connection, name: str, tables: Sequence[CatalogTable], *, may_be_empty: bool = False
) -> Publication:
    """Make the publication, or add the tables that it lacks; other tables stay in it.

    :param may_be_empty: it is made although there is no table for it yet.
    :raises UnsupportedTable: publishing a table would break its updates, or not tell all of them.
    :raises AccessDenied: this user may not; the statement for one who may.
    :raises SourceMisconfigured: a publication of that name is there and does not fit; the statement that mends it.
    """
    for table in tables:
        table.require_capturable()
        table.require_identity()
    require_disjoint(tables)
    publication = read_publication(session, name)
    if publication is None:
        if not tables and not may_be_empty:
            raise InputError("A publication needs a table.", next_step="Name at least one table.")
        _run(session, creation(name, tables, session.info.server_version))
    else:
        missing = [table for table in tables if publication.tables.get(table.oid) is None]
        blocked = [problem for problem in publication.problems(tables) if "ADD TABLE" not in problem[1]]
        if blocked:
            raise SourceMisconfigured(blocked[0][0], next_step=f"Run: {blocked[0][1]}")
        if missing:
            named = ", ".join(table.name.sql for table in missing)
            _run(session, f"ALTER PUBLICATION {quoted(name)} ADD TABLE {named};")
    return check_publication(session, name, tables)


def check_publication(session: Connection, name: str, tables: Sequence[CatalogTable]) -> Publication:
    """Look whether the publication still sends all changes of *tables*.

    :raises SourceNotFound: it is gone. :raises SourceMisconfigured: it does not; the statement that mends it.
    """
    publication = read_publication(session, name)
    if publication is None:
        raise SourceNotFound(
            f"The database has no publication {name!r}.",
            next_step=f"Run: {creation(name, tables, session.info.server_version)}",
        )
    problems = publication.problems(tables)
    if problems:
        raise SourceMisconfigured(problems[0][0], next_step=f"Run: {problems[0][1]}")
    return publication


def require_disjoint(tables: Sequence[CatalogTable]) -> None:
    """Look that no table is a part of another one: its rows would come twice, or under the other's name alone.

    :raises UnsupportedTable: one is.
    """
    names = {table.name for table in tables}
    for table in tables:
        above = next((name for name in table.ancestors if name in names), None)
        if above is not None:
            raise UnsupportedTable(
                str(table.name),
                f"it is a partition of {above}, which is captured too, and its changes come under that name.",
                next_step=f"Name either {above} or its partitions.",
            )


def _run(session: Connection, statement: str) -> None:
    """Run a statement that takes locks, waiting for them only so long that the application does not queue behind us."""
    try:
        with session.transaction():
            session.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'".encode())
            session.execute(statement.encode())
    except pg.InsufficientPrivilege as error:
        raise AccessDenied(
            f"The user {session.info.user!r} may not change the publication: {error.diag.message_primary}.",
            next_step=f"As the tables' owner or a superuser, run: {statement}",
        ) from None
    except pg.ReadOnlySqlTransaction:
        raise SourceMisconfigured(
            "The server takes no changes (a standby): the publication is made on its primary.",
            next_step=f"On the primary, run: {statement}",
        ) from None
    except pg.LockNotAvailable:
        raise SourceBusy(
            "A table stayed locked while it was to be published.",
            next_step="Try again when the other session (DDL, VACUUM or ANALYZE) has ended.",
        ) from None
    except psycopg.errors.DuplicateObject:
        return  # somebody made the same at the same time: what is there is checked next
