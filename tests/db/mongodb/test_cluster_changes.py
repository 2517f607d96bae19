"""A cluster that changes while somebody writes to it and its history is read: no row is lost, none is told twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.db.mongodb.conftest import cluster_or_skipped
from tests.db.mongodb.delivering import TABLE, MongoDelivering
from tests.db.mongodb.regions import COLUMNS, CUT, create, writer
from tests.db.mongodb.running import MongoCapture, running
from tests.servers.mongodb_cluster import SHARDS, MongoCluster

from headwater.capture import renewal
from headwater.errors import TransientError
from headwater.sources.errors import LogPurged

pytestmark = pytest.mark.soak
ROWS = 3000


@pytest.fixture
def own_cluster() -> Iterator[MongoCluster]:
    """A cluster of the test's own."""
    with cluster_or_skipped() as cluster:
        yield cluster


def deliver_while(cluster: MongoCluster, capture: MongoCapture, change: Callable[[], None]) -> None:
    """*change* the cluster in the middle of the history, go on for some time, and compare."""
    query = MongoDelivering(capture, TABLE, split_rows=100, interval_seconds=0.05)
    with writer(cluster, ROWS) as writing, ThreadPoolExecutor(1) as others:
        query.run_until(lambda: query.read_rows > 0)
        assert not query.planner.is_history_done()
        changed = others.submit(change)
        deliver_until(query, changed.done)
        changed.result()
        enough = writing.count + 50
        deliver_until(query, lambda: writing.count > enough or writing.failure is not None)
    deliver_until(query, query.planner.is_history_done)
    query.finish()
    query.assert_equal()
    assert max(query.sink.history[TABLE].values()) == 1
    query.close()


def deliver_until(query: MongoDelivering, done: Callable[[], bool]) -> None:
    """Batches, which are tried again where the server does not answer, as Spark does it."""
    end = time.monotonic() + 120
    while not done():
        assert time.monotonic() < end, (query.planner.status(), query.capture.failure)
        try:
            query.batch(timeout=0.2)
        except TransientError:
            query.crash()


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_is_killed_and_comes_back(name: str, own_cluster: MongoCluster, tmp_path: Path) -> None:
    create(own_cluster, ROWS)
    shard = own_cluster.shards[name]

    def kill() -> None:
        for _ in range(2):
            shard.kill9()
            shard.start()

    with running(own_cluster, tmp_path, TABLE, columns=COLUMNS) as capture:
        deliver_while(own_cluster, capture, kill)


def test_a_shard_is_added_and_chunks_move_to_it(own_cluster: MongoCluster, tmp_path: Path) -> None:
    create(own_cluster, ROWS)

    def add() -> None:
        own_cluster.add_shard("third")
        own_cluster.move(TABLE, {"region": CUT}, "third")

    with running(own_cluster, tmp_path, TABLE, columns=COLUMNS) as capture:
        deliver_while(own_cluster, capture, add)


def test_a_shard_is_emptied_and_removed(own_cluster: MongoCluster, tmp_path: Path) -> None:
    create(own_cluster, ROWS)

    def remove() -> None:
        own_cluster.move(TABLE, {"region": CUT}, SHARDS[0])
        own_cluster.remove_shard(SHARDS[1])
        capture.catch_up()
        own_cluster.shards[SHARDS[1]].kill9()

    with running(own_cluster, tmp_path, TABLE, columns=COLUMNS) as capture:
        deliver_while(own_cluster, capture, remove)


def test_a_shard_that_was_removed_before_its_changes_were_captured_ends_the_capture_and_a_resnapshot_goes_on(
    own_cluster: MongoCluster, tmp_path: Path
) -> None:
    create(own_cluster)
    orders = own_cluster.client.shop.orders
    capture = MongoCapture(own_cluster, tmp_path, [TABLE], columns=COLUMNS)
    capture.start()
    orders.insert_one({"_id": 1000, "region": CUT, "total": 0})
    capture.catch_up()
    capture.stop()
    orders.insert_one({"_id": 1001, "region": CUT, "total": 0})
    own_cluster.move(TABLE, {"region": CUT}, SHARDS[0])
    own_cluster.remove_shard(SHARDS[1])
    own_cluster.shards[SHARDS[1]].kill9()
    failure = capture.fails_to_start()
    assert isinstance(failure, LogPurged)
    assert "a shard was removed" in str(failure)
    assert "headwater resnapshot" in str(failure.next_step)
    assert renewal.renew(capture.store, None) is not None
    capture.start()
    orders.insert_one({"_id": 1002, "region": CUT, "total": 0})
    capture.catch_up()
    assert [row["_id"] for row in capture.rows(TABLE)] == [1000, 1002]
    capture.stop()


def test_a_collection_that_is_resharded_stops_and_a_resnapshot_goes_on(
    own_cluster: MongoCluster, tmp_path: Path
) -> None:
    create(own_cluster, ROWS)
    for server in (own_cluster.config, *own_cluster.shards.values()):
        server.client.admin.command({"setParameter": 1, "reshardingMinimumOperationDurationMillis": 0})
    with running(own_cluster, tmp_path, TABLE, columns=COLUMNS) as capture:
        query = MongoDelivering(capture, TABLE, split_rows=1000, interval_seconds=0.05)
        with writer(own_cluster, ROWS) as writing, ThreadPoolExecutor(1) as others:
            key = {"reshardCollection": TABLE, "key": {"_id": "hashed"}, "numInitialChunks": 4}
            changed = others.submit(own_cluster.client.admin.command, key)
            deliver_until(query, changed.done)
            changed.result()
            assert "resharded" in capture.wait_until_stopped(TABLE)
            assert renewal.renew(capture.store, [TABLE]) is None
            enough = writing.count + 50
            deliver_until(query, lambda: writing.count > enough or writing.failure is not None)
        deliver_until(query, query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        query.close()
