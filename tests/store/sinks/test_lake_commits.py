"""Commits to a lake against others: zombies, tables that are gone; and what they leave in its directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.sinks.sink import Committed, Mode

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, history_part, order, own_rows, table_of
from .lakes import At, Lake


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
