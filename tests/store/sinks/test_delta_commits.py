"""Commits of a Delta sink against other writers and chores, and what they leave in the directory."""

from __future__ import annotations

from pathlib import Path

import deltalake
import pytest

from headwater import failpoints
from headwater.sinks import delta_log, rewrite
from headwater.sinks import lake as lake_module
from headwater.sinks.errors import SinkBusy
from headwater.sinks.sink import Committed, Mode

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order
from .lakes import At, DeltaLake


@pytest.fixture
def lake(tmp_path: Path) -> DeltaLake:
    return DeltaLake(str(tmp_path / "lake"))


def test_a_commit_of_another_writer_in_between_is_taken_into_account(lake: DeltaLake, at: At) -> None:
    feed = Feed(lake.sink())
    feed.history(1, [order(key) for key in range(5)])
    feed.changes(1, (INSERT, order(5)), (INSERT, order(6)))
    at("sink.delta.before_commit", lake.table().optimize.compact)
    assert feed.changes(2, (UPDATE, order(5, "paid")), (DELETE, order(0)))
    assert lake.statuses() == {**dict.fromkeys((1, 2, 3, 4, 6), "new"), 5: "paid"}


def test_a_table_that_others_commit_to_all_the_time_is_said_to_be_busy(
    lake: DeltaLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_module, "COMMIT_ATTEMPTS", 2)
    feed = Feed(lake.sink())
    feed.changes(1, (INSERT, order(1)))

    def hit(name: str) -> None:
        if name == "sink.delta.before_commit":
            lake.table().alter.set_table_properties({"delta.checkpointInterval": "99"})

    monkeypatch.setattr(failpoints, "hit", hit)
    with pytest.raises(SinkBusy):
        feed.changes(2, (INSERT, order(2)))
    assert lake.statuses() == {1: "new"}


def test_small_files_are_joined_and_replaced_ones_removed(lake: DeltaLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 4)
    monkeypatch.setattr(delta_log, "CHECKPOINT_COMMITS", 5)
    feed = Feed(lake.sink(retention_hours=0))
    for epoch in range(1, 42):
        feed.changes(epoch, (INSERT, order(epoch)), (UPDATE, order(1, f"at {epoch}")))
    assert lake.statuses() == {1: "at 41", **dict.fromkeys(range(2, 42), "new")}
    files = lake.files()
    assert len(files) < 10
    assert len(list(Path(lake.place, "public.orders").glob("*.parquet"))) < 20
    assert list(Path(lake.place, "public.orders", "_delta_log").glob("*.checkpoint.parquet"))


def test_files_of_attempts_that_failed_are_cleaned_and_no_others(lake: DeltaLake) -> None:
    sink = lake.sink()
    feed = Feed(sink)
    feed.history(1, [order(1)])
    feed.stage_history(feed.token(0, 2), [order(2)])
    directory = Path(lake.place, "public.orders")
    assert len(list(directory.glob("*.parquet"))) == 2
    assert sink.clean(ORDERS) == []
    assert len(sink.clean(ORDERS, retention_hours=0)) == 1
    assert lake.statuses() == {1: "new"}


def test_a_token_that_another_process_committed_is_found_with_what_was_known_before(lake: DeltaLake) -> None:
    feed = Feed(lake.sink())
    feed.history(1, [order(1)])
    feed.changes(1, (INSERT, order(2)))
    staged = feed.stage_changes(feed.token(2), [(INSERT, order(3))])
    token = deltalake.Transaction("headwater/q/public.orders/changes", 2)
    lake.table().delete(commit_properties=deltalake.CommitProperties(app_transactions=[token]))
    assert not feed.sink.commit(feed.table, feed.token(2), [staged])
    assert feed.sink.committed(feed.table, feed.query, feed.backfill) == Committed(2, 1)
    assert feed.changes(3, (INSERT, order(4)))
    assert lake.statuses() == {4: "new"}


def test_a_batch_of_changes_does_not_list_the_files_that_the_table_has(
    lake: DeltaLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(lake.sink(Mode.CHANGES))
    feed.history(1, [order(1)])
    monkeypatch.delattr(delta_log.DeltaLog, "files")
    for epoch in (1, 2):
        assert feed.changes(epoch, (INSERT, order(epoch + 1)))
    assert len(lake.files()) == 3
