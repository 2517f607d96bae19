"""Forks, compaction and provenance, on every store."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.store.journal.backends import Backend

from headwater.errors import InputError
from headwater.journal.entry import EMPTY, Entry, new_id
from headwater.journal.errors import BoundaryNotFoundError, InvalidEntryError, SegmentNotFoundError
from headwater.journal.fork import (
    Branch,
    children,
    compact,
    ensure_head_or_fork,
    fork,
    fork_at,
    lineage,
    origin_of,
    start,
)
from headwater.journal.run_state import replay
from headwater.journal.store import Store


def some_run(store: Store) -> Branch:
    branch = start(store, "shop", {"sink": "delta"})
    for kind, fields in (
        ("run_started", {}),
        ("notice", {"n": 1}),
        ("metric", {"rows": 1}),
        ("notice", {"n": 2}),
        ("metric", {"rows": 2}),
        ("run_completed", {"interrupted": False}),
    ):
        head = store.append(branch.session, branch.segment, Entry(kind, fields))
    return replace(branch, head=head)


def state_of(store: Store, branch: Branch) -> object:
    state = replay(store.read_all(branch.session, branch.segment))
    return replace(state, session_id=None, segment_id=None, entries_count=0)


def test_a_fork_is_a_new_session_with_one_entry_and_the_same_state(backend: Backend) -> None:
    """Scenario 35; the parent is not written."""
    store = backend.store
    parent = some_run(store)
    before = backend.bytes_of(parent.session, parent.segment)
    child = fork(store, parent.session, parent.segment)
    assert child.session != parent.session
    assert store.read_entry_count(child.session, child.segment) == 1
    assert state_of(store, child) == state_of(store, parent)
    assert backend.bytes_of(parent.session, parent.segment) == before
    origin = origin_of(store, child.session, child.segment)
    assert origin is not None
    assert (origin.segment, origin.head) == (parent.segment, parent.head)


def test_a_fork_at_an_entry_has_the_state_of_that_moment(backend: Backend) -> None:
    """Scenarios 36, g: same session, one entry, both listed, full content compared."""
    store = backend.store
    parent = some_run(store)
    before = backend.bytes_of(parent.session, parent.segment)
    entries = store.read_all(parent.session, parent.segment)
    for seq in range(1, len(entries) + 1):
        child = fork_at(store, parent.session, parent.segment, seq)
        assert child.session == parent.session
        assert store.read_entry_count(child.session, child.segment) == 1
        expected = replace(replay(entries[:seq]), session_id=None, segment_id=None, entries_count=0)
        assert state_of(store, child) == expected
        origin = origin_of(store, child.session, child.segment)
        assert origin is not None
        assert (origin.relation, origin.head) == ("forked_from", entries[seq - 1].head)
    assert len(store.list_segments(parent.session)) == len(entries) + 1
    assert backend.bytes_of(parent.session, parent.segment) == before


def test_a_fork_at_zero_is_before_anything_but_the_start(store: Store) -> None:
    """Scenario g."""
    parent = some_run(store)
    child = fork_at(store, parent.session, parent.segment, 0)
    state = replay(store.read_all(child.session, child.segment))
    assert (state.pipeline, state.history) == ("shop", ())
    bare = new_id()
    store.create_segment(parent.session, bare, [Entry("notice")])
    child = fork_at(store, parent.session, bare, 0)
    assert replay(store.read_all(child.session, child.segment)).history == ()
    origin = origin_of(store, child.session, child.segment)
    assert origin is not None
    assert origin.head == EMPTY


def test_a_fork_at_an_unknown_entry_is_refused(store: Store) -> None:
    """Scenario g: never a fork with false provenance."""
    parent = some_run(store)
    with pytest.raises(BoundaryNotFoundError) as caught:
        fork_at(store, parent.session, parent.segment, 99)
    assert caught.value.current == parent.head
    with pytest.raises(InputError):
        fork_at(store, parent.session, parent.segment, -1)
    store.append(parent.session, parent.segment, [Entry("a"), Entry("b")])
    with pytest.raises(InvalidEntryError):
        fork_at(store, parent.session, parent.segment, parent.head.seq + 1)
    with pytest.raises(SegmentNotFoundError):
        fork(store, parent.session, new_id())
    assert store.list_segments(parent.session) == [parent.segment]


def test_an_unmoved_head_needs_no_fork(store: Store) -> None:
    """Scenario h."""
    branch = some_run(store)
    state = replay(store.read_all(branch.session, branch.segment))
    assert ensure_head_or_fork(store, branch.session, branch.segment, branch.head, state) == branch
    assert store.list_segments(branch.session) == [branch.segment]


def test_a_foreign_append_makes_the_writer_go_on_in_a_fork(store: Store) -> None:
    """Scenario 37: the foreign entry stays in the source only; the source gets no mark."""
    branch = start(store, "shop")
    state = replay(store.read_all(branch.session, branch.segment))
    store.append(branch.session, branch.segment, Entry("foreign"))
    moved = ensure_head_or_fork(store, branch.session, branch.segment, branch.head, state)
    assert moved.session == branch.session
    assert moved.segment != branch.segment
    assert [e.kind for e in store.read_all(branch.session, branch.segment)] == ["segment_start", "foreign"]
    origin = origin_of(store, moved.session, moved.segment)
    assert origin is not None
    assert (origin.segment, origin.head) == (branch.segment, branch.head)


def test_a_head_that_went_back_makes_a_fork_too(store: Store) -> None:
    """Scenario h: smaller count; and gone is not found."""
    branch = some_run(store)
    state = replay(store.read_all(branch.session, branch.segment))
    store.truncate(branch.session, branch.segment, 2)
    assert ensure_head_or_fork(store, branch.session, branch.segment, branch.head, state).segment != branch.segment
    store.delete_session(branch.session)
    with pytest.raises(SegmentNotFoundError):
        ensure_head_or_fork(store, branch.session, branch.segment, branch.head, state)


def test_a_fork_of_a_fork_names_its_direct_parent(backend: Backend) -> None:
    """Scenario 38: ancestors unchanged."""
    store = backend.store
    root = some_run(store)
    child = fork_at(store, root.session, root.segment, 3)
    grandchild = fork_at(store, child.session, child.segment, 1)
    assert [origin.segment for origin in lineage(store, grandchild.session, grandchild.segment)] == [
        child.segment,
        root.segment,
    ]
    assert lineage(store, root.session, root.segment) == []
    assert [branch.segment for branch in children(store, root.session, root.segment)] == [child.segment]
    assert [branch.segment for branch in children(store, child.session, child.segment)] == [grandchild.segment]
    assert state_of(store, grandchild) == state_of(store, child)


def test_a_lineage_ends_at_an_ancestor_that_was_deleted(store: Store) -> None:
    root = some_run(store)
    child = fork(store, root.session, root.segment)
    grandchild = fork(store, child.session, child.segment)
    store.delete_session(root.session)
    assert [o.segment for o in lineage(store, grandchild.session, grandchild.segment)] == [child.segment, root.segment]


def test_children_in_other_sessions_are_found(store: Store) -> None:
    root = some_run(store)
    first = fork(store, root.session, root.segment)
    second = fork_at(store, root.session, root.segment, 2)
    found = children(store, root.session, root.segment)
    assert [branch.segment for branch in found] == [first.segment, second.segment]


def test_compaction_goes_on_in_the_same_session(backend: Backend) -> None:
    """Scenario a: lineage, session kept, state restored; the old one stays readable."""
    store = backend.store
    old = some_run(store)
    before = backend.bytes_of(old.session, old.segment)
    state = replay(store.read_all(old.session, old.segment))
    short = replace(state, history=state.history[-1:])
    new = compact(store, old.session, old.segment, short)
    assert new.session == old.session
    assert new.head.seq == 1
    folded = replay(store.read_all(new.session, new.segment))
    assert (folded.history, folded.interrupted) == (short.history, False)
    origin = origin_of(store, new.session, new.segment)
    assert origin is not None
    assert (origin.relation, origin.segment, origin.head) == ("compacted_from", old.segment, old.head)
    assert backend.bytes_of(old.session, old.segment) == before
    assert origin_of(store, old.session, old.segment) is None
