"""Streams that Spark writes into logs of their own, each batch once, and what readers get of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from tests.spark.driven_writer import epochs, logged, staged
from typer.testing import CliRunner

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.query import QueryOptions
from headwater.cli.main import app
from headwater.sinks.open import open_sink
from headwater.spark.jobs import SparkJobs

TABLE = {"table": "shop.orders"}


class Written:
    """A stream of the files in a folder, written into a store: a file is a batch. It can be started again."""

    def __init__(self, spark: Any, folder: Path, schema: str = "id INT, v STRING", **options: str) -> None:
        self._spark, self._folder, self._schema = spark, folder, schema
        self._options = {"store": f"{folder}/store", **TABLE, **options}
        (folder / "in").mkdir()
        self._files = 0

    def put(self, *rows: tuple[int, str] | tuple[int, str, str]) -> None:
        """Rows of the next batch."""
        self._files += 1
        lines = [json.dumps(dict(zip(("id", "v", "_change_type"), row, strict=False))) for row in rows]
        path = self._folder / "in" / f"{self._files:03}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (self._files, self._files))  # Spark takes the oldest first

    def run(self, checkpoint: str = "checkpoint", **options: str) -> None:
        """Write all that is there."""
        files = self._spark.readStream.schema(self._schema).option("maxFilesPerTrigger", "1")
        write(files.json(str(self._folder / "in")), self._folder / checkpoint, **self._options | options)


def write(rows: Any, checkpoint: Path, mode: str = "append", **options: str) -> None:
    writer = rows.writeStream.format("headwater").options(**options).outputMode(mode)
    ended(writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start())


def ended(query: Any) -> None:
    assert query.awaitTermination(120), "the query did not end"


def streamed(spark: Any, folder: Path, name: str, **options: str) -> list[list[tuple[str, int]]]:
    """What a stream of the log delivers, batch by batch, in one run that ends."""
    batches: list[list[tuple[str, int]]] = []

    def take(frame: Any, _: int) -> None:
        rows = frame.orderBy("_position").collect()
        batches.append([(row["_change_type"], row["id"]) for row in rows])

    given = {"store": f"{folder}/store", **TABLE, "columns": "*,_change_type,_position", "query": name, **options}
    writer = spark.readStream.format("headwater").options(**given).load().writeStream.foreachBatch(take)
    ended(writer.option("checkpointLocation", f"{folder}/{name}").trigger(availableNow=True).start())
    return [batch for batch in batches if batch]


def test_a_stream_is_written_once_and_read_as_a_table(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWATER_SOURCE", raising=False)
    stream = Written(spark, tmp_path, key="id")
    stream.put((1, "a"), (2, "b"))
    stream.put((1, "c"))
    stream.run()
    upsert = "update_postimage"
    assert logged(tmp_path) == [(upsert, 1, "a"), (upsert, 2, "b"), (upsert, 1, "c")]
    assert epochs(tmp_path) == [2, 1]
    forget_last_commit(tmp_path / "checkpoint")
    stream.put((3, "d"))
    stream.run()
    assert epochs(tmp_path) == [2, 1, 1]
    assert staged(tmp_path) == []

    given = {"store": f"{tmp_path}/store", **TABLE}
    frame = spark.read.format("headwater").options(**given).load()
    assert frame.columns == ["id", "v", "_change_type", "_commit_version", "_commit_timestamp", "_unavailable"]
    assert frame.where("_change_type = 'update_postimage'").count() == 4
    wanted = [[(upsert, 1), (upsert, 2)], [(upsert, 1)], [(upsert, 3)]]
    assert streamed(spark, tmp_path, "reader", maxRows="1") == wanted
    assert streamed(spark, tmp_path, "reader") == []
    stream.put((4, "e"))
    stream.run()
    assert streamed(spark, tmp_path, "reader") == [[(upsert, 4)]]
    stream.put((5, "f"))
    stream.put((6, "g"))
    stream.run()
    assert epochs(tmp_path)[-2:] == [1, 1], "what its only consumer has not read is not forgotten"
    told = CliRunner().invoke(app, ["log", "status", f"{tmp_path}/store", "--json"])
    [log] = json.loads(told.stdout)
    assert (log["name"], log["held_back_by"]) == ("shop.orders", "reader")
    assert log["rows"] in (2, 3)  # what it had read before it planned last may be there yet
    assert CliRunner().invoke(app, ["log", "show", f"{tmp_path}/store", "shop.orders", "--values"]).exit_code == 0


def forget_last_commit(checkpoint: Path) -> None:
    """As if the driver had died after our commit, before Spark wrote down its own."""
    newest = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    for path in (checkpoint / "commits").glob(f"*{newest}*"):
        path.unlink()


def test_a_new_checkpoint_is_another_stream(spark: Any, tmp_path: Path) -> None:
    stream = Written(spark, tmp_path)
    stream.put((1, "a"))
    stream.run()
    with pytest.raises(StreamingQueryException, match="takeover=true"):
        stream.run("other")
    stream.run("other", takeover="true")
    assert logged(tmp_path, "id", "_row_id") == [("insert", 1, 1), ("insert", 1, 2)]


def test_a_stream_of_ours_is_transformed_and_written_again_and_delivered(spark: Any, tmp_path: Path) -> None:
    stream = Written(spark, tmp_path, "id INT, v STRING, _change_type STRING", key="id")
    stream.put((1, "a", "insert"), (2, "b", "insert"))
    stream.put((1, "a", "update_preimage"), (1, "c", "update_postimage"), (2, "b", "delete"), (3, "d", "insert"))
    stream.run()
    first = spark.readStream.format("headwater").options(store=f"{tmp_path}/store", **TABLE).load()
    upper = first.selectExpr("id", "upper(v) AS big", "_change_type", "_commit_timestamp")
    (tmp_path / "two").mkdir()
    write(upper, tmp_path / "two" / "checkpoint", store=f"{tmp_path}/two/store", key="id", **TABLE)
    found = logged(tmp_path / "two", "id", "big")  # in order for each key
    assert [row for row in found if row[1] == 1] == [
        ("insert", 1, "A"),
        ("update_preimage", 1, "A"),
        ("update_postimage", 1, "C"),
    ]
    assert [row for row in found if row[1] != 1 and row[1] != 3] == [("insert", 2, "B"), ("delete", 2, "B")]
    assert [row for row in found if row[1] == 3] == [("insert", 3, "D")]
    deliver(spark, tmp_path / "two")
    rows = DeltaTable(tmp_path / "two" / "lake" / "shop.orders").to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["big"]) for row in rows) == [(1, "C"), (3, "D")]


def deliver(spark: Any, folder: Path) -> None:
    """The written log into a mirror, by pointers, as a pipeline does it."""
    options = QueryOptions(f"{folder}/store", "", "mirror", ("shop.orders",), history=False, keyed=True)
    sink = open_sink("delta", path=f"{folder}/lake", mode="mirror")
    with DeliveryLoop(Delivery(options, sink), SparkJobs(spark, "mirror")) as loop:
        while loop.plan(0.5):
            loop.deliver()


def test_a_complete_result_replaces_the_one_before(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"id": 1, "v": "a"}\n{"id": 1, "v": "b"}\n{"id": 2, "v": "c"}')
    rows = spark.readStream.schema("id INT, v STRING").json(f"{tmp_path}/in")
    totals = rows.groupBy("id").count().where("count > 1").selectExpr("id", "count AS v").coalesce(1)
    options = {"store": f"{tmp_path}/store", "key": "id", **TABLE}
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    write(totals, tmp_path / "checkpoint", "complete", **options)
    (tmp_path / "in" / "2.json").write_text('{"id": 2, "v": "d"}\n{"id": 2, "v": "e"}')
    write(totals, tmp_path / "checkpoint", "complete", **options)
    assert sorted(row[:2] for row in logged(tmp_path)) == [("insert", 1), ("insert", 1), ("insert", 2)]
    deliver(spark, tmp_path)
    mirror = DeltaTable(tmp_path / "lake" / "shop.orders").to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["v"]) for row in mirror) == [(1, 2), (2, 3)]
    with pytest.raises(StreamingQueryException, match="truncated"):
        streamed(spark, tmp_path, "careful")
    assert len(streamed(spark, tmp_path, "careless", onTruncate="ignore")[0]) == 3
