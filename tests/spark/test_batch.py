"""A table as a batch, driven as Spark drives it: one snapshot for all tasks, and the changes of a range of epochs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, IsNotNull, LessThan
from pyspark.sql.types import StructType
from tests.db.conftest import StartPostgres
from tests.servers.postgres import Database
from tests.spark.driven import DrivenStream, read_all, source_of, wait_for_changes

from headwater.log_store.errors import InvalidOffset
from headwater.sources.errors import SourceBusy, SourceNotFound
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind
from headwater.spark import action_snapshots, batch_reader
from headwater.spark.columns import Columns
from headwater.spark.errors import NoCapture, TableChanged
from headwater.spark.options import SourceOptions
from headwater.spark.tables import find_table
from headwater.versioned import TableNotKept


def batch(database: Database, folder: Path, **options: str) -> tuple[Any, Any, Any]:
    source = source_of(database, folder, options.pop("table", "t"), **options)
    schema = source.schema()
    reader: Any = source.reader(schema)
    return reader, schema, reader.partitions()


def make_table(database: Database, rows: int) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        f"INSERT INTO t SELECT n, 'row ' || n FROM generate_series(1, {rows}) n",
    )


def test_all_tasks_see_one_snapshot_whenever_they_read(newest_postgres: Database, tmp_path: Path) -> None:
    make_table(newest_postgres, 2000)
    reader, schema, partitions = batch(newest_postgres, tmp_path, splitRows="400")
    assert len(partitions) == 5
    rows = read_all(reader, schema, partitions[:2])
    newest_postgres.execute("DELETE FROM t WHERE id % 2 = 0", "UPDATE t SET v = 'later'", "INSERT INTO t VALUES (2001)")
    rows += read_all(reader, schema, partitions[2:])
    assert sorted((row["id"], row["v"]) for row in rows) == [(n, f"row {n}") for n in range(1, 2001)]
    assert {row["_change_type"] for row in rows} == {"insert"}
    assert len({row["_commit_version"] for row in rows}) == 1
    assert read_all(reader, schema, partitions[:1]), "a task that is tried again finds its snapshot"


def test_m29_a_standby_is_read_while_it_replays(start_postgres: StartPostgres, tmp_path: Path) -> None:
    primary = start_postgres()
    with primary.database() as database:
        make_table(database, 2000)
        standby = start_postgres(primary=primary, settings={"max_standby_streaming_delay": "-1"})
        source = standby.dsn(database.name)
        reader, schema, partitions = batch(database, tmp_path, source=source, splitRows="400")
        assert len(partitions) == 5
        rows = read_all(reader, schema, partitions[:2])
        database.execute("DELETE FROM t WHERE id % 2 = 0", "UPDATE t SET v = 'later'", "VACUUM t")
        rows += read_all(reader, schema, partitions[2:])
        assert sorted((row["id"], row["v"]) for row in rows) == [(n, f"row {n}") for n in range(1, 2001)]
        standby.close()


def test_a_read_of_a_locked_table_says_so_before_its_tasks_give_up(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert batch_reader._LOCK_SECONDS + 30 < action_snapshots.START_SECONDS, "tasks can wait for a first part before"
    monkeypatch.setattr(batch_reader, "_LOCK_SECONDS", 1.0)
    make_table(newest_postgres, 20)
    source = source_of(newest_postgres, tmp_path, "t")
    reader: Any = source.reader(source.schema())
    moments = batch_reader.TableMoments(newest_postgres.dsn, reader.partitions()[0].table)
    assert batch_reader.TableMoments.from_json(json.loads(json.dumps(moments.to_json()))) == moments
    with newest_postgres.connect() as locking:
        locking.execute("BEGIN")
        locking.execute("LOCK TABLE t")
        for ask in (reader.partitions, moments.open):
            with pytest.raises(SourceBusy, match="lock timeout"):
                ask()


def test_parts_that_nobody_sized_are_as_many_as_tasks_can_use() -> None:
    cuts = [None, *(Cut((str(block),)) for block in range(1, 50)), None]
    splits = [Split(number, KeyRange(low, high), 100) for number, (low, high) in enumerate(pairwise(cuts))]
    joined = batch_reader._joined(splits, 16)
    assert len(joined) == 16
    assert (joined[0].range.start, joined[-1].range.end) == (None, None)
    assert all(low.range.end == high.range.start for low, high in pairwise(joined)), "nothing is left out"
    assert {part.rows for part in joined} == {300, 400}
    assert [part.range for part in batch_reader._joined(splits[:3], 16)] == [split.range for split in splits[:3]]
    assert batch_reader._joined([], 16) == []


def test_a_table_is_read_by_its_blocks_and_by_key_where_filters_ask_for_keys(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_table(newest_postgres, 2000)
    _, _, partitions = batch(newest_postgres, tmp_path)
    assert [(part.kind, part.part) for part in partitions] == [(SplitKind.HEAP, KeyRange())]
    reader: Any = source_of(newest_postgres, tmp_path, "t", pushdown="true").reader(batch(newest_postgres, tmp_path)[1])
    reader.pushFilters([GreaterThan(("id",), 5)])
    assert {part.kind for part in reader.partitions()} == {SplitKind.KEY}


def test_filters_on_the_key_run_in_the_database(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (a int, b text, PRIMARY KEY (a, b))",
        "INSERT INTO t SELECT n / 3, 'row ' || n FROM generate_series(0, 899) n",
    )
    source = source_of(newest_postgres, tmp_path, "t", splitRows="100", pushdown="true", columns="*")
    schema = source.schema()
    for filters, low, high, parts in (
        ([GreaterThanOrEqual(("a",), 100), LessThan(("a",), 110)], 100, 109, 2),
        ([EqualTo(("a",), 299), IsNotNull(("b",))], 299, 299, 1),
        ([In(("a",), (7, 5)), GreaterThan(("a",), 5)], 6, 7, 1),
        ([EqualTo(("b",), "row 1")], 0, 299, 9),
        ([LessThan(("a",), 1 << 40)], 0, 299, 9),
        ([EqualTo(("a",), 1), EqualTo(("a",), 2)], 1, 0, 0),
    ):
        reader: Any = source.reader(schema)
        assert list(reader.pushFilters(filters)) == filters, "Spark applies them again"
        partitions = reader.partitions()
        assert len(partitions) <= parts, filters
        found = sorted(row["a"] for row in read_all(reader, schema, partitions))
        assert found == [n for n in range(low, high + 1) for _ in range(3)], filters


def test_filters_on_a_table_whose_rows_no_key_orders_are_left_to_spark(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (a int, b text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT nullif(n, 7), 'row' FROM generate_series(1, 20) n",
    )
    source = source_of(newest_postgres, tmp_path, "t", pushdown="true", columns="*")
    schema = source.schema()
    reader: Any = source.reader(schema)
    filters = [GreaterThan(("a",), 10)]
    assert list(reader.pushFilters(filters)) == filters
    found = [row["a"] for row in read_all(reader, schema, reader.partitions())]
    assert sorted(value or 0 for value in found) == [0, *range(1, 7), *range(8, 21)]


def test_columns_of_another_table_go_by_their_names(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(
        "CREATE TABLE one (id int PRIMARY KEY, a text, b text)",
        "CREATE TABLE two (id int PRIMARY KEY, b text, a text)",
        "INSERT INTO two (id, a, b) VALUES (1, 'this is a', 'this is b')",
    )
    schema = source_of(newest_postgres, tmp_path, "one").schema()
    for options in ({}, {"onSchemaChange": "ignore"}):
        reader: Any = source_of(newest_postgres, tmp_path, "two", **options).reader(schema)
        rows = read_all(reader, schema, reader.partitions())
        assert [(row["id"], row["a"], row["b"]) for row in rows] == [(1, "this is a", "this is b")]


def test_columns_of_a_table_that_was_made_anew_go_by_their_names(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY, a text, b text)")
    source = source_of(newest_postgres, tmp_path, "t", onSchemaChange="ignore")
    schema = source.schema()
    columns = Columns.of(schema, find_table(SourceOptions.parse(source.options)), None)
    newest_postgres.execute(
        "DROP TABLE t",
        "CREATE TABLE t (b text, a text, id int PRIMARY KEY)",
        "INSERT INTO t VALUES ('this is b', 'this is a', 1)",
    )
    now = find_table(SourceOptions.parse(source.options))
    assert columns.places(now, stops=False)[:3] == ("id", "a", "b")
    reader: Any = source.reader(schema)
    rows = read_all(reader, schema, reader.partitions())
    assert [(row["id"], row["a"], row["b"]) for row in rows] == [(1, "this is a", "this is b")]


def test_some_columns_of_a_schema_that_was_found_can_be_declared(newest_postgres: Database, tmp_path: Path) -> None:
    make_table(newest_postgres, 3)
    source = source_of(newest_postgres, tmp_path, "t")
    for names in (["v"], ["_change_type"], ["_commit_version", "id"]):
        schema = StructType([source.schema()[name] for name in names])
        reader: Any = source.reader(schema)
        rows = read_all(reader, schema, reader.partitions())
        assert [list(row) for row in rows] == [names] * 3


def test_a_table_that_is_not_there_is_named(newest_postgres: Database, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="nothing"):
        batch(newest_postgres, tmp_path, table="nothing")


def test_the_changes_of_a_range_of_epochs(newest_postgres: Database, tmp_path: Path) -> None:
    make_table(newest_postgres, 3)
    stream = DrivenStream(source_of(newest_postgres, tmp_path, "t", history="false"))
    ends = [stream.reader.initialOffset()["e"]]
    try:
        for statement, rows in (("INSERT INTO t VALUES (10)", 1), ("UPDATE t SET v = 'y'", 5), ("DELETE FROM t", 9)):
            newest_postgres.execute(statement)
            ends.append(wait_for_changes(tmp_path, rows))
        found = []
        for start, end in pairwise(ends):
            reader, schema, parts = batch(newest_postgres, tmp_path, startEpoch=str(start), endEpoch=str(end))
            found.append([row["_change_type"] for row in read_all(reader, schema, parts)])
        assert found == [["insert"], ["update_postimage"] * 4, ["delete"] * 4]
        reader, schema, parts = batch(newest_postgres, tmp_path, startEpoch=str(ends[2]), columns="id")
        assert sorted(row["id"] for row in read_all(reader, schema, parts)) == [1, 2, 3, 10]
        with pytest.raises(InvalidOffset, match="newest sealed"):
            batch(newest_postgres, tmp_path, startEpoch="0", endEpoch=str(1 << 60))
        newest_postgres.execute("TRUNCATE t", "INSERT INTO t VALUES (1)")
        wait_for_changes(tmp_path, 10)
        with pytest.raises(TableChanged, match="truncated"):
            batch(newest_postgres, tmp_path, startEpoch=str(ends[-1]))
    finally:
        stream.stop()


def test_changes_need_a_log_and_past_states_a_kept_table(newest_postgres: Database, tmp_path: Path) -> None:
    make_table(newest_postgres, 1)
    with pytest.raises(NoCapture, match=r"no log.*headwater capture"):
        batch(newest_postgres, tmp_path, startEpoch="0")
    with pytest.raises(TableNotKept, match=r'not kept.*kind = "table"'):
        batch(newest_postgres, tmp_path, asOfEpoch="7")
