"""The tables of a publication are read without opening them: as the server's view has them, also a locked one."""

from __future__ import annotations

import pytest
from tests.servers.postgres import Database

from headwater.sources.postgres.connection import Connection, Dsn, ask, connect
from headwater.sources.postgres.publication import _TABLES, _TABLES_OF_VIEW, read_publication

TABLES = (
    "CREATE SCHEMA other",
    "CREATE TABLE plain (id int PRIMARY KEY, a text, b text)",
    "CREATE TABLE parent (id int PRIMARY KEY)",
    "CREATE TABLE child (extra text) INHERITS (parent)",
    "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY)",
    "CREATE TABLE root (id int PRIMARY KEY, a text) PARTITION BY RANGE (id)",
    "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE other.middle PARTITION OF root FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id)",
    "CREATE TABLE other.deep PARTITION OF other.middle FOR VALUES FROM (10) TO (20)",
    "CREATE TABLE other.alone (id int PRIMARY KEY, a text)",
    "ALTER TABLE plain DROP COLUMN b",
    "CREATE VIEW seen AS SELECT * FROM plain",
)
PUBLISHED = (
    "FOR ALL TABLES",
    "FOR TABLE plain, root, other.alone",
    "FOR TABLE plain (id), parent, leaf, other.middle",
    "FOR TABLE ONLY parent, root, leaf, other.deep",
    "FOR TABLE plain WHERE (id > 5), leaf WHERE (id > 3)",
    "FOR TABLES IN SCHEMA other",
    "FOR TABLES IN SCHEMA public, other",
    "FOR TABLE root, other.alone, TABLES IN SCHEMA other",
    "",
)


def published(session: Connection, query: str) -> list[tuple[object, ...]]:
    rows = ask(session, query, ["p"])
    return sorted((row.oid, row.namespace, row.name, row.listed and row.columns, row.filtered) for row in rows)


def test_the_tables_are_those_of_the_view(postgres: Database) -> None:
    postgres.execute(*TABLES)
    with connect(Dsn(postgres.dsn)) as session:
        for kind in PUBLISHED:
            for root in ("true", "false"):
                postgres.execute(f"CREATE PUBLICATION p {kind} WITH (publish_via_partition_root = {root})")
                assert published(session, _TABLES) == published(session, _TABLES_OF_VIEW), (kind, root)
                postgres.execute("DROP PUBLICATION p")


@pytest.mark.parametrize("table", ["plain", "root", "leaf"])
def test_a_locked_table_is_read_as_any_other(newest_postgres: Database, table: str) -> None:
    newest_postgres.execute(*TABLES, "CREATE PUBLICATION p FOR ALL TABLES")
    with connect(Dsn(newest_postgres.dsn), lock_timeout="100ms") as session, newest_postgres.connect() as holder:
        holder.execute("BEGIN")
        holder.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
        publication = read_publication(session, "p")
        assert publication is not None
        assert table in {sent.name.name for sent in publication.tables.values()} | {"root"}
