"""Checks that every store makes in the same way: of batches, cuts, headers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater.errors import InputError
from headwater.journal import scan
from headwater.journal.entry import EMPTY, SEGMENT_START, Entry, Head
from headwater.journal.errors import (
    BoundaryNotFoundError,
    BusyError,
    CorruptError,
    HeadConflictError,
    InvalidEntryError,
)


def as_batch(entry: Entry | Sequence[Entry]) -> Sequence[Entry]:
    """What `append` was given, as a sequence.

    :raises InvalidEntryError: it is empty, or holds something else than entries.
    """
    given: object = entry
    batch = [entry] if isinstance(entry, Entry) else list(entry) if isinstance(given, Iterable) else None
    if batch is None:
        raise InvalidEntryError(f"Received an entry of type {type(given).__name__}; valid is Entry.")
    check_entries(batch)
    if not batch:
        raise InvalidEntryError("Received an empty batch; an append needs at least one entry.")
    return batch


def check_entries(entries: Iterable[object]) -> None:
    """:raises InvalidEntryError: one of *entries* is something else."""
    for entry in entries:
        if not isinstance(entry, Entry):
            raise InvalidEntryError(f"Received an entry of type {type(entry).__name__}; valid is Entry.")


def changed_meanwhile(segment: str) -> BusyError:
    """For a `cut` that was planned for other bytes."""
    return BusyError(f"Segment {segment} was changed while it was looked at.", next_step="Call again.")


def check_cut(segment: str, n: int, current: Head, expected: Head | None) -> None:
    """The checks of `truncate` that every backend makes in the same order."""
    if n < 0:
        raise InputError(f"Received n={n}; valid is 0 or more.")
    if expected is not None and expected != current:
        raise HeadConflictError(segment, expected, current)
    if n > current.seq:
        raise BoundaryNotFoundError(segment, n, current)


def check_batch_boundary(last: Entry | None, n: int) -> None:
    """:raises InvalidEntryError: *last*, the last kept entry, is not the end of its batch."""
    if last is not None and last.batch is not None and last.batch[0] < last.batch[1]:
        first = n - last.batch[0]
        raise InvalidEntryError(
            f"Entry {n} is inside the batch {first + 1} … {first + last.batch[1]}, which stays whole.",
            next_step=f"Take {first} or {first + last.batch[1]}.",
        )


def check_new_header(session: str, segment: str, entries: Iterable[Entry]) -> None:
    """:raises InvalidEntryError: the first entry of a sequence is a `segment_start` of other ids."""
    if not isinstance(entries, Sequence):
        return
    check_entries(entries)
    if entries and entries[0].kind == SEGMENT_START:
        for name, value in (("session_id", session), ("segment_id", segment)):
            stated = entries[0].fields.get(name, value)
            if stated != value:
                raise InvalidEntryError(f"The {SEGMENT_START} entry states {name} {stated}, the segment has {value}.")


def check_header(source: scan.Source, session: str, segment: str, block: list[Entry]) -> None:
    """:raises CorruptError: the file's first entry belongs to another session or segment."""
    first = block[0]
    if first.seq == 1 and first.kind == SEGMENT_START:
        for name, value in (("session_id", session), ("segment_id", segment)):
            if first.fields.get(name, value) != value:
                raise CorruptError(source.name, 1, 0, 1, f"the file is of another {name}: it was moved or copied here")


def end_of_entry(source: scan.Source, segment: str, n: int) -> tuple[int, Head]:
    """(offset after entry *n*, head there); looks at the bytes of that entry only.

    :raises BoundaryNotFoundError: no line states this seq.
    """
    if n == 0:
        return 0, EMPTY
    size = source.size()
    start = scan.find_seq(source, n, size)
    if start is None:
        raise BoundaryNotFoundError(segment, n)
    end = scan.next_line(source, start, size + 1) or size
    try:
        entry = scan.entry_at(source, start, source.read(start, end - start).rstrip(b"\r\n"))
    except scan.DamageError as damage:
        raise scan.first_corrupt(source, damage) from None
    check_batch_boundary(entry, n)
    return end, entry.head
