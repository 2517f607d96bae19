"""Reading a segment: its committed entries, its end, an entry by its number. Works on any :class:`SegmentBytes`.

The rules of what counts as committed are in this module and nowhere else:

* a newline commits a line; bytes after the last newline are a torn write and do not count;
* lines of a batch count when its last line is there; a torn batch does not count as a whole;
* blank lines and a carriage return before the newline are tolerated and do not count;
* a committed line that is not what was written is damage, never skipped;
* a *whole* line with a wrong byte in place of its newline is damage too: no torn write looks like that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from headwater.journal.codec import (
    CRC_TAIL,
    NO_CRC,
    DamagedLineError,
    NewerLineError,
    batch_after,
    decode,
    fits,
    foreign_id,
    stated_crc,
    stated_seq,
)
from headwater.journal.entry import EMPTY, Entry, Head, Limits
from headwater.journal.errors import (
    BoundaryNotFoundError,
    CorruptError,
    InvalidEntryError,
    JournalError,
    UnsupportedVersionError,
)

CHUNK = 1 << 20
LINE_LIMIT = Limits().line_bytes + 4096
BROKEN_BATCH = "a batch before it is incomplete, or its own begin is missing"
TOO_LONG = "the line is longer than the format allows"
_SMALL = 1 << 12


class SegmentBytes(Protocol):
    """The bytes of one segment."""

    @property
    def name(self) -> str:
        """Path for error messages."""

    def size(self) -> int:
        """Bytes now."""

    def read(self, offset: int, length: int) -> bytes:
        """Up to *length* bytes at *offset*; less only at the end."""


@dataclass(frozen=True, slots=True)
class Position:
    """Between two lines: byte offset, and head of what stands before it."""

    offset: int
    head: Head


START = Position(0, EMPTY)


class DamageError(Exception):
    """The bytes after *position* are not the next line. Becomes `CorruptError` once confirmed."""

    def __init__(self, position: Position, reason: str | DamagedLineError) -> None:
        self.position, self.reason = position, reason
        super().__init__(str(reason))


def corrupt(source: SegmentBytes, damage: DamageError) -> JournalError:
    """The public error for *damage*; counts lines, so only for the error path."""
    offset = damage.position.offset
    if isinstance(damage.reason, NewerLineError):
        return UnsupportedVersionError(source.name, offset, str(damage.reason))
    count = sum(source.read(at, min(CHUNK, offset - at)).count(b"\n") for at in range(0, offset, CHUNK))
    return CorruptError(source.name, count + 1, offset, damage.position.head.seq + 1, str(damage.reason))


def first_corrupt(source: SegmentBytes, damage: DamageError) -> JournalError:
    """The error for *damage*, or for one that stands before it. Reads from the start."""
    try:
        for _ in Reader(source):
            pass
    except DamageError as first:
        damage = first
    return corrupt(source, damage)


def check_torn(tail: bytes, position: Position) -> None:
    """A torn write is the beginning of a line; a whole line with one byte more is a damaged newline.

    Not so when that byte is zero: a power loss leaves zeros where bytes were not written yet.
    """
    if len(tail) <= CRC_TAIL or tail.endswith(b"\0"):
        return
    try:
        decode(tail[:-1], position.head.seq + 1, position.head.crc)
    except DamagedLineError:
        return
    raise DamageError(position, "the newline after the line was overwritten")


def raw_lines(source: SegmentBytes, offset: int, end: int) -> Iterator[tuple[int, int, bytes | None, bool]]:
    """(offset, length, bytes, is committed) of each line up to *end*; no bytes when they are more than any line has.

    In bounded memory. The last one can be without its newline.
    """
    at, length = offset, 0  # where to read on, how much of the line was read
    waiting: list[bytes] = []
    while at < end:
        chunk = source.read(at, min(CHUNK, end - at))
        if not chunk:
            break
        at += len(chunk)
        first, *others = chunk.split(b"\n")
        waiting.append(first)
        length += len(first)
        if length > LINE_LIMIT:
            waiting.clear()
        if others:
            yield offset, length, b"".join(waiting) if length <= LINE_LIMIT else None, True
            offset += length + 1
            rest = others.pop()
            for data in others:
                length = len(data)
                yield offset, length, data, True
                offset += length + 1
            waiting, length = [rest], len(rest)
    if length:
        yield offset, length, b"".join(waiting) if length <= LINE_LIMIT else None, False


class Reader:
    """Committed entries after *position*, oldest first; `position` is then the end of what was given out.

    :raises DamageError: while iterating.
    """

    def __init__(self, source: SegmentBytes, position: Position = START, *, end: int | None = None) -> None:
        self._source, self._begin, self._offset = source, position, position.offset
        self._end = source.size() if end is None else end
        self._last: Entry | None = None

    @property
    def position(self) -> Position:
        return self._begin if self._last is None else Position(self._offset, self._last.head)

    def __iter__(self) -> Iterator[Entry]:
        seq, crc = self._begin.head.seq, self._begin.head.crc
        mark: tuple[int, int] | None = None
        inside = self._offset > 0  # a reader can begin at any entry, also inside a batch
        held: list[tuple[int, Entry]] = []  # of a batch whose end is not read yet
        for offset, length, data, is_committed in raw_lines(self._source, self._offset, self._end):
            if not is_committed:
                check_torn(data or b"", Position(offset, Head(seq, crc)))
                return
            try:
                if data is None:
                    raise DamagedLineError(TOO_LONG)
                if data[-1:] != b"}":
                    data = data.removesuffix(b"\r")
                    if not data.strip():
                        continue
                entry = decode(data, seq + 1, crc)
                if not (inside or fits(entry, mark)):
                    raise DamagedLineError(BROKEN_BATCH)
            except DamagedLineError as reason:
                raise DamageError(Position(offset, Head(seq, crc)), reason) from None
            seq, crc, inside = entry.seq, entry.crc, False
            mark = batch_after(entry) if entry.batch is not None else None
            if mark is not None or held:
                held.append((offset + length + 1, entry))
                if mark is not None:
                    continue
                for self._offset, self._last in held:
                    yield self._last
                held.clear()
                continue
            self._offset, self._last = offset + length + 1, entry
            yield entry


def line_begin(source: SegmentBytes, before: int) -> int:
    """Offset after the last newline before *before*; 0 when there is none."""
    at, step = before, _SMALL
    while at > 0:
        begin = max(0, at - step)
        cut = source.read(begin, at - begin).rfind(b"\n")
        if cut >= 0:
            return begin + cut + 1
        at, step = begin, min(step * 4, CHUNK)
    return 0


def next_line(source: SegmentBytes, offset: int, end: int) -> int | None:
    """Offset of the first line that begins after *offset* and before *end*."""
    step = _SMALL
    while offset < end:
        chunk = source.read(offset, min(step, end - offset))
        cut = chunk.find(b"\n")
        if cut >= 0:
            start = offset + cut + 1
            return start if start < end else None
        if not chunk:
            return None
        offset, step = offset + len(chunk), min(step * 4, CHUNK)
    return None


def crc_before(source: SegmentBytes, offset: int) -> int:
    """The checksum stated by the last line before *offset*; 0 at the start.

    :raises DamageError: that line states none.
    """
    end = offset
    while end > 0:
        begin = max(0, end - 64)
        tail = source.read(begin, end - begin).rstrip(b"\r\n \t")
        if tail:
            crc = stated_crc(tail)
            if crc is None:
                raise DamageError(Position(line_begin(source, begin + len(tail)), EMPTY), NO_CRC)
            return crc
        end = begin
    return 0


def _entry_at(source: SegmentBytes, offset: int, data: bytes) -> Entry:
    """The line *data* at *offset*, checked against what the line before it states.

    :raises DamageError: it does not fit.
    """
    seq, crc = stated_seq(data), crc_before(source, offset)
    try:
        if seq is None:
            raise DamagedLineError("does not begin like an entry")
        return decode(data, seq, crc)
    except DamagedLineError as reason:
        raise DamageError(Position(offset, Head((seq or 1) - 1, crc)), reason) from None


def end_of(source: SegmentBytes, size: int | None = None) -> Position:
    """Where the committed entries of the first *size* bytes end: O(1) in the number of entries.

    :raises DamageError: the last committed line is damaged.
    """
    size = source.size() if size is None else size
    end = committed = line_begin(source, size)
    position, newest = START, EMPTY
    while end > 0:
        start = line_begin(source, end - 1)
        if end - start > LINE_LIMIT:
            raise DamageError(Position(start, EMPTY), TOO_LONG)
        data = source.read(start, end - start).rstrip(b"\r\n")
        if data.strip():
            entry = _entry_at(source, start, data)
            newest = entry.head if newest == EMPTY else newest
            if batch_after(entry) is None:
                position = Position(end, entry.head)
                break
        end = start  # a blank line, or part of a torn batch
    if CRC_TAIL < size - committed <= LINE_LIMIT:
        check_torn(source.read(committed, size - committed), Position(committed, newest))
    return position


def find_seq(source: SegmentBytes, seq: int, end: int) -> int | None:
    """Offset of the line that states *seq*, by bisection; None when there is none or the lines are not in order."""
    low, high = 0, end  # the line begins in low … high - 1
    while high - low > 1:
        middle = (low + high - 1) // 2
        start, stated = next_line(source, middle, high), None
        while start is not None and (stated := stated_seq(source.read(start, 64))) is None:
            start = next_line(source, start, high)  # blank, or damaged
        if start is None or stated is None or stated > seq:
            high = middle + 1
        elif stated == seq:
            return start
        else:
            low = start
    return low if stated_seq(source.read(low, 64)) == seq else None


def end_of_entry(source: SegmentBytes, segment: str, n: int) -> tuple[int, Head]:
    """(offset after entry *n*, head there); looks at the bytes of that entry only.

    :raises BoundaryNotFoundError: no line states this seq. :raises InvalidEntryError: it is inside a batch.
    """
    if n == 0:
        return 0, EMPTY
    size = source.size()
    start = find_seq(source, n, size)
    if start is None:
        raise BoundaryNotFoundError(segment, n)
    end = next_line(source, start, size + 1) or size
    try:
        entry = _entry_at(source, start, source.read(start, end - start).rstrip(b"\r\n"))
    except DamageError as damage:
        raise first_corrupt(source, damage) from None
    check_batch_end(entry)
    return end, entry.head


def check_batch_end(last: Entry) -> None:
    """:raises InvalidEntryError: *last*, the last kept entry, is not the end of its batch."""
    if batch_after(last) is not None and last.batch is not None:
        first = last.seq - last.batch[0]
        raise InvalidEntryError(
            f"Entry {last.seq} is inside the batch {first + 1} … {first + last.batch[1]}, which stays whole.",
            next_step=f"Take {first} or {first + last.batch[1]}.",
        )


def stands(source: SegmentBytes, position: Position) -> bool:
    """Do the bytes before *position* still end in the head that it states?"""
    try:
        return position.offset <= source.size() and crc_before(source, position.offset) == position.head.crc
    except DamageError:
        return False


def check_header(source: SegmentBytes, first: Entry, session: str, segment: str) -> None:
    """:raises CorruptError: the file's first entry belongs to another session or segment."""
    name = foreign_id(first, session, segment)
    if name is not None:
        raise CorruptError(source.name, 1, 0, 1, f"the file is of another {name}: it was moved or copied here")
