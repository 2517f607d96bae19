"""Damage: find it (`verify`), read around it (`salvage`), take it out (`repair`, `rescue`).

`repair` keeps the longest good prefix and moves every byte after it to a side file; nothing is deleted. `rescue` puts
everything that can still be read, also behind the damage, into a new segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from headwater import failpoints
from headwater.journal import codec, scan
from headwater.journal.codec import DamagedLineError, NewerLineError
from headwater.journal.entry import EMPTY, SEGMENT_START, Entry, Head, new_id
from headwater.journal.errors import CorruptError, UnsupportedVersionError
from headwater.journal.fork import Branch, Origin
from headwater.journal.store import Store, changed_meanwhile

MOST_DAMAGES = 1000

REPAIR_FOUND = failpoints.register("journal.repair.before_cut")
REPAIR_CUT = failpoints.register("journal.repair.after_cut")
RESCUE_READ = failpoints.register("journal.rescue.before_create")


@dataclass(frozen=True, slots=True)
class Damage:
    """One line that is not what was written."""

    line: int
    offset: int
    length: int
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found. `head` is that of the good prefix; torn bytes are no damage, they were never committed.

    `damages` are the first :data:`MOST_DAMAGES` of `damage_count`.
    """

    path: str
    size: int
    head: Head
    damages: tuple[Damage, ...]
    torn_bytes: int
    damage_count: int = 0

    @property
    def ok(self) -> bool:
        return not self.damages


@dataclass(frozen=True, slots=True)
class Salvage:
    """Everything readable. `unverified` entries stand behind damage, so their chain could not be checked."""

    entries: tuple[Entry, ...]
    damages: tuple[Damage, ...]
    unverified: int


@dataclass(frozen=True, slots=True)
class Rescue:
    """How many entries `rescue` found, the (first) damage between them, and how many stand unchecked behind damage."""

    entries: int
    damages: tuple[Damage, ...]
    unverified: int


@dataclass(frozen=True, slots=True)
class Repair:
    """What `repair` did: the head now, where the bytes after it are (None: nothing to do), and how many."""

    head: Head
    quarantined: str | None
    bytes: int


class _Line(NamedTuple):
    """Bytes up to a newline, or to the end; `data` is None when they are more than any line has."""

    offset: int
    length: int
    data: bytes | None
    committed: bool


def _lines(source: scan.Source, size: int) -> Iterator[_Line]:
    """All lines, in bounded memory."""
    offset = at = length = 0  # where the line begins, where to read on, how much of the line was read
    waiting: list[bytes] = []
    while at < size:
        chunk = source.read(at, min(scan.CHUNK, size - at))
        if not chunk:
            break
        at += len(chunk)
        first, *others = chunk.split(b"\n")
        waiting.append(first)
        length += len(first)
        if length > scan.LINE_LIMIT:
            waiting.clear()
        if others:
            yield _Line(offset, length, b"".join(waiting) if length <= scan.LINE_LIMIT else None, True)
            offset += length + 1
            *whole, last = others
            for line in whole:
                yield _Line(offset, len(line), line, True)
                offset += len(line) + 1
            waiting, length = [last], len(last)
    if length:
        yield _Line(offset, length, b"".join(waiting) if length <= scan.LINE_LIMIT else None, False)


class _Walk:
    """A tolerant read: goes on after damage, from the checksum that the damaged line states."""

    def __init__(self, source: scan.Source, session: str, segment: str, size: int | None = None) -> None:
        self._source = source
        self._ids = (session, segment)
        self.size = source.size() if size is None else size
        self.damages: list[Damage] = []  # the first of them
        self.damage_count = 0
        self.good = scan.START  # end of the undamaged prefix, incomplete batches included
        self.torn = 0
        self.unverified = 0

    def __iter__(self) -> Iterator[Entry]:
        seq = 0  # of the newest line that states one
        crc: int | None = 0  # what the next line continues; None when a damaged line hides it
        expected: tuple[int, int] | None = None  # batch mark that the next line must have
        for number, (offset, length, line, committed) in enumerate(_lines(self._source, self.size), start=1):
            if not committed:
                self._end(number, offset, length, line, Head(seq, crc or 0))
                return
            if line is None:
                self._add(Damage(number, offset, length, seq + 1, scan.TOO_LONG))
                crc = None
                continue
            data = line.removesuffix(b"\r")
            if not data.strip():
                continue
            try:
                entry = self._decode(data, seq, crc)
                if entry.seq == 1:
                    scan.check_header(self._source, *self._ids, [entry])
            except (DamagedLineError, CorruptError) as reason:
                if isinstance(reason, NewerLineError):
                    raise UnsupportedVersionError(self._source.name, offset, str(reason)) from None
                text = reason.reason if isinstance(reason, CorruptError) else str(reason)
                self._add(Damage(number, offset, length, seq + 1, text))
                stated = codec.stated_seq(data)
                seq = stated if stated == seq + 1 else seq
                crc = codec.stated_crc(data)
                continue
            seq, crc = entry.seq, entry.crc
            if not self.damages:
                if codec.batch_break([entry], expected) is None:
                    self.good = scan.Place(offset + length + 1, entry.head)
                else:
                    self._add(Damage(number, offset, length, seq, codec.BROKEN_BATCH))
            expected = codec.batch_after(entry)
            yield entry

    def _add(self, damage: Damage) -> None:
        self.damage_count += 1
        if len(self.damages) < MOST_DAMAGES:
            self.damages.append(damage)

    def committed(self) -> Iterator[Entry]:
        """The same without a torn batch at the end, which was never acknowledged."""
        held: list[Entry] = []
        for entry in self:
            if held and entry.batch != codec.batch_after(held[-1]):
                yield from held  # damage took its end: it was acknowledged
                held.clear()
            if codec.batch_after(entry) is not None:
                held.append(entry)
                continue
            yield from held
            held.clear()
            yield entry

    def _end(self, number: int, offset: int, length: int, line: bytes | None, head: Head) -> None:
        """The bytes after the last newline: torn, or a damaged newline."""
        try:
            scan.check_torn(line or b"", scan.Place(offset, head))
        except scan.DamageError as damage:
            self._add(Damage(number, offset, length, head.seq + 1, str(damage.reason)))
        else:
            self.torn = length

    def _decode(self, data: bytes, seq: int, crc: int | None) -> Entry:
        """Strict before any damage. Behind it a line may state a later seq; its chain is checked where it is known."""
        if not self.damages:
            return codec.decode(data, seq + 1, crc or 0)
        stated = codec.stated_seq(data)
        if stated is None or stated <= seq:
            raise DamagedLineError("not readable as an entry")
        if crc is not None:
            try:
                return codec.decode(data, stated, crc)
            except DamagedLineError:
                pass
        entry = codec.decode_unchained(data, stated)
        self.unverified += 1
        return entry


def verify(store: Store, session: str, segment: str) -> Verification:
    """Check every byte, while no writer is inside the segment.

    :raises SegmentNotFoundError: there is none.
    """
    with store.source(session, segment, still=True) as source:
        walk = _Walk(source, session, segment)
        for _ in walk:
            pass
        good = scan.end_of(_Prefix(source, walk.good.offset))
        torn = walk.torn + (0 if walk.damages else walk.good.offset - good.offset)
        return Verification(source.name, walk.size, good.head, tuple(walk.damages), torn, walk.damage_count)


def salvage(store: Store, session: str, segment: str) -> Salvage:
    """All entries that can be read, in memory, and the damage between them. Changes nothing.

    For a segment larger than memory: :func:`rescue`, then read the new one.
    """
    with store.source(session, segment, still=True) as source:
        walk = _Walk(source, session, segment)
        return Salvage(tuple(walk.committed()), tuple(walk.damages), walk.unverified)


class _Prefix:
    """The first bytes of a source."""

    def __init__(self, source: scan.Source, end: int) -> None:
        self.name = source.name
        self._source = source
        self._end = end

    def size(self) -> int:
        return self._end

    def read(self, offset: int, length: int) -> bytes:
        return self._source.read(offset, max(0, min(length, self._end - offset)))


def repair(store: Store, session: str, segment: str) -> Repair:
    """Cut the segment after its longest good prefix; the bytes after it are quarantined beside it, durably, first.

    :raises CorruptError: the file belongs to another segment: a repair would take all of it.
    :raises BusyError: somebody wrote meanwhile; call again.
    """
    with store.source(session, segment, still=True) as source:
        size = source.size()
        walk = _Walk(source, session, segment)
        for _ in walk:
            pass
        if walk.damages and "another s" in walk.damages[0].reason:
            first = walk.damages[0]
            raise CorruptError(source.name, first.line, first.offset, first.seq, first.reason)
        place = scan.end_of(_Prefix(source, walk.good.offset))
        label = f"damaged-{walk.damages[0].line}" if walk.damages else "torn"
        clean = not source.read(place.offset, min(scan.CHUNK, size - place.offset)).strip()
    if clean and not walk.damages:
        return Repair(place.head, None, 0)
    failpoints.hit(REPAIR_FOUND)
    saved = store.cut(session, segment, place.offset, label, size)
    failpoints.hit(REPAIR_CUT)
    return Repair(place.head, saved, size - place.offset)


def rescue(store: Store, session: str, segment: str) -> tuple[Branch, Rescue]:
    """A new segment of the same session with every entry that can be read, renumbered; the old one is not touched.

    Entry by entry: a segment may be larger than memory.

    :raises BusyError: somebody truncated or repaired it meanwhile; nothing was made.
    """
    name = new_id()
    with store.source(session, segment, still=True) as source:
        first = next(iter(_Walk(source, session, segment).committed()), None)
        end, last = source.size(), EMPTY
        for entry in _Walk(source, session, segment).committed():
            last = entry.head
        marked = source.read(max(0, end - 64), 64)
    fields = dict(first.fields) if first is not None and first.kind == SEGMENT_START else {}
    origin = Origin("salvaged_from", session, segment, last)
    fields.update(session_id=session, segment_id=name, salvaged_from=origin.to_json())
    failpoints.hit(RESCUE_READ)
    count = 0
    with store.source(session, segment) as source:
        walk = _Walk(source, session, segment, end)

        def entries() -> Iterator[Entry]:
            nonlocal count
            yield Entry(SEGMENT_START, fields)
            for place, entry in enumerate(walk.committed()):
                count += 1
                if place or entry.kind != SEGMENT_START:
                    yield replace(entry, batch=None)
            if source.read(max(0, end - 64), 64) != marked:
                raise changed_meanwhile(segment)

        head = store.create_segment(session, name, entries())
    return Branch(session, name, head), Rescue(count, tuple(walk.damages), walk.unverified)
