"""What every sink in a database must do, over a real server: each kind has a test class of its own with these tests."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.store.sinks.file_sinks import (
    DELETE,
    INSERT,
    OLD,
    ORDERS,
    UPDATE,
    Feed,
    IntegerOrder,
    deliver_any_batches,
    history_part,
    log_rows,
    many_changes,
    many_rows,
    order,
    own_rows,
    table_of,
)

from headwater.sinks.delivery import commit_tables
from headwater.sinks.errors import OtherAttempt, SinkFenced, SinkRowError, SinkSchemaError, StagedLost
from headwater.sinks.sink import Committed, Mode, Staged, Token
from headwater.sinks.sql_sink import SqlSink
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream.vnode import hash_keys

MakeSink = Callable[..., SqlSink]
NOTE = SourceColumn("note", pa.string(), "text", 9)
WIDE = replace(ORDERS, columns=(*ORDERS.columns, NOTE))
LINK = table_of({"a": pa.int64(), "b": pa.string()}, key=("a", "b"), name="links")


def rows_of(sink: SqlSink, table: SourceTable = ORDERS, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    names = list(columns or table.schema.names)
    found = [row for batch in sink.shown(table, names) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: tuple((row[name] is None, row[name]) for name in table.key_columns))


def versions_of(sink: SqlSink, table: SourceTable = ORDERS) -> list[tuple[Any, ...]]:
    """Key, status, from and to in seconds, whether it is current."""
    names = ["id", "status", "_valid_from", "_valid_to", "_is_current"]
    found = [row for batch in sink.shown(table, names) for row in batch.to_pylist()]
    made = [
        (row["id"], row["status"], _seconds(row["_valid_from"]), _seconds(row["_valid_to"]), row["_is_current"])
        for row in found
    ]
    return sorted(made, key=lambda row: (row[0], row[2], row[3] is None, row[3]))


def _seconds(moment: Any) -> float | None:
    return None if moment is None else moment.timestamp()


class SqlScenarios:
    """Needs the fixture ``make``: a sink in a fresh database, with options."""

    def test_tables_with_odd_names_are_apart_and_so_are_their_tokens(self, make: MakeSink) -> None:
        sink = make()
        names = [("a.b", "c"), ("a", "b.c"), ("x" * 128, "y" * 128), ("x" * 128, "y" * 127 + "z"), ("p", "50% 'off'")]
        tables = [replace(ORDERS, namespace=namespace, name=name) for namespace, name in names]
        for number, table in enumerate(tables):
            assert Feed(sink, table).history(1, [order(number)])
            assert Feed(sink, table).changes(1, (UPDATE, order(number, "changed")))
        for number, table in enumerate(tables):
            assert rows_of(sink, table) == [order(number, "changed")]

    def test_inserts_updates_and_deletes(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        assert feed.changes(1, (INSERT, order(1)), (INSERT, order(2)), (INSERT, order(3)))
        assert feed.changes(2, (OLD, order(1)), (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(4)))
        assert rows_of(sink) == [order(1, "paid"), order(3), order(4)]

    def test_a_key_that_changes_leaves_one_row(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        feed.changes(1, (INSERT, order(1)), (INSERT, order(2)))
        feed.changes(2, (DELETE, order(1)), (INSERT, order(9)), (OLD, order(2)), (UPDATE, order(8)))
        assert rows_of(sink) == [order(8), order(9)]

    def test_delete_and_insert_of_a_key_in_one_batch(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        feed.changes(1, (INSERT, order(1)), (INSERT, order(2)), (DELETE, order(2)))
        feed.changes(2, (DELETE, order(1)), (INSERT, order(1, "again")), (INSERT, order(3)), (DELETE, order(3)))
        assert rows_of(sink) == [order(1, "again")]

    def test_a_batch_that_comes_again_changes_nothing(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        assert sink.committed(ORDERS, "q", "b1") == Committed()
        feed.changes(5, (INSERT, order(1)))
        assert not feed.changes(5, (INSERT, order(1, "other")))
        assert not feed.changes(4, (INSERT, order(2)))
        assert rows_of(sink) == [order(1)]
        assert sink.committed(ORDERS, "q", "b1") == Committed(5, 0, 0)

    def test_an_empty_batch_is_taken(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        assert feed.changes(1)
        assert feed.changes(2, (INSERT, order(1)))
        assert feed.changes(3)
        assert rows_of(sink) == [order(1)]

    def test_history_and_changes_in_one_batch(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        token = feed.token(3, 1, 2)
        changed = hash_keys(own_rows(ORDERS, [order(1), order(7)]), ("id",))
        staged = [
            feed.stage_history(token, [order(1, "newest"), order(2)], changed=changed),
            feed.stage_changes(token, [(INSERT, order(1, "older")), (INSERT, order(10))]),
            feed.stage_history(token, [order(5)]),
        ]
        assert sink.commit(ORDERS, token, staged)
        expected = [order(1, "newest"), order(2), order(5), order(10)]
        assert rows_of(sink) == expected
        assert sink.committed(ORDERS, "q", "b1") == Committed(3, 1, 2)
        assert not sink.commit(ORDERS, token, staged)
        assert rows_of(sink) == expected

    def test_the_other_attempt_of_a_plan_is_refused(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        feed.history(1, [order(1)])
        token = feed.token(0, 1, attempt=1)
        staged = feed.stage_history(token, [order(1, "other")])
        with pytest.raises(OtherAttempt):
            sink.commit(ORDERS, token, [staged])
        assert rows_of(sink) == [order(1)]

    def test_another_backfill_of_rows_that_are_there_doubles_none(self, make: MakeSink) -> None:
        sink = make()
        Feed(sink).history(1, [order(1), order(2)])
        again = Feed(sink, backfill="b2")
        again.history(1, [order(1, "b2")])
        again.history(2, [order(2, "b2"), order(3, "b2")])
        assert rows_of(sink) == [order(1, "b2"), order(2, "b2"), order(3, "b2")]
        assert sink.committed(ORDERS, "q", "b2").plan == 2

    def test_truncate_voids_what_was_before_it(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        feed.changes(1, (INSERT, order(1)), (INSERT, order(2)))
        feed.changes(2, (INSERT, order(3)), (INSERT, order(4)), truncated=(2, 1))
        assert rows_of(sink) == [order(4)]
        feed.changes(3, truncated=(3, 0))
        assert rows_of(sink) == []
        assert not feed.changes(3, truncated=(3, 0))
        assert sink.committed(ORDERS, "q", "b1").epoch == 3

    def test_a_replaced_range_has_the_rows_that_were_read_and_no_others(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        feed.history(1, [order(key) for key in range(10)])
        feed.history(2, [order(3, "again"), order(5, "again")], ranges=[(3, 6)], replaces=True, order=IntegerOrder())
        kept = [order(key) for key in (0, 1, 2, 6, 7, 8, 9)]
        assert rows_of(sink) == sorted([*kept, order(3, "again"), order(5, "again")], key=lambda row: row["id"])
        feed.history(3, [], ranges=[(None, 3), (8, None)], replaces=True, order=IntegerOrder())
        assert [row["id"] for row in rows_of(sink)] == [3, 5, 6, 7]
        feed.history(4, [order(1)], replaces=True)
        assert rows_of(sink) == [order(1)]

    def test_a_new_column_of_rows_that_are_there(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        feed.history(1, [order(1, "a"), order(2, "b")])
        feed.history(2, [order(1, "x", "9.00"), order(3, "x", "9.00")], columns=("total",))
        assert rows_of(sink) == [order(1, "a", "9.00"), order(2, "b")]

    def test_unavailable_columns_keep_what_the_mirror_has(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)
        feed.changes(1, (INSERT, order(1, "long text")), (INSERT, order(2, "other text")), (INSERT, order(3, "third")))
        feed.changes(
            2,
            (UPDATE, order(1, None, "5.00"), "status"),
            (UPDATE, order(2, "told", "6.00")),
            (UPDATE, order(2, None, "7.00"), "status"),
            (UPDATE, order(3, None, None), "status,total"),
            (UPDATE, order(4, None, "8.00"), "status"),
            (INSERT, order(5)),
            (DELETE, order(9)),
        )
        assert rows_of(sink) == [
            order(1, "long text", "5.00"),
            order(2, "told", "7.00"),
            order(3, "third"),
            order(4, None, "8.00"),
            order(5),
        ]

    def test_a_table_whose_key_is_the_whole_row(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink, LINK)
        feed.history(1, [{"a": 1, "b": "x"}, {"a": 2, "b": None}])
        feed.changes(1, (INSERT, {"a": None, "b": "z"}), (DELETE, {"a": 2, "b": None}), (INSERT, {"a": 3, "b": "y"}))
        assert rows_of(sink, LINK) == [{"a": 1, "b": "x"}, {"a": 3, "b": "y"}, {"a": None, "b": "z"}]
        changed = hash_keys(own_rows(LINK, [{"a": 3, "b": "y"}]), LINK.key_columns)
        feed.history(2, [{"a": 3, "b": "y"}, {"a": 4, "b": "n"}], epoch=1, changed=changed)
        feed.changes(2, (DELETE, {"a": None, "b": "z"}))
        assert [row["a"] for row in rows_of(sink, LINK)] == [1, 3, 4]
        Feed(sink, LINK, backfill="b2").history(1, [{"a": 4, "b": "n"}, {"a": 5, "b": None}], epoch=2)
        assert [row["a"] for row in rows_of(sink, LINK)] == [1, 3, 4, 5]

    def test_any_names(self, make: MakeSink) -> None:
        sink = make(table="{schema} to {table}")
        odd = table_of({'I"d': pa.int64(), "100%s": pa.string(), "select": pa.string()}, key=('I"d',), name="O`r'd %s")
        feed = Feed(sink, odd)
        feed.changes(1, (INSERT, {'I"d': 1, "100%s": "a", "select": "b"}))
        feed.changes(2, (UPDATE, {'I"d': 1, "100%s": None, "select": "c"}, "100%s"))
        assert rows_of(sink, odd) == [{'I"d': 1, "100%s": "a", "select": "c"}]
        assert sink.committed(odd, "q", "b1") == Committed(2)

    def test_a_table_that_somebody_removed_begins_anew(self, make: MakeSink, execute: Callable[..., Any]) -> None:
        sink = make()
        feed = Feed(sink)
        feed.history(1, [order(1)], epoch=3)
        feed.changes(4, (INSERT, order(2)))
        execute("DROP TABLE public.orders")
        assert sink.committed(ORDERS, "q", "b1") == Committed()
        assert rows_of(sink) == []
        assert feed.history(1, [order(5)])
        assert rows_of(sink) == [order(5)]
        assert sink.committed(ORDERS, "q", "b1") == Committed(0, 1, 0)

    @pytest.mark.parametrize("seed", range(2))
    def test_any_batches_give_what_a_dictionary_gives(self, seed: int, make: MakeSink) -> None:
        sink = make()
        expected = deliver_any_batches(Feed(sink), random.Random(seed))
        assert rows_of(sink) == expected

    def test_a_hundred_thousand_rows_in_one_batch(self, make: MakeSink, relations: Callable[[], list[str]]) -> None:
        sink = make()
        feed = Feed(sink)
        keys = np.arange(100_000)
        token = feed.token(0, 1)
        staged = sink.stage_history(ORDERS, token, history_part(), iter([many_rows(keys)]))
        assert len(relations()) == 1
        assert sink.commit(ORDERS, token, [staged])
        assert not relations()
        token = feed.token(1, 1)
        batches = [many_changes(keys[::2], DELETE), many_changes(keys[1::2], UPDATE)]
        staged = sink.stage_changes(ORDERS, token, iter(batches), None)
        assert staged.rows == 100_000
        assert sink.commit(ORDERS, token, [staged])
        found = pa.Table.from_batches(list(sink.shown(ORDERS, ["id", "total"])))
        assert sorted(found.column("id").to_pylist()) == keys[1::2].tolist()
        assert set(found.column("total").to_pylist()) == {Decimal("1.00")}
        assert not relations()

    def test_changes_are_appended(self, make: MakeSink) -> None:
        sink = make(mode=Mode.CHANGES)
        feed = Feed(sink)
        token = feed.token(1, 1)
        staged = [feed.stage_changes(token, [(INSERT, order(7))]), feed.stage_history(token, [order(1), order(2)])]
        sink.commit(ORDERS, token, staged)
        feed.changes(2, (OLD, order(1)), (UPDATE, order(1, "paid")), (DELETE, order(2)))
        assert not feed.changes(2, (DELETE, order(2)))
        names = ["id", "status", "_change_type", "_commit_version"]
        found = [row for batch in sink.shown(ORDERS, names) for row in batch.to_pylist()]
        assert sorted((row["_commit_version"], row["id"], row["_change_type"], row["status"]) for row in found) == [
            (7, 1, "insert", "new"),
            (7, 2, "insert", "new"),
            (100, 7, "insert", "new"),
            (200, 1, "update_preimage", "new"),
            (201, 1, "update_postimage", "paid"),
            (202, 2, "delete", "new"),
        ]

    def test_history_has_every_version(self, make: MakeSink) -> None:
        sink = make(mode=Mode.HISTORY)
        feed = Feed(sink)
        feed.history(1, [order(1), order(2)])
        feed.changes(2, (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(3)))
        feed.changes(3, (UPDATE, order(1, None, "9.00"), "status"), (UPDATE, order(3, "a")), (UPDATE, order(3, "b")))
        assert not feed.changes(3, (DELETE, order(1)))
        assert versions_of(sink) == [
            (1, "new", 1, 2, False),
            (1, "paid", 2, 3, False),
            (1, "paid", 3, None, True),
            (2, "new", 1, 2, False),
            (3, "new", 2, 3, False),
            (3, "a", 3, 3, False),
            (3, "b", 3, None, True),
        ]

    def test_history_that_is_read_again_begins_only_versions_that_differ(self, make: MakeSink) -> None:
        sink = make(mode=Mode.HISTORY)
        feed = Feed(sink)
        feed.history(1, [order(1), order(2), order(3), order(4)])
        feed.history(2, [order(1), order(2, "other"), order(5)], ranges=[(1, 4)], replaces=True, order=IntegerOrder())
        assert versions_of(sink) == [
            (1, "new", 1, None, True),
            (2, "new", 1, 1, False),
            (2, "other", 1, None, True),
            (3, "new", 1, 1, False),
            (4, "new", 1, None, True),
            (5, "new", 1, None, True),
        ]
        feed.history(3, [order(1, "x", "1.00"), order(4, "x", "7.00"), order(9)], columns=("total",))
        assert versions_of(sink)[-3:-1] == [(4, "new", 1, 1, False), (4, "new", 1, None, True)]
        assert [row["total"] for row in rows_of(sink)].count(Decimal("7.00")) == 1
        assert len(versions_of(sink)) == 7

    def test_truncate_ends_all_versions(self, make: MakeSink) -> None:
        sink = make(mode=Mode.HISTORY)
        feed = Feed(sink)
        feed.history(1, [order(1), order(2)])
        feed.changes(2, (INSERT, order(1, "before")), (INSERT, order(2, "after")), truncated=(2, 1))
        assert [(row[0], row[1], row[4]) for row in versions_of(sink)] == [
            (1, "new", False),
            (2, "new", False),
            (2, "after", True),
        ]

    def test_a_version_never_begins_before_the_one_that_it_ends(self, make: MakeSink) -> None:
        sink = make(mode=Mode.HISTORY)
        feed = Feed(sink)
        feed.changes(9, (INSERT, order(1)))
        token = replace(feed.token(10), after=9)
        batch = log_rows(ORDERS, [(UPDATE, order(1, "later"))], 10)
        early = pa.array([3_000_000], pa.timestamp("us", tz="UTC"))
        batch = batch.set_column(batch.schema.get_field_index("_commit_timestamp"), "_commit_timestamp", early)
        sink.commit(ORDERS, token, [sink.stage_changes(ORDERS, token, iter([batch]), None)])
        assert versions_of(sink) == [(1, "new", 9, 9, False), (1, "later", 9, None, True)]

    def test_columns_that_are_added(self, make: MakeSink) -> None:
        for mode in Mode:
            sink = make(mode=mode)
            table = replace(ORDERS, name=f"added_{mode.value}")
            feed = Feed(sink, table)
            feed.changes(1, (INSERT, order(1)))
            feed.table = replace(WIDE, name=table.name)
            feed.changes(2, (INSERT, {**order(2), "note": "n"}))
            feed.table = table
            feed.changes(3, (INSERT, order(3)))
            assert [row["note"] for row in rows_of(sink, replace(WIDE, name=table.name))] == [None, "n", None]

    def test_types_that_become_wider(self, make: MakeSink) -> None:
        narrow = table_of({"id": pa.int32(), "n": pa.int16(), "d": pa.decimal128(6, 2), "f": pa.float32()})
        wide = table_of({"id": pa.int64(), "n": pa.int64(), "d": pa.decimal128(20, 4), "f": pa.float64()})
        sink = make()
        Feed(sink, narrow).changes(1, (INSERT, {"id": 1, "n": 7, "d": Decimal("1.25"), "f": 0.5}))
        Feed(sink, wide).changes(2, (INSERT, {"id": 1 << 40, "n": 1 << 50, "d": Decimal("1.2345"), "f": 0.1}))
        Feed(sink, narrow).changes(3, (INSERT, {"id": 3, "n": 3, "d": Decimal("0.50"), "f": 1.5}))
        assert rows_of(sink, wide) == [
            {"id": 1, "n": 7, "d": Decimal("1.2500"), "f": 0.5},
            {"id": 3, "n": 3, "d": Decimal("0.5000"), "f": 1.5},
            {"id": 1 << 40, "n": 1 << 50, "d": Decimal("1.2345"), "f": 0.1},
        ]

    def test_another_type_is_refused(self, make: MakeSink) -> None:
        sink = make()
        Feed(sink).changes(1, (INSERT, order(1)))
        other = table_of({"id": pa.int64(), "status": pa.int64(), "total": pa.decimal128(10, 2)})
        with pytest.raises(SinkSchemaError, match="'status' is"):
            Feed(sink, other).changes(2, (INSERT, {"id": 2, "status": 5, "total": None}))
        assert rows_of(sink) == [order(1)]
        assert sink.committed(ORDERS, "q", "b1").epoch == 1

    def test_a_renamed_column_by_policy(self, make: MakeSink) -> None:
        renamed = replace(
            ORDERS, columns=(ORDERS.columns[0], replace(ORDERS.columns[1], name="state"), ORDERS.columns[2])
        )
        for policy in ("copy", "rename"):
            table, after = (replace(one, name=f"orders_{policy}") for one in (ORDERS, renamed))
            sink = make(on_rename=policy)
            Feed(sink, table).changes(1, (INSERT, order(1, "old")))
            Feed(sink, after).changes(2, (INSERT, {"id": 2, "state": "new", "total": None}))
            assert [row["state"] for row in rows_of(sink, after)] == ["old", "new"]
            kept = [row["status"] for row in rows_of(sink, table)]
            assert kept == (["old", None] if policy == "copy" else [None, None])

    @pytest.mark.parametrize("mode", [Mode.MIRROR, Mode.CHANGES, Mode.HISTORY], ids=lambda mode: mode.value)
    def test_columns_that_change_without_a_row_are_there_at_once(self, make: MakeSink, mode: Mode) -> None:
        renamed = replace(
            WIDE, columns=(ORDERS.columns[0], replace(ORDERS.columns[1], name="state"), ORDERS.columns[2], NOTE)
        )
        sink = make(mode=mode)
        Feed(sink).changes(1, (INSERT, order(1, "old")))
        assert Feed(sink, renamed).changes(2)
        (row,) = pa.Table.from_batches(sink.shown(renamed, ["id", "state", "note"])).to_pylist()
        assert row == {"id": 1, "state": None if mode is Mode.CHANGES else "old", "note": None}
        assert sink.committed(ORDERS, "q", "b1").epoch == 1

    def test_a_key_that_is_renamed_keeps_its_index(self, make: MakeSink) -> None:
        renamed = replace(
            ORDERS, columns=(replace(ORDERS.columns[0], name="number"), *ORDERS.columns[1:]), key_columns=("number",)
        )
        sink = make()
        Feed(sink).changes(1, (INSERT, order(1)), (INSERT, order(2)))
        feed = Feed(sink, renamed)
        assert feed.changes(2, (UPDATE, {"number": 1, "status": "paid", "total": None}))
        assert feed.changes(3, (DELETE, {"number": 2, "status": None, "total": None}))
        assert [(row["number"], row["status"]) for row in rows_of(sink, renamed)] == [(1, "paid")]

    def test_a_dropped_column_by_policy(self, make: MakeSink) -> None:
        dropped = replace(WIDE, columns=(*ORDERS.columns, replace(NOTE, dropped=True)))
        for policy in ("keep", "drop"):
            table, after = (replace(one, name=f"orders_{policy}") for one in (WIDE, dropped))
            sink = make(on_drop=policy)
            Feed(sink, table).changes(1, (INSERT, {**order(1), "note": "n"}))
            Feed(sink, after).changes(2, (INSERT, {**order(2), "note": None}))
            kept = [row["note"] for row in rows_of(sink, table)]
            assert kept == (["n", None] if policy == "keep" else [None, None])

    def test_a_refused_row_is_told_without_its_value_and_nothing_is_committed(
        self, make: MakeSink, execute: Callable[..., Any]
    ) -> None:
        sink = make()
        feed = Feed(sink)
        feed.changes(1, (INSERT, order(1)))
        execute("ALTER TABLE public.orders ADD CONSTRAINT positive CHECK (total > 0)")
        with pytest.raises(SinkRowError) as caught:
            feed.changes(2, (INSERT, order(2)), (INSERT, order(3, "secret", "-7.77")))
        assert caught.value.table == "public.orders"
        assert "positive" in str(caught.value)
        assert "7.77" not in str(caught.value)
        assert "secret" not in str(caught.value)
        assert rows_of(sink) == [order(1)]
        assert sink.committed(ORDERS, "q", "b1").epoch == 1

    def test_refused_rows_are_found_among_many(self, make: MakeSink, execute: Callable[..., Any]) -> None:
        sink = make()
        Feed(sink).changes(1, (INSERT, order(1)))
        execute("ALTER TABLE public.orders ADD CONSTRAINT positive CHECK (total > 0)")
        rows = pa.Table.from_batches([many_rows(np.arange(5_000))]).to_pylist()
        rows[17]["total"] = rows[4_321]["total"] = Decimal("-1.00")
        found = sink.refused(ORDERS, pa.Table.from_pylist(rows, ORDERS.schema))
        assert [place for place, _ in found] == [17, 4_321]
        assert all("positive" in reason for _, reason in found)
        assert rows_of(sink) == [order(1)]
        assert sink.refused(ORDERS, pa.Table.from_batches([many_rows(np.arange(10))])) == []

    def test_what_earlier_generations_staged_is_removed_and_never_committed(
        self, make: MakeSink, relations: Callable[[], list[str]]
    ) -> None:
        sink = make()
        feed = Feed(sink)
        old = replace(feed.token(1), generation=3)
        batch = many_changes(np.arange(50_000), INSERT)
        staged = sink.stage_changes(ORDERS, old, iter([batch]), None)
        small = sink.stage_changes(ORDERS, old, iter([batch.slice(0, 2)]), None)
        new = sink.stage_changes(ORDERS, replace(old, generation=4), iter([batch]), None)
        sink.abort(ORDERS, "another", 9)
        assert len(relations()) == 2
        sink.abort(ORDERS, "q", 4)
        assert len(relations()) == 1
        with pytest.raises(SinkFenced):
            sink.commit(ORDERS, old, [small])
        with pytest.raises((SinkFenced, StagedLost)):
            sink.commit(ORDERS, old, [staged])
        assert sink.commit(ORDERS, new.token, [new])
        assert sum(batch.num_rows for batch in sink.shown(ORDERS, ["id"])) == 50_000
        assert not relations()

    def test_staged_rows_that_are_gone(self, make: MakeSink) -> None:
        sink = make()
        token = Feed(sink).token(1)
        staged = sink.stage_changes(ORDERS, token, iter([many_changes(np.arange(50_000), INSERT)]), None)
        sink.abort(ORDERS, "q", 1)
        with pytest.raises(StagedLost):
            sink.commit(ORDERS, replace(token, generation=1), [staged])
        assert sink.committed(ORDERS, "q", "b1") == Committed()

    @pytest.mark.parametrize(
        ("damage", "found"),
        [
            ("DELETE FROM {} WHERE id % 1000 = 7", "has 49,950 of the 50,000 rows"),
            ("UPDATE {} SET status = 'other' WHERE id = 7", "has other rows"),
        ],
    )
    def test_staged_rows_that_are_others_by_then_are_not_committed(
        self, make: MakeSink, execute: Callable[..., Any], damage: str, found: str
    ) -> None:
        sink = make()
        token = Feed(sink).token(1)
        batch = many_changes(np.arange(50_000), INSERT)
        staged = sink.stage_changes(ORDERS, token, iter([batch]), None)
        (part,) = staged.detail.parts
        execute(damage.format(f"headwater.{part.relation}"))
        with pytest.raises(StagedLost, match=found):
            sink.commit(ORDERS, token, [staged])
        assert sink.committed(ORDERS, "q", "b1") == Committed()
        again = sink.stage_changes(ORDERS, token, iter([batch]), None)
        assert sink.commit(ORDERS, token, [again])
        assert sum(rows.num_rows for rows in sink.shown(ORDERS, ["id"])) == 50_000

    def test_of_two_that_race_one_commits(self, make: MakeSink) -> None:
        sink = make()
        feed = Feed(sink)

        def commit(token: Token, staged: Staged, won: list[bool]) -> None:
            won.append(sink.commit(ORDERS, token, [staged]))

        for epoch in range(1, 9):
            token = feed.token(epoch)
            staged = [feed.stage_changes(token, [(INSERT, order(epoch, str(number)))]) for number in range(2)]
            won: list[bool] = []
            runs = [threading.Thread(target=commit, args=(token, one, won)) for one in staged]
            for run in runs:
                run.start()
            for run in runs:
                run.join()
            assert sorted(won) == [False, True]
        assert len(rows_of(sink)) == 8

    def test_tables_of_a_new_schema_that_are_created_at_once_are_all_there(self, make: MakeSink) -> None:
        for attempt in range(3):
            tables = [replace(ORDERS, namespace=f"fresh{attempt}", name=f"orders{number}") for number in range(4)]
            feeds = [Feed(make(), table) for table in tables]
            staged = {one.table.full_name: [one.stage_history(one.token(0, 1), [order(1)])] for one in feeds}
            assert commit_tables(make(), staged) == {}
            assert [rows_of(make(), table) for table in tables] == [[order(1)]] * 4

    def test_queries_that_create_one_table_at_once_share_it(self, make: MakeSink) -> None:
        for attempt in range(3):
            table = replace(ORDERS, namespace=f"shared{attempt}")
            feeds = [Feed(make(), table, query=f"q{number}") for number in range(4)]
            tokens = [feed.token(0, 1) for feed in feeds]
            for feed in feeds:
                feed.sink.abort(table, feed.query, 0)
            staged = [
                feed.stage_history(token, [order(at)])
                for at, (feed, token) in enumerate(zip(feeds, tokens, strict=True))
            ]
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(make().commit, [table] * 4, tokens, [[one] for one in staged]))
            assert rows_of(make(), table) == [order(at) for at in range(4)]
