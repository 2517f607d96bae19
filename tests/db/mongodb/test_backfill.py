"""History and changes of MongoDB come to the source, each document once, whoever writes meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.db.backfill.parking import Parking
from tests.db.mongodb.delivering import TABLE, MongoDelivering, create, writer
from tests.db.mongodb.running import running
from tests.db.mongodb.test_capture import IDS
from tests.servers.mongodb import MongoServer

from headwater.capture import renewal
from headwater.log_store.log_events import events_of
from headwater.sources.table import SpecialValues
from headwater.state import open_reader

COLUMNS = {TABLE: "struct<_id: long, state: string, total: long, note: json>"}
STEPS = ("planned", "logged", "units", "read", "committed")


@pytest.mark.parametrize("backfill", ["parallel", pytest.param("single", marks=pytest.mark.soak)])
def test_history_and_live_changes_come_to_the_source(backfill: str, server: MongoServer, tmp_path: Path) -> None:
    create(server, 1500)
    with running(server, tmp_path, TABLE, columns=COLUMNS) as capture:
        query = MongoDelivering(capture, TABLE, backfill=backfill, split_rows=200, interval_seconds=0.05)
        with writer(server):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert query.batches > 3
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_history_and_changes_meet_at_keys_of_every_type(server: MongoServer, tmp_path: Path) -> None:
    mixed = server.client.shop.mixed
    mixed.insert_many([{"_id": key, "n": number} for number, key in enumerate(IDS)])
    with running(server, tmp_path, "shop.mixed") as capture:
        query = MongoDelivering(capture, "shop.mixed", split_rows=3, parallelism=1, interval_seconds=0.05)
        number = 0
        while not query.planner.is_history_done():
            number += 1
            for key in IDS:
                mixed.update_one({"_id": {"$eq": key}}, {"$set": {"n": number}}, upsert=True)
            mixed.delete_one({"_id": {"$eq": IDS[number % len(IDS)]}})
            query.batch(timeout=0.2)
        query.finish()
        query.assert_equal()
        assert max(query.sink.history["shop.mixed"].values()) == 1
        query.close()


@pytest.mark.parametrize("keyed", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_each_row_is_that_of_the_time_that_was_planned(server: MongoServer, tmp_path: Path, keyed: bool) -> None:
    create(server, 300)
    orders = server.client.shop.orders
    with running(server, tmp_path, TABLE, columns=COLUMNS) as capture:
        query = MongoDelivering(capture, TABLE, split_rows=1000, keyed=keyed)
        before = {document["_id"]: document["total"] for document in orders.find()}

        def change(step: str) -> None:
            if step == "planned":
                orders.update_many({"_id": {"$lt": 300}}, {"$inc": {"total": 1000}})
                orders.delete_many({"_id": {"$gte": 300, "$lte": 400}})
                orders.insert_one({"_id": 1, "state": "late"})

        assert query.batch(timeout=5, between=change)
        assert {key[0]: row["total"] for key, row in query.sink.mirror[TABLE].items()} == before
        query.finish()
        query.assert_equal()
        query.close()


class _Crash(Exception):
    pass


def test_m31_a_crash_at_each_step_loses_and_doubles_nothing(server: MongoServer, tmp_path: Path) -> None:
    create(server, 600)
    crashes = iter(STEPS)

    def crash_at(step: str) -> Callable[[str], None]:
        def between(now: str) -> None:
            if now == step:
                raise _Crash

        return between

    with running(server, tmp_path, TABLE, columns=COLUMNS) as capture:
        query = MongoDelivering(capture, TABLE, split_rows=100, parallelism=1, interval_seconds=0.05)
        with writer(server, 0.02):
            while not query.planner.is_history_done():
                try:
                    query.batch(timeout=0.2, between=crash_at(next(crashes, "")))
                except _Crash:
                    query.crash()
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_a_snapshot_that_the_server_gave_up_is_taken_again(server: MongoServer, tmp_path: Path) -> None:
    create(server, 300)
    admin = server.client.admin
    with running(server, tmp_path, TABLE, columns=COLUMNS) as capture:
        query = MongoDelivering(capture, TABLE, split_rows=100, parallelism=1, interval_seconds=0.05)
        query.batch(timeout=5)

        def give_up(step: str) -> None:
            if step == "logged":
                raise _Crash

        try:
            admin.command({"setParameter": 1, "minSnapshotHistoryWindowInSeconds": 0})
            with pytest.raises(_Crash):
                query.batch(timeout=5, between=give_up)
            for number in range(50):
                server.client.shop.orders.update_many({}, {"$set": {"total": number}})
        finally:
            admin.command({"setParameter": 1, "minSnapshotHistoryWindowInSeconds": 300})
        query.crash()
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_values_of_the_history_that_a_column_does_not_take_are_told_among_the_events_of_the_table(
    server: MongoServer, tmp_path: Path
) -> None:
    odd = [{"_id": n, "state": "new", "total": "much" if n % 10 == 0 else n, "note": None} for n in range(1, 101)]
    server.client.shop.orders.insert_many(odd)
    special = {f"{TABLE}.total": SpecialValues.NULL}
    with running(server, tmp_path, TABLE, columns=COLUMNS, special_values=special) as capture:
        query = MongoDelivering(capture, TABLE, split_rows=30)
        query.finish()
        query.close()

        def told() -> list[str]:
            with open_reader(capture.store) as reader, reader.snapshot() as view:
                return [str(event.detail["text"]) for event in events_of(view, TABLE, 0, int(view.epoch))]

        capture.wait_for(told)
        assert all("values of total are null: string, and not long" in text for text in told())
        assert "much" not in "".join(told())


def test_documents_with_values_of_another_type_are_parked_and_resolved(server: MongoServer, tmp_path: Path) -> None:
    orders = server.client.shop.orders
    orders.insert_many([{"_id": n, "total": "much" if n == 2 else None if n == 3 else n} for n in range(1, 5)])
    with running(server, tmp_path, TABLE, columns=COLUMNS, special_values={TABLE: SpecialValues.PARK}) as capture:
        query = Parking(capture, TABLE)
        query.key = "_id"
        query.finish()
        assert (query.mirror("total"), set(query.letters)) == ({1: 1, 3: None, 4: 4}, {2})
        orders.update_one({"_id": 2}, {"$set": {"total": 2}})
        orders.update_one({"_id": 3}, {"$set": {"total": "more"}})
        orders.update_one({"_id": 4}, {"$set": {"total": None}})
        orders.insert_one({"_id": 5, "total": "most"})
        query.catch_up()
        assert (query.mirror("total"), set(query.letters)) == ({1: 1, 2: 2, 4: None}, {3, 5})
        orders.delete_many({"_id": {"$in": [3, 5]}})
        query.catch_up()
        assert query.letters == {}
        query.planner.close()


@pytest.mark.soak
def test_a_collection_is_read_anew_after_it_was_dropped_and_captured_again(server: MongoServer, tmp_path: Path) -> None:
    create(server, 50)
    with running(server, tmp_path, TABLE, columns=COLUMNS) as capture:
        query = MongoDelivering(capture, TABLE)
        query.finish()
        server.client.shop.orders.drop()
        capture.wait_until_stopped(TABLE)
        create(server, 20)
        assert renewal.renew(capture.store, [TABLE]) is None
        query.finish()
        query.assert_equal()
        query.close()
