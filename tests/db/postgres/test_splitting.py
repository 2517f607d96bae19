"""Splits: every row in exactly one, of about the same size, whatever the keys are; and cuts use the index."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from tests.db.postgres.test_snapshot import described
from tests.servers.postgres import Database

from headwater.sources.errors import UnsupportedTable
from headwater.sources.postgres import splitting
from headwater.sources.postgres.catalog import read_table
from headwater.sources.postgres.connection import Dsn, connect
from headwater.sources.postgres.key_columns import condition, read_key
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.snapshots import PostgresSnapshots
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceTable


def planned(database: Database, name: str, rows: int, kind: SplitKind | None = SplitKind.KEY) -> SplitPlan:
    with PostgresSnapshots(database.dsn).export() as snapshot:
        return snapshot.plan(described(database, name), split_rows=rows, kind=kind)


def counts(database: Database, name: str, plan: SplitPlan) -> list[int]:
    """The rows of each split, which together must be all, and each cut shared by two."""
    assert plan.splits[0].range.start is None
    assert plan.splits[-1].range.end is None
    assert all(one.range.end == other.range.start for one, other in pairwise(plan.splits))
    assert [split.number for split in plan.splits] == list(range(len(plan.splits)))
    with connect(Dsn(database.dsn)) as session:
        catalog = read_table(session, TableName("public", name))
        key = read_key(session, catalog, described(database, name).key_columns) if plan.kind is SplitKind.KEY else ()
        found = []
        for split in plan.splits:
            where = condition(plan.kind, split.range, key)
            text = "true" if where is None else where.as_string(session)
            row = session.execute(f"SELECT count(*) FROM {catalog.from_sql} WHERE {text}".encode()).fetchone()
            assert row is not None
            found.append(row[0])
    assert sum(found) == database.value(
        f"SELECT count(*) FROM ONLY {name}" if not catalog.is_partitioned else f"SELECT count(*) FROM {name}"
    )
    assert not any(count for split, count in zip(plan.splits, found, strict=True) if split.empty)
    return found


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables are sampled as large ones are."""
    monkeypatch.setattr(splitting, "EXACT_ROWS", 0)


SKEWED = {
    "gaps": ("k bigint PRIMARY KEY, v text", "SELECT i::bigint * i * i, 'x' FROM generate_series(1, 20000) i", "k"),
    "huge gaps": (
        "k bigint PRIMARY KEY, v text",
        "SELECT CASE WHEN i < 10 THEN i * 900000000000000000 ELSE -i END, 'x' FROM generate_series(1, 20000) i",
        "k",
    ),
    "m18 few values in the first column": (
        "a int, b int, v text, PRIMARY KEY (a, b)",
        "SELECT CASE WHEN i % 100 = 0 THEN i ELSE 7 END, i, 'x' FROM generate_series(1, 20000) i",
        "a, b",
    ),
    "uuids": ("k uuid PRIMARY KEY, v text", "SELECT gen_random_uuid(), 'x' FROM generate_series(1, 20000) i", "k"),
    "texts": (
        'k text COLLATE "C" PRIMARY KEY, v text',
        "SELECT CASE WHEN i % 2 = 0 THEN 'http://very.long/prefix/' || i ELSE md5(i::text) END, 'x'"
        " FROM generate_series(1, 20000) i",
        "k",
    ),
}


@pytest.mark.parametrize("skew", SKEWED)
def test_no_skew_makes_uneven_splits(newest_postgres: Database, skew: str) -> None:
    columns, rows, _ = SKEWED[skew]
    newest_postgres.execute(f"CREATE TABLE t ({columns})", f"INSERT INTO t {rows}")
    plan = planned(newest_postgres, "t", 1000)
    assert counts(newest_postgres, "t", plan) == [0, *[1000] * 20, 0]
    assert (plan.rows, plan.kind) == (20_000, SplitKind.KEY)
    assert [split.rows for split in plan.splits] == [0, *[1000] * 20, 0]
    assert [split.empty for split in plan.splits] == [True, *[False] * 20, True]
    assert "20 ranges of keys" in plan.why


@pytest.mark.parametrize("skew", SKEWED)
@pytest.mark.usefixtures("sampled")
def test_a_sample_is_enough(newest_postgres: Database, skew: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "FEWEST_BLOCKS", 60)
    monkeypatch.setattr(splitting, "BLOCKS_PER_SPLIT", 10)
    columns, rows, _ = SKEWED[skew]
    newest_postgres.execute(
        f"CREATE TABLE t ({columns})",
        f"INSERT INTO t {rows.replace(chr(39) + 'x' + chr(39), 'repeat(chr(120), 300)')}",
        "ANALYZE t",
    )
    plan = planned(newest_postgres, "t", 2000)
    found = counts(newest_postgres, "t", plan)
    assert len(found) in range(10, 15)
    assert max(found) < 6000
    assert plan.rows in range(15_000, 25_000)


def test_m18_all_rows_have_one_first_value(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE t (a int, b text, c int, PRIMARY KEY (a, b, c))",
        "INSERT INTO t SELECT 1, 'same', i FROM generate_series(1, 1000) i",
    )
    assert counts(postgres, "t", planned(postgres, "t", 100)) == [0, *[100] * 10, 0]


@pytest.mark.parametrize("exact_rows", [0, 500_000])
@pytest.mark.parametrize("name", ["n", "more", "bucket", "before", "key1", "s"])
def test_key_columns_may_have_the_names_that_a_plan_uses(
    newest_postgres: Database, name: str, exact_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "EXACT_ROWS", exact_rows)
    newest_postgres.execute(
        f"CREATE TABLE t ({name} int, key0 int, PRIMARY KEY ({name}, key0))",
        "INSERT INTO t SELECT i / 10, -i FROM generate_series(1, 1000) i",
    )
    found = counts(newest_postgres, "t", planned(newest_postgres, "t", 100))
    assert len(found) == 12
    assert sum(found) == 1000


@pytest.mark.parametrize("kind", list(SplitKind))
def test_an_empty_table_has_nothing_to_read(postgres: Database, kind: SplitKind) -> None:
    postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    plan = planned(postgres, "t", 100, kind)
    assert plan.splits == (Split(0, KeyRange(), 0, empty=True),)
    assert plan.rows == 0
    postgres.execute("INSERT INTO t VALUES (1)", "DELETE FROM t")
    assert sum(counts(postgres, "t", planned(postgres, "t", 100, kind))) == 0


@pytest.mark.parametrize("rows", [1, 2, 99, 100, 101, 200])
def test_m19_tables_of_just_so_many_rows(newest_postgres: Database, rows: int) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)", f"INSERT INTO t SELECT generate_series(1, {rows})")
    found = counts(newest_postgres, "t", planned(newest_postgres, "t", 100))
    assert found == [0, *[100] * (rows // 100), *([rows % 100] if rows % 100 else []), 0]
    assert counts(newest_postgres, "t", planned(newest_postgres, "t", 1)) == [0, *[1] * rows, 0]


@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.usefixtures("sampled")
def test_a_table_that_was_never_analyzed_is_measured(postgres: Database, analyzed: bool) -> None:
    postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 100000)",
        *(["ANALYZE t"] if analyzed else []),
    )
    for kind in SplitKind:
        plan = planned(postgres, "t", 10_000, kind)
        assert plan.rows in range(80_000, 120_000)
        found = [count for count in counts(postgres, "t", plan) if count]
        assert len(found) in range(8, 13)
        assert max(found) < 25_000


def test_m30_a_hundred_thousand_splits_take_seconds(newest_postgres: Database) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 300000)")
    began = time.monotonic()
    plan = planned(newest_postgres, "t", 3)
    assert len(plan.splits) == 100_002
    assert time.monotonic() - began < 30
    assert plan.splits[50_001].range == KeyRange(Cut(("150001",)), Cut(("150004",)))


def test_by_heap_every_row_is_in_one_range_of_blocks(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', i % 700) FROM generate_series(1, 20000) i",
        "DELETE FROM t WHERE id BETWEEN 3000 AND 9000",
        "VACUUM ANALYZE t",
    )
    plan = planned(postgres, "t", 1000, SplitKind.HEAP)
    found = counts(postgres, "t", plan)
    assert len(found) in range(12, 17)
    assert "blocks" in plan.why
    lengths = [int(b.range.start.values[0]) for b in plan.splits if b.range.start]
    assert len({b - a for a, b in pairwise(lengths)}) <= 2


def test_partitioned_tables_are_split_by_key_and_by_heap(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE t (id int, at int, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (10) TO (90) PARTITION BY RANGE (at)",
        "CREATE TABLE t2 PARTITION OF t1 FOR VALUES FROM (10) TO (50)",
        "CREATE TABLE t3 PARTITION OF t1 FOR VALUES FROM (50) TO (90)",
        "CREATE TABLE t4 PARTITION OF t FOR VALUES FROM (90) TO (99)",
        "INSERT INTO t SELECT i, i % 90 FROM generate_series(1, 20000) i",
        "ANALYZE t",
    )
    assert counts(postgres, "t", planned(postgres, "t", 1000)) == [0, *[1000] * 20, 0]
    assert planned(postgres, "t", 1000, None).kind is SplitKind.KEY
    by_heap = planned(postgres, "t", 1000, SplitKind.HEAP)
    assert len([count for count in counts(postgres, "t", by_heap) if count]) > 10


@pytest.mark.usefixtures("sampled")
def test_partitioned_tables_are_sampled(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY HASH (id)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES WITH (MODULUS 4, REMAINDER {n})" for n in range(4)),
        "INSERT INTO t SELECT generate_series(1, 50000)",
        "ANALYZE t",
    )
    found = counts(postgres, "t", planned(postgres, "t", 5000))
    assert len(found) == 12
    assert max(found) < 9000


def test_rows_of_inheriting_tables_are_not_split(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE child () INHERITS (t)",
        "INSERT INTO t SELECT generate_series(1, 100)",
        "INSERT INTO child SELECT generate_series(1001, 9000)",
    )
    assert counts(newest_postgres, "t", planned(newest_postgres, "t", 10)) == [0, *[10] * 10, 0]


def test_the_heap_is_chosen_where_the_key_is_spread_over_it(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE clustered (id int PRIMARY KEY)",
        "INSERT INTO clustered SELECT generate_series(1, 5000)",
        "CREATE TABLE spread (id uuid PRIMARY KEY)",
        "INSERT INTO spread SELECT gen_random_uuid() FROM generate_series(1, 5000)",
        'CREATE TABLE unindexed (id int NOT NULL, v text COLLATE "C" NOT NULL)',
        "INSERT INTO unindexed SELECT i, i::text FROM generate_series(1, 5000) i",
        "ALTER TABLE unindexed REPLICA IDENTITY FULL",
        "ANALYZE",
    )
    chosen = {name: planned(newest_postgres, name, 1000, None) for name in ("clustered", "spread", "unindexed")}
    assert {name: plan.kind.value for name, plan in chosen.items()} == {
        "clustered": "key",
        "spread": "heap",
        "unindexed": "heap",
    }
    assert "spread over the heap" in chosen["spread"].why
    assert "no index" in chosen["unindexed"].why
    assert planned(newest_postgres, "spread", 100_000, None).kind is SplitKind.KEY
    assert planned(newest_postgres, "spread", 1000, SplitKind.KEY).kind is SplitKind.KEY
    assert counts(newest_postgres, "unindexed", planned(newest_postgres, "unindexed", 1000)) == [0, *[1000] * 5, 0]


def test_keys_that_may_be_null_have_no_order(newest_postgres: Database) -> None:
    newest_postgres.execute("CREATE TABLE t (id int, v text)", "ALTER TABLE t REPLICA IDENTITY FULL")
    with pytest.raises(UnsupportedTable, match="may be null"):
        planned(newest_postgres, "t", 10)


# -- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SplitKind))
@pytest.mark.parametrize("rows", [1, 7, 100, 1000, 1001])
def test_m19_pages_end_after_so_many_rows(newest_postgres: Database, kind: SplitKind, rows: int) -> None:
    newest_postgres.execute(
        'CREATE TABLE t (a int, b text COLLATE "C", v text, PRIMARY KEY (a, b))',
        "INSERT INTO t SELECT i % 3, i::text, repeat('x', 300) FROM generate_series(1, 1000) i",
    )
    table, source = described(newest_postgres, "t"), PostgresSnapshots(newest_postgres.dsn)
    rest, pages, seen = KeyRange(), 0, 0
    with source.export() as snapshot:
        while pages < 30:
            end = snapshot.page_end(table, kind, rest, rows)
            part = KeyRange(rest.start, end)
            found = sum(batch.num_rows for batch in source.read(table, kind, part, snapshot.name))
            pages, seen = pages + 1, seen + found
            assert found == rows if kind is SplitKind.KEY and end else found <= max(rows + 30, 30)
            if end is None:
                break
            rest = KeyRange(end, None)
        assert seen == 1000 or pages == 30


# -- statements ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "key", "values"),
    [
        ("a int", "a", ("500",)),
        ("a int, b text", "a, b", ("500", "x")),
        ("a varchar(20), b bigint, c uuid", "a, b, c", ("500", "1", "00000000-0000-0000-0000-000000000000")),
        ("a char(5)", "a", ("500",)),
        ("a numeric(10,2), b timestamptz", "a, b", ("500.00", "2024-01-01 00:00:00+00")),
        ("a name, b inet", "a, b", ("500", "10.0.0.1")),
        ("a positive, b int", "a, b", ("500", "1")),
    ],
)
def test_cuts_are_conditions_of_the_index(postgres: Database, columns: str, key: str, values: tuple[str, ...]) -> None:
    postgres.execute("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    postgres.execute(f"CREATE TABLE t ({columns}, PRIMARY KEY ({key}))")
    table: SourceTable = described(postgres, "t")
    with connect(Dsn(postgres.dsn)) as session:
        catalog = read_table(session, TableName("public", "t"))
        names = read_key(session, catalog, table.key_columns)
        session.execute("SET enable_seqscan = off")
        session.execute("SET enable_bitmapscan = off")
        for part in (KeyRange(Cut(values), Cut(values, after=True)), KeyRange(Cut(values[:1]), Cut(values[:1], True))):
            where = condition(SplitKind.KEY, part, names)
            assert where is not None
            plan = session.execute(f"EXPLAIN SELECT * FROM public.t WHERE {where.as_string(session)}".encode())
            text = "\n".join(row[0] for row in plan)
            assert "Index Cond" in text, text
            assert "Filter" not in text
        where = condition(SplitKind.HEAP, KeyRange(Cut(("1",)), Cut(("2",))), ())
        assert where is not None
        plan = session.execute(f"EXPLAIN SELECT * FROM public.t WHERE {where.as_string(session)}".encode())
        assert "Tid Range Scan" in "\n".join(row[0] for row in plan)
