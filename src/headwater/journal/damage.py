"""Damage: find it (`verify`), read around it (`salvage`), take it out (`repair`, `rescue`).

`repair` keeps the longest good prefix and moves every byte after it to a side file; nothing is deleted. `rescue` puts
everything that can still be read, also behind the damage, into a new segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headwater import failpoints
from headwater.journal import codec, scan
from headwater.journal.branch import Branch, Origin
from headwater.journal.checks import check_header
from headwater.journal.codec import DamagedLineError, NewerLineError
from headwater.journal.entry import EMPTY, SEGMENT_START, Entry, Head
from headwater.journal.errors import CorruptError, UnsupportedVersionError
from headwater.journal.ids import new_id
from headwater.journal.store import Store

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
    """What `verify` found. `head` is that of the good prefix; torn bytes are no damage, they were never committed."""

    path: str
    size: int
    head: Head
    damages: tuple[Damage, ...]
    torn_bytes: int

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
class Repair:
    """What `repair` did: the head now, where the bytes after it are (None: nothing to do), and how many."""

    head: Head
    quarantined: str | None
    bytes: int


def _lines(source: scan.Source, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, line, committed?) of all lines, in bounded memory."""
    offset = 0
    pending = b""
    while offset + len(pending) < size:
        chunk = source.read(offset + len(pending), min(scan.CHUNK, size - offset - len(pending)))
        if not chunk:
            break
        cut = chunk.rfind(b"\n")
        if cut < 0:
            pending += chunk
            continue
        for line in (pending + chunk[:cut]).split(b"\n"):
            yield offset, line, True
            offset += len(line) + 1
        pending = chunk[cut + 1 :]
    if pending:
        yield offset, pending, False


class _Walk:
    """A tolerant read: goes on after damage, from the checksum that the damaged line states."""

    def __init__(self, source: scan.Source, session: str, segment: str) -> None:
        self._source = source
        self._ids = (session, segment)
        self.damages: list[Damage] = []
        self.good = scan.START  # end of the undamaged prefix, incomplete batches included
        self.torn = 0
        self.unverified = 0

    def __iter__(self) -> Iterator[Entry]:
        seq = 0  # of the newest line that states one
        crc: int | None = 0  # what the next line continues; None when a damaged line hides it
        expected: tuple[int, int] | None = None  # batch mark that the next line must have
        size = self._source.size()
        for number, (offset, line, committed) in enumerate(_lines(self._source, size), start=1):
            data = line.removesuffix(b"\r")
            if not committed:
                self._end(number, offset, line, Head(seq, crc or 0))
                return
            if not data.strip():
                continue
            try:
                entry = self._decode(data, seq, crc)
                if entry.seq == 1:
                    check_header(self._source, *self._ids, [entry])
            except (DamagedLineError, CorruptError) as reason:
                if isinstance(reason, NewerLineError):
                    raise UnsupportedVersionError(self._source.name, offset, str(reason)) from None
                text = reason.reason if isinstance(reason, CorruptError) else str(reason)
                self.damages.append(Damage(number, offset, len(line), seq + 1, text))
                stated = codec.stated_seq(data)
                seq = stated if stated == seq + 1 else seq
                crc = codec.stated_crc(data)
                continue
            seq, crc = entry.seq, entry.crc
            if not self.damages:
                if codec.batch_break([entry], expected) is None:
                    self.good = scan.Place(offset + len(line) + 1, entry.head)
                else:
                    self.damages.append(Damage(number, offset, len(line), seq, codec.BROKEN_BATCH))
            expected = codec.batch_after(entry)
            yield entry

    def _end(self, number: int, offset: int, line: bytes, head: Head) -> None:
        """The bytes after the last newline: torn, or a damaged newline."""
        try:
            scan.check_torn(line, scan.Place(offset, head))
        except scan.DamageError as damage:
            self.damages.append(Damage(number, offset, len(line), head.seq + 1, str(damage.reason)))
        else:
            self.torn = len(line)

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
    with store.still(session, segment) as source:
        walk = _Walk(source, session, segment)
        for _ in walk:
            pass
        good = scan.end_of(_Prefix(source, walk.good.offset))
        torn = walk.torn + (0 if walk.damages else walk.good.offset - good.offset)
        return Verification(source.name, source.size(), good.head, tuple(walk.damages), torn)


def salvage(store: Store, session: str, segment: str) -> Salvage:
    """All entries that can be read, and the damage between them. Changes nothing."""
    with store.still(session, segment) as source:
        walk = _Walk(source, session, segment)
        entries = list(walk)
        del entries[codec.complete(entries) :]  # a torn batch at the end was never acknowledged
        return Salvage(tuple(entries), tuple(walk.damages), walk.unverified)


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
    with store.still(session, segment) as source:
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


def rescue(store: Store, session: str, segment: str) -> tuple[Branch, Salvage]:
    """A new segment of the same session with every entry that can be read, renumbered; the old one is not touched."""
    found = salvage(store, session, segment)
    name = new_id()
    origin = Origin("salvaged_from", session, segment, found.entries[-1].head if found.entries else EMPTY)
    entries = [replace(entry, batch=None) for entry in found.entries]
    fields = dict(entries.pop(0).fields) if entries and entries[0].kind == SEGMENT_START else {}
    fields.update(session_id=session, segment_id=name, salvaged_from=origin.to_json())
    failpoints.hit(RESCUE_READ)
    head = store.create_segment(session, name, [Entry(SEGMENT_START, fields), *entries])
    return Branch(session, name, head), found
