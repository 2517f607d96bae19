"""The state of a pipeline run, folded from the entries of its segment. Pure: no I/O, no clock.

===================  ==================================================================================
kind                 effect
===================  ==================================================================================
`segment_start`      ids, `pipeline`, `config`; `state` (what a fork or compaction carries) replaces everything
`run_started`        a run is open: `interrupted` until it says how it ended
`command`            an operator's command into the history, with its `extensions`
`barrier`            into the history
`commit_started`     into the history; open until the `commit_finished` of the same sink and epoch
`commit_finished`    into the history
`notice`             into the history
`phase_changed`      into the history
`epoch_end`          sets `epoch_count`
`run_completed`      sets `interrupted` to its flag (a paused run is interrupted)
`run_failed`         sets `interrupted` to its flag, true when absent; into the history
`pause_abandoned`    clears `interrupted`
`config_changed`     replaces `config`
`metric`             to `metrics`, in order
`extension`          to `extensions`, in order
`rollback`           takes the entries of its `seqs` out of history, commands and extensions again
===================  ==================================================================================

A segment that ends after `run_started` is therefore restored as interrupted. Other kinds change nothing; they are
counted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.journal.entry import SEGMENT_START, Entry


class RunKind(enum.StrEnum):
    """Kinds of entries that a pipeline run writes."""

    SEGMENT_START = SEGMENT_START
    RUN_STARTED = "run_started"
    COMMAND = "command"
    BARRIER = "barrier"
    COMMIT_STARTED = "commit_started"
    COMMIT_FINISHED = "commit_finished"
    NOTICE = "notice"
    PHASE_CHANGED = "phase_changed"
    EPOCH_END = "epoch_end"
    RUN_COMPLETED = "run_completed"
    RUN_FAILED = "run_failed"
    PAUSE_ABANDONED = "pause_abandoned"
    CONFIG_CHANGED = "config_changed"
    METRIC = "metric"
    EXTENSION = "extension"
    ROLLBACK = "rollback"


OUTPUT = frozenset(
    {RunKind.BARRIER, RunKind.COMMIT_STARTED, RunKind.COMMIT_FINISHED, RunKind.PHASE_CHANGED, RunKind.EPOCH_END}
)
"""Kinds that show that a run did something: after one of them it is not rolled back."""

BACKGROUND = frozenset({RunKind.METRIC, RunKind.EXTENSION, RunKind.NOTICE})
"""Kinds that background jobs write into the segment of a run; they outlive a rollback."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that happened: kind and fields of the entry; `seq` is 0 when it was carried over from a parent."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    seq: int = field(default=0, compare=False)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "fields": dict(self.fields)}


@dataclass(frozen=True, slots=True)
class RunState:
    """What the entries say; see the module's docstring."""

    session_id: str | None = None
    segment_id: str | None = None
    pipeline: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[Item, ...] = ()
    extensions: tuple[Item, ...] = ()
    metrics: tuple[Item, ...] = ()
    epoch_count: int = 0
    interrupted: bool = False
    entries_count: int = 0
    unknown_count: int = 0

    @property
    def commands(self) -> tuple[Item, ...]:
        """The operator's commands, oldest first."""
        return tuple(item for item in self.history if item.kind == RunKind.COMMAND)

    @property
    def open_commits(self) -> tuple[Item, ...]:
        """Commits that were started and have no result: nobody knows whether the sink has them."""
        started: dict[tuple[Any, Any], Item] = {}
        for item in self.history:
            name = (item.fields.get("sink"), item.fields.get("epoch"))
            if item.kind == RunKind.COMMIT_STARTED:
                started[name] = item
            elif item.kind == RunKind.COMMIT_FINISHED:
                started.pop(name, None)
        return tuple(started.values())

    def to_json(self) -> dict[str, Any]:
        """What a child carries: everything but ids and counts of entries."""
        return {
            "history": [item.to_json() for item in self.history],
            "extensions": [item.to_json() for item in self.extensions],
            "metrics": [item.to_json() for item in self.metrics],
            "epoch_count": self.epoch_count,
            "interrupted": self.interrupted,
        }


def replay(entries: Iterable[Entry]) -> RunState:
    """Fold *entries*, oldest first, into the state that they describe."""
    fold = Fold()
    for entry in entries:
        fold.add(entry)
    return fold.state()


class Fold:
    """The left fold itself, for a writer that adds entry by entry."""

    def __init__(self) -> None:
        self.session_id: str | None = None
        self.segment_id: str | None = None
        self.pipeline: str | None = None
        self.config: Mapping[str, Any] = {}
        self.history: list[Item] = []
        self.extensions: list[Item] = []
        self.metrics: list[Item] = []
        self.epoch_count = 0
        self.interrupted = False
        self.count = 0
        self.unknown = 0

    def state(self) -> RunState:
        return RunState(
            self.session_id,
            self.segment_id,
            self.pipeline,
            self.config,
            tuple(self.history),
            tuple(self.extensions),
            tuple(self.metrics),
            self.epoch_count,
            self.interrupted,
            self.count,
            self.unknown,
        )

    def add(self, entry: Entry) -> None:
        """One entry more."""
        self.count += 1
        step = _STEPS.get(entry.kind)
        if step is None:
            self.unknown += 1
        else:
            step(self, entry)

    def start(self, entry: Entry) -> None:
        fields = entry.fields
        self.session_id = fields.get("session_id")
        self.segment_id = fields.get("segment_id")
        self.pipeline = fields.get("pipeline")
        self.config = fields.get("config") or {}
        carried = fields.get("state") or {}
        self.history = _items(carried.get("history"))
        self.extensions = _items(carried.get("extensions"))
        self.metrics = _items(carried.get("metrics"))
        self.epoch_count = carried.get("epoch_count", 0)
        self.interrupted = carried.get("interrupted", False)

    def push(self, entry: Entry) -> None:
        self.history.append(Item(entry.kind, entry.fields, entry.seq))

    def command(self, entry: Entry) -> None:
        self.push(entry)
        for extension in entry.fields.get("extensions", ()):
            self.extensions.append(Item(RunKind.EXTENSION, extension, entry.seq))

    def extension(self, entry: Entry) -> None:
        self.extensions.append(Item(entry.kind, entry.fields, entry.seq))

    def metric(self, entry: Entry) -> None:
        self.metrics.append(Item(entry.kind, entry.fields, entry.seq))

    def epoch_end(self, entry: Entry) -> None:
        self.epoch_count = entry.fields.get("epoch_count", self.epoch_count + 1)

    def run_started(self, _: Entry) -> None:
        self.interrupted = True

    def run_completed(self, entry: Entry) -> None:
        self.interrupted = bool(entry.fields.get("interrupted", False))

    def run_failed(self, entry: Entry) -> None:
        self.push(entry)
        self.interrupted = bool(entry.fields.get("interrupted", True))

    def pause_abandoned(self, _: Entry) -> None:
        self.interrupted = False

    def config_changed(self, entry: Entry) -> None:
        self.config = entry.fields.get("config") or {}

    def rollback(self, entry: Entry) -> None:
        gone = set(entry.fields.get("seqs", ()))
        self.history = [item for item in self.history if item.seq not in gone]
        self.extensions = [item for item in self.extensions if item.seq not in gone]
        self.interrupted = bool(entry.fields.get("interrupted", False))


def _items(carried: Any) -> list[Item]:
    return [Item(item["kind"], item.get("fields") or {}) for item in carried or ()]


_STEPS: dict[str, Callable[[Fold, Entry], None]] = {
    RunKind.SEGMENT_START: Fold.start,
    RunKind.RUN_STARTED: Fold.run_started,
    RunKind.COMMAND: Fold.command,
    RunKind.BARRIER: Fold.push,
    RunKind.COMMIT_STARTED: Fold.push,
    RunKind.COMMIT_FINISHED: Fold.push,
    RunKind.NOTICE: Fold.push,
    RunKind.PHASE_CHANGED: Fold.push,
    RunKind.EPOCH_END: Fold.epoch_end,
    RunKind.RUN_COMPLETED: Fold.run_completed,
    RunKind.RUN_FAILED: Fold.run_failed,
    RunKind.PAUSE_ABANDONED: Fold.pause_abandoned,
    RunKind.CONFIG_CHANGED: Fold.config_changed,
    RunKind.METRIC: Fold.metric,
    RunKind.EXTENSION: Fold.extension,
    RunKind.ROLLBACK: Fold.rollback,
}
