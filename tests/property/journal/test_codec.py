"""Properties of one line: round trip, and no change goes unseen."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.property.journal.test_model import ENTRIES

from headwater.journal.codec import DamagedLineError, decode, lines, prepare, stated_crc, stated_seq
from headwater.journal.entry import Entry, Head, Limits

HEADS = st.builds(Head, seq=st.integers(0, 2**62), crc=st.integers(0, 2**32 - 1))


@settings(deadline=None)
@given(entry=ENTRIES, after=HEADS, key=st.none() | st.text(min_size=1, max_size=10))
def test_an_entry_survives_its_line(entry: Entry, after: Head, key: str | None) -> None:
    data, head = lines([prepare(entry, Limits(), key)], after, 0)
    assert data.count(b"\n") == 1
    assert data.endswith(b"\n")
    read = decode(data[:-1], head.seq, after.crc)
    assert (read.kind, repr(dict(read.fields)), read.ts, read.key) == (
        entry.kind,
        repr(dict(entry.fields)),
        entry.ts,
        key,
    )
    assert read.head == head
    assert (stated_seq(data), stated_crc(data[:-1])) == (head.seq, head.crc)


@settings(deadline=None)
@given(entry=ENTRIES, after=HEADS, data=st.data())
def test_a_changed_byte_is_always_seen(entry: Entry, after: Head, data: st.DataObject) -> None:
    line, head = lines([prepare(entry, Limits())], after, 0)
    place = data.draw(st.integers(0, len(line) - 2))
    flip = data.draw(st.integers(1, 255))
    changed = bytearray(line[:-1])
    changed[place] ^= flip
    with pytest.raises(DamagedLineError):
        decode(bytes(changed), head.seq, after.crc)


@settings(deadline=None)
@given(entry=ENTRIES, after=HEADS, other=HEADS)
def test_a_line_fits_after_its_own_predecessor_only(entry: Entry, after: Head, other: Head) -> None:
    assume(after != other)
    line, head = lines([prepare(entry, Limits())], after, 0)
    with pytest.raises(DamagedLineError):
        decode(line[:-1], other.seq + 1, other.crc)
    assert decode(line[:-1], head.seq, after.crc).seq == head.seq


@settings(deadline=None)
@given(junk=st.binary(max_size=200))
def test_foreign_bytes_are_refused_and_never_crash(junk: bytes) -> None:
    with pytest.raises(DamagedLineError):
        decode(junk, 1, 0)
