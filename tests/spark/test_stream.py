"""The stream of a table through a real Spark: history, then changes, each once, also over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.servers.postgres import Database
from tests.spark.collecting import Stream, mirrored


def test_a_query_delivers_history_and_changes_once(spark: Any, newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, at timestamptz DEFAULT now(), tags text[])",
        "INSERT INTO t SELECT n, 'row ' || n, now(), ARRAY['a', NULL] FROM generate_series(1, 3000) n",
    )
    stream = Stream(spark, newest_postgres, tmp_path, "t", splitRows="1000")
    stream.run()
    assert sorted(row["id"] for row in stream.rows()) == list(range(1, 3001))
    newest_postgres.execute(
        "UPDATE t SET v = 'new' WHERE id <= 10", "DELETE FROM t WHERE id = 11", "INSERT INTO t VALUES (0, 'zero')"
    )
    stream.start()
    rows = stream.wait_for(3012)
    stream.stop()
    assert len(rows) == 3012
    expected = dict(newest_postgres.execute("SELECT id, v FROM t"))
    assert {key: row["v"] for key, row in mirrored(rows).items()} == expected


def test_a_table_is_read_as_it_is_now(spark: Any, newest_postgres: Database) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT n, 'row ' || n FROM generate_series(1, 5000) n",
    )
    options = {"source": newest_postgres.dsn, "table": "t", "splitRows": "1000"}
    frame = spark.read.format("headwater").options(**options).load()
    assert frame.rdd.getNumPartitions() == 5
    assert frame.selectExpr("count(*)", "sum(id)").first() == (5000, 5000 * 5001 // 2)
    empty = newest_postgres.execute("CREATE TABLE e (id int PRIMARY KEY)")
    assert empty == []
    assert spark.read.format("headwater").options(**options | {"table": "e"}).load().count() == 0
    plans = spark.readStream.format("headwater").options(**options).load()._jdf.queryExecution().toString()
    assert "source=postgresql://*********(redacted)@" in plans
    assert newest_postgres.server.password not in plans
