"""The writer of a pipeline run: one place that appends, counts and mirrors.

Order of every entry: on disk first, then the head, the state and the mirror, all under one lock. An entry that could
not be written is not counted, and the caller stops before it acts on it.
All writers of one process share one `RunLog`; a foreign writer is noticed at the next append (compare-and-swap) and at
the next `begin`, which then goes on in a fork.

Its memory does not grow with the run: it keeps the folded state, which is bounded, and the newest entries; everything
else is read from the store.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.journal import branch as branches
from headwater.journal.entry import EMPTY, Entry, Head
from headwater.journal.errors import HeadConflictError, InvalidEntryError, SegmentCutError, SegmentNotFoundError
from headwater.journal.fs_store import now_ms
from headwater.journal.run_state import BACKGROUND, OUTPUT, Fold, RunKind, RunState
from headwater.journal.store import Store

_log = logging.getLogger(__name__)
MIRROR = 1000
"""So many of the newest entries are kept in memory."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to roll back to, taken before a run starts."""

    segment: str
    head: Head
    interrupted: bool
    fold: Fold = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Target:
    """A command that a rewind can go back to; `effects` tells that commits after it will not be undone."""

    entry: Entry
    cut: int
    expected_head: Head
    effects: bool


def _as_read(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """*fields* as they will be read back: the caller may go on changing its own."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(fields)))
    except (TypeError, ValueError, RecursionError):
        return fields  # the store will refuse them
    return kept


class RunLog:
    """Restores a segment and goes on writing it.

    :raises SegmentNotFoundError: there is none.
    :raises InvalidEntryError: it holds nothing to restore from.
    """

    def __init__(self, store: Store, session: str, segment: str) -> None:
        self._store = store
        self._lock = threading.RLock()
        self.session = session
        if self._load(segment) != RunKind.SEGMENT_START:
            raise InvalidEntryError(
                f"Segment {segment} does not begin with a {RunKind.SEGMENT_START} entry: there is no run to restore.",
                next_step="Run `headwater journal list` and take another one.",
            )

    @classmethod
    def start(cls, store: Store, pipeline: str, config: Mapping[str, Any] | None = None) -> RunLog:
        """A new session."""
        branch = branches.start(store, pipeline, config)
        return cls(store, branch.session, branch.segment)

    @classmethod
    def restore(cls, store: Store, segment: str) -> RunLog:
        """By the segment's id alone.

        :raises SegmentNotFoundError: no session has it.
        """
        session = store.lookup_session_of(segment)
        if session is None:
            raise SegmentNotFoundError("(any)", segment)
        return cls(store, session, segment)

    def _load(self, segment: str) -> str | None:
        """Read it through; the kind of its first entry."""
        while True:
            fold, mirror, first = Fold(), deque[Entry](maxlen=MIRROR), None
            try:
                for entry in self._store.iter(self.session, segment):
                    first = first or entry.kind
                    fold.add(entry)
                    mirror.append(entry)
                break
            except SegmentCutError:
                continue
        self.segment = segment
        self.head = mirror[-1].head if mirror else EMPTY
        self._fold, self._mirror = fold, mirror
        return first

    @property
    def entries(self) -> list[Entry]:
        """The newest entries, oldest first: all of a short run, :data:`MIRROR` of a long one."""
        with self._lock:
            return list(self._mirror)

    @property
    def state(self) -> RunState:
        """What the entries so far say."""
        return self._fold.state()

    # ---- writing -------------------------------------------------------------------------------

    def record(self, kind: str, fields: Mapping[str, Any] | None = None) -> Entry:
        """Write one entry; it is durable (as far as the store promises) on return.

        :raises HeadConflictError: a foreign writer was here.
        """
        with self._lock:
            entry = Entry(kind, fields or {}, now_ms())
            kept = _as_read(entry.fields)
            head = self._store.append(self.session, self.segment, entry, expected_head=self.head)
            stored = Entry(kind, kept, entry.ts, head.seq, head.crc)
            self.head = head
            self._mirror.append(stored)
            self._fold.add(stored)
            return stored

    def metric(self, fields: Mapping[str, Any]) -> bool:
        """Write a metric, best effort: a failure is logged and does not stop the run."""
        try:
            self.record(RunKind.METRIC, fields)
        except Exception as error:  # best effort is the contract
            _log.warning("metric of segment %s dropped: %s", self.segment, type(error).__name__)
            return False
        return True

    def begin(self, trigger: str, command: Mapping[str, Any] | None = None, **about: Any) -> Mark:
        """Start a run: fork when somebody else wrote, close what a crash left open, then `run_started`.

        Returns the mark before the run, for :meth:`rollback`. A *command* of the operator is a new beginning;
        without one the run resumes, and open commits are the resumed run's to settle.

        :param about: fields that say which process it is.
        """
        with self._lock:
            self._ensure_head()
            if command is not None:
                self._close_open_commits()
            mark = Mark(self.segment, self.head, self._fold.interrupted, self._fold.copy())
            self.record(RunKind.RUN_STARTED, {"trigger": trigger, **about})
            if command is not None:
                self.record(RunKind.COMMAND, command)
            return mark

    def _ensure_head(self) -> None:
        branch = branches.ensure_head_or_fork(self._store, self.session, self.segment, self.head, self.state)
        if branch.segment != self.segment:
            self._load(branch.segment)

    def _close_open_commits(self) -> None:
        """Nobody knows whether the sink has them; say so, so that they are looked up there and not done twice."""
        for item in self.state.open_commits:
            outcome = {"sink": item.fields.get("sink"), "epoch": item.fields.get("epoch"), "outcome": "unknown"}
            self.record(RunKind.COMMIT_FINISHED, outcome)
            self.record(RunKind.NOTICE, {"text": "a commit was open when the run was interrupted", **outcome})

    # ---- going back ----------------------------------------------------------------------------

    def rollback(self, mark: Mark) -> bool:
        """Take a run back that did nothing; False when it did something, or is not the last any more.

        Disk first, memory after. When background jobs wrote in between, their entries stay: the run's own are
        withdrawn by a `rollback` entry. Otherwise the segment is cut, and the removed entries are saved.
        """
        with self._lock:
            added = self._added_since(mark)
            if added is None:
                return False
            own = [seq for seq, kind in added if kind not in BACKGROUND]
            if len(own) != len(added):
                self.record(RunKind.ROLLBACK, {"seqs": own, "interrupted": mark.interrupted})
            elif added:
                self._store.truncate(self.session, self.segment, mark.head.seq, expected_head=self.head)
                self.head, self._fold = mark.head, mark.fold.copy()
                self._mirror = deque(self._store.tail(self.session, self.segment, MIRROR), maxlen=MIRROR)
            return True

    def _added_since(self, mark: Mark) -> list[tuple[int, str]] | None:
        """(seq, kind) of the entries after *mark*; None when there is output among them, or no such mark any more."""
        if mark.segment != self.segment:
            return None
        added: list[tuple[int, str]] = []
        try:
            for block in self._store.blocks(self.session, self.segment, after=mark.head):
                if any(entry.kind in OUTPUT for entry in block):
                    return None
                added += [(entry.seq, entry.kind) for entry in block if entry.seq <= self.head.seq]
        except SegmentCutError:
            return None
        return added

    def rewind_targets(self) -> list[Target]:
        """The commands of this segment that can be gone back to, newest first, as far as the state keeps them."""
        with self._lock:
            targets: list[Target] = []
            for item in reversed(self.state.commands):
                if item.seq < 2:  # carried over from a parent
                    continue
                pair = list(self._store.iter(self.session, self.segment, from_seq=item.seq - 1, limit=2))
                if len(pair) < 2:  # cut off by a foreign writer
                    continue
                before, entry = pair
                cut = before.seq - (before.kind == RunKind.RUN_STARTED)
                targets.append(Target(entry, cut, self.head, self._fold.last_commit > entry.seq))
            return targets

    def rewind(self, target: Target) -> Entry:
        """Cut the segment before *target* and return its command.

        :raises HeadConflictError: something was written since the targets were listed.
        """
        with self._lock:
            if target.expected_head != self.head:
                raise HeadConflictError(self.segment, target.expected_head, self.head)
            self._store.truncate(self.session, self.segment, target.cut, expected_head=target.expected_head)
            self._load(self.segment)
            return target.entry

    # ---- others --------------------------------------------------------------------------------

    def compact(self, state: RunState, carry: Sequence[Entry] = ()) -> None:
        """Go on in a new segment with the shortened *state*; the old one stays readable.

        :raises HeadConflictError: a foreign writer was here: *state* does not know its entries.
        """
        with self._lock:
            current = self._store.head(self.session, self.segment)
            if current != self.head:
                raise HeadConflictError(self.segment, self.head, current)
            branch = branches.compact(self._store, self.session, self.segment, state, carry)
            self._load(branch.segment)
