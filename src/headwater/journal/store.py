"""The contract of a journal store, and everything that can be said once for all backends.

A *session* is a family of runs, a *segment* one linear log of it, an *entry* one line of that. Entries have a seq from
1 without gaps; the :class:`~headwater.journal.entry.Head` of a segment is the token for compare-and-swap.

All calls are synchronous and safe for threads; appends, truncations and deletes are safe between processes. Reads
take no lock: they see a prefix of what is committed, never part of an entry or of a batch. A backend gives the bytes
of a segment as a :class:`~headwater.journal.reader.SegmentBytes`; reading is the same code for all.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Self

from headwater.errors import InputError
from headwater.journal import reader
from headwater.journal.entry import EMPTY, Entry, Head, Limits, Rewound, Truncation, check_id
from headwater.journal.errors import (
    BoundaryNotFoundError,
    BusyError,
    HeadConflictError,
    SegmentCutError,
)
from headwater.journal.reader import DamageError, Position, Reader, SegmentBytes
from headwater.system.owner_lock import Owner, OwnerLock

Order = Literal["created", "active"]
_REMEMBERED = 4096


class Store(ABC):
    """See the module's docstring."""

    limits: Limits

    # ---- writing -------------------------------------------------------------------------------

    @abstractmethod
    def create_segment(self, session: str, segment: str, entries: Iterable[Entry] = ()) -> Head:
        """Create a segment with *entries*, all or nothing, durable on return at every durability level.

        :param entries: written as they come, so they can be longer than memory.
        :raises AlreadyExistsError: the segment exists.
        :raises SegmentDeletedError: it, or its session, was deleted.
        :raises InvalidEntryError: the first entry is a `segment_start` of other ids, or one is not JSON.
        """

    @abstractmethod
    def append(
        self,
        session: str,
        segment: str,
        entry: Entry | Sequence[Entry],
        *,
        expected_head: Head | None = None,
        idempotency_key: str | None = None,
    ) -> Head:
        """Add an entry, or a batch whose entries become visible together. Returns the new head.

        :param expected_head: append only when this is the head (compare-and-swap).
        :param idempotency_key: when an entry of the segment has this key already, write nothing and return its head.
        :raises SegmentNotFoundError: there is no such segment, or it was deleted.
        :raises HeadConflictError: the head is another one; the error holds it.
        :raises InvalidEntryError: not JSON.
        :raises CorruptError: the last committed line is damaged.
        :raises NoRoomError: the disk is full; the log is as before.
        """

    @abstractmethod
    def truncate(self, session: str, segment: str, n: int, *, expected_head: Head | None = None) -> Truncation:
        """Keep the first *n* entries, in place: every byte of them stays, and damage after them can be cut too.

        The removed ones are saved beside the segment.

        :raises BoundaryNotFoundError: there are fewer than *n* entries.
        :raises InvalidEntryError: *n* is inside a batch.
        :raises HeadConflictError: the head is not *expected_head*.
        """

    @abstractmethod
    def cut(self, session: str, segment: str, offset: int, label: str, expected_size: int) -> str:
        """Cut the segment's bytes at *offset* if it still has *expected_size* bytes; save them under *label* first.

        The tool of `repair`: looks at no entry. Returns where they are.

        :raises BusyError: it has another size: another process wrote meanwhile.
        """

    @abstractmethod
    def append_trace(self, session: str, segment: str, record: Mapping[str, Any]) -> bool:
        """Write a debug record beside the log, best effort: False when it was dropped. Never raises for I/O."""

    @abstractmethod
    def iter_trace(self, session: str, segment: str) -> Iterator[dict[str, Any]]:
        """The trace records that are kept, oldest first; unreadable ones are left out."""

    @abstractmethod
    def delete_session(self, session: str, *, modified_at: int | None = None) -> bool:
        """Delete a session with all that belongs to it: it never comes back. False when there was none.

        :param modified_at: delete only when this is still its :meth:`session_modified_at`; else False.
        """

    @abstractmethod
    def own(self, session: str) -> OwnerLock:
        """Become the one writer of *session* among those who ask.

        :raises OwnedElsewhereError: names the host, pid and start time of the owner.
        """

    @abstractmethod
    def owner(self, session: str) -> Owner | None:
        """Who owns *session* now. Writes nothing."""

    @abstractmethod
    def sync(self, session: str, segment: str) -> None:
        """Make everything appended so far durable, at every durability level."""

    @abstractmethod
    def close(self) -> None:
        """Sync what `flush` still owes and close all files. The store cannot be used after it.

        :raises SyncFailedError: that sync failed, or an earlier one did, which no call has reported.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what exists ---------------------------------------------------------------------------

    @abstractmethod
    def exists(self, session: str, segment: str) -> bool:
        """:raises AccessDeniedError: it cannot be known."""

    @abstractmethod
    def session_ids(self) -> list[str]:
        """All sessions that have a segment, in any order."""

    @abstractmethod
    def segment_ids(self, session: str) -> list[str]:
        """All segments of *session*, in any order; none for an unknown session."""

    @abstractmethod
    def modified_at(self, session: str, segment: str) -> int | None:
        """Unix milliseconds of the last change of a segment; None when there is none."""

    @abstractmethod
    def location(self, session: str, segment: str) -> str:
        """Where a person finds it."""

    def session_modified_at(self, session: str) -> int | None:
        """Unix milliseconds of the newest change in *session*; None when there is no such session."""
        times = (self.modified_at(session, segment) for segment in self.segment_ids(session))
        return max((time for time in times if time is not None), default=None)

    def list_sessions(self, *, limit: int | None = None, order_by: Order = "created") -> list[str]:
        """Sessions, most recently created first, or most recently active first."""
        return _newest_first(self.session_ids(), order_by, self.session_modified_at)[:limit]

    def list_segments(self, session: str, *, limit: int | None = None, order_by: Order = "created") -> list[str]:
        """Segments of *session*, most recent first; none for an unknown session."""
        names = self.segment_ids(session)
        return _newest_first(names, order_by, lambda segment: self.modified_at(session, segment))[:limit]

    def lookup_session_of(self, segment: str) -> str | None:
        """The session that holds *segment*, the newest when several do; None when none does."""
        check_id(segment, "segment")
        return next((session for session in self.list_sessions() if self.exists(session, segment)), None)

    # ---- reading -------------------------------------------------------------------------------

    @abstractmethod
    def source(self, session: str, segment: str, *, still: bool = False) -> AbstractContextManager[SegmentBytes]:
        """The segment's bytes, for reading. :param still: no writer is inside an append or truncation meanwhile.

        :raises SegmentNotFoundError: there is none.
        """

    def head(self, session: str, segment: str) -> Head:
        """The head, from the last line only: its price does not grow with the segment."""
        try:
            with self.source(session, segment) as source:
                return reader.end_of(source).head
        except DamageError:  # perhaps only because a writer was at work: look again while none is
            with self.source(session, segment, still=True) as source:
                return settled_end(source).head

    def read_entry_count(self, session: str, segment: str) -> int:
        """How many entries there are: O(1)."""
        return self.head(session, segment).seq

    def read_all(self, session: str, segment: str) -> list[Entry]:
        """All entries, all or nothing.

        :raises SegmentNotFoundError: there is no such segment.
        :raises CorruptError: a committed line is damaged.
        """
        while True:
            try:
                return list(self._read(session, segment))
            except SegmentCutError:
                continue

    def iter(self, session: str, segment: str, *, from_seq: int = 1, limit: int | None = None) -> Iterator[Entry]:
        """Entries one by one in bounded memory, as they stand now.

        :param from_seq: start at this entry. :param limit: at most this many.
        :raises SegmentCutError: the segment was truncated below the reader's position.
        """
        if from_seq < 1 or (limit is not None and limit < 0):
            raise InputError(f"Received from_seq={from_seq}, limit={limit}; valid are from_seq ≥ 1 and limit ≥ 0.")
        return itertools.islice(self._read(session, segment, from_seq), limit)

    def tail(self, session: str, segment: str, n: int) -> list[Entry]:
        """The newest *n* entries, oldest first."""
        while n > 0:
            first = max(1, self.head(session, segment).seq - n + 1)
            try:
                entries = list(self.iter(session, segment, from_seq=first))
            except SegmentCutError:
                continue
            if entries or first == 1:  # else it was cut below `first` meanwhile
                return entries[-n:]
        return []

    def _read(self, session: str, segment: str, from_seq: int = 1, after: Head | None = None) -> Iterator[Entry]:
        """Entries from *from_seq* on, or after the head *after*.

        :raises SegmentCutError: there is no such head (any more).
        """
        seq = from_seq if after is None else after.seq + 1
        with self.source(session, segment) as source:
            position = self._position(session, segment, source, seq)
            if after is not None and after != EMPTY and (position is None or position.head != after):
                raise SegmentCutError(segment, after.seq)
            while position is not None:
                entries = Reader(source, position)
                try:
                    for entry in entries:
                        if entry.seq == 1:
                            reader.check_header(source, entry, session, segment)
                        yield entry
                    return
                except DamageError as damage:
                    position = entries.position
                    self._confirm(session, segment, position, damage)

    def _position(self, session: str, segment: str, source: SegmentBytes, seq: int) -> Position | None:
        """Where *seq* begins; None when it is beyond the end.

        :raises CorruptError: the damage is before *seq*; what stands before damage can still be read.
        """
        if seq == 1:
            return reader.START
        try:
            offset = reader.find_seq(source, seq, reader.line_begin(source, source.size()))
            if offset is not None:
                return Position(offset, Head(seq - 1, reader.crc_before(source, offset)))
            end = reader.end_of(source)
            if end.head.seq < seq:
                return end if end.head.seq == seq - 1 else None
        except DamageError:
            pass
        with self.source(session, segment, still=True) as settled:
            entries = Reader(settled)
            try:
                return next((entries.position for entry in entries if entry.seq == seq - 1), None)
            except DamageError as damage:
                raise reader.corrupt(settled, damage) from None

    def _confirm(self, session: str, segment: str, position: Position, damage: DamageError) -> None:
        """Raise what *damage* after *position* really is; return when it is gone while no writer is at work.

        Then a truncation and an append passed between two reads, and *position* still stands.
        """
        with self.source(session, segment, still=True) as source:
            if not reader.stands(source, position):
                raise SegmentCutError(segment, position.head.seq)
            entries = Reader(source, position)
            try:
                for _ in entries:
                    if entries.position.offset > damage.position.offset:
                        return
            except DamageError as real:
                raise reader.corrupt(source, real) from None

    def follow(
        self,
        session: str,
        segment: str,
        *,
        from_seq: int = 1,
        poll: float = 0.05,
        stop: threading.Event | None = None,
    ) -> Iterator[Entry | Rewound]:
        """Entries as they come, for ever: until *stop* is set or the generator is closed.

        A truncation shows as :class:`~headwater.journal.entry.Rewound`; after it come the entries that stand there now.

        :raises SegmentNotFoundError: the segment was deleted.
        """
        stop = stop or threading.Event()
        last = EMPTY
        if from_seq > 1:
            before = next(self.iter(session, segment, from_seq=from_seq - 1, limit=1), None)
            if before is None:
                raise BoundaryNotFoundError(segment, from_seq - 1, self.head(session, segment))
            last = before.head
        given: deque[Head] = deque([last], maxlen=_REMEMBERED)
        while not stop.is_set():
            if self.head(session, segment) == last:
                stop.wait(poll)
                continue
            try:
                for entry in self._read(session, segment, after=last):
                    if stop.is_set():
                        return
                    last = entry.head
                    given.append(last)
                    yield entry
            except SegmentCutError:
                last = self._common(session, segment, given)
                yield Rewound(last.seq)

    def _common(self, session: str, segment: str, given: deque[Head]) -> Head:
        """The newest of *given* that still stands; forgets the others."""
        while given and (head := given[-1]) != EMPTY:
            try:
                entry = next(self.iter(session, segment, from_seq=head.seq, limit=1), None)
            except SegmentCutError:
                continue  # cut again
            if entry is not None and entry.head == head:
                return head
            given.pop()
        given.append(EMPTY)
        return EMPTY


def _newest_first(names: list[str], order_by: Order, active: Callable[[str], int | None]) -> list[str]:
    if order_by == "active":
        return [name for _, name in sorted(((active(name) or 0, name) for name in names), reverse=True)]
    return sorted(names, reverse=True)


# -- what every backend checks in the same way ---------------------------------------------------------------------


def settled_end(source: SegmentBytes, size: int | None = None) -> Position:
    """The end of *source* while no writer is at work: what looks damaged now is.

    :raises CorruptError: for the first damage of the segment.
    """
    try:
        return reader.end_of(source, size)
    except DamageError as damage:
        raise reader.first_corrupt(source, damage) from None


def changed_meanwhile(segment: str) -> BusyError:
    """For a `cut` that was planned for other bytes."""
    return BusyError(f"Segment {segment} was changed while it was read.", next_step="Call again.")


def plan_truncation(source: SegmentBytes, segment: str, n: int, expected: Head | None) -> tuple[int, Head] | None:
    """(offset after entry *n*, head there) for a `truncate`; None when there is nothing after it."""
    if n < 0:
        raise InputError(f"Received n={n}; valid is 0 or more.")
    try:
        current = reader.end_of(source).head
    except DamageError as damage:
        if expected is not None:
            raise reader.first_corrupt(source, damage) from None
        return reader.end_of_entry(source, segment, n)
    if expected is not None and expected != current:
        raise HeadConflictError(segment, expected, current)
    if n > current.seq:
        raise BoundaryNotFoundError(segment, n, current)
    return None if n == current.seq else reader.end_of_entry(source, segment, n)
