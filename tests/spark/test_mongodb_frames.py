"""A collection of MongoDB as a DataFrame, driven as Spark drives it: a batch with filters, and a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, LessThan
from tests.db.mongodb.conftest import started_or_skipped
from tests.servers.mongodb import MongoServer
from tests.spark.driven import DrivenStream, read_all, source_of

from headwater.sources.errors import SnapshotExpired


@pytest.fixture
def server() -> Iterator[MongoServer]:
    with started_or_skipped() as made:
        made.client.shop.orders.insert_many([{"_id": number, "v": f"row {number}"} for number in range(1, 1001)])
        yield made


def test_a_batch_is_one_snapshot_and_filters_of_keys_run_in_the_database(server: MongoServer, tmp_path: Path) -> None:
    source = source_of(server, tmp_path, "shop.orders", splitRows="200", pushdown="true")  # type: ignore[arg-type]
    schema = source.schema()
    reader: Any = source.reader(schema)
    assert list(reader.pushFilters([GreaterThan(("_id",), 350), LessThan(("_id",), 650)])) != []
    partitions = reader.partitions()
    assert len(partitions) == 3
    rows = read_all(reader, schema, partitions[:1])
    server.client.shop.orders.update_many({}, {"$set": {"v": "later"}})
    rows += read_all(reader, schema, partitions[1:])
    assert {row["_id"]: row["v"] for row in rows if 350 < row["_id"] < 650} == {
        number: f"row {number}" for number in range(351, 650)
    }
    assert len(rows) == 299
    one: Any = source_of(server, tmp_path, "shop.orders").reader(schema)  # type: ignore[arg-type]
    list(one.pushFilters([EqualTo(("_id",), 5)]))
    assert len([row for row in read_all(one, schema, one.partitions()) if row["_id"] == 5]) == 1


def test_a_snapshot_that_the_server_no_longer_has_says_how_it_keeps_more(server: MongoServer, tmp_path: Path) -> None:
    source = source_of(server, tmp_path, "shop.orders")  # type: ignore[arg-type]
    reader: Any = source.reader(source.schema())
    partitions = reader.partitions()
    server.client.admin.command({"setParameter": 1, "minSnapshotHistoryWindowInSeconds": 0})
    deadline = time.monotonic() + 60
    with pytest.raises(SnapshotExpired) as expired:
        _read_until(reader, partitions, server, deadline)
    assert "Load the table again" in str(expired.value.next_step)
    assert "minSnapshotHistoryWindowInSeconds: 3600" in str(expired.value.next_step)


def _read_until(reader: Any, partitions: Any, server: MongoServer, deadline: float) -> None:
    """Read again and again while the server forgets."""
    while time.monotonic() < deadline:
        server.client.shop.orders.update_one({"_id": 1}, {"$set": {"v": "later"}})
        for partition in partitions:
            list(reader.read(partition))


def test_a_stream_has_history_then_every_change(server: MongoServer, tmp_path: Path) -> None:
    stream = DrivenStream(source_of(server, tmp_path, "shop.orders", splitRows="400"))  # type: ignore[arg-type]
    try:
        rows: list[dict[str, Any]] = []
        while len(rows) < 1000:
            rows += stream.batch() or []
        assert sorted(row["_id"] for row in rows) == list(range(1, 1001))
        server.client.shop.orders.update_one({"_id": 7}, {"$set": {"v": "new"}})
        server.client.shop.orders.delete_one({"_id": 8})
        changes: list[dict[str, Any]] = []
        while len(changes) < 2:
            changes += stream.batch() or []
        assert [(row["_change_type"], row["_id"]) for row in changes] == [("update_postimage", 7), ("delete", 8)]
        assert changes[0]["_commit_version"] < changes[1]["_commit_version"]
    finally:
        stream.stop()
