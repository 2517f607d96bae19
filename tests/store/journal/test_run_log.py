"""The writer of a run: order of commit, forks, rollback, rewind, subscribers.

Chat turns are runs here (table in test_replay.py); the worker is `RunLog`, the pod metadata is `Pointers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.journal import Entry, Pointer, Pointers, RunLog, Store, new_id, origin_of
from headwater.journal.errors import (
    CorruptError,
    HeadConflictError,
    InvalidEntryError,
    InvalidNameError,
    SegmentNotFoundError,
    SerialisationError,
    StoreIoError,
)
from headwater.journal.subscription import Reset


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
    subscription = log.subscribe()
    log.begin("schedule")
    assert log.segment != old
    assert kinds(store, log) == ["segment_start", "run_started"]
    origin = origin_of(store, log.session, log.segment)
    assert origin is not None
    assert origin.segment == old
    assert isinstance(subscription.take(), Reset)
    assert isinstance(subscription.take(), Entry)


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
    """Scenario 40: disk, state, mirror and new subscribers are clean; the run before stays."""
    log = RunLog.start(store, "shop")
    log.begin("operator", {"name": "first"})
    log.record("barrier", {"epoch": 1})
    log.record("run_completed", {"interrupted": False})
    before, state = kinds(store, log), log.state
    mark = log.begin("operator", {"name": "second"})
    assert log.rollback(mark)
    assert kinds(store, log) == before
    assert log.state == state
    assert [entry.kind for entry in log.subscribe().snapshot] == before


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
    """Scenario 42: not counted, not told, and the sink is not called."""
    log = RunLog.start(store, "shop")
    log.begin("schedule")
    subscription = log.subscribe()
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
    assert subscription.take() is None


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


def test_a_subscriber_gets_snapshot_and_news_without_gap_or_overlap(store: Store) -> None:
    """Scenario 47."""
    log = RunLog.start(store, "shop")
    log.record("barrier", {"epoch": 1})
    subscription = log.subscribe()
    log.record("barrier", {"epoch": 2})
    assert [entry.seq for entry in subscription.snapshot] == [1, 2]
    news = subscription.take(timeout=1)
    assert isinstance(news, Entry)
    assert news.seq == 3
    assert subscription.take() is None
    log.compact(log.state)
    reset = subscription.take()
    assert isinstance(reset, Reset)
    assert [entry.kind for entry in reset.entries] == ["segment_start"]
    log.unsubscribe(subscription)
    log.record("barrier", {"epoch": 3})
    assert subscription.take() is None


def test_pointers_name_what_is_current(tmp_path: Path) -> None:
    """Scenario 15: none, reserved, replaced, deleted twice, listed."""
    pointers = Pointers(tmp_path / "pointers")
    session, segment = new_id(), new_id()
    assert pointers.read("main") is None
    assert pointers.names() == []
    pointers.write("main", Pointer(session))
    assert pointers.read("main") == Pointer(session, None)
    pointers.write("main", Pointer(session, segment, {"title": "nightly"}))
    assert pointers.read("main") == Pointer(session, segment, {"title": "nightly"})
    assert (tmp_path / "pointers" / "main.json").exists()
    pointers.write("a name with spaces", Pointer(session))
    assert pointers.names() == ["a name with spaces", "main"]
    pointers.delete("main")
    pointers.delete("main")
    assert pointers.names() == ["a name with spaces"]


def test_an_update_of_a_pointer_keeps_what_it_does_not_touch(tmp_path: Path) -> None:
    """Scenarios 16, 39: reserved first, active later; labels stay."""
    pointers = Pointers(tmp_path)
    session, segment = new_id(), new_id()
    pointers.write("main", Pointer(session, None, {"peers": ["a", "b"]}))

    def activate(current: Pointer | None) -> Pointer:
        assert current is not None
        return Pointer(current.session, segment, current.labels)

    assert pointers.update("main", activate) == Pointer(session, segment, {"peers": ["a", "b"]})
    assert pointers.read("main") == Pointer(session, segment, {"peers": ["a", "b"]})


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b", ".hidden", "x" * 201, "\ud800"])
def test_pointer_names_are_file_names(tmp_path: Path, name: str) -> None:
    """Scenario 15."""
    pointers = Pointers(tmp_path)
    for call in (pointers.read, pointers.delete, lambda n: pointers.write(n, Pointer(new_id()))):
        with pytest.raises(InvalidNameError):
            call(name)


def test_a_damaged_pointer_is_told(tmp_path: Path) -> None:
    (tmp_path / "main.json").write_text("{")
    with pytest.raises(CorruptError):
        Pointers(tmp_path).read("main")
    with pytest.raises(InvalidNameError):
        Pointers(tmp_path).write("other", Pointer("not an id"))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"session": 5, "segment": null, "labels": {}}', "[]"])
def test_a_file_that_is_no_pointer_is_told_whatever_it_holds(tmp_path: Path, text: str) -> None:
    (tmp_path / "main.json").write_text(text)
    with pytest.raises(CorruptError):
        Pointers(tmp_path).read("main")


@pytest.mark.parametrize("labels", [{"a": object()}, {"a": "\ud800"}, {"a": float("nan")}])
def test_labels_that_are_not_json_are_refused_and_the_old_record_stays(tmp_path: Path, labels: dict[str, Any]) -> None:
    pointers = Pointers(tmp_path)
    pointers.write("main", before := Pointer(new_id()))
    with pytest.raises(SerialisationError):
        pointers.write("main", Pointer(new_id(), None, labels))
    assert pointers.read("main") == before
    assert pointers.names() == ["main"]
