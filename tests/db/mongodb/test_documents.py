"""Documents of a real server: their order, their columns by snapshot and by stream."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import bson
import pytest
from tests.servers.mongodb import MongoServer
from tests.unit.sources.mongodb.documents_cases import CODECS, EVERY_TYPE, IN_ORDER

from headwater.sources.mongodb.documents.columns import inferred_columns
from headwater.sources.mongodb.documents.decoder import DocumentDecoder
from headwater.sources.mongodb.documents.events import EventDecoder
from headwater.sources.mongodb.documents.key_order import id_key
from headwater.sources.table import SourceTable


def as_id(value: Any) -> Any:
    """Arrays and regular expressions are no ``_id``; inside of an object they are."""
    return {"in": value} if isinstance(value, (list, bson.Regex)) else value


def made_ids(chance: random.Random, count: int) -> list[Any]:
    """Near each other, so that what they are compared by is a detail of them."""
    made: list[Any] = []
    for _ in range(count):
        number = chance.choice((0, 1, 2, 10, 2**31, 2**53, 2**62)) + chance.randrange(-2, 3)
        sign = chance.choice((-1, 1))
        match chance.randrange(8):
            case 0:
                made.append(bson.Int64(sign * number))
            case 1:
                made.append(sign * number + chance.choice((0.0, 0.1, 0.5, 1e-9)))
            case 2:
                made.append(bson.Decimal128(f"{sign * number}.{chance.randrange(10**6):06d}"))
            case 3:
                made.append(bson.Decimal128(f"{sign * number}E{chance.randrange(-300, 300)}"))
            case 4:
                made.append(chance.random() * 10 ** chance.randrange(-300, 300) * sign)
            case 5:
                made.append("".join(chance.choices("\0aAbé☃", k=chance.randrange(4))))
            case 6:
                made.append({chance.choice("ab"): one for one in made_ids(chance, 1)})
            case _:
                made.append(chance.randbytes(chance.randrange(3)))
    return made


def test_keys_sort_as_the_server_sorts_ids_of_all_types(server: MongoServer) -> None:
    chance = random.Random(9)
    values = {id_key(bson.encode({"_id": as_id(one)})): as_id(one) for one in [*IN_ORDER, *made_ids(chance, 2000)]}
    collection = server.client.shop.mixed
    collection.insert_many([{"_id": one} for one in values.values()])
    documents = b"".join(list[Any](collection.find_raw_batches().sort("_id", 1)))
    for codec in CODECS.values():
        columns = inferred_columns([bson.encode({"_id": 1}), bson.encode({"_id": "a"})])
        decoder = DocumentDecoder(SourceTable("shop", "mixed", columns.columns, ("_id_key",)), codec_used=codec)
        keys = decoder.decode(documents).batch.column("_id_key").to_pylist()
        assert len(keys) == len(values)
        assert all(before < after for before, after in pairwise(keys))


@pytest.mark.parametrize(
    "equal", [(1, 1.0), (1, bson.Decimal128("1.00")), (0, -0.0), (0.5, bson.Decimal128("0.5")), ({"a": 1}, {"a": 1.0})]
)
def test_ids_of_one_key_cannot_be_together_in_a_collection(server: MongoServer, equal: tuple[Any, Any]) -> None:
    from pymongo.errors import DuplicateKeyError

    collection = server.client.shop.equal
    collection.insert_one({"_id": equal[0]})
    with pytest.raises(DuplicateKeyError):
        collection.insert_one({"_id": equal[1]})
    assert id_key(bson.encode({"_id": equal[0]})) == id_key(bson.encode({"_id": equal[1]}))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_all_types_are_the_same_by_snapshot_and_by_stream(server: MongoServer, codec: str) -> None:
    database = server.client.shop
    documents = [{"_id": bson.Int64(number), **EVERY_TYPE, "n": number} for number in range(50)]
    stream: Any = database.orders.aggregate_raw_batches([{"$changeStream": {}}])
    database.orders.insert_many(documents)
    raw = b"".join(list[Any](database.orders.find_raw_batches().sort("_id", 1)))
    columns = inferred_columns([bson.encode(one) for one in documents[:5]])
    decoder = DocumentDecoder(
        SourceTable("shop", "orders", columns.columns, columns.key_columns), codec_used=CODECS[codec]
    )
    by_snapshot = decoder.decode(raw)
    events = EventDecoder(codec_used=CODECS[codec])
    while True:
        told = events.decode(next(stream))
        if told.num_rows:
            break
    assert by_snapshot.conflicts == ()
    assert by_snapshot.batch.num_rows == 50
    assert decoder.decode(told.column("document")).batch == by_snapshot.batch
    assert decoder.decode(told.column("key")).batch.column("_id") == by_snapshot.batch.column("_id")
    assert set(told.column("operation").to_pylist()) == {"insert"}
    assert set(told.column("collection").to_pylist()) == {"orders"}
    assert told.column("token").null_count == told.column("cluster_time").null_count == 0
