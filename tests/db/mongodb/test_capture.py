"""A capture of MongoDB tells every change once, in commit order, with the values that the server has."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bson import Binary, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.json_util import RELAXED_JSON_OPTIONS, dumps, loads
from tests.db.mongodb.delivering import TABLE, create, writer
from tests.db.mongodb.running import MongoCapture, running
from tests.sampled import share
from tests.servers.mongodb import MongoServer

from headwater.capture import TableState, renewal
from headwater.capture.options import OnRewrite
from headwater.control.command import AddTables
from headwater.control.request import ask_capture
from headwater.errors import InputError
from headwater.sources.errors import SchemaStopped, SourceNotFound, UnsupportedTable
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.open import open_source
from headwater.sources.table import SpecialValues
from headwater.stream import Op

IDS: list[Any] = [
    MinKey(),
    None,
    float("nan"),
    -5,
    7,
    7.5,
    Decimal128("9.25"),
    Int64(1 << 60),
    "",
    "b",
    "ä",
    {"a": 1, "b": [2]},
    Binary(b"xy"),
    Binary(uuid.UUID(int=7).bytes, 4),
    ObjectId("64b64b64b64b64b64b64b64b"),
    False,
    datetime(1969, 7, 20, tzinfo=UTC),
    Timestamp(3, 4),
    MaxKey(),
]
"""A key of every type that one can have, in the server's order."""


@pytest.mark.soak
def test_the_replayed_log_is_the_collection(server: MongoServer, tmp_path: Path) -> None:
    server.client.shop.create_collection("orders")
    declared = {TABLE: "struct<_id: long, state: string, total: double, note: json>"}
    with running(server, tmp_path, TABLE, columns=declared) as capture:
        create(server, 500)
        with writer(server):
            capture.wait_for(lambda: capture.capture.statistics.transactions > 150)
        capture.assert_equal(TABLE)
        capture.assert_once(TABLE)


def test_a_restart_goes_on_without_loss_or_repeat(server: MongoServer, tmp_path: Path) -> None:
    create(server, 1)
    capture = MongoCapture(server, tmp_path, [TABLE])
    orders = server.client.shop.orders
    for number in range(10, 12):
        capture.start()
        orders.insert_one({"_id": number})
        capture.catch_up()
        capture.stop()
        orders.insert_one({"_id": number + 100})
    capture.start()
    capture.catch_up()
    assert [row["_id"] for row in capture.rows(TABLE)] == [10, 110, 11, 111]
    capture.stop()


def test_a_transaction_is_never_split_over_epochs_and_is_one_cut_over_tables(
    server: MongoServer, tmp_path: Path
) -> None:
    shop = server.client.shop
    for name in ("a", "b"):
        shop.create_collection(name)
    columns = dict.fromkeys(("shop.a", "shop.b"), "struct<_id: objectId, tx: int>")
    with running(server, tmp_path, "shop.a", "shop.b", columns=columns) as capture:
        with server.client.start_session() as session:
            for number in range(100):
                with session.start_transaction():
                    for name in ("a", "b", "a"):
                        shop[name].insert_one({"tx": number}, session=session)
        capture.catch_up()
        epochs: dict[int, set[int]] = {}
        for name in ("shop.a", "shop.b"):
            capture.assert_once(name)
            for row in capture.rows(name):
                epochs.setdefault(row["tx"], set()).add(row["_epoch"])
        assert capture.capture.statistics.transactions == 100
    assert len(epochs) == 100
    assert all(len(found) == 1 for found in epochs.values())


def test_a_large_transaction_is_told_in_pieces_and_is_one_epoch(
    server: MongoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.sources.mongodb.changes.MAX_ROWS", 100)
    monkeypatch.setattr("headwater.sources.mongodb.watch.BATCH_EVENTS", 70)
    monkeypatch.setattr("headwater.sources.mongodb.lookup.MOST_SHARE", 50)
    orders = server.client.shop.orders
    orders.insert_many([{"_id": number, "n": 0} for number in range(1000, 1300)])
    with running(server, tmp_path, TABLE, columns={TABLE: "struct<_id: long, n: int>"}) as capture:
        with server.client.start_session() as session, session.start_transaction():
            orders.insert_many([{"_id": number} for number in range(500)], session=session)
            orders.update_many({"_id": {"$gte": 1000}}, {"$inc": {"n": 1}}, session=session)
        orders.insert_one({"_id": 5000})
        orders.update_many({"_id": {"$gte": 1000}}, {"$inc": {"n": 1}})
        capture.catch_up()
        capture.assert_once(TABLE)
        rows = capture.rows(TABLE)
    (first,) = {row["_position"][:8] for row in rows if row["_id"] < 500}
    transaction = [row for row in rows if row["_position"][:8] == first]
    assert len(transaction) == 800
    assert len({row["_epoch"] for row in transaction}) == 1
    assert {row["_id"]: row["n"] for row in rows if row["_id"] >= 1000} == {
        document["_id"]: document.get("n") for document in orders.find({"_id": {"$gte": 1000}})
    }


def test_many_documents_that_are_written_at_once_without_a_transaction_all_come(
    server: MongoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of version 8 gives them one cluster time, and an answer may end in their middle."""
    monkeypatch.setattr("headwater.sources.mongodb.watch.BATCH_EVENTS", 70)
    orders = server.client.shop.orders
    orders.insert_one({"_id": -1})
    with running(server, tmp_path, TABLE, columns={TABLE: "struct<_id: long, n: int>"}) as capture:
        orders.insert_many([{"_id": number, "n": 1} for number in range(1000)])
        orders.delete_many({"_id": {"$gte": 500}})
        capture.catch_up()
        capture.assert_once(TABLE)
        rows = capture.rows(TABLE)
        epochs: dict[bytes, set[int]] = {}
        for row in rows:
            epochs.setdefault(row["_position"][:8], set()).add(row["_epoch"])
    assert [row["_id"] for row in rows if row["_op"] == Op.INSERT] == list(range(1000))
    assert sorted(row["_id"] for row in rows if row["_op"] == Op.DELETE) == list(range(500, 1000))
    assert all(len(found) == 1 for found in epochs.values())


def test_images_tell_the_document_of_each_change_and_the_one_before(server: MongoServer, tmp_path: Path) -> None:
    shop = server.client.shop
    shop.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    with running(server, tmp_path, TABLE, columns={TABLE: "struct<_id: long, n: int>"}) as capture:
        shop.orders.insert_one({"_id": 1, "n": 0})
        for _ in range(20):
            shop.orders.update_one({"_id": 1}, {"$inc": {"n": 1}})
        shop.orders.replace_one({"_id": 1}, {"n": 100})
        shop.orders.delete_one({"_id": 1})
        capture.catch_up()
        told = [(row["_op"], row["n"]) for row in capture.rows(TABLE)]
        capture.assert_once(TABLE)
    pairs = [pair for n in range(20) for pair in ((Op.UPDATE_DELETE, n), (Op.UPDATE_INSERT, n + 1))]
    last = [(Op.UPDATE_DELETE, 20), (Op.UPDATE_INSERT, 100), (Op.DELETE, 100)]
    assert told == [(Op.INSERT, 0), *pairs, *last]


def test_without_images_an_update_has_the_newest_document_and_a_delete_its_key(
    server: MongoServer, tmp_path: Path
) -> None:
    create(server, 2)
    capture = MongoCapture(server, tmp_path, [TABLE], columns={TABLE: "struct<_id: long, total: int>"})
    capture.start()
    capture.catch_up()
    capture.stop()
    orders = server.client.shop.orders
    orders.update_one({"_id": 3}, {"$set": {"total": 50}})
    orders.update_one({"_id": 3}, {"$set": {"total": 51}})
    orders.update_one({"_id": 6}, {"$set": {"total": 60}})
    orders.delete_one({"_id": 6})
    capture.start()
    capture.catch_up()
    told = [(row["_op"], row["_id"], row["total"]) for row in capture.rows(TABLE)]
    capture.stop()
    # the updates of what is gone are not told: its delete is
    assert told == [(Op.UPDATE_INSERT, 3, 51), (Op.UPDATE_INSERT, 3, 51), (Op.DELETE, 6, None)]


def test_images_that_are_turned_off_are_looked_up_from_there_on(server: MongoServer, tmp_path: Path) -> None:
    shop = server.client.shop
    shop.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    shop.orders.insert_one({"_id": 1, "n": 0})
    with running(server, tmp_path, TABLE, columns={TABLE: "struct<_id: long, n: int>"}) as capture:
        shop.orders.update_one({"_id": 1}, {"$set": {"n": 1}})
        capture.catch_up()
        shop.command({"collMod": "orders", "changeStreamPreAndPostImages": {"enabled": False}})
        for n in range(2, 5):
            shop.orders.update_one({"_id": 1}, {"$set": {"n": n}})
        capture.catch_up()
        capture.assert_once(TABLE)
        assert capture.rows(TABLE)[-1]["n"] == 4
        assert len([row for row in capture.rows(TABLE) if row["_op"] == Op.UPDATE_INSERT]) == 4


def test_keys_of_every_type_are_followed(server: MongoServer, tmp_path: Path) -> None:
    shop = server.client.shop
    shop.create_collection("mixed")
    with running(server, tmp_path, "shop.mixed") as capture:
        shop.mixed.insert_many([{"_id": key, "n": number} for number, key in enumerate(IDS)])
        for key in IDS:
            shop.mixed.update_one({"_id": {"$eq": key}}, {"$set": {"n": -1}})
        shop.mixed.delete_one({"_id": {"$eq": IDS[3]}})
        capture.assert_equal("shop.mixed")
        capture.assert_once("shop.mixed")
        keys = [row["_id_key"] for row in capture.rows("shop.mixed")[: len(IDS)]]
        assert keys == sorted(keys)
        assert len(set(keys)) == len(IDS)


def test_whole_documents_are_exact_in_one_column(server: MongoServer, tmp_path: Path) -> None:
    shop = server.client.shop
    shop.create_collection("docs")
    document = {
        "_id": "a",
        "decimal": Decimal128("1.10"),
        "long": Int64(1 << 60),
        "when": datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
        "bytes": Binary(b"\0\1", 5),
        "nested": {"list": [1, {"x": None}, [True]]},
        "pattern": Regex("a.*", "i"),
    }
    with running(server, tmp_path, "shop.docs", columns={"shop.docs": "document"}) as capture:
        shop.docs.insert_one(document)
        capture.assert_equal("shop.docs")
        (row,) = capture.rows("shop.docs")
    assert loads(row["document"]) == loads(dumps(document, json_options=RELAXED_JSON_OPTIONS))


def test_fields_that_come_later_are_in_the_rest_and_none_is_lost(server: MongoServer, tmp_path: Path) -> None:
    create(server, 10)
    with running(server, tmp_path, TABLE) as capture:
        server.client.shop.orders.insert_one({"_id": 100, "state": "new", "later": {"a": 1}})
        capture.catch_up()
        (row,) = capture.rows(TABLE)
    assert row["_rest"] == '{"later":{"a":1}}'
    assert row["note"] is None


def test_a_value_of_another_type_stops_or_is_null_and_told_as_the_policy_says(
    server: MongoServer, tmp_path: Path
) -> None:
    create(server, 10)
    columns = {TABLE: "struct<_id: long, total: int>"}
    server.client.stock.articles.insert_one({"_id": 1})
    capture = MongoCapture(server, tmp_path, [TABLE, "stock.articles"], columns=columns)
    capture.start()
    server.client.shop.orders.insert_one({"_id": 99, "total": 1})
    server.client.shop.orders.insert_one({"_id": 100, "total": "much"})
    server.client.stock.articles.insert_one({"_id": 2})
    reason = capture.wait_until_stopped(TABLE)
    assert "much" not in reason
    assert f"special_values of {TABLE}.total" in reason
    assert reason.endswith(f"headwater resnapshot {TABLE}")
    capture.catch_up()
    assert [row["_id"] for row in capture.rows(TABLE)] == [99]
    assert [row["_id"] for row in capture.rows("stock.articles")] == [2]
    capture.stop()
    null = {TABLE: SpecialValues.NULL}
    with running(server, tmp_path / "null", TABLE, special_values=null, columns=columns) as other:
        server.client.shop.orders.insert_one({"_id": 101, "total": "more"})
        other.catch_up()
        assert [row["total"] for row in other.rows(TABLE)] == [None]
        other.wait_for(lambda: any("total" in str(event.detail) for event in other.events(TABLE)))


@pytest.mark.parametrize("how", share(["drop", "rename", "taken", "database"], 1, 2))
def test_a_collection_that_goes_stops_and_the_others_go_on(how: str, server: MongoServer, tmp_path: Path) -> None:
    client = server.client
    for name in ("orders", "other"):
        client.shop[name].insert_one({"_id": 1})
    client.stock.articles.insert_one({"_id": 1})
    names = [TABLE, "stock.articles"]
    with running(server, tmp_path, *names) as capture:
        client.shop.orders.insert_one({"_id": 2})
        match how:
            case "drop":
                client.shop.orders.drop()
            case "rename":
                client.shop.orders.rename("olders")
            case "taken":
                client.shop.other.rename("orders", dropTarget=True)
            case _:
                client.drop_database("shop")
        reason = capture.wait_until_stopped(TABLE)
        assert f"headwater resnapshot {TABLE}" in reason
        client.stock.articles.insert_one({"_id": 2})
        capture.catch_up()
        assert [row["_id"] for row in capture.rows(TABLE)] == [2]
        assert [row["_id"] for row in capture.rows("stock.articles")] == [2]


def test_a_collection_that_is_dropped_while_no_capture_runs_stops_alone(server: MongoServer, tmp_path: Path) -> None:
    create(server, 3)
    server.client.shop.other.insert_one({"_id": 1})
    with running(server, tmp_path, TABLE, "shop.other"):
        pass
    server.client.shop.orders.drop()
    with running(server, tmp_path, TABLE, "shop.other") as capture:
        server.client.shop.other.insert_one({"_id": 2})
        assert "dropped" in capture.wait_until_stopped(TABLE)
        capture.catch_up()
        assert [row["_id"] for row in capture.rows("shop.other")] == [2]


def test_the_only_database_is_dropped_and_the_capture_goes_on_with_tables_that_are_made_anew(
    server: MongoServer, tmp_path: Path
) -> None:
    create(server, 3)
    with running(server, tmp_path, TABLE) as capture:
        server.client.drop_database("shop")
        capture.wait_until_stopped(TABLE)
        create(server, 5)
        assert renewal.renew(capture.store, [TABLE]) is None
        server.client.shop.orders.insert_one({"_id": 1})
        capture.catch_up()
        assert [row["_id"] for row in capture.rows(TABLE)] == [1]
        assert capture.failure is None


@pytest.mark.parametrize("how", ["dropped", "taken"])
def test_a_collection_that_was_created_again_is_read_again(how: str, server: MongoServer, tmp_path: Path) -> None:
    create(server, 3)
    server.client.shop.other.insert_one({"_id": 1})
    capture = MongoCapture(server, tmp_path, [TABLE])
    capture.options = replace(capture.options, on_rewrite=OnRewrite.REREAD)
    capture.start()
    before = capture.tables()[TABLE]
    if how == "dropped":
        capture.stop()
        server.client.shop.orders.drop()
        create(server, 3)
        capture.start()
    else:
        server.client.shop.other.rename("orders", dropTarget=True)

    def is_renewed() -> bool:
        table = capture.tables()[TABLE]
        return table.state is TableState.ACTIVE and table.since != before.since

    capture.wait_for(lambda: capture.failure is not None or is_renewed())
    capture.stop()


@pytest.mark.soak
def test_the_policy_stop_ends_the_capture_before_a_drop(server: MongoServer, tmp_path: Path) -> None:
    create(server, 3)
    capture = MongoCapture(server, tmp_path, [TABLE], schema_policy=SchemaPolicy.STOP)
    capture.start()
    server.client.shop.orders.drop()
    assert isinstance(capture.wait_for_end(), SchemaStopped)


@pytest.mark.soak
def test_tables_are_added_while_it_runs_also_of_another_database(server: MongoServer, tmp_path: Path) -> None:
    create(server, 3)
    for name in ("shop", "stock"):
        server.client[name].more.insert_one({"_id": 0})
    with running(server, tmp_path, TABLE) as capture:
        for name in ("shop.more", "stock.more"):
            server.client.shop.orders.insert_one({"_id": 1000 + len(name)})
            ask_capture(capture.store, AddTables((name,)))
            server.client[name.partition(".")[0]].more.insert_one({"_id": 1})
        server.client.shop.orders.insert_one({"_id": 2000})
        capture.catch_up()
        for name in ("shop.more", "stock.more"):
            assert [row["_id"] for row in capture.rows(name)] == [1], name
        assert len(capture.rows(TABLE)) == 3
        capture.assert_once(TABLE)


@pytest.mark.soak
def test_names_of_every_kind_in_several_databases(server: MongoServer, tmp_path: Path) -> None:
    names = {"shop.fs.files": 'shop."fs.files"', "Shop2.Big Orders": '"Shop2"."Big Orders"'}
    for name in names:
        database, _, collection = name.partition(".")
        server.client[database][collection].insert_one({"_id": 1})
    with running(server, tmp_path, *names) as capture:
        for name in names:
            database, _, collection = name.partition(".")
            server.client[database][collection].insert_one({"_id": 2})
        capture.catch_up()
        for log in names.values():
            assert [row["_id"] for row in capture.rows(log)] == [2]


def test_what_cannot_be_captured_is_refused(server: MongoServer, tmp_path: Path) -> None:
    shop = server.client.shop
    create(server, 1)
    shop.create_collection("seen", viewOn="orders")
    shop.create_collection("points", timeseries={"timeField": "at"})
    shop.create_collection("folded", collation={"locale": "en", "strength": 2})
    source = open_source(server.dsn, spill=tmp_path)
    try:
        for name in ("shop.seen", "shop.points", "shop.folded"):
            with pytest.raises(UnsupportedTable):
                source.tables([name])
        with pytest.raises(SourceNotFound, match="order") as missing:
            source.tables(["shop.order"])
        assert "shop.orders" in str(missing.value.next_step)
        with pytest.raises(InputError):
            source.tables(["orders"])
    finally:
        source.close()
    for columns in ("nonsense", "struct<_id: nonsense>"):
        source = open_source(server.dsn, spill=tmp_path, columns={TABLE: columns})
        with pytest.raises(InputError, match="nonsense"):
            source.tables([TABLE])
        source.close()


@pytest.mark.soak
def test_an_event_of_more_than_16_megabytes_comes_whole(server: MongoServer, tmp_path: Path) -> None:
    shop = server.client.shop
    shop.create_collection("orders", changeStreamPreAndPostImages={"enabled": True})
    with running(server, tmp_path, TABLE, columns={TABLE: "struct<_id: long, a: string, n: int>"}) as capture:
        shop.orders.insert_one({"_id": 1, "a": "x" * (9 << 20), "n": 0})
        shop.orders.update_one({"_id": 1}, {"$set": {"n": 1}})
        shop.orders.insert_one({"_id": 2})
        capture.catch_up()
        told = [(row["_op"], row["_id"], row["n"], len(row["a"] or "")) for row in capture.rows(TABLE)]
    assert told == [
        (Op.INSERT, 1, 0, 9 << 20),
        (Op.UPDATE_DELETE, 1, 0, 9 << 20),
        (Op.UPDATE_INSERT, 1, 1, 9 << 20),
        (Op.INSERT, 2, None, 0),
    ]
