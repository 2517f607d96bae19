"""What happens to a capture of MongoDB when its server fails, forgets, is another one, or refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pymongo
import pytest
from tests.db.mongodb.conftest import StartServer
from tests.db.mongodb.delivering import TABLE, create
from tests.db.mongodb.running import MongoCapture, running
from tests.servers.mongodb import MongoServer

from headwater.capture import renewal
from headwater.databases.secret_files import in_file
from headwater.errors import InputError
from headwater.sources.errors import (
    ForeignOffset,
    InvalidOffset,
    LogPurged,
    ServerReplaced,
    SourceWentBack,
)
from headwater.sources.events import ChangeStream, Registered
from headwater.sources.mongodb.connection import Dsn
from headwater.sources.mongodb.offset import MongoOffset
from headwater.sources.mongodb.server import operation_time
from headwater.sources.mongodb.source import MongoSource
from headwater.sources.open import open_source
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import KeyRange, SplitKind

COLUMNS = {TABLE: "struct<_id: long, state: string>"}


def insert(server: MongoServer, first: int, last: int, **fields: Any) -> None:
    server.client.shop.orders.insert_many([{"_id": number, **fields} for number in range(first, last + 1)])


@pytest.mark.soak
def test_m21_a_server_that_is_killed_comes_back_and_the_capture_goes_on(
    start_mongodb: StartServer, tmp_path: Path
) -> None:
    server = start_mongodb()
    create(server, 1)
    with running(server, tmp_path, TABLE, columns=COLUMNS) as capture:
        insert(server, 100, 110)
        capture.catch_up()
        server.kill9()
        server.start()
        insert(server, 200, 210)
        capture.catch_up()
        found = [row["_id"] for row in capture.rows(TABLE)]
        assert found == [*range(100, 111), *range(200, 211)]
        capture.assert_once(TABLE)
        assert capture.capture.statistics.restarts > 0


@pytest.mark.soak
def test_a_rotated_password_is_read_from_its_file_by_a_running_capture(
    start_mongodb: StartServer, tmp_path: Path
) -> None:
    server, file = start_mongodb(), tmp_path / "shop.dsn"
    create(server, 1)
    admin = server.client.admin
    admin.command({"createUser": "rotated", "pwd": "one", "roles": [{"role": "root", "db": "admin"}]})
    file.write_text(server.address("rotated", "one"))
    with running(server, tmp_path, TABLE, columns=COLUMNS, dsn=in_file(file)) as capture:
        insert(server, 100, 110)
        capture.catch_up()
        admin.command({"updateUser": "rotated", "pwd": "two"})
        server.kill9()
        server.start()
        capture.wait_for(lambda: "refused the user 'rotated'" in capture.capture.statistics.last_error)
        file.write_text(server.address("rotated", "two"))
        insert(server, 200, 210)
        capture.catch_up()
        assert [row["_id"] for row in capture.rows(TABLE)] == [*range(100, 111), *range(200, 211)]
        capture.assert_once(TABLE)


@pytest.mark.soak
def test_m23_another_member_becomes_primary_and_nothing_is_lost_or_told_twice(
    start_mongodb: StartServer, tmp_path: Path
) -> None:
    first = start_mongodb()
    members = [first, start_mongodb(beside=first), start_mongodb(beside=first)]
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in members)
    dsn = f"mongodb://headwater:{first.password}@{hosts}/?replicaSet=rs0&authSource=admin"
    with pymongo.MongoClient[dict[str, Any]](dsn, w="majority") as client:
        orders = client.shop.orders
        orders.insert_many([{"_id": number, "state": "old"} for number in range(500)])
        with running(first, tmp_path, TABLE, columns=COLUMNS, dsn=dsn) as capture:
            snapshots = open_snapshots(dsn)
            snapshot = snapshots.export()
            for number in range(1000, 1050):
                orders.insert_one({"_id": number, "state": "before"})
            first.kill9()
            for number in range(1050, 1100):
                orders.insert_one({"_id": number, "state": "after"})
            end = MongoOffset(operation_time(client))
            capture.wait_for(lambda: capture.failure is not None or _has(capture, end))
            assert capture.failure is None
            assert [row["_id"] for row in capture.rows(TABLE)] == list(range(1000, 1100))
            capture.assert_once(TABLE)
            table = capture.logged(TABLE)
            read = snapshots.read(table, SplitKind.KEY, KeyRange(), snapshot.name)
            assert sum(batch.num_rows for batch in read) == 500


def _has(capture: MongoCapture, end: MongoOffset) -> bool:
    offset = capture.offset()
    return offset is not None and offset >= end


def test_m22_an_oplog_that_rolled_over_ends_the_capture_and_a_resnapshot_goes_on(
    start_mongodb: StartServer, tmp_path: Path
) -> None:
    server = start_mongodb({"oplogSize": "1", "syncdelay": "1"})
    create(server, 1)
    capture = MongoCapture(server, tmp_path, [TABLE], columns=COLUMNS)
    capture.start()
    insert(server, 100, 110)
    capture.catch_up()
    capture.stop()
    lost = server.client.local["oplog.rs"]
    oldest = lost.find_one(sort=[("$natural", 1)])
    for _ in range(600):
        insert(server, 1_000_000, 1_000_100, state="x" * 2000)
        server.client.shop.orders.delete_many({"_id": {"$gte": 1_000_000}})
        newest = lost.find_one(sort=[("$natural", 1)])
        offset = capture.offset()
        assert oldest is not None
        assert newest is not None
        assert offset is not None
        if (newest["ts"].time, newest["ts"].inc) > (offset.time >> 32, offset.time & 0xFFFFFFFF):
            break
    failure = capture.fails_to_start()
    assert isinstance(failure, LogPurged)
    assert "headwater resnapshot" in str(failure.next_step)
    assert "replSetResizeOplog" in str(failure.next_step)
    assert renewal.renew(capture.store, None) is not None
    capture.start()
    insert(server, 200, 205)
    capture.catch_up()
    assert [row["_id"] for row in capture.rows(TABLE)] == [*range(100, 111), *range(200, 206)]
    capture.stop()


def test_a_capture_begins_after_the_token_that_a_person_gives(server: MongoServer, tmp_path: Path) -> None:
    create(server, 1)
    with server.client.shop.orders.watch() as stream:
        insert(server, 10, 14)
        tokens = [next(stream)["_id"]["_data"] for _ in range(3)]
    dsn = server.address("headwater", server.password, startToken=tokens[1])
    with running(server, tmp_path, TABLE, columns=COLUMNS, dsn=dsn) as capture:
        capture.catch_up()
        assert [row["_id"] for row in capture.rows(TABLE)] == [12, 13, 14]
    wrong = server.address("headwater", server.password, startToken="zz")
    source = open_source(wrong, spill=tmp_path)
    with pytest.raises(InvalidOffset):
        source.begin(source.tables([TABLE]), resumed=False)
    source.close()


def polled(stream: ChangeStream) -> None:
    for _ in range(20):
        stream.poll(0.5, stop_at_boundary=False)


def test_a_token_of_another_collection_goes_on_by_its_time_and_one_that_nobody_has_is_refused(
    server: MongoServer, tmp_path: Path
) -> None:
    create(server, 1)
    source = MongoSource(server.dsn, columns=COLUMNS)
    tables = source.tables([TABLE])
    _, identity = source.begin(tables, resumed=False)
    with server.client.shop.other.watch() as watched:
        server.client.shop.other.insert_one({})
        event = next(watched)
    at = event["clusterTime"].time << 32 | event["clusterTime"].inc
    insert(server, 10, 11)
    stream = source.open(tables, MongoOffset(at, event["_id"]["_data"]), identity)
    found: list[int] = []
    for _ in range(20):
        for told in stream.poll(0.5, stop_at_boundary=False):
            found += told.rows.column("_id").to_pylist() if hasattr(told, "rows") else []
        if len(found) == 2:
            break
    assert found == [10, 11]
    stream.close()
    token = event["_id"]["_data"]
    lost = MongoOffset(at - 1, f"{token[:2]}{at - 1:016X}{token[18:]}")
    stream = source.open(tables, lost, identity)
    with pytest.raises(SourceWentBack, match="restored"):
        polled(stream)
    stream.close()
    source.close()


def test_another_server_an_older_state_and_foreign_positions_are_refused(
    server: MongoServer, start_mongodb: StartServer, tmp_path: Path
) -> None:
    create(server, 1)
    capture = MongoCapture(server, tmp_path, [TABLE], columns=COLUMNS)
    capture.start()
    capture.catch_up()
    capture.stop()
    source = MongoSource(server.dsn, columns=COLUMNS)
    tables = source.tables([TABLE])
    _, identity = source.begin(tables, resumed=False)
    with pytest.raises(SourceWentBack, match="older state"):
        source.open(tables, MongoOffset((1 << 63) - 1), identity)
    with pytest.raises(ForeignOffset):
        source.open(tables, PostgresOffset.at(1), identity)
    source.close()
    other = start_mongodb({"replSet": "rs1"})
    create(other, 1)
    moved = MongoCapture(other, tmp_path, [TABLE], columns=COLUMNS)
    failure = moved.fails_to_start()
    assert isinstance(failure, ServerReplaced)
    assert "rs1" in str(failure)


def test_a_collection_of_a_restored_server_is_noticed(server: MongoServer, tmp_path: Path) -> None:
    """Its name is the same, and no drop is in the log that is left."""
    create(server, 1)
    source = MongoSource(server.dsn, columns=COLUMNS)
    (table,) = source.tables([TABLE])
    position, identity = source.begin([table], resumed=False)
    known = replace(table, source_id=5)
    stream = source.open([known], position, identity)
    server.client.shop.other.insert_one({})
    found: list[Any] = []
    for _ in range(20):
        stream.poll(0.5, stop_at_boundary=False)
        found = list(source.check([Registered(known, "{}")]).findings)
        if found:
            break
    assert found[0].stops
    assert found[0].reread
    assert "headwater resnapshot" in found[0].reason
    stream.close()
    source.close()


def test_a_server_that_was_restored_and_went_on_is_noticed_also_after_an_idle_moment(
    start_mongodb: StartServer, tmp_path: Path
) -> None:
    server = start_mongodb({"setParameter": "periodicNoopIntervalSecs=1"})
    create(server, 1)
    capture = MongoCapture(server, tmp_path, [TABLE], columns=COLUMNS)
    capture.start()
    insert(server, 10, 12)
    capture.catch_up()
    capture.stop()
    server.kill9()
    server.back_up(tmp_path / "backup")
    server.start()
    capture.start()
    insert(server, 20, 20)
    capture.catch_up()
    capture.wait_for(lambda: _is_idle(capture))
    capture.stop()
    server.kill9()
    server.restore(tmp_path / "backup")
    server.start()
    insert(server, 30, 40)
    captured = capture.offset()
    assert captured is not None
    capture.wait_for(lambda: operation_time(server.client) > captured.time)
    failure = capture.fails_to_start()
    assert isinstance(failure, SourceWentBack)
    assert "headwater resnapshot" in str(failure.next_step)
    assert renewal.renew(capture.store, None) is not None
    capture.start()
    insert(server, 50, 50)
    capture.catch_up()
    assert [row["_id"] for row in capture.rows(TABLE)] == [10, 11, 12, 20, 50]
    capture.stop()


def _is_idle(capture: MongoCapture) -> bool:
    """Whether the last thing that is durable is a moment at which nothing came."""
    offset = capture.offset()
    return offset is not None and bool(offset.events) and offset.token != offset.events["shop"]


@pytest.mark.soak
def test_a_resnapshot_of_one_table_goes_on_from_now_on_an_idle_server(server: MongoServer, tmp_path: Path) -> None:
    create(server, 1)
    with running(server, tmp_path, TABLE, columns=COLUMNS) as capture:
        capture.catch_up()
        before = capture.tables()[TABLE].since.to_json()
        assert renewal.renew(capture.store, [TABLE]) is None
        assert capture.tables()[TABLE].since.to_json() != before
        insert(server, 10, 12)
        capture.catch_up()
        assert len(capture.rows(TABLE)) == 3


def test_the_source_names_itself_without_its_password(server: MongoServer) -> None:
    source: Any = open_source(server.dsn, spill=Path())
    assert server.password not in source.name
    assert source.name.startswith("mongodb://headwater@127.0.0.1:")
    with pytest.raises(InputError):
        Dsn("mongodb://")
