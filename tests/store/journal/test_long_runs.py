"""A run of months: bounded memory, bounded state, forks that fit, and entries of any shape that brick nothing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.journal.backends import Backend
from tests.store.journal.memory_store import MemoryStore

from headwater.journal import (
    Entry,
    Limits,
    RunLog,
    Store,
    fork,
    fork_at,
    replay,
    run_log,
    run_state,
)
from headwater.journal.errors import HeadConflictError
from headwater.journal.run_state import Fold, RunKind


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small bounds, so that a short run shows what a long one does."""
    monkeypatch.setattr(run_state, "KEPT", 10)
    monkeypatch.setattr(run_state, "KEPT_COMMANDS", 3)
    monkeypatch.setattr(run_log, "MIRROR", 5)


@pytest.mark.usefixtures("short")
def test_what_a_run_keeps_in_memory_does_not_grow(store: Store) -> None:
    log = RunLog.start(store, "shop")
    for number in range(200):
        log.record("barrier", {"epoch": number})
        log.record("metric", {"rows": number})
        log.record("extension", {"domain": "lag", "payload": number})
    assert len(log.entries) == 5
    assert sum(map(len, (log._fold.history, log._fold.extensions, log._fold.metrics))) <= 60
    state = log.state
    assert [item.fields["epoch"] for item in state.history] == list(range(190, 200))
    assert (len(state.extensions), len(state.metrics), state.forgotten) == (10, 10, 570)
    assert state.entries_count == log.head.seq == 601
    assert RunLog.restore(store, log.segment).state == state


@pytest.mark.usefixtures("short")
def test_what_a_restart_needs_is_kept_however_old_it_is() -> None:
    """Open commits, the newest commands, the newest extension of each domain."""
    entries = [Entry("commit_started", {"sink": ["a"], "epoch": number}) for number in range(3)]
    entries += [Entry("commit_finished", {"sink": ["a"], "epoch": 1})]
    entries += [Entry("command", {"name": number}) for number in range(5)]
    entries += [Entry("extension", {"domain": "plan", "payload": number}) for number in range(2)]
    entries += [Entry("extension", {"domain": "lag"}), Entry("barrier")] * 100
    state = replay(entries)
    assert [item.fields["epoch"] for item in state.open_commits] == [0, 2]
    assert [item.fields["name"] for item in state.commands] == [2, 3, 4]
    assert [item.fields.get("payload") for item in state.extensions if item.fields["domain"] == "plan"] == [1]


@pytest.mark.usefixtures("short")
def test_the_fold_gives_the_same_state_wherever_it_was_cut_short() -> None:
    entries = [Entry(kind, {"epoch": n, "sink": "a"}, seq=n) for n in range(1, 150) for kind in ("commit_started",)]
    entries += [Entry("commit_finished", {"epoch": n, "sink": "a"}) for n in range(1, 100)]
    fold = Fold()
    for entry in entries:
        fold.add(entry)
        assert fold.copy().state() == fold.state()
    assert len(fold.state().open_commits) == 50


def test_a_fork_of_a_long_run_fits_into_one_entry(store: Store) -> None:
    log = RunLog.start(store, "shop")
    store.append(log.session, log.segment, [Entry("barrier", {"epoch": n, "pad": "p" * 9000}) for n in range(2000)])
    child = fork(store, log.session, log.segment)
    state = RunLog(store, child.session, child.segment).state
    assert state.history[-1].fields["epoch"] == 1999
    assert state.forgotten >= 1000


def test_a_fork_carries_state_up_to_the_limit_of_an_entry(backend: Backend) -> None:
    store = backend.limited(Limits(entry_bytes=20_000))
    log = RunLog.start(store, "shop")
    for number in range(30):
        log.record("barrier", {"epoch": number, "pad": "p" * 1500})
    child = fork_at(store, log.session, log.segment, 31)
    state = RunLog(store, child.session, child.segment).state
    assert state.history[-1].fields["epoch"] == 29
    assert len(state.history) + state.forgotten == 30


def test_the_deepest_entry_can_be_forked(store: Store) -> None:
    deep: Any = 1
    for _ in range(126):
        deep = [deep]
    log = RunLog.start(store, "shop")
    log.record("barrier", {"deep": deep})
    child = fork(store, log.session, log.segment)
    assert RunLog(store, child.session, child.segment).state.history[0].fields == {"deep": deep}


SHAPES: list[Any] = [5, "text", [5], [[]], {"a": 5}, [{"kind": 5}], None, True]


@pytest.mark.parametrize("kind", [kind.value for kind in RunKind])
def test_no_shape_of_an_entry_makes_its_run_impossible_to_restore(kind: str) -> None:
    with MemoryStore() as store:
        names = ("seqs", "extensions", "state", "config", "epoch_count", "sink", "epoch", "domain", "interrupted")
        log = RunLog.start(store, "shop")
        for shape in SHAPES:
            for name in names:
                log.record(kind, {name: shape})
            for inner in ("history", "extensions", "metrics", "epoch_count", "forgotten"):
                log.record(kind, {"state": {inner: shape}})
        log.begin("operator", {"name": "go"})
        restored = RunLog.restore(store, log.segment)
        assert restored.state == log.state
        fork(store, log.session, log.segment)


def test_the_caller_may_go_on_changing_the_fields_that_it_gave(store: Store) -> None:
    log = RunLog.start(store, "shop")
    fields: dict[str, Any] = {"epoch": 1, "tables": ("a", "b")}
    log.record("barrier", fields)
    fields["epoch"] = 2
    log.record("barrier", fields)
    assert [item.fields["epoch"] for item in log.state.history] == [1, 2]
    assert log.state == RunLog.restore(store, log.segment).state
    assert log.entries == store.read_all(log.session, log.segment)


@pytest.mark.usefixtures("short")
def test_a_long_run_without_output_is_rolled_back_from_disk(store: Store) -> None:
    log = RunLog.start(store, "shop")
    before = log.state
    mark = log.begin("operator", {"name": "run"})
    for number in range(40):
        log.record("config_changed", {"config": {"n": number}})
    assert log.rollback(mark)
    assert log.state == before == RunLog.restore(store, log.segment).state
    assert log.head == store.head(log.session, log.segment)
    assert log.entries == store.read_all(log.session, log.segment)
    log.begin("operator", {"name": "again"})
    assert log.segment == mark.segment


def test_a_mark_that_was_rewound_over_is_too_late(store: Store) -> None:
    """The entries that stand there now are others; they must not be cut."""
    log = RunLog.start(store, "shop")
    log.begin("operator", {"name": "first"})
    mark = log.begin("operator", {"name": "second"})
    log.rewind(log.rewind_targets()[-1])
    for _ in range(6):
        log.record("config_changed", {"config": {}})
    assert not log.rollback(mark)
    assert log.head.seq == 7


def test_a_compaction_does_not_swallow_entries_of_others(store: Store) -> None:
    log = RunLog.start(store, "shop")
    store.append(log.session, log.segment, Entry("foreign"))
    with pytest.raises(HeadConflictError):
        log.compact(log.state)
    assert len(store.list_segments(log.session)) == 1
