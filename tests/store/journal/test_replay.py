"""The fold of a run's entries. Pure: entries in, state out.

The reference scenarios speak of chat turns; here they are runs of a pipeline:

=====================================  =====================================================
chat turn                              run of a pipeline
=====================================  =====================================================
segment_start, system prompt           segment_start, pipeline
invoke                                 run_started
user_input                             command
assistant_item, tool call, result      phase_changed
system_item                            notice
turn_end, turn_count                   no such part: the log store counts epochs
run_completed / run_errored            run_completed / run_failed
llm_usage                              metric
config_changed                         no such part: a run has one configuration
=====================================  =====================================================
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.journal.codec import decode, lines, prepare
from headwater.journal.entry import EMPTY, Entry, Limits
from headwater.journal.run_state import Item, RunKind, RunState, replay

Pair = tuple[str, dict[str, Any]]


def run(*pairs: Pair) -> RunState:
    return replay([Entry(kind, fields, seq=seq) for seq, (kind, fields) in enumerate(pairs, start=1)])


START: Pair = ("segment_start", {"session_id": "s", "segment_id": "g", "pipeline": "shop", "config": {"sink": "delta"}})
STARTED: Pair = ("run_started", {"trigger": "schedule"})


def test_no_entries_give_the_empty_state() -> None:
    """Scenario 17."""
    assert replay([]) == RunState()


def test_a_start_sets_ids_pipeline_and_config() -> None:
    """Scenario 18."""
    state = run(START)
    assert (state.session_id, state.segment_id, state.pipeline) == ("s", "g", "shop")
    assert state.config == {"sink": "delta"}
    assert state.entries_count == 1


def test_a_whole_run_is_folded() -> None:
    """Scenarios 1, 19: two items of history, not interrupted, all entries counted."""
    assert run(START, STARTED, ("notice", {"text": "x"})).interrupted
    state = run(
        START,
        STARTED,
        ("phase_changed", {"to": "live"}),
        ("notice", {"text": "x"}),
        ("metric", {"rows": 1}),
        ("run_completed", {"interrupted": False, "result": "finished"}),
    )
    assert [item.kind for item in state.history] == ["phase_changed", "notice"]
    assert (state.interrupted, state.entries_count) == (False, 6)


def test_a_run_without_an_end_is_interrupted() -> None:
    """Scenarios 20, 26: and run_started changes nothing else."""
    before, after = run(START), run(START, STARTED)
    assert after.interrupted
    assert not before.interrupted
    assert (before.history, before.config) == (after.history, after.config)


def test_commands_and_notices_keep_their_order() -> None:
    """Scenario 21."""
    pairs: list[Pair] = [
        ("command", {"name": "pause"}),
        ("notice", {"event": "sink_restarts"}),
        ("command", {"name": "resume"}),
        ("notice", {"event": "sink_starts"}),
    ]
    state = run(*pairs)
    assert [(item.kind, item.fields) for item in state.history] == pairs


@pytest.mark.parametrize(("fields", "interrupted"), [({}, True), ({"interrupted": False}, False)])
def test_a_failed_run_says_whether_it_can_be_resumed(fields: dict[str, object], interrupted: bool) -> None:
    """Scenario f."""
    state = run(START, STARTED, ("run_failed", {"message": "no disk", **fields}))
    assert state.interrupted is interrupted
    assert state.history[-1].kind == "run_failed"


def test_notices_are_returned_verbatim() -> None:
    """Scenarios 30, f."""
    state = run(("notice", {"text": "exactly\nthis", "level": 3}))
    assert state.history == (Item("notice", {"text": "exactly\nthis", "level": 3}),)


def test_metrics_and_unknown_kinds_change_nothing_and_are_counted() -> None:
    """Scenario 23: figures stay in the segment."""
    state = run(START, ("from_the_future", {"x": 1}), ("metric", {"rows": 3}))
    assert (state.entries_count, state.history) == (3, ())


def test_a_paused_run_is_interrupted() -> None:
    """Scenario 34."""
    assert run(START, STARTED, ("run_completed", {"interrupted": True, "result": "paused"})).interrupted


def test_a_carried_state_replaces_everything() -> None:
    """Scenario 10 of the weak points: history and interruption are not lost by a fork."""
    parent = run(START, STARTED, ("notice", {"n": 1}))
    carried = json.loads(json.dumps(parent.to_json()))
    child = run(("segment_start", {"pipeline": "shop", "config": {"sink": "delta"}, "state": carried}))
    for name in ("pipeline", "config", "history", "interrupted"):
        assert getattr(child, name) == getattr(parent, name), name


@pytest.mark.parametrize("kind", list(RunKind))
def test_every_kind_goes_through_its_line_unchanged(kind: RunKind) -> None:
    """Scenarios 28, 29: the tag names on disk are these, for ever."""
    fields = {"text": "é", "binary": "aGk=", "nested": {"a": [1, None]}, "flag": True}
    data, head = lines([prepare(Entry(kind, fields, ts=5), Limits())], EMPTY, 0)
    entry = decode(data[:-1], 1, 0)
    assert entry == Entry(kind.value, fields, ts=5)
    assert entry.head == head
    assert f'"kind":"{kind.value}"'.encode() in data
    assert kind.value == kind.name.lower()
