"""The mirror in a lake has the rows of its source, whatever the batches are."""

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
from headwater.sinks.sink import Committed
from headwater.sources.table import SourceTable
from headwater.stream.vnode import hash_keys

from .file_sinks import (
    DELETE,
    INSERT,
    OLD,
    ORDERS,
    UPDATE,
    Feed,
    IntegerOrder,
    deliver_any_batches,
    history_part,
    many_changes,
    many_rows,
    order,
    own_rows,
    table_of,
)
from .lakes import Lake, SinkOfLake


@pytest.fixture
def sink(lake: Lake) -> SinkOfLake:
    return lake.sink()


@pytest.fixture
def feed(sink: SinkOfLake) -> Feed:
    return Feed(sink)


def rows_of(lake: Lake, table: SourceTable = ORDERS) -> list[dict[str, Any]]:
    """What a reader of the table sees, by key."""
    found = lake.read(f"{table.namespace}.{table.name}").to_pylist()
    return sorted(found, key=lambda row: tuple(row[name] for name in table.key_columns))


def test_inserts_updates_and_deletes(feed: Feed, lake: Lake) -> None:
    assert feed.changes(1, (INSERT, order(1)), (INSERT, order(2)), (INSERT, order(3)))
    assert feed.changes(2, (OLD, order(1)), (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(4)))
    assert rows_of(lake) == [order(1, "paid"), order(3), order(4)]


def test_a_key_that_changes_leaves_one_row(feed: Feed, lake: Lake) -> None:
    feed.changes(1, (INSERT, order(1)), (INSERT, order(2)))
    feed.changes(2, (DELETE, order(1)), (INSERT, order(9)), (OLD, order(2)), (UPDATE, order(8)))
    assert rows_of(lake) == [order(8), order(9)]


def test_delete_and_insert_of_a_key_in_one_batch(feed: Feed, lake: Lake) -> None:
    feed.changes(1, (INSERT, order(1)), (INSERT, order(2)), (DELETE, order(2)))
    feed.changes(2, (DELETE, order(1)), (INSERT, order(1, "again")), (INSERT, order(3)), (DELETE, order(3)))
    assert rows_of(lake) == [order(1, "again")]


def test_a_batch_that_comes_again_changes_nothing(feed: Feed, lake: Lake, sink: SinkOfLake) -> None:
    feed.changes(5, (INSERT, order(1)))
    before = lake.newest()
    assert not feed.changes(5, (INSERT, order(1, "other")))
    assert not feed.changes(4, (INSERT, order(2)))
    assert rows_of(lake) == [order(1)]
    assert lake.newest() == before
    assert sink.committed(ORDERS, "q", "b1") == Committed(5, 0, 0)


def test_history_and_changes_in_one_batch(feed: Feed, lake: Lake, sink: SinkOfLake) -> None:
    token = feed.token(3, 1, 2)
    staged = [
        feed.stage_changes(token, [(INSERT, order(10))]),
        feed.stage_history(token, [order(1), order(2)]),
        feed.stage_history(token, [order(5)]),
    ]
    assert sink.commit(ORDERS, token, staged)
    assert rows_of(lake) == [order(1), order(2), order(5), order(10)]
    assert sink.committed(ORDERS, "q", "b1") == Committed(3, 1, 2)
    assert not sink.commit(ORDERS, token, staged)
    assert rows_of(lake) == [order(1), order(2), order(5), order(10)]


def test_history_comes_after_the_changes_of_its_batch(feed: Feed, lake: Lake, sink: SinkOfLake) -> None:
    token = feed.token(3, 1)
    changed = hash_keys(own_rows(ORDERS, [order(1), order(7)]), ("id",))
    staged = [
        feed.stage_history(token, [order(1, "newest"), order(2)], changed=changed),
        feed.stage_changes(token, [(INSERT, order(1, "older")), (INSERT, order(3))]),
    ]
    assert sink.commit(ORDERS, token, staged)
    assert rows_of(lake) == [order(1, "newest"), order(2), order(3)]


def test_changed_keys_are_upserted_and_not_doubled(feed: Feed, lake: Lake) -> None:
    feed.history(1, [order(1), order(2)])
    feed.changes(2, (INSERT, order(3, "by the log")))
    changed = hash_keys(own_rows(ORDERS, [order(3)]), ("id",))
    feed.history(2, [order(3, "read"), order(4)], changed=changed)
    assert rows_of(lake) == [order(1), order(2), order(3, "read"), order(4)]


def test_the_other_attempt_of_a_plan_is_refused(feed: Feed, lake: Lake, sink: SinkOfLake) -> None:
    feed.history(1, [order(1)])
    token = feed.token(0, 1, attempt=1)
    staged = feed.stage_history(token, [order(1, "other")])
    with pytest.raises(OtherAttempt):
        sink.commit(ORDERS, token, [staged])
    assert rows_of(lake) == [order(1)]


def test_another_backfill_of_rows_that_are_there_doubles_none(lake: Lake, sink: SinkOfLake) -> None:
    Feed(sink).history(1, [order(1), order(2)])
    again = Feed(sink, backfill="b2")
    again.history(1, [order(1, "b2")])
    again.history(2, [order(2, "b2"), order(3, "b2")])
    assert rows_of(lake) == [order(1, "b2"), order(2, "b2"), order(3, "b2")]
    assert sink.committed(ORDERS, "q", "b2").plan == 2


def test_truncate_voids_what_was_before_it(feed: Feed, lake: Lake, sink: SinkOfLake) -> None:
    feed.changes(1, (INSERT, order(1)), (INSERT, order(2)))
    feed.changes(2, (INSERT, order(3)), (INSERT, order(4)), truncated=(2, 1))
    assert rows_of(lake) == [order(4)]
    feed.changes(3, truncated=(3, 0))
    assert rows_of(lake) == []
    assert not feed.changes(3, truncated=(3, 0))
    assert sink.committed(ORDERS, "q", "b1").epoch == 3


def test_a_replaced_range_has_the_rows_that_were_read_and_no_others(feed: Feed, lake: Lake) -> None:
    feed.history(1, [order(key) for key in range(10)])
    feed.history(2, [order(3, "again"), order(5, "again")], ranges=[(3, 6)], replaces=True, order=IntegerOrder())
    kept = [order(key) for key in (0, 1, 2, 6, 7, 8, 9)]
    assert rows_of(lake) == sorted([*kept, order(3, "again"), order(5, "again")], key=lambda row: row["id"])
    feed.history(3, [], ranges=[(None, 3), (8, None)], replaces=True, order=IntegerOrder())
    assert [row["id"] for row in rows_of(lake)] == [3, 5, 6, 7]
    feed.history(4, [order(1)], replaces=True)
    assert rows_of(lake) == [order(1)]


def test_a_new_column_of_rows_that_are_there(feed: Feed, lake: Lake) -> None:
    feed.history(1, [order(1, "a"), order(2, "b")])
    feed.history(2, [order(1, "x", "9.00"), order(3, "x", "9.00")], columns=("total",))
    assert rows_of(lake) == [order(1, "a", "9.00"), order(2, "b")]


def test_unavailable_columns_keep_what_the_mirror_has(feed: Feed, lake: Lake) -> None:
    feed.changes(1, (INSERT, order(1, "long text")), (INSERT, order(2, "other text")), (INSERT, order(3, "third")))
    feed.changes(
        2,
        (UPDATE, order(1, None, "5.00"), "status"),
        (UPDATE, order(2, "told", "6.00")),
        (UPDATE, order(2, None, "7.00"), "status"),
        (UPDATE, order(3, None, None), "status,total"),
        (UPDATE, order(4, None, "8.00"), "status"),
    )
    assert rows_of(lake) == [
        order(1, "long text", "5.00"),
        order(2, "told", "7.00"),
        order(3, "third"),
        order(4, None, "8.00"),
    ]


def test_two_tables_are_apart(lake: Lake, sink: SinkOfLake) -> None:
    other = table_of({"a": pa.string(), "b": pa.int32(), "v": pa.float64()}, key=("b", "a"), name="Other Table")
    feed = Feed(sink, other)
    feed.changes(1, (INSERT, {"a": "x", "b": 1, "v": 0.5}), (INSERT, {"a": "y", "b": 1, "v": 1.5}))
    Feed(sink).changes(1, (INSERT, order(1)))
    feed.changes(2, (DELETE, {"a": "x", "b": 1}), (UPDATE, {"a": "y", "b": 1, "v": float("nan")}))
    [row] = rows_of(lake, other)
    assert (row["a"], row["b"]) == ("y", 1)
    assert np.isnan(row["v"])
    assert rows_of(lake) == [order(1)]


@pytest.mark.parametrize("seed", range(3))
def test_any_batches_give_what_a_dictionary_gives(seed: int, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 3)
    chance = random.Random(seed)
    feed = Feed(lake.sink(file_bytes=chance.choice([1, 2000, 1 << 20])))
    expected = deliver_any_batches(feed, chance)
    assert rows_of(lake) == expected


def test_a_hundred_thousand_rows_in_one_batch(lake: Lake, feed: Feed, sink: SinkOfLake) -> None:
    keys = np.arange(100_000)
    token = feed.token(0, 1)
    assert sink.commit(ORDERS, token, [sink.stage_history(ORDERS, token, history_part(), iter([many_rows(keys)]))])
    token = feed.token(1, 1)
    batches = [many_changes(keys[::2], DELETE), many_changes(keys[1::2], UPDATE)]
    staged = sink.stage_changes(ORDERS, token, iter(batches), None)
    assert staged.rows == 100_000
    assert sink.commit(ORDERS, token, [staged])
    found = lake.read()
    assert sorted(found.column("id").to_pylist()) == keys[1::2].tolist()
    assert set(found.column("total").to_pylist()) == {Decimal("1.00")}
    staging = Path(lake.place) / "_headwater_staging"
    assert not [path for path in staging.rglob("*") if path.is_file()]
