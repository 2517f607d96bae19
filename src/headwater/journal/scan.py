"""Reading a segment's bytes: forwards, backwards, by seq, and its end. Works on any :class:`Source`.

The rules of what counts as committed live here and nowhere else:

* a newline commits a line; bytes after the last newline are a torn write and do not count;
* lines of a batch count when its last line is there; a torn batch does not count as a whole;
* blank lines and a carriage return before the newline are tolerated and do not count;
* a committed line that is not what was written is damage, never skipped;
* a *whole* line with a wrong byte in place of its newline is damage too: no torn write looks like that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

from headwater.journal import codec
from headwater.journal.codec import DamagedLineError, NewerLineError
from headwater.journal.entry import EMPTY, SEGMENT_START, Entry, Head, Limits
from headwater.journal.errors import (
    BoundaryNotFoundError,
    CorruptError,
    InvalidEntryError,
    JournalError,
    UnsupportedVersionError,
)

CHUNK = 1 << 20
TOO_LONG = "the line is longer than the format allows"
_SMALL = 1 << 12
LINE_LIMIT = Limits().line_bytes + 4096


class Source(Protocol):
    """The bytes of one segment."""

    @property
    def name(self) -> str:
        """Path for error messages."""

    def size(self) -> int:
        """Bytes now."""

    def read(self, offset: int, length: int) -> bytes:
        """Up to *length* bytes at *offset*; less only at the end."""


@dataclass(frozen=True, slots=True)
class Place:
    """Between two lines: byte offset, and head of what stands before it."""

    offset: int
    head: Head


START = Place(0, EMPTY)


class DamageError(Exception):
    """Damage found at *place*: the bytes after it are not the next line. Becomes `CorruptError` once confirmed."""

    def __init__(self, place: Place, reason: DamagedLineError) -> None:
        self.place = place
        self.reason = reason
        super().__init__(str(reason))


def corrupt(source: Source, damage: DamageError) -> JournalError:
    """The public error for *damage*; counts lines, so only for the error path."""
    offset = damage.place.offset
    if isinstance(damage.reason, NewerLineError):
        return UnsupportedVersionError(source.name, offset, str(damage.reason))
    at = count = 0
    while at < offset:
        chunk = source.read(at, min(CHUNK, offset - at))
        if not chunk:
            break
        count += chunk.count(b"\n")
        at += len(chunk)
    return CorruptError(source.name, count + 1, offset, damage.place.head.seq + 1, str(damage.reason))


def check(source: Source) -> None:
    """:raises CorruptError: for the first damage of the segment, with exact line and seq. Reads from the start."""
    try:
        for _ in Forward(source):
            pass
    except DamageError as first:
        raise corrupt(source, first) from None


def first_corrupt(source: Source, damage: DamageError) -> JournalError:
    """The error for *damage*, or for one that stands before it."""
    try:
        check(source)
    except JournalError as error:
        return error
    return corrupt(source, damage)


def check_torn(tail: bytes, place: Place) -> None:
    """A torn write is the beginning of a line; a whole line with one byte more is a damaged newline.

    Not so when that byte is zero: a power loss leaves zeros where bytes were not written yet.
    """
    if len(tail) <= codec.CRC_TAIL or tail.endswith(b"\0"):
        return
    try:
        codec.decode(tail[:-1], place.head.seq + 1, place.head.crc)
    except DamagedLineError:
        return
    raise DamageError(place, DamagedLineError("the newline after the line was overwritten"))


class Forward:
    """Committed entries after *place*, in blocks; `place` follows what was given out."""

    def __init__(self, source: Source, place: Place = START, *, end: int | None = None) -> None:
        self.place = place
        self._source = source
        self._end = source.size() if end is None else end
        self._inside = place.offset > 0  # a reader may begin at any entry, also inside a batch

    def __iter__(self) -> Iterator[list[Entry]]:
        scan = self.place  # runs ahead of self.place while a batch is incomplete
        held: list[Entry] = []
        pending: list[bytes] = []
        pending_size = 0
        while True:
            at = scan.offset + pending_size
            chunk = self._source.read(at, min(CHUNK, self._end - at)) if at < self._end else b""
            if not chunk:
                break
            cut = chunk.rfind(b"\n")
            if cut < 0:
                pending_size += len(chunk)
                if pending_size > LINE_LIMIT:
                    self._skip_endless(scan, at + len(chunk))
                    return
                pending.append(chunk)
                continue
            pending.append(chunk[:cut])
            run = b"".join(pending).split(b"\n")
            pending = [chunk[cut + 1 :]]
            pending_size = len(pending[0])
            scan, entries = self._decode(run, scan, held)
            if entries:
                held = []
                if entries[-1].batch is not None:
                    complete = codec.complete(entries)
                    held = entries[complete:]
                    del entries[complete:]
                place = scan if not held else self._place_before(held, scan)
                if entries:
                    self.place = place
                    yield entries
        if pending_size:
            check_torn(b"".join(pending), scan)

    def _decode(self, run: list[bytes], scan: Place, held: list[Entry]) -> tuple[Place, list[Entry]]:
        """The entries of *held* and then of the lines of *run*."""
        out: list[Entry] = []
        offset, seq, crc = scan.offset, scan.head.seq, scan.head.crc
        done = 0
        while done < len(run):
            fresh: list[Entry] = []
            seq, crc = codec.decode_run(run[done:] if done else run, seq, crc, fresh)
            plain = run[done : done + len(fresh)]
            offset += sum(map(len, plain)) + len(plain)
            done += len(plain)
            out += fresh
            if done == len(run):
                break
            data = run[done].removesuffix(b"\r")
            if data.strip():
                try:
                    entry = codec.decode(data, seq + 1, crc)
                except DamagedLineError as reason:
                    self._give_up(held + out, Place(offset, Head(seq, crc)), reason)
                out.append(entry)
                seq, crc = entry.seq, entry.crc
            offset += len(run[done]) + 1
            done += 1
        whole = held + out
        broken = codec.batch_break(whole, whole[0].batch if whole and self._inside else None)
        self._inside = self._inside and not whole
        if broken is not None:
            at = find_seq(self._source, whole[broken].seq, offset) or 0
            before = Head(whole[broken].seq - 1, whole[broken - 1].crc if broken else scan.head.crc)
            torn = DamagedLineError(codec.BROKEN_BATCH)
            self._give_up(whole[:broken], Place(at, before), torn)
        return Place(offset, Head(seq, crc)), whole

    def _give_up(self, before: list[Entry], place: Place, reason: DamagedLineError) -> NoReturn:
        raise FoundDamageError(place, reason, before[: codec.complete(before)])

    def _place_before(self, held: list[Entry], scan: Place) -> Place:
        """Where the incomplete batch begins: needed only to come back to it, so found by seq."""
        first = find_seq(self._source, held[0].seq, scan.offset)
        crc = crc_before(self._source, first if first is not None else 0)
        return Place(first or 0, Head(held[0].seq - 1, crc))

    def _skip_endless(self, place: Place, at: int) -> None:
        """Bytes without a newline beyond any line: a torn tail, or damage when a newline comes after all."""
        while at < self._end:
            chunk = self._source.read(at, min(CHUNK, self._end - at))
            if b"\n" in chunk:
                raise DamageError(place, DamagedLineError(TOO_LONG))
            if not chunk:
                return
            at += len(chunk)


class FoundDamageError(DamageError):
    """Damage, with the good entries of the same block that stand before it."""

    def __init__(self, place: Place, reason: DamagedLineError, before: list[Entry]) -> None:
        super().__init__(place, reason)
        self.before = before


def line_start(source: Source, end: int) -> int:
    """Offset of the line whose newline is the byte before *end*."""
    at, step = end - 1, _SMALL
    while at > 0:
        begin = max(0, at - step)
        cut = source.read(begin, at - begin).rfind(b"\n")
        if cut >= 0:
            return begin + cut + 1
        at, step = begin, min(step * 4, CHUNK)
    return 0


def last_newline(source: Source, size: int) -> int:
    """Offset after the last newline before *size*; 0 when there is none."""
    at, step = size, _SMALL
    while at > 0:
        begin = max(0, at - step)
        cut = source.read(begin, at - begin).rfind(b"\n")
        if cut >= 0:
            return begin + cut + 1
        at, step = begin, min(step * 4, CHUNK)
    return 0


def crc_before(source: Source, offset: int) -> int:
    """The checksum stated by the last line before *offset*; 0 at the start.

    :raises DamageError: that line states none.
    """
    end = offset
    while end > 0:
        begin = max(0, end - 64)
        tail = source.read(begin, end - begin).rstrip(b"\r\n \t")
        if tail:
            crc = codec.stated_crc(tail)
            if crc is None:
                raise DamageError(
                    Place(line_start(source, begin + len(tail) + 1), EMPTY),
                    DamagedLineError("does not end in a checksum"),
                )
            return crc
        end = begin
    return 0


def lines_backward(source: Source, end: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that are not blank before *end*, newest first.

    :raises DamageError: one is longer than any line.
    """
    while end > 0:
        start = line_start(source, end)
        if end - start > LINE_LIMIT:
            raise DamageError(Place(start, EMPTY), DamagedLineError(TOO_LONG))
        data = source.read(start, end - start).rstrip(b"\r\n")
        if data.strip():
            yield start, data
        end = start


def entry_at(source: Source, offset: int, data: bytes) -> Entry:
    """The line *data* at *offset*, checked against what the line before it states.

    :raises DamageError: it does not fit.
    """
    seq = codec.stated_seq(data)
    crc = crc_before(source, offset)
    try:
        if seq is None:
            raise DamagedLineError("does not begin like an entry")
        return codec.decode(data, seq, crc)
    except DamagedLineError as reason:
        raise DamageError(Place(offset, Head((seq or 1) - 1, crc)), reason) from None


def end_of(source: Source, size: int | None = None) -> Place:
    """Where the committed entries end: O(1) in the number of entries.

    :raises DamageError: the last committed line is damaged.
    """
    size = source.size() if size is None else size
    end = committed = last_newline(source, size)
    place = START
    newest = EMPTY
    for offset, data in lines_backward(source, end):
        entry = entry_at(source, offset, data)
        newest = entry.head if newest == EMPTY else newest
        if entry.batch is None or entry.batch[0] == entry.batch[1]:
            place = Place(end, entry.head)
            break
        end = offset  # part of a torn batch
    if codec.CRC_TAIL < size - committed <= LINE_LIMIT:
        check_torn(source.read(committed, size - committed), Place(committed, newest))
    return place


def find_seq(source: Source, seq: int, end: int) -> int | None:
    """Offset of the line that states *seq*, by bisection; None when there is none or the lines are not in order."""
    low, high = 0, end
    while high - low > _SMALL * 4:
        middle = (low + high) // 2
        start = next_line(source, middle, high)
        if start is None:
            high = middle
            continue
        found = codec.stated_seq(source.read(start, 64))
        if found is None:
            break
        if found == seq:
            return start
        if found < seq:
            low = start
        else:
            high = middle
    at = low
    while at < end:
        found = codec.stated_seq(source.read(at, 64))
        if found == seq:
            return at
        if found is not None and found > seq:
            return None
        following = next_line(source, at, end)
        if following is None:
            return None
        at = following
    return None


def next_line(source: Source, offset: int, end: int) -> int | None:
    """Offset of the first line that begins after *offset* and before *end*."""
    step = _SMALL
    while offset < end:
        chunk = source.read(offset, min(step, end - offset))
        if not chunk:
            return None
        cut = chunk.find(b"\n")
        if cut >= 0:
            start = offset + cut + 1
            return start if start < end else None
        offset += len(chunk)
        step = min(step * 4, CHUNK)
    return None


def stands(source: Source, place: Place) -> bool:
    """Do the bytes before *place* still end in the head that it states?"""
    if place.offset > source.size():
        return False
    try:
        return crc_before(source, place.offset) == place.head.crc
    except DamageError:
        return False


def check_header(source: Source, session: str, segment: str, block: list[Entry]) -> None:
    """:raises CorruptError: the file's first entry belongs to another session or segment."""
    first = block[0]
    if first.seq == 1 and first.kind == SEGMENT_START:
        for name, value in (("session_id", session), ("segment_id", segment)):
            if first.fields.get(name, value) != value:
                raise CorruptError(source.name, 1, 0, 1, f"the file is of another {name}: it was moved or copied here")


def check_batch_boundary(last: Entry | None, n: int) -> None:
    """:raises InvalidEntryError: *last*, the last kept entry, is not the end of its batch."""
    if last is not None and last.batch is not None and last.batch[0] < last.batch[1]:
        first = n - last.batch[0]
        raise InvalidEntryError(
            f"Entry {n} is inside the batch {first + 1} … {first + last.batch[1]}, which stays whole.",
            next_step=f"Take {first} or {first + last.batch[1]}.",
        )


def end_of_entry(source: Source, segment: str, n: int) -> tuple[int, Head]:
    """(offset after entry *n*, head there); looks at the bytes of that entry only.

    :raises BoundaryNotFoundError: no line states this seq.
    """
    if n == 0:
        return 0, EMPTY
    size = source.size()
    start = find_seq(source, n, size)
    if start is None:
        raise BoundaryNotFoundError(segment, n)
    end = next_line(source, start, size + 1) or size
    try:
        entry = entry_at(source, start, source.read(start, end - start).rstrip(b"\r\n"))
    except DamageError as damage:
        raise first_corrupt(source, damage) from None
    check_batch_boundary(entry, n)
    return end, entry.head
