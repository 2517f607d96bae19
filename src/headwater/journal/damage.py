"""Damage: find it (`verify`), read around it (`salvage`), take it out (`repair`, `rescue`).

`repair` keeps the longest good prefix and moves every byte after it to a side file; nothing is deleted. `rescue` puts
everything that can still be read, also behind the damage, into a new segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headwater import failpoints
from headwater.journal import codec, reader
from headwater.journal.codec import DamagedLineError, NewerLineError
from headwater.journal.entry import EMPTY, SEGMENT_START, Entry, Head, new_id
from headwater.journal.errors import CorruptError, UnsupportedVersionError
from headwater.journal.fork import Branch, Origin
from headwater.journal.reader import DamageError, Position, SegmentBytes
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
    """The result of `verify`. `head` is that of the good prefix; torn bytes are no damage, they were never committed.

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
    """How many entries `rescue` copied, the (first) damage between them, and how many stand unchecked behind damage."""

    entries: int
    damages: tuple[Damage, ...]
    unverified: int


@dataclass(frozen=True, slots=True)
class Repair:
    """What `repair` did: the head now, where the bytes after it are (None: nothing to do), and how many."""

    head: Head
    quarantined: str | None
    bytes: int


class _Walk:
    """A tolerant read: goes on after damage, from the checksum that the damaged line states."""

    def __init__(self, source: SegmentBytes, session: str, segment: str, size: int | None = None) -> None:
        self._source, self._ids = source, (session, segment)
        self.size = source.size() if size is None else size
        self.damages: list[Damage] = []  # the first of them
        self.damage_count = self.torn = self.unverified = 0
        self.foreign: CorruptError | None = None  # the file is of another segment
        self.good = 0  # end of the undamaged prefix, incomplete batches included

    def __iter__(self) -> Iterator[Entry]:
        seq = 0  # of the newest line that states one
        crc: int | None = 0  # what the next line continues; None when a damaged line hides it
        mark: tuple[int, int] | None = None  # batch mark that the next line must have
        for number, line in enumerate(reader.raw_lines(self._source, 0, self.size), start=1):
            offset, length, data, is_committed = line
            if not is_committed:
                self._end(number, offset, length, data, Head(seq, crc or 0))
                return
            if data is not None:
                data = data.removesuffix(b"\r")
                if not data.strip():
                    continue
            try:
                entry = self._decode(data, seq, crc)
                if entry.seq == 1:
                    reader.check_header(self._source, entry, *self._ids)
            except CorruptError as error:
                self.foreign = error
                self._add(Damage(number, offset, length, seq + 1, error.reason))
                seq, crc = 1, codec.stated_crc(data or b"")
                continue
            except NewerLineError as version:
                raise UnsupportedVersionError(self._source.name, offset, str(version)) from None
            except DamagedLineError as reason:
                self._add(Damage(number, offset, length, seq + 1, str(reason)))
                if data is not None and codec.stated_seq(data) == seq + 1:
                    seq += 1
                crc = None if data is None else codec.stated_crc(data)
                continue
            seq, crc = entry.seq, entry.crc
            if not self.damages:
                if codec.fits(entry, mark):
                    self.good = offset + length + 1
                else:
                    self._add(Damage(number, offset, length, seq, reader.BROKEN_BATCH))
            mark = codec.batch_after(entry)
            yield entry

    def committed(self) -> Iterator[Entry]:
        """The same without a torn batch at the end, which was never acknowledged."""
        held: list[Entry] = []
        for entry in self:
            if held and entry.batch != codec.batch_after(held[-1]):
                yield from held  # damage took its end: it was acknowledged
                held.clear()
            held.append(entry)
            if codec.batch_after(entry) is None:
                yield from held
                held.clear()

    def finish(self) -> Position:
        """Read to the end; where the committed entries of the undamaged prefix end."""
        for _ in self:
            pass
        return reader.end_of(self._source, self.good)

    def _add(self, damage: Damage) -> None:
        self.damage_count += 1
        if len(self.damages) < MOST_DAMAGES:
            self.damages.append(damage)

    def _end(self, number: int, offset: int, length: int, data: bytes | None, head: Head) -> None:
        """The bytes after the last newline: torn, or a damaged newline."""
        try:
            reader.check_torn(data or b"", Position(offset, head))
        except DamageError as damage:
            self._add(Damage(number, offset, length, head.seq + 1, str(damage)))
        else:
            self.torn = length

    def _decode(self, data: bytes | None, seq: int, crc: int | None) -> Entry:
        """Strict before any damage. Behind it a line can state a later seq; its chain is checked where it is known."""
        if data is None:
            raise DamagedLineError(reader.TOO_LONG)
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
        end = walk.finish()
        torn = walk.torn + (0 if walk.damages else walk.good - end.offset)
        return Verification(source.name, walk.size, end.head, tuple(walk.damages), torn, walk.damage_count)


def salvage(store: Store, session: str, segment: str) -> Salvage:
    """All entries that can be read, in memory, and the damage between them. Changes nothing.

    For a segment larger than memory: :func:`rescue`, then read the new one.
    """
    with store.source(session, segment, still=True) as source:
        walk = _Walk(source, session, segment)
        return Salvage(tuple(walk.committed()), tuple(walk.damages), walk.unverified)


def repair(store: Store, session: str, segment: str) -> Repair:
    """Cut the segment after its longest good prefix; the bytes after it are quarantined beside it, durably, first.

    :raises CorruptError: the file belongs to another segment: a repair would take all of it.
    :raises BusyError: another process wrote meanwhile; call again.
    """
    with store.source(session, segment, still=True) as source:
        walk = _Walk(source, session, segment)
        end, size = walk.finish(), walk.size
        if walk.foreign is not None:
            raise walk.foreign
        label = f"damaged-{walk.damages[0].line}" if walk.damages else "torn"
        clean = not source.read(end.offset, min(reader.CHUNK, size - end.offset)).strip()
    if clean and not walk.damages:
        return Repair(end.head, None, 0)
    failpoints.hit(REPAIR_FOUND)
    saved = store.cut(session, segment, end.offset, label, size)
    failpoints.hit(REPAIR_CUT)
    return Repair(end.head, saved, size - end.offset)


def rescue(store: Store, session: str, segment: str) -> tuple[Branch, Rescue]:
    """A new segment of the same session with every entry that can be read, renumbered; the old one is not touched.

    Entry by entry: a segment can be larger than memory.

    :raises BusyError: another process truncated or repaired it meanwhile; nothing was created.
    """
    name = new_id()
    first: Entry | None = None
    last = EMPTY
    with store.source(session, segment, still=True) as source:
        end = source.size()
        for entry in _Walk(source, session, segment, end).committed():
            first, last = first or entry, entry.head
        tail = source.read(max(0, end - 64), 64)
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
            for entry in walk.committed():
                count += 1
                if count > 1 or entry.kind != SEGMENT_START:
                    yield replace(entry, batch=None)
            if source.read(max(0, end - 64), 64) != tail:
                raise changed_meanwhile(segment)

        head = store.create_segment(session, name, entries())
    return Branch(session, name, head), Rescue(count, tuple(walk.damages), walk.unverified)
