"""Commits to a lake against others: zombies, tables that are gone; and what they leave in its directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.sink import Committed, Mode
from headwater.sinks.versions import IS_CURRENT

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, history_part, order, own_rows, table_of
from .lakes import At, DeltaLake, Lake

FIXTURE = Path(__file__).parents[2] / "fixtures" / "sinks" / "delta_unmarked"
"""Written by versions that did not name the table in its properties: one that was only created, one with rows."""


def test_a_zombie_that_commits_the_same_batch_later_changes_nothing(lake: Lake, at: At) -> None:
    sink = lake.sink()
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = feed.token(2)
    of_zombie = feed.stage_changes(token, [(INSERT, order(2)), (UPDATE, order(1, "once"))])
    ours = feed.stage_changes(token, [(INSERT, order(2)), (UPDATE, order(1, "once"))])
    at(lake.before_commit, lambda: sink.commit(ORDERS, token, [ours]))
    commits = lake.commits()
    assert not sink.commit(ORDERS, token, [of_zombie])
    assert lake.statuses() == {1: "once", 2: "new"}
    assert lake.commits() == commits + 1


def test_a_zombie_with_an_older_batch_is_refused_after_newer_ones(lake: Lake, at: At) -> None:
    sink = lake.sink()
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = feed.token(2)
    of_zombie = feed.stage_changes(token, [(UPDATE, order(1, "two"))])

    def go_on() -> None:
        sink.commit(ORDERS, token, [feed.stage_changes(token, [(UPDATE, order(1, "two"))])])
        feed.changes(3, (DELETE, order(1)))

    at(lake.before_commit, go_on)
    assert not sink.commit(ORDERS, token, [of_zombie])
    assert lake.statuses() == {}
    assert sink.committed(ORDERS, "q", "b1") == Committed(3)


@pytest.mark.parametrize("mode", Mode, ids=[mode.value for mode in Mode])
def test_a_zombie_that_appends_history_is_refused(mode: Mode, lake: Lake, at: At) -> None:
    sink = lake.sink(mode)
    feed = Feed(sink)
    token = feed.token(0, 1)
    staged = [feed.stage_history(token, [order(1), order(2)]) for _ in range(2)]
    at(lake.before_commit, lambda: sink.commit(ORDERS, token, [staged[0]]))
    assert not sink.commit(ORDERS, token, [staged[1]])
    assert lake.statuses() == {1: "new", 2: "new"}


def test_a_table_that_was_removed_is_made_anew(lake: Lake) -> None:
    sink = lake.sink()
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    lake.drop()
    assert sink.committed(ORDERS, "q", "b1") == Committed()
    feed.changes(1, (INSERT, order(2)))
    assert lake.statuses() == {2: "new"}


def test_staging_that_fails_leaves_nothing(lake: Lake) -> None:
    sink = lake.sink()
    feed = Feed(sink)

    def broken() -> Iterator[pa.RecordBatch]:
        yield own_rows(ORDERS, [order(1)])
        raise ValueError("the source is gone")

    for _ in range(2):  # before there is a table, and after
        with pytest.raises(ValueError, match="gone"):
            sink.stage_history(ORDERS, feed.token(0, 1), history_part(), broken())
        assert not list(Path(lake.place).rglob("*.parquet"))
        feed.changes(1)


def test_a_table_without_rows_is_there_all_the_same(lake: Lake) -> None:
    sink = lake.sink()
    Feed(sink).history(1, [])
    assert lake.read().schema.names == ["id", "status", "total"]
    assert sink.committed(ORDERS, "q", "b1").plan == 1


def test_files_without_a_changed_key_are_left_alone(lake: Lake) -> None:
    table = table_of({"id": pa.int64(), "v": pa.string()})
    sink = lake.sink(file_bytes=1)
    feed = Feed(sink, table)
    token = feed.token(0, 1)
    parts = [feed.stage_history(token, [{"id": first + n, "v": "a"} for n in range(10)]) for first in (0, 100, 200)]
    sink.commit(table, token, parts)
    before = lake.files()
    feed.changes(1, (UPDATE, {"id": 105, "v": "b"}), (INSERT, {"id": 50, "v": "c"}), (DELETE, {"id": 300}))
    after = lake.files()
    assert len(before & after) == 2
    assert len(after - before) == 2


@pytest.mark.parametrize("mode", Mode, ids=[mode.value for mode in Mode])
def test_a_table_that_others_created_is_left_alone_unless_it_is_adopted(mode: Mode, lake: Lake) -> None:
    lake.create(lake.sink(mode)._columns(ORDERS), [IS_CURRENT] if mode is Mode.HISTORY else [])
    commits = lake.commits()
    for _ in range(2):
        refused = Feed(lake.sink(mode))
        with pytest.raises(SinkSchemaError, match="not created by Headwater") as caught:
            refused.history(1, [order(1)])
        assert "adopt = true" in str(caught.value.next_step)
        with pytest.raises(SinkSchemaError, match="not created by Headwater"):
            lake.sink(mode).check_table(ORDERS, "q")
        lake.sink(mode).abort(ORDERS, "q", 1)
    assert lake.commits() == commits
    assert not list(Path(lake.place).rglob("part-*.parquet"))
    lake.sink(mode, adopt=True).check_table(ORDERS, "q")
    Feed(lake.sink(mode, adopt=True)).history(1, [order(1)])
    assert lake.statuses() == {1: "new"}
    ours = Feed(lake.sink(mode))  # once it has rows of ours, it is ours, also for a query of another name
    ours.query = "other"
    ours.history(1, [order(2)])
    assert 2 in lake.statuses()


@pytest.mark.parametrize("state", ["created", "written"])
def test_delta_tables_of_earlier_versions_are_known_as_ours(state: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURE / state, tmp_path / "lake")
    lake = DeltaLake(str(tmp_path / "lake"))
    lake.sink().check_table(ORDERS, "q")
    Feed(lake.sink()).changes(2, (INSERT, order(9)))
    assert 9 in lake.statuses()


def test_a_delta_table_stays_ours_when_it_is_written_again_for_other_columns(tmp_path: Path) -> None:
    lake = DeltaLake(str(tmp_path / "lake"))
    Feed(lake.sink()).history(1, [order(1)])
    wider = table_of({"id": pa.int64(), "status": pa.string(), "total": pa.decimal128(20, 4), "more": pa.string()})
    Feed(lake.sink(), wider).changes(2, (DELETE, {"id": 1}))
    assert lake.read().num_rows == 0
    assert lake.table().metadata().configuration["headwater.table"] == "public.orders"
    other = Feed(lake.sink(), wider)
    other.query = "other"
    other.changes(1, (INSERT, {"id": 2, "status": "new"}))
    assert lake.statuses() == {2: "new"}
