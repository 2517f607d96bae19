"""An upstream Delta table through a real Spark: as a DataFrame, and into a sink of ours, each row once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.spark.collecting import mirrored
from tests.store.test_delta_upstream import Lake, Rows

from headwater.backfill.claims import Delivery
from headwater.backfill.control import status
from headwater.backfill.query import QueryOptions
from headwater.control.command import ResnapshotTable
from headwater.control.request import ask_query
from headwater.pipeline.sink_query import LoopThread
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Sink
from headwater.spark.errors import InvalidOption
from headwater.spark.jobs import SparkJobs
from headwater.spark.option_table import meanings
from headwater.spark.upstream_options import UpstreamSourceOptions
from headwater.state.query_store import own_state


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "orders", {key: f"v{key}" for key in range(3000)})


def rows_of(lake: Lake) -> Rows:
    found = lake.delta.to_pyarrow_table().to_pydict()
    return dict(zip(found["id"], found["v"], strict=True))


def wait_for(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


class Frames:
    """A stream of the table into Parquet files, with the trigger *available now*."""

    def __init__(self, spark: Any, lake: Lake, folder: Path, **options: str) -> None:
        self.spark, self.folder = spark, folder
        self.options = {"upstream": f"delta:{lake.path}", "key": "id", "store": str(folder / "state"), **options}

    def run(self) -> None:
        frame = self.spark.readStream.format("headwater").options(**self.options).load()
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(self.folder / "checkpoint"))
        query = writer.trigger(availableNow=True).start(str(self.folder / "rows"))
        assert query.awaitTermination(120)

    def rows(self) -> list[dict[str, Any]]:
        found = self.spark.read.parquet(str(self.folder / "rows")).collect()
        order = ["delete", "update_preimage", "insert", "update_postimage"]
        return sorted(
            (row.asDict() for row in found), key=lambda row: (row["_commit_version"], order.index(row["_change_type"]))
        )


def test_a_data_frame_of_a_delta_table_has_every_row_and_change_once(spark: Any, lake: Lake, tmp_path: Path) -> None:
    frames = Frames(spark, lake, tmp_path, maxRows="1000")
    frames.run()
    assert {row["id"]: row["v"] for row in frames.rows()} == rows_of(lake)
    lake.merge({1: "x", 5000: "new"})
    lake.delta.delete("id = 2")
    lake.overwrite({3: "v3", 4: "four"})
    frames.run()
    rows = frames.rows()
    assert {key: row["v"] for key, row in mirrored(rows).items()} == rows_of(lake) == {3: "v3", 4: "four"}
    assert [row["_change_type"] for row in rows if row["id"] == 1] == [
        "insert",
        "update_preimage",
        "update_postimage",
        "delete",
    ]
    assert {row["_commit_version"] for row in rows} == {0, 1, 2, 3}
    assert all(row["_commit_timestamp"] is not None for row in rows)
    lake.overwrite({1: "y"})
    lake.overwrite({1: "z"})
    lake.vacuum()
    with pytest.raises(Exception, match="headwater resnapshot --store"):  # S9: it is to end, and cannot
        frames.run()
    assert len(frames.rows()) == len(rows)


class RunningDelivery:
    """A query that delivers the table to a sink of ours."""

    def __init__(self, spark: Any, lake: Lake, folder: Path, sink: Sink) -> None:
        self.spark, self.sink, self.folder = spark, sink, folder
        self.upstream = lake.upstream()
        self.query = QueryOptions.over(self.upstream, str(folder / "state"), "copy", max_rows=1000)
        self.running: LoopThread

    def start(self) -> None:
        delivery = Delivery(self.query, self.sink)
        self.running = LoopThread(lambda: delivery, "copy", SparkJobs(self.spark, "copy"))

    def rows(self) -> Rows:
        table = self.upstream.table(self.upstream.newest_epoch())
        batches = list(self.sink.shown(table, ["id", "v"]))
        found = pa.Table.from_batches(batches).to_pydict() if batches else {"id": [], "v": []}
        assert len(set(found["id"])) == len(found["id"])
        return dict(zip(found["id"], found["v"], strict=True))


def test_s9_m10_a_sink_is_fed_stops_where_the_table_has_forgotten_and_goes_on_with_the_command(
    spark: Any, lake: Lake, tmp_path: Path
) -> None:
    delivery = RunningDelivery(spark, lake, tmp_path, open_sink("delta", path=str(tmp_path / "sink"), mode="mirror"))
    delivery.start()
    try:
        wait_for(lambda: delivery.rows() == rows_of(lake))
        lake.merge({1: "x", 5000: "new"})
        lake.delta.delete("id < 1000 and id > 10")
        wait_for(lambda: delivery.rows() == rows_of(lake))
    finally:
        delivery.running.stop()
    kept = delivery.rows()
    lake.overwrite({1: "x"})
    lake.overwrite({1: "y", 2: "z"})
    lake.vacuum()
    store = delivery.query.store
    delivery.start()
    try:
        wait_for(
            lambda: (
                (found := status(own_state(store, "copy"), "copy")) is not None and found.value["phase"] == "stopped"
            )
        )
        assert delivery.running.is_alive
        assert delivery.rows() == kept
        ask_query(own_state(store, "copy"), "copy", ResnapshotTable(), seconds=60.0)
        wait_for(lambda: delivery.rows() == {1: "y", 2: "z"})
        lake.append({3: "more"})
        wait_for(lambda: delivery.rows() == rows_of(lake))
    finally:
        delivery.running.stop()


def test_every_option_is_described_here_and_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/upstream_tables.md").read_text()
    for name, meaning in meanings(UpstreamSourceOptions).items():
        assert meaning.endswith(".")
        assert f"`{name}`" in page


def test_options_are_read_and_wrong_ones_refused() -> None:
    made = UpstreamSourceOptions.parse(
        {"Upstream": "delta:s3://lake/orders", "key": "id, at", "storage.aws_region": "eu", "maxrows": "7"}
    )
    query = made.for_query()
    assert query.upstream is not None
    assert query.upstream.name == "delta:s3://lake/orders"
    assert query.max_rows == 7
    assert "eu" not in repr(made), "options of a store can be secret"
    with pytest.raises(InvalidOption, match=r"without its zone.*2026-01-31T12:00:00Z"):
        UpstreamSourceOptions.parse({"upstream": "delta:/x", "key": "id", "since": "2026-01-31T12:00"})
    for wrong in ({"upstram": "x"}, {"since": "yesterday"}, {"maxRows": "0"}, {"preimages": "maybe"}):
        with pytest.raises(InvalidOption):
            UpstreamSourceOptions.parse({"upstream": "delta:/x", "key": "id", **wrong})
