"""The writer of a run: order of commit, forks, rollback, rewind.

Chat turns are runs here (table in test_replay.py); the worker is `RunLog`.
"""

from __future__ import annotations

from typing import Any

import pytest

from headwater.journal import Entry, RunLog, Store, new_id, origin_of
from headwater.journal.errors import (
    HeadConflictError,
    InvalidEntryError,
    SegmentNotFoundError,
    StoreIoError,
)


def kinds(store: Store, log: RunLog) -> list[str]:
    return [entry.kind for entry in store.read_all(log.session, log.segment)]


def test_one_run_writes_start_command_barrier_epoch_and_end(store: Store) -> None:
    """Scenarios 31, 33: and a commit with its result."""
    log = RunLog.start(store, "shop", {"sink": "delta"})
    log.begin("operator", {"name": "run"})
    log.record("barrier", {"epoch": 1})
    log.record("commit_started", {"sink": "delta", "epoch": 1})
    log.record("commit_finished", {"sink": "delta", "epoch": 1, "outcome": "committed"})
    log.record("epoch_end", {"epoch_count": 1})
    log.record("run_completed", {"interrupted": False})
    assert kinds(store, log) == [
        "segment_start",
        "run_started",
        "command",
        "barrier",
        "commit_started",
        "commit_finished",
        "epoch_end",
        "run_completed",
    ]


def test_a_restored_run_equals_the_live_one(store: Store) -> None:
    """Scenarios 32, 34: by segment id alone; a paused run is interrupted."""
    live = RunLog.start(store, "shop", {"sink": "delta"})
    live.begin("schedule")
    live.record("barrier", {"epoch": 1})
    live.record("epoch_end", {"epoch_count": 1})
    live.record("run_completed", {"interrupted": True, "result": "paused"})
    restored = RunLog.restore(store, live.segment)
    assert restored.state == live.state
    assert restored.head == live.head
    assert restored.entries == live.entries
    assert restored.state.interrupted
    assert restored.state.entries_count == store.read_entry_count(live.session, live.segment)


def test_an_unknown_or_empty_segment_cannot_be_restored(store: Store) -> None:
    """Scenario 45."""
    with pytest.raises(SegmentNotFoundError):
        RunLog.restore(store, new_id())
    session, empty, headless = new_id(), new_id(), new_id()
    store.create_segment(session, empty)
    store.create_segment(session, headless, [Entry("barrier")])
    for segment in (empty, headless):
        with pytest.raises(InvalidEntryError):
            RunLog(store, session, segment)


def test_a_foreign_append_is_noticed_and_the_next_run_goes_on_in_a_fork(store: Store) -> None:
    """Scenario 39: drift across runs."""
    log = RunLog.start(store, "shop")
    old = log.segment
    store.append(log.session, old, Entry("foreign"))
    with pytest.raises(HeadConflictError):
        log.record("barrier")
    log.begin("schedule")
    assert log.segment != old
    assert kinds(store, log) == ["segment_start", "run_started"]
    origin = origin_of(store, log.session, log.segment)
    assert origin is not None
    assert origin.segment == old


def test_a_background_job_that_shares_the_log_makes_no_fork(store: Store) -> None:
    """Scenario 39."""
    log = RunLog.start(store, "shop")
    log.begin("schedule")
    assert log.metric({"rows": 5})
    log.record("run_completed", {"interrupted": False})
    segment = log.segment
    log.begin("schedule")
    assert log.segment == segment


def test_a_run_that_did_nothing_is_rolled_back(store: Store) -> None:
    """Scenario 40: disk, state, mirror are clean; the run before stays."""
    log = RunLog.start(store, "shop")
    log.begin("operator", {"name": "first"})
    log.record("barrier", {"epoch": 1})
    log.record("run_completed", {"interrupted": False})
    before, state = kinds(store, log), log.state
    mark = log.begin("operator", {"name": "second"})
    assert log.rollback(mark)
    assert kinds(store, log) == before
    assert log.state == state
    assert kinds(store, log) == before


@pytest.mark.parametrize("kind", ["barrier", "commit_started", "epoch_end", "phase_changed"])
def test_a_run_that_did_something_is_not_rolled_back(store: Store, kind: str) -> None:
    """Scenarios 40, e: commands and notices are no output, these are."""
    log = RunLog.start(store, "shop")
    mark = log.begin("operator", {"name": "run"})
    log.record(kind)
    assert not log.rollback(mark)
    assert kinds(store, log)[-1] == kind


def test_a_rollback_keeps_what_a_background_job_wrote_in_between(store: Store) -> None:
    """Scenario dd."""
    log = RunLog.start(store, "shop")
    mark = log.begin("operator", {"name": "run"})
    log.metric({"rows": 5})
    log.record("notice", {"text": "background"})
    assert log.rollback(mark)
    assert kinds(store, log)[-3:] == ["metric", "notice", "rollback"]
    assert not log.state.interrupted
    assert log.state.commands == ()
    assert [item.fields["rows"] for item in log.state.metrics] == [5]
    assert RunLog.restore(store, log.segment).state == log.state


def test_a_rollback_that_fails_on_disk_changes_nothing_in_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog.start(store, "shop")
    mark = log.begin("operator", {"name": "run"})
    before = list(log.entries)

    def broken(*_: Any, **__: Any) -> None:
        raise StoreIoError("truncate", "x", OSError(5, "broken"))

    monkeypatch.setattr(store, "truncate", broken)
    with pytest.raises(StoreIoError):
        log.rollback(mark)
    assert log.entries == before


def test_a_mark_of_another_segment_is_too_late(store: Store) -> None:
    log = RunLog.start(store, "shop")
    mark = log.begin("schedule")
    log.compact(log.state)
    assert not log.rollback(mark)


def test_rewind_goes_back_before_a_command(store: Store) -> None:
    """Scenario 41: newest first, a warning when commits are not undone, the command is given back, stale is refused."""
    log = RunLog.start(store, "shop")
    for name in ("first", "second"):
        log.begin("operator", {"name": name})
        if name == "first":
            log.record("commit_started", {"sink": "a", "epoch": 1})
            log.record("commit_finished", {"sink": "a", "epoch": 1})
        log.record("run_completed", {"interrupted": False})
    second, first = log.rewind_targets()
    assert (first.entry.fields["name"], second.entry.fields["name"]) == ("first", "second")
    assert (first.effects, second.effects) == (True, False)
    log.record("notice", {"text": "meanwhile"})
    with pytest.raises(HeadConflictError):
        log.rewind(second)
    assert log.rewind(log.rewind_targets()[0]).fields["name"] == "second"
    assert kinds(store, log)[-1] == "run_completed"
    assert [item.fields["name"] for item in log.state.commands] == ["first"]


def test_an_append_that_fails_stops_the_run_before_it_acts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 42: not counted, and the sink is not called."""
    log = RunLog.start(store, "shop")
    log.begin("schedule")
    before, head = list(log.entries), log.head
    committed: list[int] = []

    def broken(*_: Any, **__: Any) -> None:
        raise StoreIoError("write to", "x", OSError(5, "broken"))

    def commit() -> None:
        log.record("commit_started", {"sink": "a", "epoch": 1})
        committed.append(1)

    monkeypatch.setattr(store, "append", broken)
    with pytest.raises(StoreIoError):
        commit()
    assert committed == []
    assert (log.entries, log.head) == (before, head)


def test_a_metric_that_fails_does_not_stop_the_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 43."""
    log = RunLog.start(store, "shop")

    def broken(*_: Any, **__: Any) -> None:
        raise StoreIoError("write to", "x", OSError(5, "broken"))

    monkeypatch.setattr(store, "append", broken)
    assert not log.metric({"rows": 1})
    assert not log.metric({"rows": object()})
    monkeypatch.undo()
    log.record("barrier")


def test_a_command_after_a_crash_first_closes_what_was_open(store: Store) -> None:
    """Scenario 44; a resume leaves it to the resumed run."""
    log = RunLog.start(store, "shop")
    log.begin("schedule")
    log.record("commit_started", {"sink": "a", "epoch": 7})
    resumed = RunLog.restore(store, log.segment)
    resumed.begin("resume")
    assert len(resumed.state.open_commits) == 1
    commanded = RunLog.restore(store, log.segment)
    commanded.begin("operator", {"name": "run"})
    assert commanded.state.open_commits == ()
    written = kinds(store, commanded)
    assert written[-4:] == ["commit_finished", "notice", "run_started", "command"]
    closing = commanded.entries[-4]
    assert closing.fields == {"sink": "a", "epoch": 7, "outcome": "unknown"}
