"""Conformance, part 3: torn tails, damage, verify, salvage, repair, rescue."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from tests.store.journal.backends import Backend

from headwater import failpoints
from headwater.errors import CorruptionError
from headwater.journal import codec, damage, reader
from headwater.journal.damage import repair, rescue, salvage, verify
from headwater.journal.entry import EMPTY, Entry, Head, Limits, new_id
from headwater.journal.errors import BusyError, CorruptError, UnsupportedVersionError
from headwater.journal.fork import origin_of
from headwater.journal.store import Store

Ids = tuple[str, str]


def fill(store: Store, ids: Ids, count: int) -> None:
    for number in range(1, count + 1):
        store.append(*ids, Entry("x", {"n": number}, ts=1000 + number))


def test_a_torn_tail_cut_at_every_byte_is_ignored_and_replaced(backend: Backend, ids: Ids) -> None:
    """Scenarios 9, m: at every byte of the last line, up to just before the newline."""
    store = backend.store
    fill(store, ids, 3)
    whole = backend.bytes_of(*ids)
    begin = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(begin, len(whole)):
        backend.put_bytes(*ids, whole[:cut])
        assert len(store.read_all(*ids)) == 2
        assert store.read_entry_count(*ids) == 2
        assert [e.seq for e in store.tail(*ids, 5)] == [1, 2]
        assert verify(store, *ids).torn_bytes == cut - begin
        store.append(*ids, Entry("x", {"n": 3}, ts=1003))
        assert backend.bytes_of(*ids) == whole


@pytest.mark.parametrize("tail", [b"\xe3", b"\0" * 5000, b"x" * 20_000, b'{"v":1,"seq":2', b"{}"])
def test_foreign_bytes_without_a_newline_are_a_torn_tail(backend: Backend, ids: Ids, tail: bytes) -> None:
    """Scenarios 9, m: half a character, zeros after a power loss, more than 8 KiB."""
    store = backend.store
    fill(store, ids, 1)
    good = backend.bytes_of(*ids)
    backend.put_bytes(*ids, good + tail)
    assert store.read_entry_count(*ids) == 1
    assert len(store.read_all(*ids)) == 1
    assert store.append(*ids, Entry("y")).seq == 2
    assert backend.bytes_of(*ids).startswith(good)
    assert verify(store, *ids).ok


def test_zeros_in_place_of_the_last_newline_are_a_torn_write(backend: Backend, ids: Ids) -> None:
    """A power loss leaves them; any other byte there is damage."""
    store = backend.store
    fill(store, ids, 2)
    whole = backend.bytes_of(*ids)
    for tail in (b"\0", b"\0" * 100):
        backend.put_bytes(*ids, whole[:-1] + tail)
        assert store.read_entry_count(*ids) == 1
        assert len(store.read_all(*ids)) == 1
        assert verify(store, *ids).ok
        store.append(*ids, Entry("x", {"n": 2}, ts=1002))
        assert backend.bytes_of(*ids) == whole


def test_a_file_without_any_newline_has_no_entries(backend: Backend, ids: Ids) -> None:
    """Scenario m."""
    backend.put_bytes(*ids, b"no newline at all")
    assert backend.store.read_all(*ids) == []
    assert backend.store.head(*ids) == EMPTY


def test_a_flipped_bit_at_every_byte_is_found_where_it_is(backend: Backend, ids: Ids) -> None:
    """Scenario u: reads refuse, verify names the place, salvage gives the rest, append does not go on blindly."""
    store = backend.store
    fill(store, ids, 3)
    whole = backend.bytes_of(*ids)
    starts = [0, whole.index(b"\n") + 1, whole.rindex(b"\n", 0, -1) + 1]
    for place in range(len(whole)):
        line = sum(start <= place for start in starts)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        backend.put_bytes(*ids, bytes(damaged))
        with pytest.raises(CorruptError) as caught:
            store.read_all(*ids)
        assert isinstance(caught.value, CorruptionError)
        assert (caught.value.line, caught.value.offset, caught.value.seq) == (line, starts[line - 1], line)
        found = verify(store, *ids)
        assert not found.ok
        assert (found.damages[0].line, found.damages[0].offset) == (line, starts[line - 1])
        assert found.head.seq == line - 1
        rest = salvage(store, *ids)
        merged = damaged[place] != whole[place] and whole[place : place + 1] == b"\n"
        lost = {line, line + 1} if merged else {line}
        assert [e.fields["n"] for e in rest.entries] == [n for n in (1, 2, 3) if n not in lost]
        if line == 3:
            store = backend.reopen()  # an open store knows the line that it wrote and does not read it again
            with pytest.raises(CorruptError):
                store.append(*ids, Entry("y"))
            assert backend.bytes_of(*ids) == bytes(damaged)


def test_a_flipped_bit_at_every_byte_of_a_batch_is_found_and_the_batch_is_not_thrown_away(
    backend: Backend, ids: Ids
) -> None:
    """Scenario u, for batches: also the last newline, without which a batch looks torn."""
    store = backend.store
    store.append(*ids, Entry("a", ts=1))
    begin = len(backend.bytes_of(*ids))
    store.append(*ids, [Entry("b", ts=1), Entry("c", ts=1)])
    whole = backend.bytes_of(*ids)
    last = whole.rindex(b"\n", 0, -1) + 1
    for place in range(begin, len(whole)):
        for bit in range(8) if whole[place : place + 1] == b"\n" else [place % 8]:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            backend.put_bytes(*ids, bytes(damaged))
            with pytest.raises(CorruptError):
                store.read_all(*ids)
            if bit == place % 8:
                assert not verify(store, *ids).ok
                if place >= last:
                    store = backend.reopen()
                    with pytest.raises(CorruptError):
                        store.append(*ids, Entry("d"))
                    assert backend.bytes_of(*ids) == bytes(damaged)


def test_repair_keeps_the_good_prefix_and_quarantines_every_other_byte(backend: Backend, ids: Ids) -> None:
    store = backend.store
    fill(store, ids, 4)
    lines = backend.bytes_of(*ids).splitlines(keepends=True)
    damaged = lines[0] + lines[1].replace(b'"n":2', b'"n":7') + lines[2] + lines[3] + b"torn"
    backend.put_bytes(*ids, damaged)
    done = repair(store, *ids)
    assert done.head.seq == 1
    assert backend.bytes_of(*ids) == lines[0]
    assert done.quarantined is not None
    assert backend.saved_bytes(done.quarantined) == damaged[len(lines[0]) :]
    assert done.bytes == len(damaged) - len(lines[0])
    assert verify(store, *ids).ok
    assert repair(store, *ids).quarantined is None
    assert store.append(*ids, Entry("go on")).seq == 2


def test_damage_that_makes_a_newline_hides_one_entry_only(backend: Backend, ids: Ids) -> None:
    store = backend.store
    for n in range(1, 5):
        store.append(*ids, Entry("x", {"n": n, "text": "J*" if n == 2 else ""}))
    whole = backend.bytes_of(*ids)
    for made in (b"J", b"*"):
        backend.put_bytes(*ids, whole.replace(made, b"\n"))
        found = salvage(store, *ids)
        assert [entry.fields["n"] for entry in found.entries] == [1, 3, 4]
        assert [damage.line for damage in found.damages] == [2, 3]
        assert found.unverified == 0, "the second half still states the checksum that entry 3 continues"


def test_repair_of_damage_inside_a_batch_takes_the_whole_batch(backend: Backend, ids: Ids) -> None:
    store = backend.store
    store.append(*ids, Entry("a"))
    store.append(*ids, [Entry("b"), Entry("c"), Entry("d")])
    lines = backend.bytes_of(*ids).splitlines(keepends=True)
    backend.put_bytes(*ids, lines[0] + lines[1] + b"garbage\n" + lines[3])
    done = repair(store, *ids)
    assert backend.bytes_of(*ids) == lines[0]
    assert done.quarantined is not None
    assert backend.saved_bytes(done.quarantined) == lines[1] + b"garbage\n" + lines[3]


def test_a_batch_that_was_left_incomplete_in_the_middle_is_damage(backend: Backend, ids: Ids) -> None:
    """Only a foreign writer can make it: the checksums are right, the batch marks are not."""
    first, head = codec.lines([codec.prepare(Entry("a"), Limits())], EMPTY, 0)
    half, crc = codec.line(codec.prepare(Entry("b"), Limits()), 2, 0, head.crc, b',"batch":[1,2]')
    after, _ = codec.lines([codec.prepare(Entry("c"), Limits())], Head(2, crc), 0)
    backend.put_bytes(*ids, first + half + after)
    with pytest.raises(CorruptError) as caught:
        backend.store.read_all(*ids)
    assert (caught.value.line, caught.value.seq, caught.value.offset) == (3, 3, len(first + half))
    (damage,) = verify(backend.store, *ids).damages
    assert (damage.line, damage.seq) == (3, 3)
    done = repair(backend.store, *ids)
    assert done.head == head
    assert done.quarantined is not None
    assert backend.saved_bytes(done.quarantined) == half + after


def test_salvage_leaves_a_torn_batch_out(backend: Backend, ids: Ids) -> None:
    backend.store.append(*ids, Entry("a"))
    backend.store.append(*ids, [Entry("b"), Entry("c")])
    lines = backend.bytes_of(*ids).splitlines(keepends=True)
    backend.put_bytes(*ids, lines[0] + lines[1])
    assert [entry.kind for entry in salvage(backend.store, *ids).entries] == ["a"]
    seen = verify(backend.store, *ids)
    assert (seen.ok, seen.head, seen.torn_bytes) == (True, backend.store.head(*ids), len(lines[1]))
    done = repair(backend.store, *ids)
    assert done.quarantined is not None
    assert backend.saved_bytes(done.quarantined) == lines[1]


def test_repair_saves_a_torn_tail_too(backend: Backend, ids: Ids) -> None:
    fill(backend.store, ids, 1)
    good = backend.bytes_of(*ids)
    backend.put_bytes(*ids, good + b"half a li")
    done = repair(backend.store, *ids)
    assert done.quarantined is not None
    assert backend.saved_bytes(done.quarantined) == b"half a li"
    assert backend.bytes_of(*ids) == good


def test_rescue_makes_a_new_segment_of_all_that_is_readable(backend: Backend, ids: Ids) -> None:
    store = backend.store
    fill(store, ids, 5)
    lines = backend.bytes_of(*ids).splitlines(keepends=True)
    backend.put_bytes(*ids, lines[0] + b"\xff\xfe\n" + b"".join(lines[2:]))
    before = backend.bytes_of(*ids)
    branch, found = rescue(store, *ids)
    assert len(found.damages) == 1
    assert found.unverified == 1
    read = store.read_all(branch.session, branch.segment)
    assert [e.fields.get("n") for e in read] == [None, 1, 3, 4, 5]
    origin = origin_of(store, branch.session, branch.segment)
    assert origin is not None
    assert (origin.relation, origin.segment) == ("salvaged_from", ids[1])
    assert backend.bytes_of(*ids) == before


def test_bad_committed_lines_are_named_exactly(backend: Backend, ids: Ids) -> None:
    """Scenarios 10, c: line, byte offset and seq, with blank lines and CRLF before it counted as lines."""
    store = backend.store
    fill(store, ids, 2)
    lines = backend.bytes_of(*ids).splitlines(keepends=True)
    prefix = lines[0].replace(b"\n", b"\r\n") + b"\n  \n" + lines[1]
    backend.put_bytes(*ids, prefix)
    assert [e.fields["n"] for e in store.read_all(*ids)] == [1, 2]
    assert store.read_entry_count(*ids) == 2
    assert [e.seq for e in store.tail(*ids, 5)] == [1, 2]
    assert [e.seq for e in store.iter(*ids, from_seq=2)] == [2]
    for bad in (b"\xe3\n", b"not json\n", b"{}\n", b'{"a":1}{"b":2}\n', b"[1]\n", b"\0\0\0\n", lines[0]):
        backend.put_bytes(*ids, prefix + bad)
        with pytest.raises(CorruptError) as caught:
            store.read_all(*ids)
        assert (caught.value.line, caught.value.offset, caught.value.seq) == (5, len(prefix), 3)
        assert caught.value.path == store.location(*ids)
        assert "headwater journal verify" in str(caught.value)
        with pytest.raises(CorruptError):
            store.head(*ids)


def test_append_after_blank_lines_and_crlf_goes_on_with_the_chain(backend: Backend, ids: Ids) -> None:
    fill(backend.store, ids, 1)
    line = backend.bytes_of(*ids)
    backend.put_bytes(*ids, line.replace(b"\n", b"\r\n") + b"\n\n")
    backend.store.append(*ids, Entry("y"))
    backend.store.append(*ids, Entry("z"))
    assert [e.seq for e in backend.store.read_all(*ids)] == [1, 2, 3]
    assert verify(backend.store, *ids).ok


def test_iteration_gives_the_good_entries_before_it_raises(backend: Backend, ids: Ids) -> None:
    fill(backend.store, ids, 3)
    lines = backend.bytes_of(*ids).splitlines(keepends=True)
    backend.put_bytes(*ids, lines[0] + lines[1] + b"garbage\n")
    entries = backend.store.iter(*ids)
    assert [next(entries).seq, next(entries).seq] == [1, 2]
    with pytest.raises(CorruptError):
        next(entries)


def test_lines_cannot_be_dropped_moved_or_doubled_unseen(backend: Backend, ids: Ids) -> None:
    fill(backend.store, ids, 4)
    a, b, c, d = backend.bytes_of(*ids).splitlines(keepends=True)
    for lines, bad in (([a, c, d], 2), ([a, c, b, d], 2), ([a, b, b, c, d], 3), ([b, c, d], 1)):
        backend.put_bytes(*ids, b"".join(lines))
        with pytest.raises(CorruptError) as caught:
            backend.store.read_all(*ids)
        assert caught.value.line == bad


def test_a_segment_of_other_ids_is_refused(backend: Backend) -> None:
    """Scenario s, reading side: a file that was copied to another name."""
    store = backend.store
    session, one, two = new_id(), new_id(), new_id()
    store.create_segment(session, one, [Entry("segment_start", {"session_id": session, "segment_id": one})])
    store.create_segment(session, two)
    backend.put_bytes(session, two, backend.bytes_of(session, one))
    with pytest.raises(CorruptError, match="segment_id"):
        store.read_all(session, two)
    with pytest.raises(CorruptError, match="segment_id"):
        store.tail(session, two, 1)
    assert not verify(store, session, two).ok
    with pytest.raises(CorruptError, match="segment_id"):
        repair(store, session, two)
    assert backend.bytes_of(session, two) == backend.bytes_of(session, one)


def test_a_line_of_a_newer_format_asks_for_an_upgrade(backend: Backend, ids: Ids) -> None:
    backend.put_bytes(*ids, b'{"v":2,"whatever":true}\n')
    for call in (backend.store.read_all, backend.store.head):
        with pytest.raises(UnsupportedVersionError, match="Upgrade"):
            call(*ids)
    with pytest.raises(UnsupportedVersionError):
        repair(backend.store, *ids)


CRAFTED = [
    b'{"v":1,"seq":1,"ts":1,"kind":"x","batch":5',
    b'{"v":1,"seq":1,"ts":1,"kind":"x","batch":[1]',
    b'{"v":1,"seq":1,"ts":1,"kind":"x","batch":[2,1]',
    b'{"v":1,"seq":1,"ts":1,"kind":5',
    b'{"v":1,"seq":1,"ts":"z","kind":"x"',
    b'{"v":1,"seq":1,"ts":1,"kind":"x","key":[1]',
    b'{"v":1,"seq":' + b"9" * 5000,
    b'{"v":' + b"9" * 5000,
    b'{"v":1,"seq":1,"ts":1,"kind":"x","a":' + b"[" * 100_000,
    b"[1",
]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("body", CRAFTED, ids=lambda body: body[:45].decode())
def test_a_line_of_another_shape_is_damage_even_when_its_checksum_is_right(
    backend: Backend, ids: Ids, body: bytes, checked: bool
) -> None:
    """And every call says so in our own words."""
    store = backend.store
    backend.put_bytes(*ids, body + (b',"crc":"%08x"}\n' % crc32(body) if checked else b",\n"))
    calls: list[Callable[[], object]] = [
        lambda: store.read_all(*ids),
        lambda: store.head(*ids),
        lambda: store.tail(*ids, 1),
        lambda: store.append(*ids, Entry("y")),
    ]
    for call in calls:
        with pytest.raises(CorruptError):
            call()
    assert not verify(store, *ids).ok
    assert salvage(store, *ids).entries == ()
    assert repair(store, *ids).head == EMPTY


def test_a_salvage_loses_nothing_before_a_batch_without_begin_and_end(backend: Backend, ids: Ids) -> None:
    store = backend.store
    store.append(*ids, Entry("before"))
    store.append(*ids, [Entry("batch", {"n": n}) for n in (1, 2, 3)])
    lines = backend.bytes_of(*ids).splitlines(keepends=True)
    backend.put_bytes(*ids, lines[0] + b"damage\n" + lines[2])
    assert [entry.kind for entry in salvage(store, *ids).entries] == ["before"]


def test_damage_without_end_is_counted_and_not_kept(fs: Backend) -> None:
    ids = new_id(), new_id()
    fs.store.create_segment(*ids, [Entry("good")])
    good = fs.bytes_of(*ids)
    fs.put_bytes(*ids, good + b"x\n" * 5000)
    seen = verify(fs.store, *ids)
    assert (seen.damage_count, len(seen.damages), seen.ok) == (5000, damage.MOST_DAMAGES, False)


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_bytes_without_a_newline_are_passed_in_bounded_memory(
    fs: Backend, monkeypatch: pytest.MonkeyPatch, ending: bytes
) -> None:
    """Longer than any line: torn at the end, damage before a newline; never held as a whole."""
    monkeypatch.setattr(reader, "LINE_LIMIT", 1 << 20)
    ids = new_id(), new_id()
    fs.store.create_segment(*ids, [Entry("good")])
    with Path(fs.store.location(*ids)).open("ab") as file:
        begin = file.tell()
        file.truncate(begin + (40 << 20))
        file.seek(0, os.SEEK_END)
        file.write(ending)
    tracemalloc.start()
    seen = verify(fs.store, *ids)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert seen.ok is not bool(ending)
    assert seen.head.seq == 1
    if ending:
        assert (seen.damages[0].offset, seen.damages[0].length) == (begin, 40 << 20)
        with pytest.raises(CorruptError):
            fs.store.head(*ids)
    else:
        assert seen.torn_bytes == 40 << 20


def test_a_rescue_does_not_hold_the_segment_in_memory(fs: Backend) -> None:
    ids = new_id(), new_id()
    fs.store.create_segment(*ids, (Entry("x", {"pad": "p" * 50_000}) for _ in range(400)))
    tracemalloc.start()
    branch, found = rescue(fs.store, *ids)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.entries == 400
    assert branch.head.seq == 401
    assert peak < 12 << 20


def test_a_rescue_of_a_segment_that_is_cut_meanwhile_makes_nothing(
    backend: Backend, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = backend.store
    fill(store, ids, 5)
    monkeypatch.setattr(failpoints, "hit", lambda _: backend.put_bytes(*ids, b""))
    with pytest.raises(BusyError):
        rescue(store, *ids)
    monkeypatch.undo()
    assert store.list_segments(ids[0]) == [ids[1]]
