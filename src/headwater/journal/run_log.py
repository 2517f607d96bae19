"""The writer of a pipeline run: one place that appends, counts, mirrors and tells others.

Order of every entry: on disk first, then the head, the state and the mirror, then the subscribers, all under one lock.
An entry that could not be written is not counted and not told, and the caller stops before it acts on it.
All writers of one process share one `RunLog`; a foreign writer is noticed at the next append (compare-and-swap) and at
the next `begin`, which then goes on in a fork.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.journal import branch as branches
from headwater.journal.entry import Entry, Head
from headwater.journal.errors import HeadConflictError, InvalidEntryError, SegmentNotFoundError
from headwater.journal.fs import now_ms
from headwater.journal.run_state import BACKGROUND, OUTPUT, Fold, RunKind, RunState
from headwater.journal.store import Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to roll back to, taken before a run starts."""

    segment: str
    head: Head
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Target:
    """A command that a rewind can go back to; `effects` tells that commits after it will not be undone."""

    entry: Entry
    cut: int
    expected_head: Head
    effects: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """Told to subscribers: forget what you have; these entries stand now."""

    entries: tuple[Entry, ...]


class Subscription:
    """Entries of the moment of subscribing, then everything after it, without gap or overlap."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.snapshot = entries
        self._news: queue.SimpleQueue[Entry | Reset] = queue.SimpleQueue()

    def tell(self, news: Entry | Reset) -> None:
        self._news.put(news)

    def take(self, timeout: float = 0.0) -> Entry | Reset | None:
        """The next news; None when there is none within *timeout* seconds."""
        try:
            return self._news.get(timeout > 0, timeout or None)
        except queue.Empty:
            return None


class RunLog:
    """Restores a segment and goes on writing it.

    :raises SegmentNotFoundError: there is none.
    :raises InvalidEntryError: it holds nothing to restore from.
    """

    def __init__(self, store: Store, session: str, segment: str) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._subscribers: list[Subscription] = []
        self.session = session
        self._load(segment)
        if not self.entries or self.entries[0].kind != RunKind.SEGMENT_START:
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

    def _load(self, segment: str) -> None:
        self.entries = self._store.read_all(self.session, segment)
        self.segment = segment
        self.head = self.entries[-1].head if self.entries else Head(0, 0)
        self._fold = Fold()
        for entry in self.entries:
            self._fold.add(entry)

    @property
    def state(self) -> RunState:
        """What the entries so far say."""
        return self._fold.state()

    # ---- writing -------------------------------------------------------------------------------

    def record(self, kind: str, fields: Mapping[str, Any] | None = None) -> Entry:
        """Write one entry; it is durable (as far as the store promises) before anybody hears of it.

        :raises HeadConflictError: a foreign writer was here.
        """
        with self._lock:
            entry = Entry(kind, fields or {}, now_ms())
            head = self._store.append(self.session, self.segment, entry, expected_head=self.head)
            stored = replace(entry, seq=head.seq, crc=head.crc)
            self.head = head
            self.entries.append(stored)
            self._fold.add(stored)
            for subscriber in self._subscribers:
                subscriber.tell(stored)
            return stored

    def metric(self, fields: Mapping[str, Any]) -> bool:
        """Write a metric, best effort: a failure is logged and does not stop the run."""
        try:
            self.record(RunKind.METRIC, fields)
        except Exception as error:  # best effort is the contract
            _log.warning("metric of segment %s dropped: %s", self.segment, type(error).__name__)
            return False
        return True

    def begin(self, trigger: str, command: Mapping[str, Any] | None = None) -> Mark:
        """Start a run: fork when somebody else wrote, close what a crash left open, then `run_started`.

        Returns the mark before the run, for :meth:`rollback`. A *command* of the operator is a new beginning;
        without one the run resumes, and open commits are the resumed run's to settle.
        """
        with self._lock:
            self._ensure_head()
            if command is not None:
                self._close_open_commits()
            mark = Mark(self.segment, self.head, self.state.interrupted)
            self.record(RunKind.RUN_STARTED, {"trigger": trigger})
            if command is not None:
                self.record(RunKind.COMMAND, command)
            return mark

    def _ensure_head(self) -> None:
        branch = branches.ensure_head_or_fork(self._store, self.session, self.segment, self.head, self.state)
        if branch.segment != self.segment:
            self._load(branch.segment)
            self._reset()

    def _close_open_commits(self) -> None:
        """Nobody knows whether the sink has them; say so, so that they are looked up there and not done twice."""
        for item in self.state.open_commits:
            outcome = {"sink": item.fields.get("sink"), "epoch": item.fields.get("epoch"), "outcome": "unknown"}
            self.record(RunKind.COMMIT_FINISHED, outcome)
            self.record(RunKind.NOTICE, {"text": "a commit was open when the run was interrupted", **outcome})

    def _reset(self) -> None:
        for subscriber in self._subscribers:
            subscriber.tell(Reset(tuple(self.entries)))

    # ---- going back ----------------------------------------------------------------------------

    def rollback(self, mark: Mark) -> bool:
        """Take a run back that did nothing; False when it did something, or is not the last any more.

        Disk first, memory after. When background jobs wrote in between, their entries stay: the run's own are
        withdrawn by a `rollback` entry. Otherwise the segment is cut, and the removed entries are saved.
        """
        with self._lock:
            if mark.segment != self.segment:
                return False
            added = self.entries[mark.head.seq :]
            if any(entry.kind in OUTPUT for entry in added):
                return False
            own = [entry for entry in added if entry.kind not in BACKGROUND]
            if len(own) != len(added):
                withdrawn = {"seqs": [entry.seq for entry in own], "interrupted": mark.interrupted}
                self.record(RunKind.ROLLBACK, withdrawn)
            elif added:
                self._store.truncate(self.session, self.segment, mark.head.seq, expected_head=self.head)
                self._load(self.segment)
            self._reset()
            return True

    def rewind_targets(self) -> list[Target]:
        """The commands that can be gone back to, newest first."""
        with self._lock:
            targets: list[Target] = []
            effects = False
            for place in range(len(self.entries) - 1, -1, -1):
                entry = self.entries[place]
                if entry.kind == RunKind.COMMIT_STARTED:
                    effects = True
                if entry.kind == RunKind.COMMAND:
                    with_run = place > 0 and self.entries[place - 1].kind == RunKind.RUN_STARTED
                    targets.append(Target(entry, entry.seq - (2 if with_run else 1), self.head, effects))
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
            self._reset()
            return target.entry

    # ---- others --------------------------------------------------------------------------------

    def compact(self, state: RunState, carry: Sequence[Entry] = ()) -> None:
        """Go on in a new segment with the shortened *state*; the old one stays readable."""
        with self._lock:
            branch = branches.compact(self._store, self.session, self.segment, state, carry)
            self._load(branch.segment)
            self._reset()

    def subscribe(self) -> Subscription:
        """A snapshot and everything after it."""
        with self._lock:
            subscription = Subscription(tuple(self.entries))
            self._subscribers.append(subscription)
            return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Tell it nothing more."""
        with self._lock:
            self._subscribers.remove(subscription)
