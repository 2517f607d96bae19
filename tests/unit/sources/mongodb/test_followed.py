"""Events of change streams: parts are put together, rows are numbered, each op is told with the document it has."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import bson
import numpy as np
import pyarrow as pa
import pytest
from bson import Int64, Timestamp

from headwater.sources.errors import SchemaStopped
from headwater.sources.events import Changes, Event, Stopped
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.mongodb.changes import EventBatches
from headwater.sources.mongodb.documents.types import source_column
from headwater.sources.mongodb.event_rows import numbers
from headwater.sources.mongodb.followed import FollowedTables
from headwater.sources.mongodb.lookup import Lookup
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import POSITION_DTYPE, MongoMark, MongoOffset
from headwater.sources.table import SourceTable
from headwater.stream import Op

TABLE = SourceTable("shop", "orders", (source_column("_id", "long", 1), source_column("n", "int", 2)), ("_id",), 7)


class Found(Lookup):
    """Looks nothing up at a server: it has documents."""

    def __init__(self, **documents: Any) -> None:
        self.documents_by_id = {int(name[1:]): document for name, document in documents.items()}
        self.share = 100
        self.asked: list[list[int]] = []

    def documents(self, table: SourceTable, keys: pa.BinaryArray, time: int) -> pa.BinaryArray:
        ids = [bson.decode(key)["_id"] for key in keys.to_pylist()]
        self.asked.append(ids)
        found = [self.documents_by_id.get(number) for number in ids]
        return pa.array([None if one is None else bson.encode(one) for one in found], pa.binary())


def event(kind: str, time: int, key: int | None = None, **fields: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "_id": {"_data": f"82{time:016X}"},
        "operationType": kind,
        "clusterTime": Timestamp(time >> 32, time & 0xFFFFFFFF),
        "wallTime": datetime(2026, 1, 1, tzinfo=UTC),
        "ns": {"db": "shop", "coll": "orders"},
    }
    return made | ({} if key is None else {"documentKey": {"_id": key}}) | fields


def decoded(*events: dict[str, Any], batches: EventBatches | None = None) -> pa.RecordBatch:
    array = bson.encode({str(number): one for number, one in enumerate(events)})
    return (batches or EventBatches()).decode(memoryview(array))


def told(*events: dict[str, Any], lookup: Lookup | None = None, **options: Any) -> tuple[list[Event], int]:
    policy, is_sharded = options.get("policy", SchemaPolicy.EVOLVE), options.get("is_sharded", False)
    followed = FollowedTables([TABLE], policy, lookup or Found(), options.get("after"), is_sharded=is_sharded)
    made: list[Event] = []
    return made, followed.tell(decoded(*events), options.get("seq", 0), made)


def rows(changes: Event) -> list[tuple[int, int, int | None, int, int]]:
    """Op, key, value, cluster time and number of each row."""
    assert isinstance(changes, Changes)
    positions = np.frombuffer(changes.rows.column("_position").buffers()[1], POSITION_DTYPE)
    return [
        (op, row["_id"], row["n"], int(place["time"]), int(place["seq"]))
        for op, row, place in zip(changes.ops.to_pylist(), changes.rows.to_pylist(), positions, strict=True)
    ]


def test_every_kind_of_change_is_told_with_the_document_that_it_has() -> None:
    (changes,), following = told(
        event("insert", 5, 1, fullDocument={"_id": 1, "n": 1}),
        event("update", 6, 1, fullDocument={"_id": 1, "n": 2}, fullDocumentBeforeChange={"_id": 1, "n": 1}),
        event("replace", 7, 1, fullDocument={"_id": 1, "n": 3}),
        event("delete", 8, 1, fullDocumentBeforeChange={"_id": 1, "n": 3}),
        event("delete", 8, 2),
    )
    assert rows(changes) == [
        (Op.INSERT, 1, 1, 5, 0),
        (Op.UPDATE_DELETE, 1, 1, 6, 0),
        (Op.UPDATE_INSERT, 1, 2, 6, 1),
        (Op.UPDATE_INSERT, 1, 3, 7, 0),
        (Op.DELETE, 1, 3, 8, 0),
        (Op.DELETE, 2, None, 8, 1),
    ]
    assert following == 2


def test_documents_that_are_missing_are_looked_up_and_what_is_gone_is_not_told() -> None:
    lookup = Found(_1={"_id": 1, "n": 9})
    (changes,), _ = told(
        event("insert", 5, 3, fullDocument={"_id": 3, "n": 0}),
        event("update", 6, 1),
        event("update", 6, 2),
        event("update", 6, 1),
        lookup=lookup,
        seq=4,
    )
    assert rows(changes) == [(Op.INSERT, 3, 0, 5, 4), (Op.UPDATE_INSERT, 1, 9, 6, 0), (Op.UPDATE_INSERT, 1, 9, 6, 2)]
    assert lookup.asked == [[1, 2, 1]]


def test_as_many_are_told_at_once_as_may_be_looked_up() -> None:
    lookup = Found()
    followed = FollowedTables([TABLE], SchemaPolicy.EVOLVE, lookup)
    batch = decoded(
        event("insert", 5, 3, fullDocument={"_id": 3}), *(event("update", time, 1) for time in range(6, 10))
    )
    for share, most in ((0, 1), (1, 2), (3, 4), (4, 5), (100, 5)):
        lookup.share = share
        assert followed.most_at_once(batch) == most


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        (event("drop", 6), "was dropped"),
        (event("rename", 6, to={"db": "shop", "coll": "olders"}), "called shop.olders"),
        (event("rename", 6, ns={"db": "shop", "coll": "other"}, to={"db": "shop", "coll": "orders"}), "took its name"),
        (event("dropDatabase", 6, ns={"db": "shop"}), "database was dropped"),
        (event("reshardCollection", 6), "was resharded"),
    ],
)
def test_a_collection_that_goes_stops_between_the_rows(gone: dict[str, Any], reason: str) -> None:
    before = event("insert", 5, 1, fullDocument={"_id": 1})
    events, _ = told(before, gone, event("insert", 7, 2, fullDocument={"_id": 2}))
    changes, stopped = events
    assert [row[1] for row in rows(changes)] == [1]
    assert isinstance(stopped, Stopped)
    assert reason in stopped.reason
    assert "headwater resnapshot shop.orders" in stopped.reason
    with pytest.raises(SchemaStopped):
        told(before, gone, policy=SchemaPolicy.STOP)


def test_a_table_that_was_added_begins_after_its_place() -> None:
    followed = FollowedTables([], SchemaPolicy.EVOLVE, Found())
    followed.add(TABLE, 5)
    events: list[Event] = []
    followed.tell(decoded(*(event("insert", time, time, fullDocument={"_id": time}) for time in (4, 5, 6))), 0, events)
    assert [row[1] for row in rows(events[0])] == [6]


def test_the_place_since_which_a_table_is_captured_holds_from_the_opening_on() -> None:
    old = event("insert", 5, 5, fullDocument={"_id": "of a collection that was dropped"})
    new = event("insert", 7, 6, fullDocument={"_id": 6})
    (changes,), _ = told(old, event("drop", 6), new, after={CollectionName("shop", "orders"): 6})
    assert [row[1] for row in rows(changes)] == [6]


def moved(kind: str, time: int, region: int, key: int = 1, **fields: Any) -> dict[str, Any]:
    """The one half of an update of a shard key."""
    return event(kind, time, documentKey={"region": region, "_id": key}, txnNumber=Int64(4), **fields)


@pytest.mark.parametrize("inserted_at", [5, 6, 7])
def test_an_update_of_a_shard_key_tells_its_insert_alone_in_either_order(inserted_at: int) -> None:
    halves = [
        moved("delete", 6, 1, fullDocumentBeforeChange={"_id": 1, "n": 1}),
        moved("insert", inserted_at, 900, fullDocument={"_id": 1, "n": 2, "region": 900}),
    ]
    halves.sort(key=lambda one: (one["clusterTime"], one["operationType"] == "delete"))
    lookup = Found(_1={"_id": 1, "n": 2, "region": 900})
    (changes,), _ = told(*halves, lookup=lookup, is_sharded=True)
    assert [row[:3] for row in rows(changes)] == [(Op.INSERT, 1, 2)]


def test_a_document_that_moved_by_a_field_that_it_had_not_is_kept() -> None:
    """After the shard key got another field: the key that is deleted lacks it, and all others are the same."""
    halves = [
        moved("insert", 5, 1, fullDocument={"_id": 1, "n": 2, "region": 1, "city": 7}),
        moved("delete", 6, 1),
    ]
    (changes,), _ = told(*halves, lookup=Found(_1={"_id": 1, "n": 2, "region": 1, "city": 7}), is_sharded=True)
    assert [row[:2] for row in rows(changes)] == [(Op.INSERT, 1)]


def test_a_delete_of_a_transaction_is_told_where_the_document_is_gone() -> None:
    lookup = Found(_2={"_id": 2, "region": 1.0})
    deletes = [moved("delete", 6, 1, 1), moved("delete", 6, 1, 2), event("delete", 7, 3)]
    (changes,), _ = told(*deletes, lookup=lookup, is_sharded=True)
    assert [row[:2] for row in rows(changes)] == [(Op.DELETE, 1), (Op.DELETE, 3)]
    assert lookup.asked == [[1, 2]]
    replica_set = Found()
    told(*deletes, lookup=replica_set)
    assert not replica_set.asked


def test_rows_know_since_when_readers_see_a_transaction_over_shards() -> None:
    late = event("insert", 9 << 32 | 5, 1, fullDocument={"_id": 1}, commitTimestamp=Timestamp(9, 2))
    plain = event("insert", 9 << 32 | 6, 2, fullDocument={"_id": 2})
    (changes,), _ = told(late, plain)
    assert isinstance(changes, Changes)
    for at, contained in ((1, [False, False]), (2, [True, False]), (5, [True, False]), (6, [True, True])):
        mark = MongoMark(MongoOffset(9 << 32 | at), MongoOffset(9 << 32 | 6))
        assert mark.contains(changes.rows.column("_position")).tolist() == contained
        assert mark.unseen(changes.rows.column("_position")).tolist() == [not one for one in contained]


def test_the_parts_of_a_large_event_are_put_together_also_over_answers() -> None:
    batches = EventBatches()
    whole = event("update", 6, 1, fullDocument={"_id": 1, "n": 2}, fullDocumentBeforeChange={"_id": 1, "n": 1})
    split = [{"_id": {"_data": f"82{number}"}, "splitEvent": {"fragment": number, "of": 3}} for number in (1, 2, 3)]
    split[0] |= {name: whole[name] for name in ("operationType", "clusterTime", "wallTime", "ns", "documentKey")}
    split[1] |= {"fullDocument": whole["fullDocument"]}
    split[2] |= {"fullDocumentBeforeChange": whole["fullDocumentBeforeChange"]}
    first = decoded(event("insert", 5, 3, fullDocument={"_id": 3}), *split[:2], batches=batches)
    assert first.num_rows == 1
    second = decoded(split[2], event("delete", 7, 3), batches=batches)
    assert second.num_rows == 2
    assert second.column("token").to_pylist() == ["823", f"82{7:016X}"]
    made: list[Event] = []
    FollowedTables([TABLE], SchemaPolicy.EVOLVE, Found()).tell(second, 0, made)
    assert [row[:3] for row in rows(made[0])] == [
        (Op.UPDATE_DELETE, 1, 1),
        (Op.UPDATE_INSERT, 1, 2),
        (Op.DELETE, 3, None),
    ]


def test_rows_are_numbered_within_their_time_and_a_time_goes_on_in_the_next_batch() -> None:
    times, counts = np.array([5, 5, 6, 7, 7], np.uint64), np.array([1, 2, 1, 2, 1])
    found, following = numbers(times, counts, 10)
    assert found.tolist() == [10, 11, 0, 0, 2]
    assert following == 3
    assert numbers(times[:0], counts[:0], 4)[1] == 4
