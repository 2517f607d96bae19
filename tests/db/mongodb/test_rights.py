"""A user who may read single databases only: what is captured, what is refused, and what is noticed of the server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.db.mongodb.conftest import StartServer
from tests.db.mongodb.delivering import TABLE, create
from tests.db.mongodb.running import MongoCapture, running
from tests.servers.mongodb import MongoServer

from headwater.capture import TableState
from headwater.control.command import AddTables
from headwater.control.request import ask_capture
from headwater.errors import HeadwaterError
from headwater.sources.errors import AccessDenied, SourceWentBack
from headwater.sources.mongodb.server import operation_time

OTHER = "stock.articles"
COLUMNS = {TABLE: "struct<_id: long, state: string>", OTHER: "struct<_id: long>"}


@contextlib.contextmanager
def reader(server: MongoServer, *databases: str) -> Iterator[str]:
    """The address of a user who may read *databases*, and nothing else."""
    roles = [{"role": "read", "db": name} for name in databases]
    server.client.admin.command({"createUser": "reader", "pwd": "reader password", "roles": roles})
    try:
        yield server.address("reader", "reader%20password")
    finally:
        server.client.admin.command({"dropUser": "reader"})


def insert(server: MongoServer, name: str, *keys: int) -> None:
    database, _, collection = name.partition(".")
    server.client[database][collection].insert_many([{"_id": key} for key in keys])


def keys(capture: MongoCapture, name: str) -> list[int]:
    return [row["_id"] for row in capture.rows(name)]


def left(server: MongoServer, capture: MongoCapture, name: str) -> None:
    """The collection *name* is dropped, so that it leaves the capture, which is stopped then."""
    capture.catch_up()
    database, _, collection = name.partition(".")
    server.client[database][collection].drop()
    capture.wait_until_stopped(name)
    capture.catch_up()
    capture.stop()


def test_one_database_is_captured_and_no_other(server: MongoServer, tmp_path: Path) -> None:
    create(server, 1)
    insert(server, OTHER, 1)
    with reader(server, "shop") as dsn:
        with running(server, tmp_path / "one", TABLE, columns=COLUMNS, dsn=dsn) as capture:
            insert(server, TABLE, 10, 11, 12)
            capture.catch_up()
            assert keys(capture, TABLE) == [10, 11, 12]
        refused = MongoCapture(server, tmp_path / "two", [TABLE, OTHER], dsn=dsn)
        failure = refused.fails_to_start()
        assert isinstance(failure, AccessDenied)
        assert "reader password" not in str(failure)
        wrong = MongoCapture(server, tmp_path / "three", [TABLE], dsn=server.address("reader", "wrong"))
        failure = wrong.fails_to_start()
        assert isinstance(failure, AccessDenied)
        assert "wrong" not in str(failure)


def test_a_table_of_another_database_is_not_added_and_the_capture_goes_on(server: MongoServer, tmp_path: Path) -> None:
    create(server, 1)
    insert(server, OTHER, 1)
    with (
        reader(server, "shop", "stock") as dsn,
        running(server, tmp_path, TABLE, columns=COLUMNS, dsn=dsn) as capture,
    ):
        insert(server, TABLE, 10)
        with pytest.raises(HeadwaterError, match="refused the user"):
            ask_capture(capture.store, AddTables((OTHER,)))
        insert(server, TABLE, 11)
        capture.catch_up()
        assert keys(capture, TABLE) == [10, 11]
        assert OTHER not in capture.tables()
        capture.stop()
        failure = capture.fails_to_start([TABLE, OTHER])
        assert isinstance(failure, AccessDenied)
        capture.start([TABLE])
        insert(server, TABLE, 12)
        capture.catch_up()
        assert keys(capture, TABLE) == [10, 11, 12]


def test_the_capture_goes_on_where_the_last_event_is_of_a_database_that_has_left_it(
    server: MongoServer, tmp_path: Path
) -> None:
    create(server, 1)
    insert(server, OTHER, 1)
    capture = MongoCapture(server, tmp_path, [TABLE, OTHER], columns=COLUMNS)
    capture.start()
    insert(server, TABLE, 10)
    insert(server, OTHER, 2)
    left(server, capture, OTHER)
    with reader(server, "shop") as dsn:
        narrow = MongoCapture(server, tmp_path, [TABLE], columns=COLUMNS, dsn=dsn)
        narrow.start()
        insert(server, TABLE, 11)
        narrow.catch_up()
        assert keys(narrow, TABLE) == [10, 11]
        narrow.stop()


def test_one_database_takes_the_place_of_another_one(server: MongoServer, tmp_path: Path) -> None:
    create(server, 1)
    insert(server, OTHER, 1)
    with reader(server, "shop", "stock") as dsn:
        capture = MongoCapture(server, tmp_path, [OTHER], columns=COLUMNS, dsn=dsn)
        capture.start()
        insert(server, OTHER, 2)
        left(server, capture, OTHER)
        capture.start([TABLE])
        insert(server, TABLE, 10)
        capture.catch_up()
        assert keys(capture, TABLE) == [10]
        capture.stop()
        capture.start([TABLE])
        insert(server, TABLE, 11)
        capture.catch_up()
        assert keys(capture, TABLE) == [10, 11]
        assert capture.tables()[OTHER].state is TableState.STOPPED
        capture.stop()


def test_a_server_that_was_restored_is_noticed_by_what_is_missing_of_the_database_that_is_left(
    start_mongodb: StartServer, tmp_path: Path
) -> None:
    server = start_mongodb({"setParameter": "periodicNoopIntervalSecs=1"})
    create(server, 1)
    insert(server, OTHER, 1)
    server.client.admin.command({"createUser": "reader", "pwd": "reader", "roles": [{"role": "read", "db": "shop"}]})
    server.kill9()
    server.back_up(tmp_path / "backup")
    server.start()
    capture = MongoCapture(server, tmp_path, [TABLE, OTHER], columns=COLUMNS)
    capture.start()
    insert(server, TABLE, 10)
    insert(server, OTHER, 2)
    left(server, capture, OTHER)
    captured = capture.offset()
    assert captured is not None
    server.kill9()
    server.restore(tmp_path / "backup")
    server.start()
    insert(server, TABLE, 20)
    capture.wait_for(lambda: operation_time(server.client) > captured.time)
    narrow = MongoCapture(server, tmp_path, [TABLE], columns=COLUMNS, dsn=server.address("reader", "reader"))
    failure = narrow.fails_to_start()
    assert isinstance(failure, SourceWentBack)
    assert "headwater resnapshot" in str(failure.next_step)
