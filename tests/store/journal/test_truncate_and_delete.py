"""Conformance, part 2: truncate, delete, list, own, trace, follow."""

from __future__ import annotations

import threading
import time
from itertools import islice

import pytest
from tests.store.journal.backends import Backend

from headwater.errors import FencedError, InputError
from headwater.journal.entry import EMPTY, Entry, Rewound, new_id
from headwater.journal.errors import (
    BoundaryNotFoundError,
    CorruptError,
    HeadConflictError,
    InvalidEntryError,
    SegmentDeletedError,
    SegmentNotFoundError,
)
from headwater.journal.store import Store
from headwater.system.owner_lock import OwnedElsewhereError

Ids = tuple[str, str]


def fill(store: Store, ids: Ids, count: int) -> None:
    for number in range(1, count + 1):
        store.append(*ids, Entry("x", {"n": number}))


def test_truncate_keeps_exactly_the_prefix(backend: Backend, ids: Ids) -> None:
    """Scenario b: prefix, count, n == len, n = 0, n > len; the removed suffix is saved."""
    store = backend.store
    fill(store, ids, 5)
    whole = backend.bytes_of(*ids)
    heads = [e.head for e in store.read_all(*ids)]
    done = store.truncate(*ids, 3)
    assert done.head == heads[2] == store.head(*ids)
    assert [e.fields["n"] for e in store.read_all(*ids)] == [1, 2, 3]
    kept = backend.bytes_of(*ids)
    assert whole.startswith(kept)
    assert done.saved is not None
    assert backend.saved_bytes(done.saved) == whole[len(kept) :]
    assert store.truncate(*ids, 3).saved is None
    with pytest.raises(BoundaryNotFoundError) as caught:
        store.truncate(*ids, 4)
    assert caught.value.current == heads[2]
    with pytest.raises(InputError):
        store.truncate(*ids, -1)
    assert store.truncate(*ids, 0).head == EMPTY
    assert store.exists(*ids)
    assert store.read_entry_count(*ids) == 0
    store.append(*ids, Entry("again"))
    assert [(e.seq, e.kind) for e in store.read_all(*ids)] == [(1, "again")]
    with pytest.raises(SegmentNotFoundError):
        store.truncate(ids[0], new_id(), 0)


def test_truncate_refuses_a_stale_head(store: Store, ids: Ids) -> None:
    fill(store, ids, 2)
    stale = store.head(*ids)
    current = store.append(*ids, Entry("y"))
    with pytest.raises(HeadConflictError) as caught:
        store.truncate(*ids, 1, expected_head=stale)
    assert caught.value.current == current
    assert store.read_entry_count(*ids) == 3
    store.truncate(*ids, 1, expected_head=current)
    assert store.read_entry_count(*ids) == 1


def test_truncate_keeps_unknown_kinds_fields_and_batches(backend: Backend, ids: Ids) -> None:
    """Scenario t: bytes of the prefix stay as they are."""
    store = backend.store
    store.append(
        *ids, Entry("from_the_future", {"unknown": {"deep": [1, 2.5, "é"]}, "big": 2**80}), idempotency_key="k"
    )
    store.append(*ids, [Entry("a"), Entry("b")])
    before = backend.bytes_of(*ids)
    store.append(*ids, Entry("c"))
    store.truncate(*ids, 3)
    assert backend.bytes_of(*ids) == before
    assert store.append(*ids, Entry("again"), idempotency_key="k").seq == 1


def test_truncate_into_a_batch_is_refused(store: Store, ids: Ids) -> None:
    store.append(*ids, Entry("a"))
    store.append(*ids, [Entry("b"), Entry("c"), Entry("d")])
    for n in (2, 3):
        with pytest.raises(InvalidEntryError, match="Take 1 or 4"):
            store.truncate(*ids, n)
    store.truncate(*ids, 1)
    assert store.read_entry_count(*ids) == 1


def test_truncate_can_cut_damage_off(backend: Backend, ids: Ids) -> None:
    store = backend.store
    fill(store, ids, 4)
    whole = backend.bytes_of(*ids)
    lines = whole.splitlines(keepends=True)
    damaged = lines[0] + lines[1] + b"garbage\n" + lines[3]
    backend.put_bytes(*ids, damaged)
    done = store.truncate(*ids, 2)
    assert backend.bytes_of(*ids) == lines[0] + lines[1]
    assert done.saved is not None
    assert backend.saved_bytes(done.saved) == b"garbage\n" + lines[3]
    assert store.append(*ids, Entry("x")).seq == 3
    backend.put_bytes(*ids, lines[0] + b"garbage\n")
    with pytest.raises(CorruptError):
        store.truncate(*ids, 1, expected_head=EMPTY)
    store.truncate(*ids, 1)
    assert store.read_entry_count(*ids) == 1


def test_a_deleted_session_stays_deleted(backend: Backend, ids: Ids) -> None:
    """Scenarios 11, z: late appends and creates after a delete do not bring it back."""
    store = backend.store
    other = backend.open() if backend.name != "memory" else store
    other.append(*ids, Entry("x"))
    assert not store.delete_session(ids[0], modified_at=1)
    assert store.delete_session(ids[0], modified_at=store.session_modified_at(ids[0]))
    assert not store.delete_session(ids[0])
    for late in (store, other):
        with pytest.raises(SegmentDeletedError):
            late.append(*ids, Entry("late"))
        with pytest.raises(SegmentDeletedError):
            late.create_segment(*ids)
        with pytest.raises(SegmentDeletedError):
            late.read_all(*ids)
    assert not store.exists(*ids)
    assert store.list_segments(ids[0]) == []
    assert store.lookup_session_of(ids[1]) is None
    other.close() if other is not store else None


def test_deleting_a_session_leaves_the_others_alone(backend: Backend, ids: Ids) -> None:
    """Scenarios 11, 12."""
    store = backend.store
    other = new_id(), new_id()
    store.create_segment(*other)
    store.create_segment(ids[0], new_id())
    assert store.session_modified_at(ids[0]) is not None
    assert store.session_modified_at(new_id()) is None
    assert store.delete_session(ids[0])
    assert not store.delete_session(ids[0])
    assert store.session_modified_at(ids[0]) is None
    assert store.list_sessions() == [other[0]]
    assert store.list_segments(ids[0]) == []
    with pytest.raises(SegmentDeletedError):
        store.append(*ids, Entry("late"))
    with pytest.raises(SegmentDeletedError):
        store.create_segment(ids[0], new_id())
    assert not backend.reopen().exists(*ids)


def test_lists_are_most_recent_first(store: Store) -> None:
    """Scenarios 3, d (order)."""
    sessions = [new_id() for _ in range(5)]
    segments = {session: [new_id() for _ in range(3)] for session in sessions}
    for session in sessions:
        for segment in segments[session]:
            store.create_segment(session, segment)
    newest = sorted(sessions, reverse=True)
    assert store.list_sessions() == newest
    assert store.list_sessions(limit=2) == newest[:2]
    for session in sessions:
        assert store.list_segments(session) == sorted(segments[session], reverse=True)
    assert store.list_segments(new_id()) == []


def test_a_list_by_activity_starts_with_what_was_written_last(store: Store) -> None:
    first, second = (new_id(), new_id()), (new_id(), new_id())
    store.create_segment(*first)
    store.create_segment(*second)
    time.sleep(0.02)
    store.append(*first, Entry("x"))
    assert store.list_sessions() == [second[0], first[0]]
    assert store.list_sessions(order_by="active") == [first[0], second[0]]


def test_lookup_finds_the_session_of_a_segment(store: Store, ids: Ids) -> None:
    """Scenarios 8, bb: of two sessions with the same segment id the newest counts."""
    assert store.lookup_session_of(new_id()) is None
    assert store.lookup_session_of(ids[1]) == ids[0]
    newer = new_id()
    store.create_segment(newer, ids[1], [Entry("other")])
    assert store.lookup_session_of(ids[1]) == newer
    assert store.read_entry_count(*ids) == 0
    assert store.read_entry_count(newer, ids[1]) == 1


def test_a_session_has_one_owner_and_the_refusal_names_it(backend: Backend, ids: Ids) -> None:
    store = backend.store
    other = backend.open() if backend.name != "memory" else store
    with store.own(ids[0]) as held:
        with pytest.raises(OwnedElsewhereError) as caught:
            other.own(ids[0])
        assert isinstance(caught.value, FencedError)
        assert caught.value.owner == held.owner
        assert str(held.owner.pid) in str(caught.value)
        assert held.owner.host in str(caught.value)
        assert held.owner.started in str(caught.value)
        other.own(new_id()).release()
        store.append(*ids, Entry("x"))
    other.own(ids[0]).release()
    other.close() if other is not store else None


def test_traces_are_apart_from_the_log(store: Store, ids: Ids) -> None:
    """Scenario 6; aa: a trace without a log makes nothing appear."""
    store.append(*ids, Entry("x"))
    assert store.append_trace(*ids, {"kind": "lifecycle", "label": "opened"})
    assert store.append_trace(*ids, {"kind": "lifecycle", "label": "closed"})
    assert store.read_entry_count(*ids) == 1
    assert [r["label"] for r in store.iter_trace(*ids)] == ["opened", "closed"]
    lonely = new_id(), new_id()
    assert store.append_trace(*lonely, {"kind": "lifecycle"})
    assert store.list_sessions() == [ids[0]]
    assert store.list_segments(lonely[0]) == []
    store.delete_session(ids[0])
    assert list(store.iter_trace(*ids)) == []


def test_follow_gives_what_is_there_then_what_comes(store: Store, ids: Ids) -> None:
    fill(store, ids, 2)
    followed = store.follow(*ids, poll=0.001)
    assert [e.seq for e in islice(followed, 2) if isinstance(e, Entry)] == [1, 2]
    store.append(*ids, [Entry("a"), Entry("b")])
    assert [e.kind for e in islice(followed, 2) if isinstance(e, Entry)] == ["a", "b"]
    late = store.follow(*ids, from_seq=4, poll=0.001)
    entry = next(late)
    assert isinstance(entry, Entry)
    assert entry.kind == "b"
    with pytest.raises(BoundaryNotFoundError):
        next(store.follow(*ids, from_seq=9))


def test_follow_tells_of_a_truncation_and_goes_on_with_what_stands_now(store: Store, ids: Ids) -> None:
    fill(store, ids, 4)
    followed = store.follow(*ids, poll=0.001)
    assert len(list(islice(followed, 4))) == 4
    store.truncate(*ids, 2)
    assert next(followed) == Rewound(2)
    store.append(*ids, Entry("new"))
    entry = next(followed)
    assert isinstance(entry, Entry)
    assert (entry.seq, entry.kind) == (3, "new")
    store.truncate(*ids, 1)
    fill(store, ids, 5)
    assert next(followed) == Rewound(1)
    assert [e.seq for e in islice(followed, 5) if isinstance(e, Entry)] == [2, 3, 4, 5, 6]


def test_follow_stops_when_told_and_ends_with_the_segment(store: Store, ids: Ids) -> None:
    fill(store, ids, 1)
    stop = threading.Event()
    followed = store.follow(*ids, poll=0.01, stop=stop)
    next(followed)
    threading.Timer(0.03, stop.set).start()
    assert list(followed) == []
    followed = store.follow(*ids, poll=0.001)
    next(followed)
    store.delete_session(ids[0])
    with pytest.raises(SegmentDeletedError):
        next(followed)


def test_sync_is_possible_at_every_level(backend: Backend, ids: Ids) -> None:
    if backend.name == "memory":
        backend.store.sync(*ids)
        return
    for level in ("none", "flush", "fsync"):
        with backend.open(durability=level) as store:
            store.append(*ids, Entry(level))
            store.sync(*ids)
    assert [e.kind for e in backend.store.read_all(*ids)] == ["none", "flush", "fsync"]
