"""The history in a lake, a table of versions: what each row was, from when, up to when."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from headwater.sinks import delta_log, fold, iceberg_snapshot, rewrite
from headwater.sinks.errors import OtherAttempt, SinkSchemaError, SinkUnwritable
from headwater.sinks.sink import Committed, Mode, Token
from headwater.sinks.versions import IS_CURRENT
from headwater.stream.vnode import hash_keys

from .file_sinks import DELETE, INSERT, OLD, ORDERS, UPDATE, Feed, IntegerOrder, log_rows, order, own_rows, table_of
from .lakes import Lake, SinkOfLake

SECOND = 1_000_000
OTHER_MODE = {
    "delta": (SinkSchemaError, "partitioned by nothing"),
    "iceberg": (SinkUnwritable, "made with mode 'mirror'"),
}


@pytest.fixture
def sink(lake: Lake) -> SinkOfLake:
    return lake.sink(Mode.HISTORY)


@pytest.fixture
def feed(sink: SinkOfLake) -> Feed:
    return Feed(sink)


def versions(lake: Lake) -> list[tuple[Any, ...]]:
    """Per version key, status, seconds of begin and end; an end is there if it is not current."""
    rows = lake.read()
    for name in ("_valid_from", "_valid_to"):
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, name, rows.column(name).cast(pa.int64()))
    found = rows.to_pylist()
    assert all(row["_is_current"] == (row["_valid_to"] is None) for row in found)
    told = [
        (row["id"], row["status"], row["_valid_from"] // SECOND, row["_valid_to"] and row["_valid_to"] // SECOND)
        for row in found
    ]
    return sorted(told, key=lambda one: (one[0], one[2], one[3] is None, one[3] or 0))


def test_inserts_updates_and_deletes(feed: Feed, lake: Lake, sink: SinkOfLake) -> None:
    assert feed.changes(1, (INSERT, order(1)), (INSERT, order(2)), (INSERT, order(3)))
    assert feed.changes(2, (OLD, order(1)), (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(4)))
    assert feed.changes(3, (UPDATE, order(1, "sent")))
    assert versions(lake) == [
        (1, "new", 1, 2),
        (1, "paid", 2, 3),
        (1, "sent", 3, None),
        (2, "new", 1, 2),
        (3, "new", 1, None),
        (4, "new", 2, None),
    ]
    assert sink.committed(ORDERS, "q", "b1") == Committed(3)


def test_a_batch_of_several_commits_has_each_version(feed: Feed, lake: Lake, sink: SinkOfLake) -> None:
    feed.history(1, [order(1), order(2)])
    token = Token("q", "b1", 0, 4, 1)
    batches = [
        log_rows(ORDERS, [(UPDATE, order(1, "a")), (DELETE, order(2))], 2),
        log_rows(ORDERS, [(UPDATE, order(1, "b")), (INSERT, order(2, "again"))], 3),
        log_rows(ORDERS, [(DELETE, order(1))], 4),
    ]
    sink.commit(ORDERS, token, [sink.stage_changes(ORDERS, token, iter(batches), None)])
    assert versions(lake) == [
        (1, "new", 1, 2),
        (1, "a", 2, 3),
        (1, "b", 3, 4),
        (2, "new", 1, 2),
        (2, "again", 3, None),
    ]


@pytest.mark.parametrize("piece", [1, fold.FOLD_BYTES])
def test_pieces_of_several_tasks_are_applied_in_order(
    lake: Lake, sink: SinkOfLake, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(fold, "FOLD_BYTES", piece)
    token = Token("q", "b1", 0, 3, 0)
    staged = [
        sink.stage_changes(
            ORDERS, token, iter([log_rows(ORDERS, [(UPDATE, order(key, f"at {at}"))], at) for at in (1, 2, 3)]), None
        )
        for key in (1, 2)
    ]
    sink.commit(ORDERS, token, staged)
    assert versions(lake) == [(key, f"at {at}", at, at + 1 if at < 3 else None) for key in (1, 2) for at in (1, 2, 3)]


def test_a_batch_that_comes_again_changes_nothing(feed: Feed, lake: Lake) -> None:
    feed.changes(5, (INSERT, order(1)))
    before = lake.newest()
    assert not feed.changes(5, (UPDATE, order(1, "other")))
    assert not feed.changes(4, (INSERT, order(2)))
    assert versions(lake) == [(1, "new", 5, None)]
    assert lake.newest() == before


def test_a_batch_that_begins_earlier_than_what_is_there_adds_the_rest_only(
    feed: Feed, lake: Lake, sink: SinkOfLake
) -> None:
    feed.changes(5, (INSERT, order(1)))
    token = Token("q", "b1", 0, 8, 0)
    batches = [log_rows(ORDERS, [(INSERT, order(1))], 5), log_rows(ORDERS, [(UPDATE, order(1, "later"))], 8)]
    early = sink.stage_changes(ORDERS, Token("q", "b1", 5, 8, 0), iter(batches), None)
    assert sink.commit(ORDERS, token, [sink.stage_changes(ORDERS, token, iter(batches), None)])
    assert versions(lake) == [(1, "new", 5, 8), (1, "later", 8, None)]
    feed.changes(9, (DELETE, order(1)))
    late = Token("q", "b1", 5, 10, 0)
    with pytest.raises(OtherAttempt):
        sink.commit(ORDERS, late, [early])


def test_unavailable_values_come_from_the_version_that_is_closed(feed: Feed, lake: Lake) -> None:
    feed.changes(1, (INSERT, order(1, "long text")), (INSERT, order(2, "other")))
    feed.changes(
        2,
        (UPDATE, order(1, None, "5.00"), "status"),
        (UPDATE, order(1, None, "6.00"), "status"),
        (DELETE, order(2)),
        (INSERT, order(2, None), "status"),
        (UPDATE, order(3, None), "status"),
    )
    assert versions(lake) == [
        (1, "long text", 1, 2),
        (1, "long text", 2, 2),
        (1, "long text", 2, None),
        (2, "other", 1, 2),
        (2, None, 2, None),
        (3, None, 2, None),
    ]


def test_a_clock_that_steps_back_makes_no_two_versions_of_one_time(feed: Feed, lake: Lake, sink: SinkOfLake) -> None:
    batch = log_rows(ORDERS, [(INSERT, order(1))], 9)
    token = Token("q", "b1", 0, 1, 0)
    later = batch.set_column(batch.schema.get_field_index("_epoch"), "_epoch", pa.array([1], pa.uint64()))
    sink.commit(ORDERS, token, [sink.stage_changes(ORDERS, token, iter([later]), None)])
    feed.changes(2, (UPDATE, order(1, "b")), (UPDATE, order(1, "c")))
    assert sorted(versions(lake), key=str) == [(1, "b", 9, 9), (1, "c", 9, None), (1, "new", 9, 9)]


def test_truncate_closes_what_is_current(feed: Feed, lake: Lake) -> None:
    feed.changes(1, (INSERT, order(1)), (INSERT, order(2)))
    feed.changes(3, (INSERT, order(8)), (INSERT, order(2, "again")), truncated=(3, 1))
    assert versions(lake) == [(1, "new", 1, 3), (2, "new", 1, 3), (2, "again", 3, None)]
    feed.changes(4, truncated=(4, 0))
    origin = 1_617_235_200  # of epochs: those of tests are its first moment
    assert versions(lake) == [(1, "new", 1, 3), (2, "new", 1, 3), (2, "again", 3, origin)]
    assert not feed.changes(4, truncated=(4, 0))


def test_history_and_changes_in_one_batch(feed: Feed, lake: Lake, sink: SinkOfLake) -> None:
    token = feed.token(3, 1, 2)
    staged = [
        feed.stage_changes(token, [(INSERT, order(10))]),
        feed.stage_history(token, [order(1), order(2)]),
        feed.stage_history(token, [order(5)]),
    ]
    assert sink.commit(ORDERS, token, staged)
    expected = [(1, "new", 1, None), (2, "new", 1, None), (5, "new", 1, None), (10, "new", 3, None)]
    assert versions(lake) == expected
    assert not sink.commit(ORDERS, token, staged)
    assert versions(lake) == expected
    assert sink.committed(ORDERS, "q", "b1") == Committed(3, 1, 2)


def test_history_of_rows_that_are_there_begins_a_version_only_where_it_differs(feed: Feed, lake: Lake) -> None:
    feed.changes(1, (INSERT, order(1)), (INSERT, order(2)))
    changed = hash_keys(own_rows(ORDERS, [order(1), order(2)]), ("id",))
    feed.history(2, [order(1), order(2, "read"), order(3)], changed=changed)
    assert versions(lake) == [(1, "new", 1, None), (2, "new", 1, 1), (2, "read", 1, None), (3, "new", 1, None)]


def test_another_backfill_of_rows_that_are_there_doubles_none(lake: Lake, sink: SinkOfLake) -> None:
    Feed(sink).history(1, [order(1), order(2)])
    again = Feed(sink, backfill="b2")
    again.history(1, [order(1)])
    again.history(2, [order(2, "b2"), order(3)])
    assert versions(lake) == [(1, "new", 1, None), (2, "new", 1, 1), (2, "b2", 1, None), (3, "new", 1, None)]


def test_a_resnapshot_closes_what_is_gone_or_differs_and_leaves_the_rest(feed: Feed, lake: Lake) -> None:
    feed.history(1, [order(key) for key in range(8)])
    feed.changes(2, (UPDATE, order(6, "changed")))
    before = lake.files()
    rows = [order(3), order(5, "again"), order(100, "in no range")]
    feed.history(2, rows[:2], ranges=[(3, 6)], replaces=True, order=IntegerOrder())
    assert versions(lake) == [
        (0, "new", 1, None),
        (1, "new", 1, None),
        (2, "new", 1, None),
        (3, "new", 1, None),
        (4, "new", 1, 1),
        (5, "new", 1, 1),
        (5, "again", 1, None),
        (6, "new", 1, 2),
        (6, "changed", 2, None),
        (7, "new", 1, None),
    ]
    before = lake.files()
    current = [order(key) for key in (0, 1, 2, 3, 7)] + [order(5, "again"), order(6, "changed")]
    feed.history(3, current, replaces=True)
    assert lake.files() == before
    feed.history(4, [], replaces=True)
    assert not [one for one in versions(lake) if one[3] is None]


def test_values_of_any_type_that_are_the_same_begin_no_version(lake: Lake, sink: SinkOfLake) -> None:
    table = table_of({"id": pa.int64(), "x": pa.float64(), "tags": pa.list_(pa.list_(pa.string())), "raw": pa.binary()})
    feed = Feed(sink, table)
    rows: list[dict[str, Any]] = [
        {"id": 1, "x": float("nan"), "tags": [["a", None], [], None], "raw": b""},
        {"id": 2, "x": None, "tags": None, "raw": None},
        {"id": 3, "x": 0.0, "tags": [], "raw": b"\x00"},
    ]
    feed.history(1, rows)
    rows[1] |= {"tags": []}
    feed.history(2, rows, replaces=True)
    found = lake.read().to_pylist()
    assert sorted((row["id"], row[IS_CURRENT]) for row in found) == [(1, True), (2, False), (2, True), (3, True)]


def test_a_new_column_of_rows_that_are_there(feed: Feed, lake: Lake) -> None:
    feed.history(1, [order(1, "a"), order(2, "b"), order(4, "d", "9.00")])
    feed.history(2, [order(1, "x", "9.00"), order(3, "x", "9.00"), order(4, "x", "9.00")], columns=("total",))
    found = lake.read().to_pylist()
    told = sorted((row["id"], row["status"], str(row["total"]), row[IS_CURRENT]) for row in found)
    assert told == [(1, "a", "1.00", False), (1, "a", "9.00", True), (2, "b", "1.00", True), (4, "d", "9.00", True)]


def test_readers_tell_current_versions_by_partition_and_closing_reads_no_others(feed: Feed, lake: Lake) -> None:
    feed.history(1, [order(key) for key in range(10)])
    feed.changes(1, (UPDATE, order(1, "a")))
    feed.changes(2, (UPDATE, order(1, "b")))
    closed = lake.files(is_current=False)
    assert len(closed) == 2
    feed.changes(3, (UPDATE, order(1, "c")))
    assert closed < lake.files(is_current=False)
    current = lake.read(is_current=True)
    assert sorted(row["id"] for row in current.to_pylist()) == list(range(10))


def test_the_rows_that_are_shown_have_all_columns(feed: Feed, sink: SinkOfLake) -> None:
    feed.changes(1, (INSERT, order(1)))
    feed.changes(2, (UPDATE, order(1, "paid")))
    shown = pa.Table.from_batches(list(sink.shown(ORDERS, ["status", IS_CURRENT]))).to_pylist()
    assert sorted((row["status"], row[IS_CURRENT]) for row in shown) == [("new", False), ("paid", True)]


def test_columns_come_grow_and_are_renamed(feed: Feed, lake: Lake) -> None:
    feed.table = table_of({"id": pa.int32(), "status": pa.string()})
    feed.changes(1, (INSERT, {"id": 1, "status": "a"}))
    feed.table = table_of({"id": pa.int64(), "state": pa.string(), "n": pa.int32()})
    feed.changes(2, (UPDATE, {"id": 1, "state": "b", "n": 5}), (INSERT, {"id": 2**40}))
    found = lake.read().to_pylist()
    told = sorted((row["id"], row["_valid_to"] is None, row["state"] or "", row["n"] or 0) for row in found)
    assert told == [(1, False, "a", 0), (1, True, "b", 5), (2**40, True, "", 0)]


def test_a_column_that_the_mode_adds_cannot_be_one_of_the_table(sink: SinkOfLake) -> None:
    feed = Feed(sink, table_of({"id": pa.int64(), "_Valid_to": pa.string()}))
    with pytest.raises(SinkSchemaError, match="one that this mode adds"):
        feed.history(1, [{"id": 1}])


def test_a_table_of_another_mode_is_refused(lake: Lake, sink: SinkOfLake) -> None:
    Feed(lake.sink()).changes(1, (INSERT, order(1)))
    error, text = OTHER_MODE[lake.name]
    with pytest.raises(error, match=text):
        Feed(sink).changes(2, (INSERT, order(2)))


@pytest.mark.parametrize("seed", range(3))
def test_any_batches_give_what_a_list_of_versions_gives(seed: int, lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 3)
    monkeypatch.setattr(delta_log, "CHECKPOINT_COMMITS", 7)
    monkeypatch.setattr(iceberg_snapshot, "EXPIRED_SNAPSHOTS", 3)
    monkeypatch.setattr(iceberg_snapshot, "KEPT_SNAPSHOTS", 3)
    chance = random.Random(seed)
    sink = lake.sink(Mode.HISTORY, file_bytes=chance.choice([1, 2000, 1 << 20]))
    feed = Feed(sink)
    expected: dict[int, list[list[Any]]] = {}

    def put(key: int, at: int, status: str | None) -> None:
        found = expected.setdefault(key, [])
        if found and found[-1][2] is None:
            found[-1][2] = at
        if status is not None:
            found.append([status, at, None])

    first = [order(key, "old") for key in chance.sample(range(40), 20)]
    feed.history(1, first)
    for row in first:
        put(row["id"], 1, "old")
    for epoch in range(2, 20):
        changes: list[tuple[Any, ...]] = []
        for _ in range(chance.randrange(1, 10)):
            key = chance.randrange(40)
            kind = chance.random()
            current = (expected.get(key) or [[None, 0, 0]])[-1]
            if kind < 0.3:
                changes.append((DELETE, order(key)))
                put(key, epoch, None)
            elif kind < 0.5 and current[2] is None:
                changes.append((UPDATE, order(key, None, f"{epoch}.00"), "status"))
                put(key, epoch, current[0])
            else:
                changes.append((INSERT, order(key, f"s{epoch}")))
                put(key, epoch, f"s{epoch}")
        feed.changes(epoch, *changes)
        if chance.random() < 0.3:
            feed.changes(epoch, (DELETE, order(1)), (INSERT, order(99)))
    wanted = [(key, *one) for key, found in expected.items() for one in found]
    assert sorted(versions(lake), key=str) == sorted(wanted, key=str)
    if sink.file_bytes == 1 << 20:
        assert len(lake.files()) < 12
