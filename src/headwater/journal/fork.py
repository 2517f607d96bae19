"""Forks and where a segment comes from. Written once against :class:`~headwater.journal.store.Store`.

Provenance is in the child's first entry only, as `forked_from`, `compacted_from` or `salvaged_from`; the parent is
never written. A child holds one entry: the folded state of the parent at the split, so neither the parent nor older
ancestors are read to restore it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headwater import failpoints
from headwater.errors import InputError
from headwater.journal.entry import EMPTY, SEGMENT_START, Entry, Head, is_id, new_id
from headwater.journal.errors import (
    BoundaryNotFoundError,
    CorruptError,
    EntryTooLargeError,
    SegmentNotFoundError,
    UnsupportedVersionError,
)
from headwater.journal.reader import check_batch_end
from headwater.journal.run_state import KEPT, Fold, RunState
from headwater.journal.store import Store

BEFORE_CREATE = failpoints.register("journal.fork.before_create")
AFTER_CREATE = failpoints.register("journal.fork.after_create")

Relation = Literal["forked_from", "compacted_from", "salvaged_from"]
_RELATIONS: tuple[Relation, ...] = ("forked_from", "compacted_from", "salvaged_from")


@dataclass(frozen=True, slots=True)
class Origin:
    """The direct parent of a segment, and the head of the parent at the split."""

    relation: Relation
    session: str
    segment: str
    head: Head

    def to_json(self) -> dict[str, Any]:
        head = self.head
        return {"session_id": self.session, "segment_id": self.segment, "seq": head.seq, "head": str(head)}


@dataclass(frozen=True, slots=True)
class Branch:
    """A segment that a writer can go on with, and its head."""

    session: str
    segment: str
    head: Head


def _create(store: Store, session: str, state: RunState, origin: Origin | None) -> Branch:
    """A segment that begins with *state*; of one that fills more than an entry, its newest part."""
    segment, keep = new_id(), KEPT
    failpoints.hit(BEFORE_CREATE)
    while True:
        fields: dict[str, Any] = {"session_id": session, "segment_id": segment, "pipeline": state.pipeline}
        fields |= {"config": dict(state.config), "state": state.to_json()}
        if origin is not None:
            fields[origin.relation] = origin.to_json()
        try:
            head = store.create_segment(session, segment, [Entry(SEGMENT_START, fields)])
            break
        except EntryTooLargeError:
            if keep == 0:
                raise
            keep //= 4
            state = state.newest(keep)
    failpoints.hit(AFTER_CREATE)
    return Branch(session, segment, head)


def start(store: Store, pipeline: str, config: Mapping[str, Any] | None = None) -> Branch:
    """A new session with its first segment."""
    return _create(store, new_id(), RunState(pipeline=pipeline, config=config or {}), None)


def _state_at(store: Store, session: str, segment: str, seq: int | None) -> tuple[RunState, Head]:
    """State and head after entry *seq*, or at the end."""
    fold = Fold()
    last: Entry | None = None
    for last in store.iter(session, segment, limit=seq):
        fold.add(last)
    head = EMPTY if last is None else last.head
    if seq is not None and head.seq < seq:
        raise BoundaryNotFoundError(segment, seq, store.head(session, segment))
    if last is not None:
        check_batch_end(last)
    return fold.state(), head


def fork(store: Store, session: str, segment: str) -> Branch:
    """A new session that goes on from the end of *segment*."""
    state, head = _state_at(store, session, segment, None)
    return _create(store, new_id(), state, Origin("forked_from", session, segment, head))


def fork_at(store: Store, session: str, segment: str, seq: int) -> Branch:
    """A new segment in the same session that goes on after entry *seq*; 0 is before anything but the start.

    :raises BoundaryNotFoundError: there is no such entry.
    :raises InvalidEntryError: *seq* is inside a batch.
    """
    if seq < 0:
        raise InputError(f"Received seq={seq}; valid is 0 or more.")
    if seq == 0:
        first = next(store.iter(session, segment, limit=1), None)
        seq = 1 if first is not None and first.kind == SEGMENT_START else 0
    state, head = _state_at(store, session, segment, seq)
    return _create(store, session, state, Origin("forked_from", session, segment, head))


def ensure_head_or_fork(store: Store, session: str, segment: str, expected: Head, state: RunState) -> Branch:
    """The segment itself when its head is *expected*; else a fork with the writer's own *state*.

    Entries of others stay in the source only. Use `append(expected_head=…)` with it: the check alone proves nothing
    about the next append.

    :raises SegmentNotFoundError: the segment was deleted.
    """
    if store.head(session, segment) == expected:
        return Branch(session, segment, expected)
    return _create(store, session, state, Origin("forked_from", session, segment, expected))


def compact(store: Store, session: str, segment: str, state: RunState) -> Branch:
    """A new segment of the session that continues with the shortened *state*."""
    head = store.head(session, segment)
    return _create(store, session, state, Origin("compacted_from", session, segment, head))


def origin_of(store: Store, session: str, segment: str) -> Origin | None:
    """The direct parent, from the first entry only."""
    first = next(store.iter(session, segment, limit=1), None)
    if first is None or first.kind != SEGMENT_START:
        return None
    for relation in _RELATIONS:
        match first.fields.get(relation):  # a field of another writer with this name is no provenance
            case {"session_id": str(parent), "segment_id": str(at), "head": str(head)} if is_id(parent) and is_id(at):
                return Origin(relation, parent, at, Head.parse(head))
    return None


def lineage(store: Store, session: str, segment: str) -> list[Origin]:
    """The ancestors, nearest first; ends at the root, or at an ancestor that was deleted."""
    ancestors: list[Origin] = []
    seen = {segment}
    origin = origin_of(store, session, segment)
    while origin is not None and origin.segment not in seen:
        ancestors.append(origin)
        seen.add(origin.segment)
        if not store.exists(origin.session, origin.segment):
            break
        origin = origin_of(store, origin.session, origin.segment)
    return ancestors


def children(store: Store, session: str, segment: str) -> list[Branch]:
    """The segments of all sessions whose direct parent is *segment*, oldest first. Reads one line of each segment.

    A segment whose first line is damaged, or that is deleted meanwhile, states no parent.
    """
    branches = []
    for other in store.list_sessions():
        for name in store.list_segments(other):
            try:
                origin = origin_of(store, other, name)
                if origin is not None and (origin.session, origin.segment) == (session, segment):
                    branches.append(Branch(other, name, store.head(other, name)))
            except (CorruptError, SegmentNotFoundError, UnsupportedVersionError):
                continue
    return sorted(branches, key=lambda branch: branch.segment)
