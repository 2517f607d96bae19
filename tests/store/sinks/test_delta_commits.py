"""Commits of a Delta sink against others: zombies, other writers, chores; and what they leave in the directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater import failpoints
from headwater.sinks import delta, delta_log, rewrite
from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import SinkBusy
from headwater.sinks.sink import Committed

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order, table_of


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


def table_at(sink: DeltaSink) -> DeltaTable:
    return DeltaTable(f"{sink.path}/public.orders")


def statuses(sink: DeltaSink) -> dict[int, str]:
    rows = table_at(sink).to_pyarrow_table().to_pylist()
    found = {row["id"]: row["status"] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], Any]], None]:
    """Do something when a failpoint is passed, once."""

    def arrange(name: str, action: Callable[[], Any]) -> None:
        left = [action]

        def hit(passed: str) -> None:
            if passed == name and left:
                left.pop()()

        monkeypatch.setattr(failpoints, "hit", hit)

    return arrange


def test_a_zombie_that_commits_the_same_batch_later_changes_nothing(sink: DeltaSink, at: Any) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = feed.token(2)
    of_zombie = feed.stage_changes(token, [(INSERT, order(2)), (UPDATE, order(1, "once"))])
    ours = feed.stage_changes(token, [(INSERT, order(2)), (UPDATE, order(1, "once"))])
    at("sink.delta.before_commit", lambda: sink.commit(ORDERS, token, [ours]))
    version = table_at(sink).version()
    assert not sink.commit(ORDERS, token, [of_zombie])
    assert statuses(sink) == {1: "once", 2: "new"}
    assert table_at(sink).version() == version + 1


def test_a_zombie_with_an_older_batch_is_refused_after_newer_ones(sink: DeltaSink, at: Any) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = feed.token(2)
    of_zombie = feed.stage_changes(token, [(UPDATE, order(1, "two"))])

    def go_on() -> None:
        sink.commit(ORDERS, token, [feed.stage_changes(token, [(UPDATE, order(1, "two"))])])
        feed.changes(3, (DELETE, order(1)))

    at("sink.delta.before_commit", go_on)
    assert not sink.commit(ORDERS, token, [of_zombie])
    assert statuses(sink) == {}
    assert sink.committed(ORDERS, "q", "b1") == Committed(3)


def test_a_zombie_that_appends_history_is_refused(sink: DeltaSink, at: Any) -> None:
    feed = Feed(sink)
    token = feed.token(0, 1)
    staged = [feed.stage_history(token, [order(1), order(2)]) for _ in range(2)]
    at("sink.delta.before_commit", lambda: sink.commit(ORDERS, token, [staged[0]]))
    assert not sink.commit(ORDERS, token, [staged[1]])
    assert statuses(sink) == {1: "new", 2: "new"}


def test_a_commit_of_another_writer_in_between_is_taken_into_account(sink: DeltaSink, at: Any) -> None:
    feed = Feed(sink)
    feed.history(1, [order(key) for key in range(5)])
    feed.changes(1, (INSERT, order(5)), (INSERT, order(6)))
    at("sink.delta.before_commit", table_at(sink).optimize.compact)
    assert feed.changes(2, (UPDATE, order(5, "paid")), (DELETE, order(0)))
    assert statuses(sink) == {**dict.fromkeys((1, 2, 3, 4, 6), "new"), 5: "paid"}


def test_a_table_that_others_commit_to_all_the_time_is_said_to_be_busy(
    sink: DeltaSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "COMMIT_ATTEMPTS", 2)
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))

    def hit(name: str) -> None:
        if name == "sink.delta.before_commit":
            table_at(sink).alter.set_table_properties({"delta.checkpointInterval": "99"})

    monkeypatch.setattr(failpoints, "hit", hit)
    with pytest.raises(SinkBusy):
        feed.changes(2, (INSERT, order(2)))
    assert statuses(sink) == {1: "new"}


def test_a_table_that_was_removed_is_made_anew(sink: DeltaSink, tmp_path: Path) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    Path(sink.path, "public.orders").rename(tmp_path / "elsewhere")
    assert sink.committed(ORDERS, "q", "b1") == Committed()
    feed.changes(1, (INSERT, order(2)))
    assert statuses(sink) == {2: "new"}


def test_small_files_are_joined_and_replaced_ones_removed(sink: DeltaSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 4)
    monkeypatch.setattr(delta_log, "CHECKPOINT_COMMITS", 5)
    feed = Feed(DeltaSink(sink.path, retention_hours=0))
    for epoch in range(1, 42):
        feed.changes(epoch, (INSERT, order(epoch)), (UPDATE, order(1, f"at {epoch}")))
    assert statuses(sink) == {1: "at 41", **dict.fromkeys(range(2, 42), "new")}
    files = table_at(sink).file_uris()
    assert len(files) < 10
    assert len(list(Path(sink.path, "public.orders").glob("*.parquet"))) < 20
    assert list(Path(sink.path, "public.orders", "_delta_log").glob("*.checkpoint.parquet"))


def test_files_of_attempts_that_failed_are_cleaned_and_no_others(sink: DeltaSink) -> None:
    feed = Feed(sink)
    feed.history(1, [order(1)])
    feed.stage_history(feed.token(0, 2), [order(2)])
    directory = Path(sink.path, "public.orders")
    assert len(list(directory.glob("*.parquet"))) == 2
    assert sink.clean(ORDERS) == []
    assert len(sink.clean(ORDERS, retention_hours=0)) == 1
    assert statuses(sink) == {1: "new"}


def test_staging_that_fails_leaves_nothing(sink: DeltaSink) -> None:
    feed = Feed(sink)
    feed.changes(1)

    def broken() -> Any:
        yield pa.RecordBatch.from_pylist([order(1)], schema=ORDERS.schema)
        raise ValueError("the source is gone")

    from .file_sinks import history_part

    with pytest.raises(ValueError, match="gone"):
        sink.stage_history(ORDERS, feed.token(0, 1), history_part(), broken())
    assert not list(Path(sink.path).rglob("*.parquet"))


def test_a_table_without_rows_is_there_all_the_same(sink: DeltaSink) -> None:
    Feed(sink).history(1, [])
    assert table_at(sink).to_pyarrow_table().schema.names == ["id", "status", "total"]
    assert sink.committed(ORDERS, "q", "b1").plan == 1


def test_files_without_a_changed_key_are_left_alone(tmp_path: Path) -> None:
    table = table_of({"id": pa.int64(), "v": pa.string()})
    sink = DeltaSink(str(tmp_path), file_bytes=1)
    feed = Feed(sink, table)
    token = feed.token(0, 1)
    parts = [feed.stage_history(token, [{"id": first + n, "v": "a"} for n in range(10)]) for first in (0, 100, 200)]
    sink.commit(table, token, parts)
    before = set(table_at(sink).file_uris())
    feed.changes(1, (UPDATE, {"id": 105, "v": "b"}), (INSERT, {"id": 50, "v": "c"}), (DELETE, {"id": 300}))
    after = set(table_at(sink).file_uris())
    assert len(before & after) == 2
    assert len(after - before) == 2
