"""A run of months: bounded memory, bounded state, forks that fit, and entries of any shape that brick nothing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.store.journal.backends import Backend
from tests.store.journal.memory_store import MemoryStore

from headwater.journal import run_state
from headwater.journal.entry import Entry, Limits
from headwater.journal.errors import HeadConflictError
from headwater.journal.fork import fork, fork_at
from headwater.journal.run_log import RunLog
from headwater.journal.run_state import RunKind
from headwater.journal.store import Store


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small bounds, so that a short run shows what a long one does."""
    monkeypatch.setattr(run_state, "KEPT", 10)


@pytest.mark.usefixtures("short")
def test_what_a_run_keeps_in_memory_does_not_grow(store: Store) -> None:
    log = RunLog.start(store, "shop")
    for number in range(200):
        log.record("notice", {"epoch": number})
        log.record("metric", {"rows": number})
    state = log.state
    assert [item.fields["epoch"] for item in state.history] == list(range(190, 200))
    assert (len(state.history), state.forgotten) == (10, 190)
    assert state.entries_count == log.head.seq == 401
    assert RunLog(store, log.session, log.segment).state == state
    child = fork(store, log.session, log.segment)
    assert RunLog(store, child.session, child.segment).state.forgotten == 190


def test_a_fork_of_a_long_run_fits_into_one_entry(store: Store) -> None:
    log = RunLog.start(store, "shop")
    store.append(log.session, log.segment, [Entry("notice", {"epoch": n, "pad": "p" * 9000}) for n in range(2000)])
    child = fork(store, log.session, log.segment)
    state = RunLog(store, child.session, child.segment).state
    assert state.history[-1].fields["epoch"] == 1999
    assert state.forgotten >= 1000


def test_a_fork_carries_state_up_to_the_limit_of_an_entry(backend: Backend) -> None:
    store = backend.limited(Limits(entry_bytes=20_000))
    log = RunLog.start(store, "shop")
    for number in range(30):
        log.record("notice", {"epoch": number, "pad": "p" * 1500})
    child = fork_at(store, log.session, log.segment, 31)
    state = RunLog(store, child.session, child.segment).state
    assert state.history[-1].fields["epoch"] == 29
    assert len(state.history) + state.forgotten == 30


def test_the_deepest_entry_can_be_forked(store: Store) -> None:
    deep: Any = 1
    for _ in range(126):
        deep = [deep]
    log = RunLog.start(store, "shop")
    log.record("notice", {"deep": deep})
    child = fork(store, log.session, log.segment)
    assert RunLog(store, child.session, child.segment).state.history[0].fields == {"deep": deep}


SHAPES: list[Any] = [5, "text", [5], [[]], {"a": 5}, [{"kind": 5}], None, True]


@pytest.mark.parametrize("kind", [kind.value for kind in RunKind])
def test_no_shape_of_an_entry_makes_its_run_impossible_to_restore(kind: str) -> None:
    with MemoryStore() as store:
        names = ("state", "config", "pipeline", "session_id", "interrupted")
        log = RunLog.start(store, "shop")
        for shape in SHAPES:
            for name in names:
                log.record(kind, {name: shape})
            for inner in ("history", "interrupted", "forgotten"):
                log.record(kind, {"state": {inner: shape}})
        log.begin("operator")
        restored = RunLog(store, log.session, log.segment)
        assert restored.state == log.state
        fork(store, log.session, log.segment)


def test_the_caller_may_go_on_changing_the_fields_that_it_gave(store: Store) -> None:
    log = RunLog.start(store, "shop")
    fields: dict[str, Any] = {"epoch": 1, "tables": ("a", "b")}
    log.record("notice", fields)
    fields["epoch"] = 2
    log.record("notice", fields)
    assert [item.fields["epoch"] for item in log.state.history] == [1, 2]
    assert log.state == RunLog(store, log.session, log.segment).state


def test_a_compaction_does_not_swallow_entries_of_others(store: Store) -> None:
    log = RunLog.start(store, "shop")
    store.append(log.session, log.segment, Entry("foreign"))
    with pytest.raises(HeadConflictError):
        log.compact(log.state)
    assert len(store.list_segments(log.session)) == 1
