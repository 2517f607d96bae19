"""Where keys of MongoDB lie between cuts of any type, and what a person may write for one."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import bson
import pyarrow as pa
import pytest
from bson import Binary, Decimal128, Int64, MaxKey, MinKey, ObjectId, Timestamp

from headwater.sources.errors import InvalidRange, UnsupportedTable
from headwater.sources.mongodb.connection import Dsn
from headwater.sources.mongodb.documents.types import source_column
from headwater.sources.mongodb.part import finds, id_of, order_key, raw_id, text_of, value_of
from headwater.sources.mongodb.snapshots import MongoKeyOrder, MongoSnapshots, at_equal_distances
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceTable

VALUES: list[Any] = [
    MinKey(),
    None,
    float("nan"),
    float("-inf"),
    -5,
    0,
    7,
    7.5,
    Decimal128("9.25"),
    Int64(1 << 62),
    1e300,
    "",
    "b",
    "ä",
    {"a": 1},
    Binary(b"xy"),
    Binary(b"0123456789abcdef"),
    Binary(uuid.UUID(int=7).bytes, 4),
    ObjectId("64b64b64b64b64b64b64b64b"),
    False,
    True,
    datetime(1969, 7, 20, tzinfo=UTC),
    datetime(2026, 1, 1, tzinfo=UTC),
    Timestamp(3, 4),
    MaxKey(),
]


def table(kind: str) -> SourceTable:
    return SourceTable("shop", "orders", (source_column("_id", kind, 1),), ("_id",))


def texts() -> list[str]:
    return [text_of(id_of(bson.encode({"_id": value}))) for value in VALUES]


def test_values_of_every_type_are_read_back_from_their_text() -> None:
    for text in texts():
        assert text_of(value_of(text)) == text
        assert text_of(id_of(raw_id(text))) == text


def test_cuts_of_every_type_are_ordered_as_the_server_orders_them() -> None:
    keys = [order_key(text) for text in texts()]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("key", None),
        ("long", pa.array([-6, -5, 6, 7, 8, 10, 1 << 62, (1 << 63) - 1])),
        ("string", pa.array(["", "a", "b", "c", "ä", "ö"])),
        ("objectId", pa.array(["64b64b64b64b64b64b64b64b", "000000000000000000000000", "f" * 24])),
        ("uuid", pa.array([str(uuid.UUID(int=number)) for number in (0, 7, 8)])),
        ("date", pa.array([-14256000001, -14256000000, 0, 1 << 42], pa.timestamp("ms", tz="UTC"))),
        ("bool", pa.array([False, True])),
        ("timestamp", pa.array([3 << 32 | 3, 3 << 32 | 4, 1 << 63], pa.uint64())),
    ],
)
@pytest.mark.parametrize("after", [False, True])
def test_places_of_typed_keys_are_those_of_their_bytes(kind: str, column: pa.Array | None, after: bool) -> None:
    cuts = [Cut((text,), after) for text in texts()]
    cut_keys = [order_key(cut.values[0]) for cut in cuts]
    if column is None:
        column = pa.array(cut_keys, pa.binary())
        keys = cut_keys
    else:
        keys = [order_key(text_of(id_of(bson.encode({"_id": _value(kind, one)})))) for one in column]
    batch = pa.RecordBatch.from_arrays([column], ["_id"])
    found = MongoKeyOrder.of(table(kind)).places(batch, cuts)
    expected = [sum(cut < key or (cut == key and not after) for cut in cut_keys) for key in keys]
    assert found.tolist() == expected


def _value(kind: str, scalar: Any) -> Any:
    value = scalar.as_py()
    match kind:
        case "long":
            return Int64(value)
        case "objectId":
            return ObjectId(value)
        case "uuid":
            return Binary(uuid.UUID(value).bytes, 4)
        case "timestamp":
            return Timestamp(value >> 32, value & 0xFFFFFFFF)
        case "date":
            return bson.DatetimeMS(scalar.cast(pa.int64()).as_py())
        case _:
            return value


def test_keys_of_a_type_without_a_known_order_are_refused() -> None:
    with pytest.raises(UnsupportedTable, match="order"):
        MongoKeyOrder.of(table("double"))


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        ("objectId", "64b64b64b64b64b64b64b64b", ObjectId("64b64b64b64b64b64b64b64b")),
        ("long", "+5", Int64(5)),
        ("string", "plain", "plain"),
        ("string", '"quoted"', "quoted"),
        ("uuid", str(uuid.UUID(int=5)), Binary(uuid.UUID(int=5).bytes, 4)),
        ("date", "2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("key", "5", 5),
        ("key", '{"$oid": "64b64b64b64b64b64b64b64b"}', ObjectId("64b64b64b64b64b64b64b64b")),
    ],
)
def test_a_person_writes_keys_as_their_type_has_them(kind: str, written: str, value: Any) -> None:
    found = _snapshots().key_range(table(kind), KeyRange(Cut((written,))))
    assert found.start is not None
    assert order_key(found.start.values[0]) == order_key(text_of(id_of(bson.encode({"_id": value}))))


def test_ranges_that_cannot_be_are_refused() -> None:
    snapshots = _snapshots()
    for kind, written in (("long", "five"), ("objectId", "64"), ("key", "{")):
        with pytest.raises(InvalidRange):
            snapshots.key_range(table(kind), KeyRange(Cut((written,))))
    with pytest.raises(InvalidRange, match="ends before"):
        snapshots.key_range(table("long"), KeyRange(Cut(("5",)), Cut(("4",))))
    with pytest.raises(InvalidRange, match="one value"):
        snapshots.key_range(table("long"), KeyRange(Cut(("5", "6"))))


def _snapshots() -> MongoSnapshots:
    return MongoSnapshots("mongodb://app:secret@127.0.0.1:1/shop?replicaSet=rs0")


def test_a_part_is_found_by_the_bounds_of_the_index() -> None:
    five, six = Cut((text_of(5),)), Cut((text_of(6),))
    assert [
        list(finds("orders", part)) for part in (KeyRange(five, five), KeyRange(None, Cut(('{"$minKey":1}',))))
    ] == [
        [],
        [],
    ]
    (bounded,) = finds("orders", KeyRange(five, six))
    assert (bounded["min"], bounded["max"]) == ({"_id": 5}, {"_id": 6})
    after, last = finds("orders", KeyRange(Cut(five.values, after=True), Cut(six.values, after=True)))
    assert after["filter"] == {"_id": {"$ne": 5}}
    assert last["filter"] == {"_id": {"$eq": 6}}
    open_ended, greatest = finds("orders", KeyRange(five, None))
    assert "max" not in open_ended
    assert greatest["filter"] == {"_id": {"$eq": MaxKey()}}


def test_cuts_of_a_sample_lie_at_equal_distances() -> None:
    assert at_equal_distances(list("abcdefgh"), 4) == ["c", "e", "g"]
    assert at_equal_distances(["a"], 4) == []
    assert at_equal_distances([], 4) == []


def test_an_address_never_shows_its_password() -> None:
    dsn = Dsn("mongodb://app:se%40cret@db1:27017,db2:27017/shop?replicaSet=rs0&startToken=82AB")
    assert (dsn.user, dsn.database, dsn.start_token) == ("app", "shop", "82AB")
    assert "startToken" not in dsn.address
    for text in (str(dsn), repr(dsn), dsn.hide("mongodb://app:se@cret@db1"), repr(_snapshots())):
        assert "se@cret" not in text
        assert "secret" not in text
