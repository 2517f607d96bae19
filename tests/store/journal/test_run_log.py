"""The writer of a run: order of commit, restore, forks.

Chat turns are runs here (table in test_replay.py); the worker is `RunLog`.
"""

from __future__ import annotations

from typing import Any

import pytest

from headwater.journal.entry import Entry, new_id
from headwater.journal.errors import (
    HeadConflictError,
    InvalidEntryError,
    SegmentNotFoundError,
    StoreIoError,
)
from headwater.journal.fork import origin_of
from headwater.journal.run_log import RunLog
from headwater.journal.store import Store


def kinds(store: Store, log: RunLog) -> list[str]:
    return [entry.kind for entry in store.read_all(log.session, log.segment)]


def test_one_run_writes_start_command_notice_metric_and_end(store: Store) -> None:
    """Scenarios 31, 33."""
    log = RunLog.start(store, "shop", {"sink": "delta"})
    log.begin("operator", pid=5)
    log.record("command", {"name": "run"})
    log.record("notice", {"event": "sink_restarts"})
    log.record("metric", {"rows": 1})
    log.record("run_completed", {"interrupted": False})
    assert kinds(store, log) == [
        "segment_start",
        "run_started",
        "command",
        "notice",
        "metric",
        "run_completed",
    ]


def test_a_restored_run_equals_the_live_one(store: Store) -> None:
    """Scenarios 32, 34: a paused run is interrupted."""
    live = RunLog.start(store, "shop", {"sink": "delta"})
    live.begin("schedule")
    live.record("notice", {"event": "sink_restarts"})
    live.record("run_completed", {"interrupted": True, "result": "paused"})
    restored = RunLog(store, live.session, live.segment)
    assert restored.state == live.state
    assert restored.head == live.head
    assert restored.state.interrupted
    assert restored.state.entries_count == store.read_entry_count(live.session, live.segment)


def test_an_unknown_or_empty_segment_cannot_be_restored(store: Store) -> None:
    """Scenario 45."""
    with pytest.raises(SegmentNotFoundError):
        RunLog(store, new_id(), new_id())
    session, empty, headless = new_id(), new_id(), new_id()
    store.create_segment(session, empty)
    store.create_segment(session, headless, [Entry("notice")])
    for segment in (empty, headless):
        with pytest.raises(InvalidEntryError):
            RunLog(store, session, segment)


def test_a_foreign_append_is_noticed_and_the_next_run_goes_on_in_a_fork(store: Store) -> None:
    """Scenario 39: drift across runs."""
    log = RunLog.start(store, "shop")
    old = log.segment
    store.append(log.session, old, Entry("foreign"))
    with pytest.raises(HeadConflictError):
        log.record("notice")
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
    log.record("metric", {"rows": 5})
    log.record("run_completed", {"interrupted": False})
    segment = log.segment
    log.begin("schedule")
    assert log.segment == segment


def test_an_append_that_fails_stops_the_run_before_it_acts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 42: not counted, and the sink is not called."""
    log = RunLog.start(store, "shop")
    log.begin("schedule")
    before, head = log.state, log.head
    committed: list[int] = []

    def broken(*_: Any, **__: Any) -> None:
        raise StoreIoError("write to", "x", OSError(5, "broken"))

    def commit() -> None:
        log.record("phase_changed", {"sink": "a", "to": "live"})
        committed.append(1)

    monkeypatch.setattr(store, "append", broken)
    with pytest.raises(StoreIoError):
        commit()
    assert committed == []
    assert (log.state, log.head) == (before, head)
