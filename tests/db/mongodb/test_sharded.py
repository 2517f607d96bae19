"""A sharded cluster: two shards behind one router. What moves between them is neither lost nor told twice."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from tests.db.mongodb.delivering import TABLE, MongoDelivering
from tests.db.mongodb.regions import COLUMNS, CUT, create, writer
from tests.db.mongodb.running import MongoCapture, running
from tests.servers.mongodb_cluster import SHARDS, MongoCluster

from headwater.sources.mongodb.connection import Dsn
from headwater.sources.mongodb.doctor import examine
from headwater.sources.mongodb.offset import MongoMark, MongoOffset
from headwater.sources.mongodb.server import as_number
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import POSITION_COLUMN
from headwater.stream import Op


def positions(capture: MongoCapture, name: str = TABLE) -> pa.FixedSizeBinaryArray:
    return pa.array([row[POSITION_COLUMN] for row in capture.rows(name)], pa.binary(16))


def test_changes_of_all_shards_come_and_so_do_those_of_collections_on_one(
    cluster: MongoCluster, tmp_path: Path
) -> None:
    create(cluster)
    shop = cluster.client.shop
    shop.plain.insert_one({"_id": 1})
    assert examine(Dsn(cluster.dsn), [TABLE]).is_healthy
    with running(cluster, tmp_path, TABLE, "shop.plain", columns=COLUMNS) as capture:
        shop.orders.insert_many([{"_id": 1000 + n, "region": n % 2 * CUT, "total": n} for n in range(50)])
        shop.orders.update_many({"_id": {"$gte": 1020}}, {"$inc": {"total": 5}})
        shop.orders.delete_many({"_id": {"$gte": 1040}})
        shop.plain.insert_one({"_id": 2})
        shop.plain.delete_one({"_id": 2})
        capture.catch_up()
        rows = capture.rows(TABLE)
        assert [sum(row["_op"] == op for row in rows) for op in (Op.INSERT, Op.UPDATE_INSERT, Op.DELETE)] == [
            50,
            20,
            10,
        ]
        assert [row["_op"] for row in capture.rows("shop.plain")] == [Op.INSERT, Op.DELETE]
        capture.assert_once(TABLE)
        # the router is killed: its cursors are gone
        cluster.kill9()
        cluster.start()
        shop.orders.insert_one({"_id": 2000, "region": 0, "total": 1})
        capture.catch_up()
        capture.assert_once(TABLE)
        assert capture.rows(TABLE)[-1]["_id"] == 2000


def test_an_update_of_the_shard_key_keeps_the_row_whichever_half_comes_first(
    cluster: MongoCluster, tmp_path: Path
) -> None:
    create(cluster, 0)
    orders = cluster.client.shop.orders
    with running(cluster, tmp_path, TABLE, columns=COLUMNS) as capture:
        orders.insert_many([{"_id": number, "region": number % 2 * CUT, "total": 0} for number in range(60)])
        for number in range(60):
            here, there = number % 2 * CUT, CUT - number % 2 * CUT
            orders.update_one({"_id": number, "region": here}, {"$set": {"region": there}})
        for number in range(0, 60, 3):  # and back, and away
            orders.update_one({"_id": number}, {"$set": {"region": 1 + number % 2 * CUT}})
        with cluster.client.start_session() as session, session.start_transaction():
            orders.delete_many({"_id": {"$gte": 50}}, session=session)
        orders.insert_one({"_id": 55, "region": 0, "total": 7})
        capture.assert_equal(TABLE)


def test_a_chunk_that_moves_is_told_not_at_all(cluster: MongoCluster, tmp_path: Path) -> None:
    create(cluster)
    orders = cluster.client.shop.orders
    with running(cluster, tmp_path, TABLE, columns=COLUMNS) as capture:
        cluster.move(TABLE, {"region": CUT}, SHARDS[0])
        orders.update_one({"_id": 1}, {"$set": {"total": 1}})
        cluster.move(TABLE, {"region": CUT}, SHARDS[1])
        orders.update_one({"_id": 1}, {"$set": {"total": 2}})
        cluster.move(TABLE, {"region": 0}, SHARDS[1])
        orders.insert_one({"_id": 200, "region": 0, "total": 3})
        capture.catch_up()
        assert [(row["_id"], row["_op"]) for row in capture.rows(TABLE)] == [
            (1, Op.UPDATE_INSERT),
            (1, Op.UPDATE_INSERT),
            (200, Op.INSERT),
        ]


def test_a_snapshot_has_a_transaction_over_shards_just_where_its_mark_says_so(
    cluster: MongoCluster, tmp_path: Path
) -> None:
    create(cluster, 10)
    client = cluster.client
    with running(cluster, tmp_path, TABLE, columns=COLUMNS) as capture:
        with client.shop.watch(show_expanded_events=True) as watched:
            with client.start_session() as session, session.start_transaction():
                for number, region in ((100, 0), (101, CUT)):
                    client.shop.orders.insert_one({"_id": number, "region": region, "total": 1}, session=session)
            events = [next(watched) for _ in range(2)]
        (seen,) = {as_number(event["commitTimestamp"]) for event in events}
        logged = sorted(as_number(event["clusterTime"]) for event in events)
        assert seen < logged[0]  # otherwise nothing is shown here
        capture.catch_up()
        found = positions(capture)
        table, source = capture.logged(TABLE), open_snapshots(cluster.dsn)
        for at in (seen - 1, seen, *logged):
            mark = MongoMark(MongoOffset(at))
            read = source.read(table, SplitKind.KEY, KeyRange(), mark.to_json())
            shown = {100, 101} & {key for batch in read for key in batch.column("_id").to_pylist()}
            assert bool(shown) is (at >= seen)
            assert mark.contains(found).tolist() == [at >= seen] * 2


def test_history_and_changes_meet_while_transactions_over_shards_commit(cluster: MongoCluster, tmp_path: Path) -> None:
    create(cluster, 600)
    with running(cluster, tmp_path, TABLE, columns=COLUMNS) as capture:
        query = MongoDelivering(capture, TABLE, split_rows=100, interval_seconds=0.05)
        with writer(cluster):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()
