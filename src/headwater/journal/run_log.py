"""The writer of a pipeline run: one object that appends and counts.

Order of every entry: on disk first, then the head and the state, all under one lock. An entry that could not be written
is not counted, and the caller stops before it acts on it. All writers of one process share one `RunLog`; a foreign
writer is noticed at the next append (compare-and-swap) and at the next `begin`, which then continues in a fork.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, Self

from headwater.journal.entry import EMPTY, Entry
from headwater.journal.errors import HeadConflictError, InvalidEntryError, SegmentCutError
from headwater.journal.fork import compact, ensure_head_or_fork, start
from headwater.journal.fs_store import now_ms
from headwater.journal.run_state import Fold, RunKind, RunState
from headwater.journal.store import Store


class RunLog:
    """Restores a segment and continues to write it.

    :ivar head: of what was read and written so far.
    :raises SegmentNotFoundError: there is none. :raises InvalidEntryError: it holds nothing to restore from.
    """

    def __init__(self, store: Store, session: str, segment: str) -> None:
        self._store, self.session = store, session
        self._lock = threading.RLock()
        if self._load(segment) != RunKind.SEGMENT_START:
            raise InvalidEntryError(
                f"Segment {segment} does not begin with a {RunKind.SEGMENT_START} entry: there is no run to restore.",
                next_step="Run `headwater journal list` and take another one.",
            )

    @classmethod
    def start(cls, store: Store, pipeline: str, config: Mapping[str, Any] | None = None) -> Self:
        """A new session."""
        branch = start(store, pipeline, config)
        return cls(store, branch.session, branch.segment)

    def _load(self, segment: str) -> str | None:
        """Read it through; the kind of its first entry."""
        while True:
            fold, head, first = Fold(), EMPTY, None
            try:
                for entry in self._store.iter(self.session, segment):
                    first = first or entry.kind
                    fold.add(entry)
                    head = entry.head
                break
            except SegmentCutError:
                continue
        self.segment, self.head, self._fold = segment, head, fold
        return first

    @property
    def state(self) -> RunState:
        """What the entries so far say."""
        with self._lock:
            return self._fold.state()

    def record(self, kind: str, fields: Mapping[str, Any] | None = None) -> Entry:
        """Write one entry; it is durable (as far as the store promises) on return.

        :raises HeadConflictError: a foreign writer was here.
        """
        with self._lock:
            entry = Entry(kind, fields or {}, now_ms())
            read_back = _as_read(entry.fields)
            self.head = self._store.append(self.session, self.segment, entry, expected_head=self.head)
            stored = Entry(kind, read_back, entry.ts, self.head.seq, self.head.crc)
            self._fold.add(stored)
            return stored

    def begin(self, trigger: str, **about: Any) -> None:
        """Write `run_started`; in a fork when a foreign writer was here.

        :param about: fields that say which process it is.
        """
        with self._lock:
            branch = ensure_head_or_fork(self._store, self.session, self.segment, self.head, self.state)
            if branch.segment != self.segment:
                self._load(branch.segment)
            self.record(RunKind.RUN_STARTED, {"trigger": trigger, **about})

    def compact(self, state: RunState) -> None:
        """Continue in a new segment with the shortened *state*; the old one stays readable.

        :raises HeadConflictError: a foreign writer was here: *state* does not know its entries.
        """
        with self._lock:
            current = self._store.head(self.session, self.segment)
            if current != self.head:
                raise HeadConflictError(self.segment, self.head, current)
            self._load(compact(self._store, self.session, self.segment, state).segment)


def _as_read(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """*fields* as they will be read back: the caller can change its own later."""
    try:
        read_back: dict[str, Any] = json.loads(json.dumps(dict(fields)))
    except (TypeError, ValueError, RecursionError):
        return fields  # the store will refuse them
    return read_back
