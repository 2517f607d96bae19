"""The stream reader over a real database and a real capture, driven as Spark drives it."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as st
from pyspark.sql.datasource import CaseInsensitiveDict
from tests.servers.postgres import Database
from tests.spark.collecting import mirrored
from tests.spark.driven import DrivenStream, read_all, source_of, wait_for_changes

from headwater.backfill.errors import QueryStateLost
from headwater.spark.data_source_api import ReadMaxRows
from headwater.spark.errors import HistoryWaits, NoCapture, StreamRuns, TableChanged, UnsupportedSchema
from headwater.spark.query_capture import is_written
from headwater.spark.source import HeadwaterDataSource

Start = Callable[..., DrivenStream]
ROWS = 500


@pytest.fixture
def start(newest_postgres: Database, tmp_path: Path) -> Iterator[Start]:
    """Starts streams of a table ``t``, and stops what is left of them."""
    started: list[DrivenStream] = []

    def begin(offset: dict[str, int] | None = None, schema: Any = None, **options: str) -> DrivenStream:
        table = options.pop("table", "t")
        made = DrivenStream(source_of(newest_postgres, tmp_path, table, **options), offset, schema)
        started.append(made)
        return made

    yield begin
    for one in started:
        one.stop()


def make_table(database: Database, rows: int = ROWS, columns: str = "v text") -> None:
    database.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, {columns})",
        f"INSERT INTO t SELECT n, 'row ' || n FROM generate_series(1, {rows}) n",
    )


def test_history_comes_first_and_every_change_once(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres)
    stream = start(splitRows="100")
    rows = stream.available_now()
    assert [row["_change_type"] for row in rows] == ["insert"] * ROWS
    assert sorted(row["id"] for row in rows) == list(range(1, ROWS + 1))
    assert all(row["_commit_timestamp"] is not None and row["_unavailable"] is None for row in rows)
    stream.reader._upto = None
    newest_postgres.execute(
        "UPDATE t SET v = 'new' WHERE id <= 3",
        "DELETE FROM t WHERE id = 4",
        "INSERT INTO t VALUES (0, 'zero')",
    )
    changes = stream.until(5)
    assert [row["_change_type"] for row in sorted(changes, key=lambda row: row["_commit_version"])] == (
        ["update_postimage"] * 3 + ["delete", "insert"]
    )
    assert min(row["_commit_version"] for row in changes) > max(row["_commit_version"] for row in rows)
    assert len({row["_commit_version"] for row in changes}) == 3
    expected = {key: {"id": key, "v": value} for key, value in newest_postgres.execute("SELECT * FROM t")}
    assert mirrored([*rows, *sorted(changes, key=lambda row: row["_commit_version"])]) == expected


def test_the_first_offset_stays_the_first(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres)
    stream = start()
    first = stream.reader.initialOffset()
    end = stream.next_end()
    assert stream.reader.initialOffset() == first
    assert len(stream.rows(end)) == ROWS


def test_a_stream_goes_on_where_its_checkpoint_is(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres)
    stream = start()
    assert len(stream.available_now()) == ROWS
    stream.stop()
    newest_postgres.execute("INSERT INTO t VALUES (1000, 'while nobody looked')")
    again = start(stream.offset)
    assert [row["id"] for row in again.until(1)] == [1000]


def test_a_batch_that_is_replayed_has_the_same_rows(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres)
    stream = start()
    stream.available_now()
    stream.reader._upto = None
    newest_postgres.execute("UPDATE t SET v = 'x' WHERE id <= 20")
    end = stream.next_end()
    rows = stream.rows(end)
    assert len(rows) == 20
    stream.kill()
    again = start(stream.offset)
    assert sorted(again.rows(end), key=itemgetter("id")) == sorted(rows, key=itemgetter("id"))


def test_history_that_was_planned_and_not_delivered_is_read_again(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres)
    stream = start(splitRows="100")
    first = stream.batch()
    assert first is not None
    end = stream.next_end()
    stream.kill()
    again = start(stream.offset, splitRows="100")
    rows = again.rows(end)
    again.offset = end
    rows += again.available_now()
    assert sorted(row["id"] for row in [*first, *rows]) == list(range(1, ROWS + 1))


def test_the_number_of_changes_per_batch_is_limited_by_whole_epochs(
    start: Start, newest_postgres: Database, tmp_path: Path
) -> None:
    make_table(newest_postgres, rows=1)
    stream = start(history="false", maxRows="10")
    assert stream.reader.getDefaultReadLimit() == ReadMaxRows(10)
    assert stream.batch() is None
    for n in range(6):
        newest_postgres.execute(f"INSERT INTO t SELECT {n * 10 + 10} + s, 'x' FROM generate_series(0, 4) s")
        wait_for_changes(tmp_path, 5 * n + 5)
    sizes: list[int] = []
    while sum(sizes) < 30:
        rows = stream.batch(ReadMaxRows(10))
        assert rows is not None
        sizes.append(len(rows))
    assert max(sizes) <= 10
    assert all(size % 5 == 0 for size in sizes), "no commit is split"
    assert len(sizes) < 6, "epochs that fit are taken together"


def test_old_rows_of_updates_are_there_and_can_be_left_out(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres, rows=3)
    newest_postgres.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    both = start(query="both", history="false")
    new = start(query="new", history="false", preimages="false")
    assert both.batch() is None
    assert new.batch() is None
    newest_postgres.execute("UPDATE t SET v = 'x' WHERE id = 1")
    told = [(row["_change_type"], row["v"]) for row in both.until(2)]
    assert told == [("update_preimage", "row 1"), ("update_postimage", "x")]
    assert [row["_change_type"] for row in new.until(1)] == ["update_postimage"]


def test_only_the_columns_that_were_asked_for(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres, columns="v text, w int DEFAULT 7")
    assert start(columns="w, id", query="a").schema.simpleString() == "struct<w:int,id:int>"
    assert start(columns="*", query="a").schema.names == ["id", "v", "w"]
    stream = start(columns="_position,v,_commit_version", query="b")
    rows = stream.available_now()
    assert len(rows) == ROWS
    assert set(rows[0]) == {"_position", "v", "_commit_version"}
    assert rows[0]["_commit_version"] == int.from_bytes(rows[0]["_position"][:8], "big")
    with pytest.raises(UnsupportedSchema, match=r"'gone'.*id, v, w"):
        start(columns="gone")
    with pytest.raises(UnsupportedSchema, match="twice"):
        start(columns="*,id")


def test_a_declared_schema_is_taken_where_it_is_exact(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres, rows=2, columns="v text, n numeric(8,2) DEFAULT 1.5")

    def declared(**kinds: st.DataType) -> st.StructType:
        return st.StructType([st.StructField(name, kind) for name, kind in kinds.items()])

    wider = declared(n=st.DecimalType(12, 4), id=st.LongType(), _change_type=st.StringType())
    rows = start(schema=wider, query="wider").available_now()
    assert sorted((row["id"], row["n"]) for row in rows) == [(1, Decimal("1.5000")), (2, Decimal("1.5000"))]
    for wrong, words in (
        (declared(id=st.ShortType()), "'id' was declared smallint.* int"),
        (declared(other=st.StringType()), "no column 'other'"),
        (declared(_commit_version=st.IntegerType()), "bigint"),
        (st.StructType([st.StructField("v", st.StringType(), nullable=False)]), "NOT NULL"),
    ):
        with pytest.raises(UnsupportedSchema, match=words):
            start(schema=wrong, query="wrong").reader.initialOffset()


def test_every_type_arrives_as_it_is(start: Start, newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, d numeric(50,12), f time, z timestamptz, n timestamp, a int[], j jsonb)"
    )
    insert = (
        "INSERT INTO t VALUES ({}, 0.0000000001, '09:05:00.000007', '2024-02-29 12:00+02', '2024-02-29 12:00', "
        "'{{1,NULL}}', '{{\"a\": 1}}')"
    )
    newest_postgres.execute(insert.format(1))
    stream = start()
    rows = stream.available_now()
    stream.reader._upto = None
    newest_postgres.execute(insert.format(2))
    rows += stream.until(1)
    for row in rows:
        assert row["d"] == "0.000000000100"
        assert row["f"] == "09:05:00.000007"
        assert row["z"] == dt.datetime(2024, 2, 29, 10, tzinfo=dt.UTC)
        assert row["n"].isoformat() == "2024-02-29T12:00:00"
        assert row["a"] == [1, None]
        assert row["j"] == '{"a": 1}'
    assert len(rows) == 2


def test_a_new_column_stops_the_stream_which_then_goes_on_with_it(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres, rows=2)
    stream = start()
    stream.available_now()
    stream.reader._upto = None
    newest_postgres.execute("ALTER TABLE t ADD COLUMN w int", "INSERT INTO t VALUES (3, 'three', 33)")
    with pytest.raises(TableChanged, match=r"new column 'w'.*Load it again"):
        stream.until(1)
    stream.stop()
    again = start(stream.offset)
    assert "w" in again.schema.names
    assert [row["w"] for row in again.until(1)] == [33]


def test_a_new_column_can_be_ignored(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres, rows=1)
    stream = start(onSchemaChange="ignore")
    named = start(columns="id,v,_change_type", query="named")
    stream.available_now()
    named.available_now()
    stream.reader._upto = named.reader._upto = None
    newest_postgres.execute("ALTER TABLE t ADD COLUMN w int", "INSERT INTO t VALUES (3, 'three', 33)")
    assert stream.until(1)[0]["v"] == "three"
    assert named.until(1)[0]["v"] == "three"


def test_available_now_says_what_history_waits_for_instead_of_waiting_for_ever(
    start: Start, newest_postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.spark.stream_reader._HISTORY_SECONDS", 1.5)
    make_table(newest_postgres, rows=3)
    assert len(start().available_now()) == 3
    newest_postgres.execute("ALTER TABLE t ADD COLUMN w int")
    waiting = start(query="waiting", columns="id,v")
    with pytest.raises(HistoryWaits, match=r"public\.t has not gone on .* its columns have changed.*any update"):
        waiting.available_now()
    newest_postgres.execute("UPDATE t SET v = 'written' WHERE id = 2")
    assert sorted(row["id"] for row in waiting.available_now()) == [1, 2, 3]


def test_a_truncate_stops_the_stream_or_is_ignored(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres, rows=2)
    stopping, going = start(query="stopping"), start(query="going", onTruncate="ignore")
    for stream in (stopping, going):
        stream.available_now()
        stream.reader._upto = None
    newest_postgres.execute("TRUNCATE t", "INSERT INTO t VALUES (9, 'after')")
    with pytest.raises(TableChanged, match=r"truncated.*onTruncate=ignore"):
        stopping.until(1)
    assert [row["id"] for row in going.until(1)] == [9]
    assert [row["id"] for row in start(query="new").available_now()] == [9], "it has nothing from before the TRUNCATE"


def test_a_truncate_stops_a_stream_that_begins_without_history_from_its_first_batch_on(
    start: Start, newest_postgres: Database
) -> None:
    make_table(newest_postgres, rows=2)
    first = start(query="first")
    first.available_now()
    assert first.offset is not None
    newest_postgres.execute("TRUNCATE t", "INSERT INTO t VALUES (9, 'after')")
    since = str(first.offset["e"])
    with pytest.raises(TableChanged, match="truncated"):
        start(query="stopping", since=since).until(1)
    assert [row["id"] for row in start(query="going", since=since, onTruncate="ignore").until(1)] == [9]


def test_a_checkpoint_from_before_what_was_delivered_is_refused(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres, rows=30)
    options = {"backfill": "single", "splitRows": "10", "parallelism": "1"}
    first = start(**options)
    assert len(first.until(1)) == 10
    old = first.offset
    assert len(first.until(20)) == 20
    first.plan()
    newest = first.offset
    first.stop()
    older = start(old, **options)
    with pytest.raises(QueryStateLost, match=r"older than what was delivered.*newest checkpoint"):
        older.plan()
    older.stop()
    newest_postgres.execute("INSERT INTO t VALUES (31, 'later')")
    assert [row["id"] for row in start(newest, **options).until(1)] == [31]


def test_a_second_stream_of_the_same_name_is_refused(
    start: Start, newest_postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.spark.stream_reader._OWNED_SECONDS", 0.3)
    make_table(newest_postgres, rows=1)
    first = start()
    first.available_now()
    with pytest.raises(StreamRuns, match=r"'spark public.t'.*option 'query'"):
        start().reader.initialOffset()
    assert len(start(query="another").available_now()) == 1


def test_without_a_capture_none_is_started_when_none_is_wanted(
    start: Start, newest_postgres: Database, tmp_path: Path
) -> None:
    make_table(newest_postgres, rows=1)
    with pytest.raises(NoCapture, match=r"Nobody captures table t.*headwater capture"):
        start(capture="none").reader.initialOffset()
    assert not is_written(str(tmp_path / "store"))


def test_the_capture_ends_with_the_stream_and_the_next_stream_takes_over(
    start: Start, newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.spark.query_capture._WATCH_SECONDS", 0.0)
    make_table(newest_postgres, rows=1)
    newest_postgres.execute("CREATE TABLE o (id int PRIMARY KEY)", "INSERT INTO o VALUES (1)")
    store = str(tmp_path / "store")
    first, second = start(), start(table="o")
    assert len(first.available_now()) == 1
    assert len(second.available_now()) == 1, "the running capture was asked for one more table"
    assert second.reader._opened.capture.pid is None
    child = first.reader._opened.capture.pid
    first.stop()
    assert not Path(f"/proc/{child}").exists()
    assert not is_written(store)
    second.reader._upto = None
    newest_postgres.execute("INSERT INTO o VALUES (2)")
    assert [row["id"] for row in second.until(1)] == [2]
    assert is_written(store)


def test_a_capture_that_cannot_go_on_is_told(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres, rows=1)
    newest_postgres.execute("SELECT pg_create_logical_replication_slot('headwater', 'pgoutput')")
    with pytest.raises(NoCapture, match="headwater"):
        start().reader.initialOffset()


def test_children_of_a_killed_process_end(newest_postgres: Database, tmp_path: Path) -> None:
    make_table(newest_postgres, rows=1)
    read, write = os.pipe()
    if not (pid := os.fork()):
        stream = DrivenStream(source_of(newest_postgres, tmp_path, "t"))
        stream.available_now()
        os.write(write, str(stream.reader._opened.capture.pid).encode())
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    child = int(os.read(read, 100))
    end = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not is_written(str(tmp_path / "store"))


def test_the_store_of_a_database_is_made_where_the_user_keeps_data(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HEADWATER_SOURCE", newest_postgres.dsn)
    make_table(newest_postgres, rows=3)
    stream = DrivenStream(HeadwaterDataSource(CaseInsensitiveDict({"table": "public.t"})))
    try:
        assert len(stream.available_now()) == 3
    finally:
        stream.stop()
    assert len(list((tmp_path / "data" / "headwater" / "stores").iterdir())) == 1


def test_a_first_batch_that_was_not_delivered_is_replayed(start: Start, newest_postgres: Database) -> None:
    make_table(newest_postgres)
    stream = start()
    end = stream.next_end()
    stream.kill()
    again = start()
    assert len(again.rows(end)) == ROWS


def test_batches_follow_each_other_where_spark_does_not_pass_their_start(
    start: Start, newest_postgres: Database
) -> None:
    """The calls and their order are those of PySpark 4.0 and 4.1."""
    make_table(newest_postgres)
    first = start(splitRows="100")
    ends = [first.reader.latestOffset()]
    starts = [first.reader.initialOffset()]
    rows = read_all(first.reader, first.schema, first.reader.partitions(starts[0], ends[0]))
    starts.append(ends[-1])
    ends.append(first.reader.latestOffset())  # in the checkpoint, never delivered
    first.kill()

    second = start(splitRows="100")
    second.reader.partitions(ends[-1], ends[-1])
    rows += read_all(second.reader, second.schema, second.reader.partitions(starts[-1], ends[-1]))
    newest_postgres.execute("UPDATE t SET v = 'new' WHERE id <= 3", "DELETE FROM t WHERE id = 4")
    for _ in range(60):
        begin, end = ends[-1], second.reader.latestOffset()
        if end != begin:
            rows += read_all(second.reader, second.schema, second.reader.partitions(begin, end))
            ends.append(end)
        if len(rows) >= ROWS + 4:
            break
    changes = [row for row in rows if row["_change_type"] != "insert"]
    assert len(rows) - len(changes) == ROWS
    expected = {key: {"id": key, "v": value} for key, value in newest_postgres.execute("SELECT * FROM t")}
    assert mirrored(sorted(rows, key=lambda row: row["_commit_version"])) == expected
