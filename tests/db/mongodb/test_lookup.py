"""Documents that are looked up at a real server: never more of them at once than fit into memory."""

from __future__ import annotations

from pathlib import Path

import bson
import pyarrow as pa
import pytest
from tests.db.mongodb.running import running
from tests.servers.mongodb import MongoServer

from headwater.sources.mongodb import lookup
from headwater.sources.mongodb.connection import Dsn
from headwater.sources.mongodb.lookup import Lookup
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.server import operation_time
from headwater.sources.mongodb.source import MongoSource
from headwater.sources.table import SourceTable

NAME = CollectionName("shop", "large")


def filled(server: MongoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 3 kB, and one of 30 kB, where 100 kB fit."""
    monkeypatch.setattr(lookup, "MOST_RECEIVED", 100_000)
    documents = [{"_id": number, "t": "x" * (3000 if number else 30_000)} for number in range(200)]
    server.client.shop.large.insert_many(documents)


def table_of(server: MongoServer) -> SourceTable:
    source = MongoSource(server.dsn)
    try:
        return source.tables([str(NAME)])[0]
    finally:
        source.close()


@pytest.mark.parametrize("has_asked_before", [False, True])
def test_another_collection_that_took_the_name_has_none_of_the_documents(
    has_asked_before: bool, server: MongoServer
) -> None:
    large = server.client.shop.large
    large.insert_one({"_id": 1, "of": "the old"})
    table, asked = table_of(server), Lookup(Dsn(server.dsn), server.client)
    keys = pa.array([bson.encode({"_id": 1})] * 2, pa.binary())
    if has_asked_before:
        found = asked.documents(table, keys, operation_time(server.client)).to_pylist()
        assert [bson.decode(one)["of"] for one in found] == ["the old", "the old"]
    for _ in range(2):
        large.drop()
        assert asked.documents(table, keys, operation_time(server.client)).to_pylist() == [None, None]
        large.insert_one({"_id": 1, "of": "the new"})
        assert asked.documents(table, keys, operation_time(server.client)).to_pylist() == [None, None]


def test_documents_of_the_first_keys_are_given_that_fit_into_memory(
    server: MongoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(server, monkeypatch)
    asked, table = Lookup(Dsn(server.dsn), server.client), table_of(server)
    time = operation_time(server.client)
    numbers = [*range(200), *[0] * 50, 1000]  # the large one, again and again, and one that is not there
    found: list[int | None] = []
    while len(found) < len(numbers):
        keys = pa.array([bson.encode({"_id": number}) for number in numbers[len(found) :]], pa.binary())
        documents = asked.documents(table, keys, time)
        assert 1 <= len(documents) < 60
        assert sum(len(one or b"") for one in documents.to_pylist()) <= 100_000
        found += [None if one is None else bson.decode(one)["_id"] for one in documents.to_pylist()]
    assert found == [*numbers[:-1], None]


def test_one_document_that_is_too_large_is_given_nevertheless(
    server: MongoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(server, monkeypatch)
    monkeypatch.setattr(lookup, "MOST_RECEIVED", 1000)
    keys = pa.array([bson.encode({"_id": number}) for number in (0, 1)], pa.binary())
    found = Lookup(Dsn(server.dsn), server.client).documents(table_of(server), keys, operation_time(server.client))
    assert [bson.decode(one)["_id"] for one in found.to_pylist()] == [0]


def test_updates_whose_documents_do_not_fit_at_once_all_come(
    server: MongoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(server, monkeypatch)
    monkeypatch.setattr(lookup, "FIRST_SHARE", 10_000)
    large = server.client.shop.large
    with running(server, tmp_path, str(NAME), columns={str(NAME): "struct<_id: long, n: int, t: string>"}) as capture:
        large.update_many({}, {"$set": {"n": 1}})
        for number in range(2, 30):
            large.update_one({"_id": 0}, {"$set": {"n": number}})
        large.delete_one({"_id": 7})
        large.insert_one({"_id": 500, "n": 0})
        capture.catch_up()
        capture.assert_once(str(NAME))
        last = {row["_id"]: row["n"] for row in capture.rows(str(NAME))}
    assert last == {0: 29, 7: None, 500: 0} | {number: 1 for number in range(1, 200) if number != 7}
