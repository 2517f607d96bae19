"""Snapshots of MongoDB: parts of collections at one cluster time, whatever their keys, whoever breaks the line."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson import Int64, ObjectId
from bson.raw_bson import RawBSONDocument
from tests.db.mongodb.conftest import StartServer
from tests.db.mongodb.delivering import create
from tests.db.mongodb.test_capture import IDS
from tests.sampled import share
from tests.servers.mongodb import MongoServer

from headwater.sources.errors import SnapshotExpired, SourceNotFound, UnsupportedTable
from headwater.sources.mongodb import part as parts
from headwater.sources.mongodb import snapshots
from headwater.sources.mongodb.documents.errors import UnreadableKey
from headwater.sources.mongodb.offset import MongoMark
from headwater.sources.mongodb.source import MongoSource
from headwater.sources.snapshots import SnapshotSource, UnsharedSnapshots, open_snapshots
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceTable, SpecialValues


def described(server: MongoServer, name: str, columns: str = "inferred") -> SourceTable:
    source = MongoSource(server.dsn, columns={name: columns})
    try:
        return source.tables([name])[0]
    finally:
        source.close()


def rows(
    source: SnapshotSource, table: SourceTable, part: KeyRange, snapshot: str | None, columns: list[str] | None = None
) -> list[dict[str, Any]]:
    read = source.read(table, SplitKind.KEY, part, snapshot, columns=columns)
    return [row for batch in read for row in batch.to_pylist()]


def test_a_snapshot_shows_one_time_to_everybody_whatever_is_written_meanwhile(server: MongoServer) -> None:
    create(server, 1000)
    table, source = described(server, "shop.orders"), open_snapshots(server.dsn)
    snapshot = source.export()
    server.client.shop.orders.update_many({}, {"$set": {"state": "later"}})
    server.client.shop.orders.delete_many({"_id": {"$lt": 300}})
    server.client.shop.orders.insert_one({"_id": 1})
    other = pickle.loads(pickle.dumps(source))
    assert not isinstance(other, UnsharedSnapshots)
    found = rows(other, table, KeyRange(), snapshot.name)
    assert [row["_id"] for row in found] == [number * 3 for number in range(1, 1001)]
    assert {row["state"] for row in found} == {"new"}
    assert snapshot.is_open()
    now = rows(source, table, KeyRange(), None, ["_id", "state"])
    assert len(now) == 902
    assert set(now[0]) == {"_id", "state"}
    snapshot.close()


def test_the_parts_of_a_plan_have_every_document_once_with_keys_of_every_type(
    server: MongoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.client.shop.mixed.insert_many([{"_id": key, "n": number} for number, key in enumerate(IDS)])
    table, source = described(server, "shop.mixed"), open_snapshots(server.dsn)
    for stepped in (1000, 0):  # by steps, and by a sample
        monkeypatch.setattr(snapshots, "STEPPED", stepped)
        for split_rows in (1, 2, 5, len(IDS), 100):
            snapshot = source.export()
            plan = snapshot.plan(table, split_rows=split_rows)
            found = [row["n"] for split in plan.splits for row in rows(source, table, split.range, snapshot.name)]
            assert found == list(range(len(IDS))), (stepped, split_rows)
            if stepped:
                assert len(plan.splits) in _counts(split_rows)
    order = source.order(table)
    monkeypatch.setattr(snapshots, "STEPPED", 1000)
    cuts = [split.range.start for split in snapshot.plan(table, split_rows=2).splits[1:] if split.range.start]
    whole = list(source.read(table, SplitKind.KEY, KeyRange(), snapshot.name, columns=list(table.key_columns)))
    places = order.places(pa.Table.from_batches(whole).combine_chunks().to_batches()[0], cuts)
    assert places.tolist() == [min(number // 2, len(cuts)) for number in range(len(IDS))]


def _counts(split_rows: int) -> tuple[int, int]:
    """How many splits there may be: the greatest key of all has none of its own."""
    count = max(1, -(-len(IDS) // split_rows))
    return count - 1, count


def test_pages_and_named_ranges_meet_without_gap_or_overlap(server: MongoServer) -> None:
    server.client.shop.mixed.insert_many([{"_id": key, "n": number} for number, key in enumerate(IDS)])
    table, source = described(server, "shop.mixed"), open_snapshots(server.dsn)
    snapshot = source.export()
    for size in (1, 3, 7):
        rest, found = KeyRange(), []
        while True:
            end = snapshot.page_end(table, SplitKind.KEY, rest, size)
            page = rows(source, table, KeyRange(rest.start, end), snapshot.name)
            assert end is None or len(page) == size
            found += [row["n"] for row in page]
            if end is None:
                break
            rest = KeyRange(end)
        assert found == list(range(len(IDS)))
    cuts = [split.range.start for split in snapshot.plan(table, split_rows=1).splits]
    for number, cut in enumerate(cuts):
        if cut is not None:
            after = Cut(cut.values, after=True)
            assert [row["n"] for row in rows(source, table, KeyRange(cut, after), snapshot.name)] == [number]
            behind = rows(source, table, KeyRange(after, None), snapshot.name)
            assert [row["n"] for row in behind] == list(range(number + 1, len(IDS)))


@pytest.mark.parametrize("kind", share(["objectId", "skewed", "long", "string"], 1, 2))
def test_m18_splits_of_a_sample_have_about_the_same_number_of_documents(
    kind: str, server: MongoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, list[Any]] = {
        "objectId": [ObjectId() for _ in range(20_000)],
        "skewed": [number if number < 19_000 else number * 1_000_000_000 for number in range(20_000)],
        "long": [Int64(number * number) for number in range(20_000)],
        "string": [f"{'a' * (number % 7)}{number}" for number in range(20_000)],
    }
    server.client.shop.many.insert_many([{"_id": key} for key in keys[kind]])
    monkeypatch.setattr(snapshots, "STEPPED", 1000)
    table, source = described(server, "shop.many"), open_snapshots(server.dsn)
    snapshot = source.export()
    plan = snapshot.plan(table, split_rows=1000)
    sizes = [len(rows(source, table, split.range, snapshot.name)) for split in plan.splits]
    assert sum(sizes) == 20_000
    assert len(sizes) == 20
    assert max(sizes) < 3000
    assert plan.rows == 20_000
    assert "sample" in plan.why


def test_m21_a_read_whose_connection_breaks_goes_on_behind_the_last_document(
    server: MongoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(server, 3000)
    monkeypatch.setattr(parts, "FIRST_DOCUMENTS", 50)
    monkeypatch.setattr(parts, "MOST_DOCUMENTS", 100)
    table, source = described(server, "shop.orders"), open_snapshots(server.dsn)
    snapshot = source.export()
    found: list[int] = []
    with _cursors_that_are_killed(server):
        for batch in source.read(table, SplitKind.KEY, KeyRange(), snapshot.name):
            server.client.shop.orders.update_one({"_id": 9000}, {"$set": {"state": "moved"}})
            found += batch.column("_id").to_pylist()
    assert found == [number * 3 for number in range(1, 3001)]
    assert snapshot.is_open()


@contextmanager
def _cursors_that_are_killed(server: MongoServer) -> Iterator[None]:
    """Somebody ends all idle cursors on the collection, again and again."""
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.01):
            _kill_cursors(server)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def _kill_cursors(server: MongoServer) -> None:
    pipeline: list[dict[str, Any]] = [
        {"$currentOp": {"idleCursors": True, "allUsers": True}},
        {"$match": {"ns": "shop.orders"}},
    ]
    found = server.client.admin.aggregate(pipeline)
    cursors = [one["cursor"]["cursorId"] for one in found if "cursor" in one]
    if cursors:
        server.client.shop.command({"killCursors": "orders", "cursors": cursors})


def test_fields_whose_names_have_dots_are_read_among_others(server: MongoServer) -> None:
    setting: dict[str, Any] = {"$setField": {"field": "a.b", "input": "$$ROOT", "value": "dotted"}}
    server.client.shop.odd.insert_one({"_id": 1, "c": 2, "d": 3})
    server.client.shop.odd.update_one({"_id": 1}, [{"$replaceWith": setting}])
    table = described(server, "shop.odd", "struct<_id: long, `a.b`: string, c: int, d: int>")
    source = open_snapshots(server.dsn)
    whole = rows(source, table, KeyRange(), source.export().name)
    assert whole == [{"_id": 1, "a.b": "dotted", "c": 2, "d": 3}]
    some = rows(source, table, KeyRange(), source.export().name, ["a.b", "c"])
    assert some == [{"a.b": "dotted", "c": 2}]


def test_values_of_the_history_that_a_column_does_not_take_are_told(
    server: MongoServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.shop.odd.insert_many([{"_id": number, "n": "secret" if number % 2 else 1} for number in range(10)])
    made = MongoSource(
        server.dsn,
        columns={"shop.odd": "struct<_id: long, n: int>"},
        special_values={"shop.odd.n": SpecialValues.NULL},
    )
    (table,) = made.tables(["shop.odd"])
    made.close()
    source = open_snapshots(server.dsn)
    with caplog.at_level(logging.WARNING, "headwater"):
        found = rows(source, table, KeyRange(), source.export().name)
    assert [row["n"] for row in found] == [None if number % 2 else 1 for number in range(10)]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "History of shop.odd: 5 values of n are null: string, and not int."


def test_a_capped_collection_is_read_like_any_other(server: MongoServer) -> None:
    server.client.shop.create_collection("capped", capped=True, size=1 << 20)
    server.client.shop.capped.insert_many([{"_id": number} for number in range(10)])
    table, source = described(server, "shop.capped"), open_snapshots(server.dsn)
    assert len(rows(source, table, KeyRange(), source.export().name)) == 10


def test_a_read_goes_on_behind_a_document_with_text_that_is_not_utf_8(
    server: MongoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [RawBSONDocument(not_utf_8({"_id": number, "t": "~~~"})) for number in range(600)]
    server.client.shop.orders.insert_many(broken)
    monkeypatch.setattr(parts, "FIRST_DOCUMENTS", 50)
    monkeypatch.setattr(parts, "MOST_DOCUMENTS", 50)
    table, source = described(server, "shop.orders", "struct<_id: long>"), open_snapshots(server.dsn)
    found: list[int] = []
    for batch in source.read(table, SplitKind.KEY, KeyRange(), source.export().name):
        _kill_cursors(server)
        found += batch.column("_id").to_pylist()
    assert found == list(range(600))


def test_keys_that_are_not_utf_8_are_refused_where_a_part_would_begin(
    server: MongoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.client.shop.odd.insert_many([RawBSONDocument(not_utf_8({"_id": f"{number}~~~"})) for number in range(9)])
    table, source = described(server, "shop.odd", "struct<_id: key>"), open_snapshots(server.dsn)
    snapshot = source.export()
    for stepped in (1000, 0):
        monkeypatch.setattr(snapshots, "STEPPED", stepped)
        with pytest.raises(UnreadableKey, match="not UTF-8"):
            snapshot.plan(table, split_rows=2)


def not_utf_8(document: dict[str, Any]) -> bytes:
    """The raw document, each ``~~~`` as bytes that no text has."""
    return bson.encode(document).replace(b"~~~", b"\xff\xff\xff")


def test_a_snapshot_that_the_server_gave_up_is_to_be_planned_anew(start_mongodb: StartServer) -> None:
    server = start_mongodb()
    create(server, 10)
    table, source = described(server, "shop.orders"), open_snapshots(server.dsn)
    snapshot = source.export()
    snapshot.plan(table, split_rows=5)
    assert snapshot.is_open()
    server.client.admin.command({"setParameter": 1, "minSnapshotHistoryWindowInSeconds": 0})
    for number in range(200):
        server.client.shop.orders.update_one({"_id": 3}, {"$set": {"total": number}})
        if not snapshot.is_open():
            break
    else:
        threading.Event().wait(2)
        server.client.shop.orders.update_one({"_id": 3}, {"$set": {"total": -1}})
    with pytest.raises(SnapshotExpired):
        rows(source, table, KeyRange(), snapshot.name)
    assert not snapshot.is_open()


def test_a_collection_that_is_gone_or_cannot_be_split_so_is_told(server: MongoServer) -> None:
    create(server, 10)
    table, source = described(server, "shop.orders"), open_snapshots(server.dsn)
    snapshot = source.export()
    with pytest.raises(UnsupportedTable):
        snapshot.plan(table, split_rows=5, kind=SplitKind.HEAP)
    assert snapshot.has_key(table)
    assert snapshot.files(table) == ""
    assert snapshot.table(table) == table
    server.client.shop.orders.drop()
    with pytest.raises(SourceNotFound):
        source.export().table(table)


def test_the_mark_of_a_snapshot_is_its_name(server: MongoServer, tmp_path: Path) -> None:
    snapshot = open_snapshots(server.dsn).export()
    assert snapshot.name == snapshot.mark.to_json()
    assert isinstance(snapshot.mark, MongoMark)
    create(server, 1)
    assert open_snapshots(server.dsn).export().mark.high > snapshot.mark.high


def test_a_collection_that_took_the_name_of_another_is_not_read_in_its_place(server: MongoServer) -> None:
    create(server, 10)
    table, source = described(server, "shop.orders"), open_snapshots(server.dsn)
    assert len(rows(source, table, KeyRange(), source.export().name)) == 10
    server.client.shop.orders.drop()
    create(server, 20)
    for snapshot in (source.export().name, None):
        with pytest.raises(SnapshotExpired, match="made anew"):
            rows(source, table, KeyRange(), snapshot)
    server.client.shop.orders.drop()
    with pytest.raises(SnapshotExpired, match="dropped"):
        rows(source, table, KeyRange(), source.export().name)
