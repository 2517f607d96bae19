"""An Iceberg mirror has the rows of its source, whatever the batches are."""

from __future__ import annotations

import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.sinks import rewrite
from headwater.sinks.errors import OtherAttempt
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.sink import Committed
from headwater.sources.table import SourceTable
from headwater.stream.vnode import hash_keys

from .file_sinks import DELETE, INSERT, OLD, ORDERS, UPDATE, Feed, IntegerOrder, log_rows, order, own_rows, table_of
from .iceberg_tables import scan, snapshot_id


@pytest.fixture
def sink(tmp_path: Path) -> IcebergSink:
    return IcebergSink(str(tmp_path / "lake"))


@pytest.fixture
def feed(sink: IcebergSink) -> Feed:
    return Feed(sink)


def rows_of(sink: IcebergSink, table: SourceTable = ORDERS) -> list[dict[str, Any]]:
    """What a reader of the Iceberg table sees, by key."""
    found = scan(sink, f"{table.namespace}.{table.name}").to_pylist()
    return sorted(found, key=lambda row: tuple(row[name] for name in table.key_columns))


def test_inserts_updates_and_deletes(feed: Feed, sink: IcebergSink) -> None:
    assert feed.changes(1, (INSERT, order(1)), (INSERT, order(2)), (INSERT, order(3)))
    assert feed.changes(2, (OLD, order(1)), (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(4)))
    assert rows_of(sink) == [order(1, "paid"), order(3), order(4)]


def test_a_key_that_changes_leaves_one_row(feed: Feed, sink: IcebergSink) -> None:
    feed.changes(1, (INSERT, order(1)), (INSERT, order(2)))
    feed.changes(2, (DELETE, order(1)), (INSERT, order(9)), (OLD, order(2)), (UPDATE, order(8)))
    assert rows_of(sink) == [order(8), order(9)]


def test_delete_and_insert_of_a_key_in_one_batch(feed: Feed, sink: IcebergSink) -> None:
    feed.changes(1, (INSERT, order(1)), (INSERT, order(2)), (DELETE, order(2)))
    feed.changes(2, (DELETE, order(1)), (INSERT, order(1, "again")), (INSERT, order(3)), (DELETE, order(3)))
    assert rows_of(sink) == [order(1, "again")]


def test_a_batch_that_comes_again_changes_nothing(feed: Feed, sink: IcebergSink) -> None:
    feed.changes(5, (INSERT, order(1)))
    before = snapshot_id(sink)
    assert not feed.changes(5, (INSERT, order(1, "other")))
    assert not feed.changes(4, (INSERT, order(2)))
    assert rows_of(sink) == [order(1)]
    assert snapshot_id(sink) == before
    assert sink.committed(ORDERS, "q", "b1") == Committed(5, 0, 0)


def test_history_and_changes_in_one_batch(feed: Feed, sink: IcebergSink) -> None:
    token = feed.token(3, 1, 2)
    staged = [
        feed.stage_changes(token, [(INSERT, order(10))]),
        feed.stage_history(token, [order(1), order(2)]),
        feed.stage_history(token, [order(5)]),
    ]
    assert sink.commit(ORDERS, token, staged)
    assert rows_of(sink) == [order(1), order(2), order(5), order(10)]
    assert sink.committed(ORDERS, "q", "b1") == Committed(3, 1, 2)
    assert not sink.commit(ORDERS, token, staged)
    assert rows_of(sink) == [order(1), order(2), order(5), order(10)]


def test_history_comes_after_the_changes_of_its_batch(feed: Feed, sink: IcebergSink) -> None:
    token = feed.token(3, 1)
    changed = hash_keys(own_rows(ORDERS, [order(1), order(7)]), ("id",))
    staged = [
        feed.stage_history(token, [order(1, "newest"), order(2)], changed=changed),
        feed.stage_changes(token, [(INSERT, order(1, "older")), (INSERT, order(3))]),
    ]
    assert sink.commit(ORDERS, token, staged)
    assert rows_of(sink) == [order(1, "newest"), order(2), order(3)]


def test_changed_keys_are_upserted_and_not_doubled(feed: Feed, sink: IcebergSink) -> None:
    feed.history(1, [order(1), order(2)])
    feed.changes(2, (INSERT, order(3, "by the log")))
    changed = hash_keys(own_rows(ORDERS, [order(3)]), ("id",))
    feed.history(2, [order(3, "read"), order(4)], changed=changed)
    assert rows_of(sink) == [order(1), order(2), order(3, "read"), order(4)]


def test_the_other_attempt_of_a_plan_is_refused(feed: Feed, sink: IcebergSink) -> None:
    feed.history(1, [order(1)])
    token = feed.token(0, 1, attempt=1)
    staged = feed.stage_history(token, [order(1, "other")])
    with pytest.raises(OtherAttempt):
        sink.commit(ORDERS, token, [staged])
    assert rows_of(sink) == [order(1)]


def test_another_backfill_of_rows_that_are_there_doubles_none(sink: IcebergSink) -> None:
    Feed(sink).history(1, [order(1), order(2)])
    again = Feed(sink, backfill="b2")
    again.history(1, [order(1, "b2")])
    again.history(2, [order(2, "b2"), order(3, "b2")])
    assert rows_of(sink) == [order(1, "b2"), order(2, "b2"), order(3, "b2")]
    assert sink.committed(ORDERS, "q", "b2").plan == 2


def test_truncate_voids_what_was_before_it(feed: Feed, sink: IcebergSink) -> None:
    feed.changes(1, (INSERT, order(1)), (INSERT, order(2)))
    feed.changes(2, (INSERT, order(3)), (INSERT, order(4)), truncated=(2, 1))
    assert rows_of(sink) == [order(4)]
    feed.changes(3, truncated=(3, 0))
    assert rows_of(sink) == []
    assert not feed.changes(3, truncated=(3, 0))
    assert sink.committed(ORDERS, "q", "b1").epoch == 3


def test_a_replaced_range_has_the_rows_that_were_read_and_no_others(feed: Feed, sink: IcebergSink) -> None:
    feed.history(1, [order(key) for key in range(10)])
    feed.history(2, [order(3, "again"), order(5, "again")], ranges=[(3, 6)], replaces=True, order=IntegerOrder())
    kept = [order(key) for key in (0, 1, 2, 6, 7, 8, 9)]
    assert rows_of(sink) == sorted([*kept, order(3, "again"), order(5, "again")], key=lambda row: row["id"])
    feed.history(3, [], ranges=[(None, 3), (8, None)], replaces=True, order=IntegerOrder())
    assert [row["id"] for row in rows_of(sink)] == [3, 5, 6, 7]
    feed.history(4, [order(1)], replaces=True)
    assert rows_of(sink) == [order(1)]


def test_a_new_column_of_rows_that_are_there(feed: Feed, sink: IcebergSink) -> None:
    feed.history(1, [order(1, "a"), order(2, "b")])
    feed.history(2, [order(1, "x", "9.00"), order(3, "x", "9.00")], columns=("total",))
    assert rows_of(sink) == [order(1, "a", "9.00"), order(2, "b")]


def test_unavailable_columns_keep_what_the_mirror_has(feed: Feed, sink: IcebergSink) -> None:
    feed.changes(1, (INSERT, order(1, "long text")), (INSERT, order(2, "other text")), (INSERT, order(3, "third")))
    feed.changes(
        2,
        (UPDATE, order(1, None, "5.00"), "status"),
        (UPDATE, order(2, "told", "6.00")),
        (UPDATE, order(2, None, "7.00"), "status"),
        (UPDATE, order(3, None, None), "status,total"),
        (UPDATE, order(4, None, "8.00"), "status"),
    )
    assert rows_of(sink) == [
        order(1, "long text", "5.00"),
        order(2, "told", "7.00"),
        order(3, "third"),
        order(4, None, "8.00"),
    ]


def test_two_tables_are_apart(sink: IcebergSink) -> None:
    other = table_of({"a": pa.string(), "b": pa.int32(), "v": pa.float64()}, key=("b", "a"), name="Other Table")
    feed = Feed(sink, other)
    feed.changes(1, (INSERT, {"a": "x", "b": 1, "v": 0.5}), (INSERT, {"a": "y", "b": 1, "v": 1.5}))
    Feed(sink).changes(1, (INSERT, order(1)))
    feed.changes(2, (DELETE, {"a": "x", "b": 1}), (UPDATE, {"a": "y", "b": 1, "v": float("nan")}))
    [row] = rows_of(sink, other)
    assert (row["a"], row["b"]) == ("y", 1)
    assert np.isnan(row["v"])
    assert rows_of(sink) == [order(1)]


@pytest.mark.parametrize("seed", range(3))
def test_any_batches_give_what_a_dictionary_gives(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 3)
    chance = random.Random(seed)
    sink = IcebergSink(str(tmp_path), file_bytes=chance.choice([1, 2000, 1 << 20]))
    feed = Feed(sink)
    expected = {key: order(key) for key in chance.sample(range(60), 30)}
    feed.history(1, list(expected.values()))
    for epoch in range(1, 25):
        changes: list[tuple[Any, ...]] = []
        for _ in range(chance.randrange(1, 12)):
            key = chance.randrange(60)
            if chance.random() < 0.3:
                changes.append((DELETE, order(key)))
                expected.pop(key, None)
            elif key in expected and chance.random() < 0.4:
                changes.append((UPDATE, order(key, None, f"{epoch}.00"), "status"))
                expected[key] = order(key, expected[key]["status"], f"{epoch}.00")
            else:
                changes.append((INSERT, order(key, f"s{epoch}")))
                expected[key] = order(key, f"s{epoch}")
        if chance.random() < 0.1:
            expected = {key: order(key, "left") for key in (1, 2)}
            changes = [*changes, *((INSERT, row) for row in expected.values())]
            feed.changes(epoch, *changes, truncated=(epoch, len(changes) - 2))
        else:
            feed.changes(epoch, *changes)
        if chance.random() < 0.3:
            feed.changes(epoch, (DELETE, order(1)), (INSERT, order(99)))
    assert rows_of(sink) == [expected[key] for key in sorted(expected)]


def test_a_hundred_thousand_rows_in_one_batch(sink: IcebergSink) -> None:
    feed = Feed(sink)
    keys = np.arange(100_000)
    feed.sink.commit(ORDERS, feed.token(0, 1), [_many(feed, keys)])
    token = feed.token(1, 1)
    batch = log_rows(ORDERS, [(DELETE, order(0))])
    deletes = _log_of(batch, keys[::2], 2)
    updates = _log_of(batch, keys[1::2], 3)
    staged = sink.stage_changes(ORDERS, token, iter([deletes, updates]), None)
    assert staged.rows == 100_000
    assert sink.commit(ORDERS, token, [staged])
    found = scan(sink)
    assert sorted(found.column("id").to_pylist()) == keys[1::2].tolist()
    assert set(found.column("total").to_pylist()) == {Decimal("2.50")}
    staging = Path(sink.warehouse) / "_headwater_staging"
    assert not [path for path in staging.rglob("*") if path.is_file()]


def _many(feed: Feed, keys: Any) -> Any:
    batch = pa.RecordBatch.from_pydict(
        {
            "id": keys,
            "status": pa.array(keys).cast(pa.string()),
            "total": pa.nulls(keys.size, pa.decimal128(10, 2)),
        },
        schema=ORDERS.schema,
    )
    from .file_sinks import history_part

    return feed.sink.stage_history(ORDERS, feed.token(0, 1), history_part(), iter([batch]))


def _log_of(pattern: pa.RecordBatch, keys: Any, op: int) -> pa.RecordBatch:
    rows = keys.size
    filled = {name: pa.repeat(pattern.column(name)[0], rows) for name in pattern.schema.names}
    filled["id"] = pa.array(keys)
    filled["total"] = pa.repeat(pa.scalar(Decimal("2.50"), pa.decimal128(10, 2)), rows)
    filled["_op"] = pa.repeat(pa.scalar(op, pa.int8()), rows)
    return pa.RecordBatch.from_pydict(filled, schema=pattern.schema)
