"""Snapshots of tables: whole rows in bounded batches, as of one moment, and errors in our own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from psycopg import sql
from tests.servers.postgres import Database

from headwater.sources.errors import (
    AccessDenied,
    SnapshotExpired,
    SourceError,
    SourceNotFound,
    SourceUnreachable,
    SpecialValue,
)
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.snapshot import BLOCKS_AHEAD, SnapshotSession, read_table
from headwater.sources.postgres.source import PostgresSource
from headwater.sources.table import SourceTable


def described(database: Database, name: str, **options: Any) -> SourceTable:
    source = PostgresSource(database.dsn, spill=Path("/nonexistent"), **options)
    try:
        return source.tables([name])[0]
    finally:
        source.close()


def rows(batches: Sequence[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def test_rows_are_whole_however_small_the_batches(postgres: Database) -> None:
    postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        r"""INSERT INTO t SELECT i, CASE i % 7 WHEN 0 THEN NULL WHEN 1 THEN '' WHEN 2 THEN E'a\nb' WHEN 3 THEN E'\r\n"'
            WHEN 4 THEN '\.' WHEN 5 THEN U&'\FEFFx' ELSE repeat('"x,', i) END FROM generate_series(1, 1000) i""",
    )
    table = described(postgres, "t")
    expected = dict(postgres.execute("SELECT id, v FROM t"))
    for size in (1, 100, 10_000, 4 << 20):
        batches = list(read_table(Dsn(postgres.dsn), table, batch_bytes=size))
        assert all(batch.schema.equals(table.schema, check_metadata=True) for batch in batches)
        assert {row["id"]: row["v"] for row in rows(batches)} == expected
        assert len(batches) == 1 if size == 4 << 20 else len(batches) > 10


def test_a_table_of_one_column_tells_null_from_empty_and_marks_from_text(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (v text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        r"INSERT INTO t VALUES (NULL), (''), (U&'\FEFF'), (U&'\FEFF\FEFFa'), ('\.'), (E'\n'), (E'\r'), (' '), ('\N')",
    )
    table = described(newest_postgres, "t")
    for size in (1, 4 << 20):
        found = [row["v"] for row in rows(list(read_table(Dsn(newest_postgres.dsn), table, batch_bytes=size)))]
        assert found == [None, "", "\ufeff", "\ufeff\ufeffa", "\\.", "\n", "\r", " ", "\\N"]


def test_an_empty_table_has_no_batches(newest_postgres: Database) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    assert list(read_table(Dsn(newest_postgres.dsn), described(newest_postgres, "t"))) == []


def test_columns_and_a_condition_can_be_chosen(newest_postgres: Database) -> None:
    newest_postgres.execute(
        'CREATE TABLE "Odd ""one""" (id int PRIMARY KEY, "a,""b" text, gone int)',
        """INSERT INTO "Odd ""one\""" SELECT i, 'x' || i, 0 FROM generate_series(1, 9) i""",
    )
    table = described(newest_postgres, '"Odd ""one"""')
    newest_postgres.execute('ALTER TABLE "Odd ""one""" DROP COLUMN gone')
    with SnapshotSession(Dsn(newest_postgres.dsn)) as session:
        where = sql.SQL("{} BETWEEN {} AND {}").format(sql.Identifier("id"), sql.Literal(3), sql.Literal(4))
        part = list(session.read(table, columns=['a,"b', "id"], where=where))
        assert rows(part) == [{'a,"b': "x3", "id": 3}, {'a,"b': "x4", "id": 4}]
        quoted = list(session.read(table, columns=["id"], where=sql.SQL('"a,""b" = \'x5\' AND id % 5 = 0')))
        assert rows(quoted) == [{"id": 5}]
        dropped = replace(table, columns=(*table.columns[:2], replace(table.columns[2], dropped=True)))
        assert {row["gone"] for row in rows(list(session.read(dropped)))} == {None}


def test_rows_of_inheriting_tables_are_not_the_tables_own_and_those_of_partitions_are(
    newest_postgres: Database,
) -> None:
    newest_postgres.execute(
        "CREATE TABLE plain (id int PRIMARY KEY)",
        "CREATE TABLE child () INHERITS (plain)",
        "INSERT INTO plain VALUES (1)",
        "INSERT INTO child VALUES (2)",
        "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high PARTITION OF parted FOR VALUES FROM (10) TO (20)",
        "INSERT INTO parted VALUES (1), (11)",
    )
    for name, expected in (("plain", {1}), ("parted", {1, 11})):
        found = rows(list(read_table(Dsn(newest_postgres.dsn), described(newest_postgres, name))))
        assert {row["id"] for row in found} == expected


def test_an_exported_snapshot_is_one_moment_for_all_who_read_it(postgres: Database) -> None:
    postgres.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 100)")
    table = described(postgres, "t")
    with postgres.connect() as exporter:
        exporter.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        row = exporter.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        postgres.execute("DELETE FROM t WHERE id <= 50", "INSERT INTO t VALUES (1000)")
        with SnapshotSession(Dsn(postgres.dsn), row[0]) as session:
            for _ in range(2):
                assert {found["id"] for found in rows(list(session.read(table)))} == set(range(1, 101))
                postgres.execute("DELETE FROM t WHERE id % 2 = 0")
        exporter.execute("COMMIT")
    with pytest.raises(SnapshotExpired, match="Take a new snapshot"):
        SnapshotSession(Dsn(postgres.dsn), row[0])
    with pytest.raises(SnapshotExpired):
        SnapshotSession(Dsn(postgres.dsn), "no snapshot at all")


def test_memory_is_bounded_when_the_reader_is_slow(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) i",
    )
    table, before = described(newest_postgres, "t"), pa.total_allocated_bytes()
    size, most, count = 200_000, 0, 0
    for batch in read_table(Dsn(newest_postgres.dsn), table, batch_bytes=size):
        count += batch.num_rows
        most = max(most, pa.total_allocated_bytes() - before)
        assert batch.nbytes < 2 * size
    assert count == 20_000
    assert most < (BLOCKS_AHEAD + 2) * 4 * size


def test_a_read_that_is_given_up_ends_its_session(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) i",
    )
    reading = read_table(Dsn(newest_postgres.dsn), described(newest_postgres, "t"), batch_bytes=100_000)
    assert next(reading).num_rows
    reading.close()  # type: ignore[attr-defined]
    newest_postgres.execute("ALTER TABLE t ADD COLUMN w int")  # nobody holds a lock on it


def test_a_special_value_in_a_late_batch_is_told_without_being_shown(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, d date)",
        "INSERT INTO t SELECT i, date '2024-01-01' + i % 999 FROM generate_series(1, 50000) i",
        "INSERT INTO t VALUES (50001, '0044-03-15 BC')",
    )
    batches: list[pa.RecordBatch] = []
    with pytest.raises(SpecialValue, match=r"special_values of public\.t\.d to text") as caught:
        batches.extend(read_table(Dsn(newest_postgres.dsn), described(newest_postgres, "t"), batch_bytes=1000))
    assert len(rows(batches)) > 20_000
    assert "0044" not in str(caught.value)


def test_what_the_server_refuses_is_told_in_our_words(newest_postgres: Database) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY, v int)", "INSERT INTO t VALUES (1, 0)")
    table = described(newest_postgres, "t")
    with pytest.raises(SourceError, match="division by zero"):
        list(read_table(Dsn(newest_postgres.dsn), table, where=sql.SQL("1 / v = 1")))
    with pytest.raises(AccessDenied):
        list(read_table(Dsn(newest_postgres.dsn_of(newest_postgres.role("reader"))), table))
    newest_postgres.execute("DROP TABLE t")
    with pytest.raises(SourceNotFound, match=r"public\.t"):
        list(read_table(Dsn(newest_postgres.dsn), table))


def test_m21_a_connection_that_breaks_in_the_middle_is_an_error_not_an_end(newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 50000) i",
    )
    reading = read_table(Dsn(newest_postgres.dsn), described(newest_postgres, "t"), batch_bytes=100_000)
    next(reading)
    newest_postgres.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'headwater'"
        " AND datname = current_database()"
    )
    with pytest.raises(SourceUnreachable):
        list(reading)
