"""The publication, on each version: made once, mended, checked, and never such that it breaks the application."""

from __future__ import annotations

import pytest
from tests.servers.postgres import Database

from headwater.sources.errors import AccessDenied, SourceMisconfigured, SourceNotFound, UnsupportedTable
from headwater.sources.postgres.catalog import read_tables
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.connection import Connection, Dsn, connect
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.publication import (
    Publication,
    check_publication,
    ensure_publication,
    read_publication,
)


def tables(session: Connection, *names: str) -> list[CatalogTable]:
    return read_tables(session, [TableName.parse(name) for name in names])


def ensure(database: Database, *names: str, dsn: str | None = None) -> Publication:
    with connect(Dsn(dsn or database.dsn)) as session:
        return ensure_publication(session, "Pub", tables(session, *names))


def check(database: Database, *names: str) -> Publication:
    with connect(Dsn(database.dsn)) as session:
        return check_publication(session, "Pub", tables(session, *names))


def sent(publication: Publication) -> list[str]:
    return sorted(str(one.name) for one in publication.tables.values())


def test_it_is_made_once_and_takes_further_tables(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE a (id int PRIMARY KEY)",
        'CREATE TABLE "B b" (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id + 1) STORED)',
    )
    made = ensure(postgres, "a")
    assert sent(made) == ["public.a"]
    assert made.via_root
    assert made.owned
    assert made.stored_generated == (postgres.server.major >= 18)
    assert sent(ensure(postgres, "a", '"B b"')) == ['public."B b"', "public.a"]
    assert sent(ensure(postgres, "a")) == ['public."B b"', "public.a"]
    with connect(Dsn(postgres.dsn)) as session:
        session.execute('DROP PUBLICATION "Pub"')
        assert read_publication(session, "Pub") is None
    with pytest.raises(SourceNotFound) as gone:
        check(postgres, "a")
    postgres.execute((gone.value.next_step or "").removeprefix("Run: "))
    assert sent(check(postgres, "a")) == ["public.a"]


def test_a_table_whose_updates_it_would_break_is_never_published(postgres: Database) -> None:
    postgres.execute("CREATE TABLE good (id int PRIMARY KEY)", "CREATE TABLE bad (id int)")
    with pytest.raises(UnsupportedTable):
        ensure(postgres, "good", "bad")
    with connect(Dsn(postgres.dsn)) as session:
        assert read_publication(session, "Pub") is None
    postgres.execute("INSERT INTO bad VALUES (1)", "UPDATE bad SET id = 2")


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("CREATE PUBLICATION \"Pub\" FOR TABLE t WITH (publish = 'insert')", "does not send delete, truncate, update"),
        ('CREATE PUBLICATION "Pub" FOR TABLE t WHERE (id > 5)', "row filter"),
        ('CREATE PUBLICATION "Pub" FOR TABLE root', "under the names of its partitions"),
        ('CREATE PUBLICATION "Pub" FOR TABLE root_1 WITH (publish_via_partition_root)', "does not have the table"),
        ('CREATE PUBLICATION "Pub"', "does not have the table"),
    ],
    ids=["operations", "row filter", "not via root", "only one leaf", "empty"],
)
def test_one_that_does_not_send_everything_is_refused_with_the_statement_that_mends_it(
    postgres: Database, statement: str, problem: str
) -> None:
    postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE root_1 PARTITION OF root FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE root_2 PARTITION OF root FOR VALUES FROM (10) TO (20)",
        statement,
    )
    name = "root" if "root" in statement else "t"
    with pytest.raises(SourceMisconfigured, match=problem) as refused:
        check(postgres, name)
    while problems := problems_of(postgres, name):
        assert len(problems) <= 2
        postgres.execute(*problems[0][1].rstrip(";").split("; "))
    assert str(refused.value.next_step).startswith("Run: ALTER PUBLICATION")
    assert f"public.{name}" in sent(check(postgres, name))


def problems_of(database: Database, name: str) -> list[tuple[str, str]]:
    with connect(Dsn(database.dsn)) as session:
        publication = read_publication(session, "Pub")
        assert publication is not None
        return publication.problems(tables(session, name))


def test_partitions_come_under_the_root_or_alone_never_both(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE root_1 PARTITION OF root FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE root_2 PARTITION OF root FOR VALUES FROM (10) TO (20)",
    )
    with pytest.raises(UnsupportedTable, match="is a partition of"):
        ensure(postgres, "root", "root_1")
    assert sent(ensure(postgres, "root_1")) == ["public.root_1"]
    assert sent(ensure(postgres, "root")) == ["public.root"]
    with pytest.raises(SourceMisconfigured, match="its root"):
        ensure(postgres, "root_1")
    postgres.execute("CREATE TABLE root_3 PARTITION OF root FOR VALUES FROM (20) TO (30)")
    assert sent(check(postgres, "root")) == ["public.root"]


def test_one_that_a_dba_made_serves_as_it_is(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, name text, secret text)",
        'CREATE PUBLICATION "Pub" FOR TABLE t (id, name)',
    )
    role = postgres.role("reader")
    postgres.execute(f"GRANT SELECT ON t TO {role}")
    publication = ensure(postgres, "t", dsn=postgres.dsn_of(role))
    assert not publication.owned
    (only,) = publication.tables.values()
    assert only.columns == ("id", "name")
    postgres.execute('DROP PUBLICATION "Pub"', 'CREATE PUBLICATION "Pub" FOR ALL TABLES')
    publication = ensure(postgres, "t", dsn=postgres.dsn_of(role))
    assert publication.all_tables
    (only,) = publication.tables.values()
    assert only.columns is None


def test_a_user_who_may_not_gets_the_statement_for_one_who_may(postgres: Database) -> None:
    postgres.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    dsn = postgres.dsn_of(postgres.role("reader"))
    for name in ("t", "u"):
        with pytest.raises(AccessDenied) as denied:
            ensure(postgres, name, dsn=dsn)
        statement = (denied.value.next_step or "").partition("run: ")[2]
        assert statement.startswith(("CREATE PUBLICATION", "ALTER PUBLICATION"))
        postgres.execute(statement)
        assert f"public.{name}" in sent(ensure(postgres, name, dsn=dsn))
