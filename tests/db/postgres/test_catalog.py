"""What the catalog says of tables, on each version: names, keys, partitions, types, and what cannot be captured."""

from __future__ import annotations

import pytest
from tests.servers.postgres import Database

from headwater.sources.errors import SourceNotFound, UnsupportedTable
from headwater.sources.postgres.catalog import all_table_names, read_table, read_tables, read_tables_by_oid
from headwater.sources.postgres.catalog_table import CatalogTable, Generated, ReplicaIdentity
from headwater.sources.postgres.catalog_types import TypeKind
from headwater.sources.postgres.connection import Dsn, connect
from headwater.sources.postgres.names import TableName


def table(database: Database, name: str, dsn: str | None = None) -> CatalogTable:
    with connect(Dsn(dsn or database.dsn)) as session:
        return read_table(session, TableName.parse(name))


def key(found: CatalogTable) -> tuple[str, ...]:
    return found.key_columns(found.captured_columns(None, stored_generated=False))


def test_c26_quoted_and_mixed_case_names_are_found_and_near_misses_are_named(postgres: Database) -> None:
    postgres.execute(
        'CREATE SCHEMA "Sales"',
        'CREATE TABLE "Sales"."Order Lines"'
        ' ("Line No" int, "say ""x""" text, "Qty" int, PRIMARY KEY ("Qty", "Line No"))',
        "CREATE TABLE orders (id int PRIMARY KEY)",
    )
    found = table(postgres, '"Sales"."Order Lines"')
    assert [column.name for column in found.columns] == ["Line No", 'say "x"', "Qty"]
    assert key(found) == ("Qty", "Line No")
    assert found.from_sql == 'ONLY "Sales"."Order Lines"'
    assert table(postgres, "Public.ORDERS").name == TableName("public", "orders")
    with pytest.raises(SourceNotFound, match=r'"Sales"\."Order Lines"'):
        table(postgres, '"order lines"')
    with pytest.raises(SourceNotFound, match=r"Did you mean public\.orders\?"):
        table(postgres, "public.order")
    with pytest.raises(SourceNotFound, match="Name a table"):
        table(postgres, "nothing_like_it")
    with connect(Dsn(postgres.dsn)) as session:
        assert [str(name) for name in all_table_names(session)] == ['"Sales"."Order Lines"', "public.orders"]
        both = read_tables(session, [TableName("public", "orders"), TableName("Sales", "Order Lines")])
        assert [one.name.name for one in both] == ["orders", "Order Lines"]


def test_the_key_follows_the_replica_identity(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE plain (a int, b int, c text, PRIMARY KEY (b, a))",
        "CREATE TABLE by_index (id int PRIMARY KEY, code text NOT NULL, kind int NOT NULL)",
        "CREATE UNIQUE INDEX by_index_code ON by_index (kind, code) INCLUDE (id)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code",
        "CREATE TABLE whole (a int, b text)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "CREATE TABLE whole_with_key (id int PRIMARY KEY, b text)",
        "ALTER TABLE whole_with_key REPLICA IDENTITY FULL",
    )
    assert key(table(postgres, "plain")) == ("b", "a")
    assert key(table(postgres, "by_index")) == ("kind", "code")
    assert key(table(postgres, "whole")) == ("a", "b")
    assert key(table(postgres, "whole_with_key")) == ("id",)


@pytest.mark.parametrize(
    ("statements", "fix"),
    [
        (["CREATE TABLE t (a int)"], 'ALTER TABLE "public"."t" REPLICA IDENTITY FULL;'),
        (
            ["CREATE TABLE t (a int NOT NULL)", 'CREATE UNIQUE INDEX "T a" ON t (a)'],
            'ALTER TABLE "public"."t" REPLICA IDENTITY USING INDEX "T a";',
        ),
        (
            ["CREATE TABLE t (a int)", "CREATE UNIQUE INDEX i ON t (a)"],
            'ALTER TABLE "public"."t" REPLICA IDENTITY FULL;',
        ),
        (
            ["CREATE TABLE t (a int NOT NULL)", "CREATE UNIQUE INDEX i ON t (a) WHERE a > 0"],
            'ALTER TABLE "public"."t" REPLICA IDENTITY FULL;',
        ),
        (
            ["CREATE TABLE t (a int PRIMARY KEY)", "ALTER TABLE t REPLICA IDENTITY NOTHING"],
            'ALTER TABLE "public"."t" REPLICA IDENTITY DEFAULT;',
        ),
        (["CREATE TABLE t (a int PRIMARY KEY DEFERRABLE)"], 'ALTER TABLE "public"."t" REPLICA IDENTITY FULL;'),
    ],
    ids=["no key", "unique index", "nullable index", "partial index", "nothing", "deferrable"],
)
def test_a_table_without_identity_is_refused_with_the_statement_that_the_server_takes(
    postgres: Database, statements: list[str], fix: str
) -> None:
    postgres.execute(*statements)
    with pytest.raises(UnsupportedTable) as refused:
        key(table(postgres, "t"))
    assert refused.value.next_step == f"Run: {fix}"
    postgres.execute(fix)
    assert key(table(postgres, "t")) == ("a",)
    postgres.execute(
        "CREATE PUBLICATION p FOR TABLE t", "INSERT INTO t VALUES (1)", "UPDATE t SET a = 2", "DELETE FROM t"
    )


def test_what_has_no_log_is_refused(postgres: Database) -> None:
    postgres.execute(
        "CREATE VIEW v AS SELECT 1 AS a",
        "CREATE MATERIALIZED VIEW m AS SELECT 1 AS a",
        "CREATE UNLOGGED TABLE u (id int PRIMARY KEY)",
        "CREATE SEQUENCE s",
    )
    for name, reason in (("v", "view"), ("m", "materialized view"), ("u", "unlogged"), ("s", "sequence")):
        with pytest.raises(UnsupportedTable, match=reason):
            table(postgres, name).require_capturable()
    with pytest.raises(UnsupportedTable) as refused:
        table(postgres, "u").require_capturable()
    assert refused.value.next_step == 'Run: ALTER TABLE "public"."u" SET LOGGED;'
    postgres.execute('ALTER TABLE "public"."u" SET LOGGED')
    table(postgres, "u").require_capturable()


def test_partitions_roots_know_their_leaves_and_leaves_their_roots(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE events (id int, region text, PRIMARY KEY (region, id)) PARTITION BY LIST (region)",
        "CREATE TABLE events_eu PARTITION OF events FOR VALUES IN ('eu') PARTITION BY LIST (region)",
        "CREATE TABLE events_eu_1 PARTITION OF events_eu DEFAULT",
        "CREATE TABLE events_us PARTITION OF events FOR VALUES IN ('us')",
        "INSERT INTO events SELECT i, 'us' FROM generate_series(1, 1000) i",
        "CREATE TABLE empty_root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (extra text) INHERITS (parent)",
    )
    root, leaf = table(postgres, "events"), table(postgres, "events_eu_1")
    assert [str(part.name) for part in root.leaves] == ["public.events_eu_1", "public.events_us"]
    assert [str(name) for name in leaf.ancestors] == ["public.events_eu", "public.events"]
    assert key(root) == key(leaf) == ("region", "id")
    assert root.from_sql == '"public"."events"'
    assert table(postgres, "empty_root").leaves == ()
    assert table(postgres, "parent").inherited
    assert table(postgres, "parent").from_sql == 'ONLY "public"."parent"'
    with connect(Dsn(postgres.dsn)) as session:
        names = [str(name) for name in all_table_names(session)]
    assert names == ["public.child", "public.empty_root", "public.events", "public.parent"]


def test_partitions_that_would_be_lost_are_refused(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE a (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE UNLOGGED TABLE a_1 PARTITION OF a FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE b (id int) PARTITION BY RANGE (id)",
        "ALTER TABLE b REPLICA IDENTITY FULL",
        "CREATE TABLE b_1 PARTITION OF b FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE c (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE c_1 PARTITION OF c FOR VALUES FROM (0) TO (10)",
        "ALTER TABLE c_1 REPLICA IDENTITY NOTHING",
        "CREATE FOREIGN DATA WRAPPER w",
        "CREATE SERVER s FOREIGN DATA WRAPPER w",
        "CREATE TABLE d (id int) PARTITION BY RANGE (id)",
        "ALTER TABLE d REPLICA IDENTITY FULL",
        "CREATE FOREIGN TABLE d_1 PARTITION OF d FOR VALUES FROM (0) TO (10) SERVER s",
    )
    for name, reason in (("a", "unlogged"), ("d", "foreign")):
        with pytest.raises(UnsupportedTable, match=reason):
            table(postgres, name).require_capturable()
    for name, fix in (
        ("b", '"public"."b_1" REPLICA IDENTITY FULL;'),
        ("c", '"public"."c_1" REPLICA IDENTITY DEFAULT;'),
    ):
        with pytest.raises(UnsupportedTable, match="partition") as refused:
            table(postgres, name).require_identity()
        assert refused.value.next_step == f"Run: ALTER TABLE {fix}"
        postgres.execute(f"ALTER TABLE {fix}")
        table(postgres, name).require_identity()


def test_columns_carry_numbers_defaults_generation_and_toast(postgres: Database) -> None:
    virtual = ", v int GENERATED ALWAYS AS (n * 2) VIRTUAL" if postgres.server.major >= 18 else ""
    postgres.execute(
        "CREATE TABLE t (gone int, id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int NOT NULL DEFAULT 7,"
        f" body text, fixed text, s int GENERATED ALWAYS AS (n + 1) STORED{virtual})",
        "ALTER TABLE t ALTER fixed SET STORAGE PLAIN",
        "INSERT INTO t (n) VALUES (1)",
        "ALTER TABLE t DROP gone",
        "ALTER TABLE t ADD computed timestamptz DEFAULT clock_timestamp()",
        "ALTER TABLE t ADD added text DEFAULT 'it''s {old}'",
        "ALTER TABLE t ADD listed int[] DEFAULT '{1,2}'",
    )
    found = table(postgres, "t")
    columns = {column.name: column for column in found.columns}
    assert "gone" not in columns
    assert columns["id"].number == 2
    assert columns["id"].identity
    assert columns["n"].not_null
    assert columns["body"].toasted
    assert not columns["fixed"].toasted
    assert not columns["n"].toasted
    assert columns["s"].generated is Generated.STORED
    assert columns["added"].missing == "it's {old}"
    assert columns["listed"].missing == "{1,2}"
    assert columns["computed"].missing is None
    if virtual:
        assert columns["v"].generated is Generated.VIRTUAL
    ordinary = [column.name for column in found.captured_columns(None, stored_generated=False)]
    assert ordinary == ["id", "n", "body", "fixed", "computed", "added", "listed"]
    assert "s" in [column.name for column in found.captured_columns(None, stored_generated=True)]
    assert [column.name for column in found.captured_columns(["n", "id"], stored_generated=False)] == ["id", "n"]


def test_a_key_that_the_log_does_not_tell_is_refused(postgres: Database) -> None:
    postgres.execute("CREATE TABLE t (a int, k int GENERATED ALWAYS AS (a + 1) STORED PRIMARY KEY)")
    with pytest.raises(UnsupportedTable, match="'k' is not in the log"):
        key(table(postgres, "t"))


def test_types_are_told_with_all_that_they_are_made_of(postgres: Database) -> None:
    postgres.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')",
        "ALTER TYPE mood ADD VALUE 'meh' BEFORE 'ok'",
        "CREATE DOMAIN price AS numeric(12, 2) CHECK (VALUE >= 0)",
        "CREATE DOMAIN list_price AS price NOT NULL",
        "CREATE TYPE pair AS (x int, y varchar(10))",
        "CREATE TYPE span AS RANGE (subtype = numeric)",
        'CREATE SCHEMA "My Types"',
        'CREATE TYPE "My Types"."Level" AS ENUM (\'A\')',
        "CREATE TABLE t (id int PRIMARY KEY, m mood, p list_price, ps price[], c pair, cs pair[], r span,"
        " mr int4multirange,"
        ' n numeric(18,4), v varchar(20)[], l "My Types"."Level", b box[], ts timestamptz(3), q oidvector, nm name)',
    )
    columns = {column.name: column for column in table(postgres, "t").columns}
    texts = {name: column.type_text for name, column in columns.items()}
    assert texts["m"] == "public.mood"
    assert texts["n"] == "numeric(18,4)"
    assert texts["v"] == "character varying(20)[]"
    assert texts["l"] == '"My Types"."Level"'
    assert texts["ts"] == "timestamp(3) with time zone"
    assert columns["m"].type.labels == ("sad", "meh", "ok", "happy")
    price = columns["p"].type
    assert price.kind is TypeKind.DOMAIN
    assert price.base is not None
    assert price.base.base is not None
    assert (price.base.base.name, price.base.base_typmod) == ("numeric", ((12 << 16) | 2) + 4)
    prices = columns["ps"].type.element
    assert prices is not None
    assert prices.kind is TypeKind.DOMAIN
    pair = columns["c"].type
    assert pair.kind is TypeKind.COMPOSITE
    assert [(name, part.name, typmod) for name, part, typmod in pair.fields] == [
        ("x", "int4", -1),
        ("y", "varchar", 14),
    ]
    assert columns["cs"].type.element == pair
    span, many = columns["r"].type, columns["mr"].type
    assert span.kind is TypeKind.RANGE
    assert span.subtype is not None
    assert span.subtype.name == "numeric"
    assert many.kind is TypeKind.MULTIRANGE
    assert many.subtype is not None
    assert many.subtype.name == "int4"
    assert columns["b"].type.element is not None
    assert columns["b"].type.element.delimiter == ";"
    assert columns["nm"].type.element is None


def test_m26_a_table_made_anew_under_the_old_name_has_another_number(postgres: Database) -> None:
    postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    before = table(postgres, "t")
    postgres.execute("ALTER TABLE t RENAME TO t_new")
    with connect(Dsn(postgres.dsn)) as session:
        assert read_tables_by_oid(session, [before.oid])[before.oid].name == TableName("public", "t_new")
    postgres.execute("DROP TABLE t_new", "CREATE TABLE t (id int PRIMARY KEY)")
    assert table(postgres, "t").oid != before.oid
    with connect(Dsn(postgres.dsn)) as session:
        assert read_tables_by_oid(session, [before.oid]) == {}


def test_rights_and_row_security_are_those_of_the_user(postgres: Database) -> None:
    role = postgres.role("reader")
    postgres.execute(
        "CREATE TABLE mine (id int PRIMARY KEY, secret text)",
        "CREATE TABLE partly (id int PRIMARY KEY, secret text)",
        "CREATE TABLE policed (id int PRIMARY KEY)",
        "ALTER TABLE policed ENABLE ROW LEVEL SECURITY",
        f"GRANT SELECT ON mine, policed TO {role}",
        f"GRANT SELECT (id) ON partly TO {role}",
    )
    dsn = postgres.dsn_of(role)
    assert table(postgres, "mine", dsn).selectable
    assert not table(postgres, "partly", dsn).selectable
    assert table(postgres, "policed", dsn).row_security
    assert not table(postgres, "policed").row_security
    assert not table(postgres, "mine", dsn).owned
    assert table(postgres, "mine").identity is ReplicaIdentity.DEFAULT
