"""The state of a pipeline run, folded from the entries of its segment. Pure: no I/O, no clock.

=================  ==================================================================================
kind               effect on the state
=================  ==================================================================================
`segment_start`    ids, `pipeline`, `config`; `state` (what a fork or compaction carries) replaces everything
`run_started`      a run is open: `interrupted` until it says how it ended
`command`          an operator's command, into the history, as `notice` and `phase_changed`
`run_completed`    sets `interrupted` to its flag (a paused run is interrupted)
`run_failed`       sets `interrupted` to its flag, true when absent; into the history
`metric`           none: figures stay in the segment
=================  ==================================================================================

A segment that ends after `run_started` is therefore restored as interrupted. Other kinds, and entries of these kinds
whose fields have another shape, change nothing. No entry can make its segment impossible to restore.

The state of a run of months is as small as that of a day: the history keeps its newest :data:`KEPT` items, and
`forgotten` counts the others, which stay in the segment.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.journal.entry import SEGMENT_START, Entry

KEPT = 1000


class RunKind(enum.StrEnum):
    """Kinds of entries that a pipeline run writes."""

    SEGMENT_START = SEGMENT_START
    RUN_STARTED = "run_started"
    COMMAND = "command"
    NOTICE = "notice"
    PHASE_CHANGED = "phase_changed"
    METRIC = "metric"
    RUN_COMPLETED = "run_completed"
    RUN_FAILED = "run_failed"


_HISTORY = {RunKind.COMMAND, RunKind.NOTICE, RunKind.PHASE_CHANGED, RunKind.RUN_FAILED}


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that happened: kind and fields of the entry; `seq` is 0 when it was carried over from a parent."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    seq: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class RunState:
    """What the entries say; see the module's docstring."""

    session_id: str | None = None
    segment_id: str | None = None
    pipeline: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[Item, ...] = ()
    interrupted: bool = False
    entries_count: int = 0
    forgotten: int = 0

    @property
    def commands(self) -> tuple[Item, ...]:
        """The commands in the history, oldest first."""
        return tuple(item for item in self.history if item.kind == RunKind.COMMAND)

    def newest(self, keep: int) -> RunState:
        """The same with at most *keep* items of history."""
        over = max(0, len(self.history) - keep)
        return replace(self, history=self.history[over:], forgotten=self.forgotten + over)

    def to_json(self) -> dict[str, Any]:
        """What a child carries: everything but ids and counts of entries."""
        history = [{"kind": item.kind, "fields": dict(item.fields)} for item in self.history]
        return {"history": history, "interrupted": self.interrupted, "forgotten": self.forgotten}


def replay(entries: Iterable[Entry]) -> RunState:
    """Fold *entries*, oldest first, into the state that they describe."""
    fold = Fold()
    for entry in entries:
        fold.add(entry)
    return fold.state()


class Fold:
    """The left fold itself, for a writer that adds entry by entry."""

    def __init__(self) -> None:
        self._state = RunState()
        self._history: deque[Item] = deque(maxlen=KEPT)
        self._forgotten = self._count = 0

    def state(self) -> RunState:
        """What the entries so far say."""
        history = tuple(self._history)
        return replace(self._state, history=history, entries_count=self._count, forgotten=self._forgotten)

    def add(self, entry: Entry) -> None:
        """Add one entry. Each step reads all that it needs first: an entry of another shape changes nothing."""
        self._count += 1
        fields = entry.fields
        match entry.kind:
            case RunKind.SEGMENT_START:
                try:
                    self._start(fields)
                except (TypeError, KeyError):
                    pass
            case RunKind.RUN_STARTED:
                self._state = replace(self._state, interrupted=True)
            case RunKind.RUN_COMPLETED:
                self._state = replace(self._state, interrupted=bool(fields.get("interrupted", False)))
            case RunKind.RUN_FAILED:
                self._state = replace(self._state, interrupted=bool(fields.get("interrupted", True)))
        if entry.kind in _HISTORY:
            self._forgotten += len(self._history) == KEPT
            self._history.append(Item(entry.kind, fields, entry.seq))

    def _start(self, fields: Mapping[str, Any]) -> None:
        carried, config = _mapping(fields.get("state")), _mapping(fields.get("config"))
        history, forgotten = _items(carried.get("history")), _number(carried.get("forgotten", 0))
        self._state = RunState(
            fields.get("session_id"),
            fields.get("segment_id"),
            fields.get("pipeline"),
            config,
            interrupted=bool(carried.get("interrupted", False)),
        )
        self._history = deque(history, maxlen=KEPT)
        self._forgotten = forgotten + max(0, len(history) - KEPT)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None):
        raise TypeError
    return value or {}


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError
    return value


def _items(carried: Any) -> list[Item]:
    if not isinstance(carried, Sequence | None) or isinstance(carried, str):
        raise TypeError
    return [Item(str(item["kind"]), _mapping(item.get("fields"))) for item in map(_mapping, carried or ())]
