"""Conformance, part 1: append, create, read, head, keys, batches. Every test runs on every store (scenario ff)."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.store.journal.backends import Backend

from headwater.errors import CapacityError, ConflictError, InputError, NotFoundError
from headwater.journal.entry import EMPTY, Entry, Head, Limits, new_id
from headwater.journal.errors import (
    AlreadyExistsError,
    EntryTooLargeError,
    HeadConflictError,
    InvalidEntryError,
    InvalidNameError,
    SegmentNotFoundError,
    StoreClosedError,
)
from headwater.journal.store import Store

Ids = tuple[str, str]


def mixed() -> list[Entry]:
    return [
        Entry("run_started", {"trigger": "schedule"}),
        Entry("barrier", {"epoch": 1, "tables": ["a", "b"], "nested": {"x": [1, None, True, 1.5]}}),
        Entry("notice", {"text": "grüße 🌊"}),
        Entry("epoch_end", {"epoch_count": 1}),
        Entry("run_completed", {"interrupted": False}),
    ]


def test_entries_come_back_as_they_were_given_with_seq_from_one(store: Store, ids: Ids) -> None:
    """Scenarios 1, 7."""
    given = mixed()
    heads = [store.append(*ids, entry) for entry in given]
    read = store.read_all(*ids)
    assert [(e.kind, e.fields) for e in read] == [(e.kind, e.fields) for e in given]
    assert [e.seq for e in read] == [1, 2, 3, 4, 5]
    assert [e.head for e in read] == heads
    assert store.read_entry_count(*ids) == 5
    assert store.head(*ids) == heads[-1]


def test_the_line_is_the_documented_format(backend: Backend, ids: Ids) -> None:
    backend.store.append(*ids, Entry("barrier", {"epoch": 5, "t": "é\n"}, ts=1000), idempotency_key="k")
    line = backend.bytes_of(*ids)
    assert line.startswith('{"v":1,"seq":1,"ts":1000,"kind":"barrier","key":"k","epoch":5,"t":"é\\n","crc":"'.encode())
    assert line.endswith(b'"}\n')
    assert line.count(b"\n") == 1
    assert list(json.loads(line)) == ["v", "seq", "ts", "kind", "key", "epoch", "t", "crc"]


def test_create_makes_all_entries_at_once(store: Store) -> None:
    """Scenario 2: a segment created with a carried state has one entry and keeps its ids."""
    session, segment = new_id(), new_id()
    start = Entry("segment_start", {"session_id": session, "segment_id": segment, "state": {"history": [1, 2]}})
    head = store.create_segment(session, segment, [start])
    assert head.seq == 1
    assert store.read_all(session, segment) == [Entry(start.kind, start.fields, store.read_all(session, segment)[0].ts)]


def test_an_empty_segment_exists_and_has_the_empty_head(store: Store, ids: Ids) -> None:
    assert store.exists(*ids)
    assert store.head(*ids) == EMPTY
    assert store.read_all(*ids) == []
    assert store.tail(*ids, 3) == []


def test_exists_only_after_create(store: Store) -> None:
    """Scenario 4."""
    session, segment = new_id(), new_id()
    assert not store.exists(session, segment)
    store.create_segment(session, segment)
    assert store.exists(session, segment)


def test_a_missing_segment_is_not_found_by_every_read_and_write(store: Store, ids: Ids) -> None:
    """Scenarios 5, r, p, 45: append does not create, with or without expected head."""
    for session, segment in ((ids[0], new_id()), (new_id(), new_id())):
        for call in (
            lambda s=session, g=segment: store.read_all(s, g),
            lambda s=session, g=segment: store.head(s, g),
            lambda s=session, g=segment: store.read_entry_count(s, g),
            lambda s=session, g=segment: list(store.iter(s, g)),
            lambda s=session, g=segment: store.tail(s, g, 1),
            lambda s=session, g=segment: store.append(s, g, Entry("x")),
            lambda s=session, g=segment: store.append(s, g, Entry("x"), expected_head=EMPTY),
            lambda s=session, g=segment: store.truncate(s, g, 0),
            lambda s=session, g=segment: store.sync(s, g),
            lambda s=session, g=segment: next(store.follow(s, g)),
        ):
            with pytest.raises(SegmentNotFoundError) as caught:
                call()
            assert isinstance(caught.value, NotFoundError)
        assert not store.exists(session, segment)


def test_create_on_an_existing_segment_is_refused_and_changes_nothing(store: Store, ids: Ids) -> None:
    """Scenario q."""
    store.append(*ids, Entry("first"))
    with pytest.raises(AlreadyExistsError) as caught:
        store.create_segment(*ids, [Entry("second")])
    assert isinstance(caught.value, ConflictError)
    assert [e.kind for e in store.read_all(*ids)] == ["first"]


def test_a_header_of_other_ids_is_refused_at_create(store: Store) -> None:
    """Scenario s, writing side; also 13: a segment does not take another session's identity."""
    session, segment = new_id(), new_id()
    for fields in ({"session_id": new_id()}, {"segment_id": new_id()}):
        with pytest.raises(InvalidEntryError):
            store.create_segment(session, segment, [Entry("segment_start", fields)])
    assert not store.exists(session, segment)


def test_names_are_canonical_uuids_only(store: Store) -> None:
    """Scenario cc, calling side."""
    good = new_id()
    for bad in ("", "x", good.upper(), good.replace("-", ""), f"{{{good}}}", f"urn:uuid:{good}", f"{good}\n", "../x"):
        with pytest.raises(InvalidNameError):
            store.create_segment(good, bad)
        with pytest.raises(InvalidNameError):
            store.create_segment(bad, good)
        with pytest.raises(InvalidNameError):
            store.append(good, bad, Entry("x"))
        with pytest.raises(InvalidNameError):
            store.list_segments(bad)
        with pytest.raises(InvalidNameError):
            store.lookup_session_of(bad)


def test_append_with_the_expected_head_wins_once(store: Store, ids: Ids) -> None:
    """Scenario o: one winner, the loser gets the current head."""
    first = store.append(*ids, Entry("a"), expected_head=EMPTY)
    with pytest.raises(HeadConflictError) as caught:
        store.append(*ids, Entry("b"), expected_head=EMPTY)
    assert caught.value.current == first
    assert caught.value.expected == EMPTY
    store.append(*ids, Entry("c"), expected_head=caught.value.current)
    assert [e.kind for e in store.read_all(*ids)] == ["a", "c"]


def test_a_rewind_and_reappend_to_the_same_length_is_another_head(backend: Backend, ids: Ids) -> None:
    """Scenario o, ABA: by another store object, so that no cache is told."""
    store = backend.store
    other = backend.open() if backend.name != "memory" else store
    store.append(*ids, Entry("a", {"n": 1}, ts=1))
    seen = store.append(*ids, Entry("b", {"n": 2}, ts=1))
    other.truncate(*ids, 1)
    now = other.append(*ids, Entry("b", {"n": 3}, ts=1))
    assert now.seq == seen.seq
    with pytest.raises(HeadConflictError) as caught:
        store.append(*ids, Entry("c"), expected_head=seen)
    assert caught.value.current == now
    store.append(*ids, Entry("c"), expected_head=now)
    assert [e.fields.get("n") for e in store.read_all(*ids)] == [1, 3, None]
    other.close() if other is not store else None


def test_two_store_objects_append_in_turns_without_losing_anything(backend: Backend, ids: Ids) -> None:
    store = backend.store
    other = backend.open() if backend.name != "memory" else store
    for turn in range(10):
        (store, other)[turn % 2].append(*ids, Entry("x", {"turn": turn}))
    assert [e.fields["turn"] for e in store.read_all(*ids)] == list(range(10))
    other.close() if other is not store else None


def test_threads_append_without_losing_or_merging(store: Store, ids: Ids) -> None:
    """Scenario h, threads."""

    def work(name: int) -> None:
        for turn in range(20):
            store.append(*ids, Entry("x", {"name": name, "turn": turn}))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = store.read_all(*ids)
    assert len(read) == 80
    for name in range(4):
        assert [e.fields["turn"] for e in read if e.fields["name"] == name] == list(range(20))


def test_a_repeated_idempotency_key_returns_the_first_head(backend: Backend, ids: Ids) -> None:
    """Scenario ee: also after reopen, after foreign appends, and with an expected head that is stale by now."""
    store = backend.store
    head = store.append(*ids, Entry("a"), idempotency_key="k1")
    store.append(*ids, Entry("b"))
    assert store.append(*ids, Entry("a"), idempotency_key="k1", expected_head=EMPTY) == head
    store = backend.reopen()
    assert store.append(*ids, Entry("a"), idempotency_key="k1") == head
    other = backend.open() if backend.name != "memory" else store
    second = other.append(*ids, Entry("c"), idempotency_key="k2")
    assert store.append(*ids, Entry("c"), idempotency_key="k2") == second
    assert store.read_entry_count(*ids) == 3
    assert [e.key for e in store.read_all(*ids)] == ["k1", None, "k2"]
    other.close() if other is not store else None


def test_a_key_that_was_truncated_away_is_free_again(store: Store, ids: Ids) -> None:
    store.append(*ids, Entry("a"), idempotency_key="k1")
    store.append(*ids, Entry("b"), idempotency_key="k2")
    store.truncate(*ids, 1)
    assert store.append(*ids, Entry("b2"), idempotency_key="k2").seq == 2
    assert store.append(*ids, Entry("a"), idempotency_key="k1").seq == 1
    assert [e.kind for e in store.read_all(*ids)] == ["a", "b2"]


def test_a_batch_is_appended_as_one(store: Store, ids: Ids) -> None:
    store.append(*ids, Entry("before"))
    head = store.append(*ids, [Entry("a"), Entry("b"), Entry("c")], idempotency_key="batch")
    assert head.seq == 4
    assert store.append(*ids, [Entry("a"), Entry("b"), Entry("c")], idempotency_key="batch") == head
    store.append(*ids, Entry("after"))
    read = store.read_all(*ids)
    assert [e.kind for e in read] == ["before", "a", "b", "c", "after"]
    assert [e.batch for e in read] == [None, (1, 3), (2, 3), (3, 3), None]
    with pytest.raises(InvalidEntryError):
        store.append(*ids, [])


def test_entries_of_one_segment_can_be_given_to_another(store: Store, ids: Ids) -> None:
    """What the store set in them does not count for an append; a creation keeps keys."""
    store.append(*ids, Entry("a"), idempotency_key="k")
    store.append(*ids, [Entry("b"), Entry("c"), Entry("d")])
    entries = store.read_all(*ids)
    for begin in range(4):
        for end in range(begin, 5):
            other = new_id()
            store.create_segment(ids[0], other, entries[begin:end])
            assert store.read_all(ids[0], other) == entries[begin:end]
            store.append(ids[0], other, entries[0])
            store.append(ids[0], other, entries[1:3])
            assert [e.kind for e in store.tail(ids[0], other, 3)] == ["a", "b", "c"]
            assert [e.key for e in store.tail(ids[0], other, 3)] == [None, None, None]
    whole = new_id()
    store.create_segment(ids[0], whole, entries)
    assert store.append(ids[0], whole, Entry("a"), idempotency_key="k").seq == 1


def test_a_torn_batch_does_not_count_at_all_and_is_replaced_by_the_next_append(backend: Backend, ids: Ids) -> None:
    store = backend.store
    store.append(*ids, Entry("before"))
    store.append(*ids, [Entry("a"), Entry("b"), Entry("c")])
    whole = backend.bytes_of(*ids)
    begin = whole.index(b"\n") + 1
    for cut in range(begin, len(whole)):
        backend.put_bytes(*ids, whole[:cut])
        assert [e.kind for e in store.read_all(*ids)] == ["before"]
        assert store.head(*ids).seq == 1
        assert [e.kind for e in store.tail(*ids, 3)] == ["before"]
    store.append(*ids, Entry("d"))
    assert [(e.seq, e.kind) for e in store.read_all(*ids)] == [(1, "before"), (2, "d")]


@pytest.mark.parametrize("name", ["v", "seq", "ts", "kind", "batch", "key", "crc"])
def test_reserved_names_are_refused_and_nothing_is_written(store: Store, ids: Ids, name: str) -> None:
    with pytest.raises(InvalidEntryError, match=name) as caught:
        store.append(*ids, Entry("x", {name: 1}))
    assert isinstance(caught.value, InputError)
    assert store.head(*ids) == EMPTY


def _nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "\ud800", {"a": "x\udfff"}, object(), {1: 2}, {"a": {None: 1}}, b"x", {1, 2}, _nested(5000)],
    ids=["nan", "inf", "surrogate", "nested-surrogate", "object", "int-key", "none-key", "bytes", "set", "deep"],
)
def test_what_is_not_json_is_refused_and_nothing_is_written(store: Store, ids: Ids, value: object) -> None:
    """Scenario w, refused part; a batch with one bad entry writes none."""
    with pytest.raises(InvalidEntryError):
        store.append(*ids, Entry("x", {"value": value}))
    with pytest.raises(InvalidEntryError):
        store.append(*ids, [Entry("good"), Entry("x", {"value": value})])
    with pytest.raises(InvalidEntryError):
        store.create_segment(ids[0], new_id(), [Entry("x", {"value": value})])
    assert store.head(*ids) == EMPTY
    assert len(store.list_segments(ids[0])) == 1


@pytest.mark.parametrize(
    "value",
    [
        "\u2028\u2029\u0085",
        "\0",
        "🌊\U0010ffff",
        "a\nb\r\nc",
        2**63,
        -(2**200),
        1e308,
        -0.0,
        5e-324,
        {"": ""},
        _nested(100),
    ],
    ids=["separators", "nul", "emoji", "newlines", "int63", "int200", "big", "minus-zero", "tiny", "empty", "nested"],
)
def test_odd_values_come_back_unchanged(store: Store, ids: Ids, value: object) -> None:
    """Scenario w, accepted part."""
    store.append(*ids, Entry("x", {"value": value}))
    store.append(*ids, Entry("after"))
    assert repr(store.read_all(*ids)[0].fields["value"]) == repr(value)


def test_a_ten_megabyte_entry_comes_back(store: Store, ids: Ids) -> None:
    """Scenario w."""
    text = "x" * 10_000_000
    store.append(*ids, Entry("big", {"text": text}))
    store.append(*ids, Entry("after"))
    assert store.tail(*ids, 2)[0].fields["text"] == text
    assert store.head(*ids).seq == 2


def test_limits_are_enforced_before_anything_is_written(backend: Backend) -> None:
    store = backend.limited(Limits(entry_bytes=100, batch_bytes=150))
    session, segment = new_id(), new_id()
    store.create_segment(session, segment)
    store.append(session, segment, Entry("x", {"t": "y" * 80}))
    for bad in (Entry("x", {"t": "y" * 100}), [Entry("x", {"t": "y" * 80})] * 2):
        with pytest.raises(EntryTooLargeError) as caught:
            store.append(session, segment, bad)
        assert isinstance(caught.value, CapacityError)
    assert store.head(session, segment).seq == 1


@pytest.mark.parametrize("kind", ["", "x" * 201])
def test_a_kind_needs_one_to_two_hundred_characters(store: Store, ids: Ids, kind: str) -> None:
    with pytest.raises(InvalidEntryError):
        store.append(*ids, Entry(kind))


@pytest.mark.parametrize("ts", [-1, 2**63, 1.5, True])
def test_a_time_that_is_not_milliseconds_is_refused(store: Store, ids: Ids, ts: int) -> None:
    with pytest.raises(InvalidEntryError):
        store.append(*ids, Entry("x", ts=ts))


def test_iteration_starts_and_ends_where_asked(store: Store, ids: Ids) -> None:
    for number in range(1, 501):
        store.append(*ids, Entry("x", {"n": number, "pad": "p" * (number % 97)}))

    def numbers(**options: int | bool) -> list[int]:
        return [e.fields["n"] for e in store.iter(*ids, **options)]  # type: ignore[arg-type]

    assert numbers() == list(range(1, 501))
    for start in (1, 2, 137, 250, 499, 500):
        assert numbers(from_seq=start, limit=3) == list(range(start, min(start + 3, 501)))
    assert numbers(from_seq=501) == []
    assert numbers(from_seq=900) == []
    assert numbers(limit=0) == []
    assert [e.seq for e in store.tail(*ids, 4)] == [497, 498, 499, 500]
    assert len(store.tail(*ids, 1000)) == 500
    with pytest.raises(InputError):
        store.iter(*ids, from_seq=0)


def test_heads_have_a_text_form() -> None:
    head = Head(12, 0xA1B2)
    assert str(head) == "12-0000a1b2"
    assert Head.parse(str(head)) == head
    with pytest.raises(InvalidEntryError):
        Head.parse("12")


def test_a_closed_store_says_so(store: Store, ids: Ids) -> None:
    store.close()
    with pytest.raises(StoreClosedError):
        store.append(*ids, Entry("x"))
    store.close()


def test_reopening_keeps_ids_entries_and_head(backend: Backend, ids: Ids) -> None:
    """Scenario 14."""
    head = backend.store.append(*ids, Entry("x"))
    store = backend.reopen()
    assert store.list_sessions() == [ids[0]]
    assert store.list_segments(ids[0]) == [ids[1]]
    assert store.head(*ids) == head
    assert store.append(*ids, Entry("y"), expected_head=head).seq == 2


def test_the_bytes_are_the_same_in_every_store(backend: Backend) -> None:
    store = backend.limited(Limits(), clock=lambda: 1_700_000_000_000)
    session, segment = "0190b0a0-0000-7000-8000-000000000001", "0190b0a0-0000-7000-8000-000000000002"
    store.create_segment(session, segment, [Entry("segment_start", {"session_id": session})])
    store.append(session, segment, [Entry("a", {"n": 1}), Entry("b")], idempotency_key="k")
    assert str(store.append(session, segment, Entry("c"))) == "4-3c050304"


@pytest.mark.parametrize("given", ["text", None, 5, [Entry("x"), "y"], {"kind": "x"}])
def test_what_is_no_entry_is_refused(store: Store, ids: tuple[str, str], given: Any) -> None:
    with pytest.raises(InvalidEntryError):
        store.append(*ids, given)
    with pytest.raises(InvalidEntryError):
        store.create_segment(new_id(), new_id(), [given])
    assert store.read_entry_count(*ids) == 0


@pytest.mark.parametrize("fields", [None, ["ab"], 5, "ab"])
def test_fields_that_are_no_mapping_are_refused(store: Store, ids: tuple[str, str], fields: Any) -> None:
    with pytest.raises(InvalidEntryError):
        store.append(*ids, Entry("x", fields))


def test_an_iterator_that_fails_creates_nothing(store: Store) -> None:
    session, segment = new_id(), new_id()

    def broken() -> Iterator[Entry]:
        yield Entry("x")
        yield Entry("x", {"bad": float("nan")})

    with pytest.raises(InvalidEntryError):
        store.create_segment(session, segment, broken())
    assert not store.exists(session, segment)
    assert store.create_segment(session, segment, iter([Entry("x")])).seq == 1
