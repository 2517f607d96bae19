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

A segment that ends after `run_started` is therefore restored as interrupted. Other kinds, and entries of these kinds
whose fields have another shape, change nothing; they are counted. No entry can make its segment impossible to restore.

The state of a run of months is as small as that of a day: history, extensions and metrics keep their newest
:data:`KEPT` items, and of the older ones what a restart needs: open commits, the newest :data:`KEPT_COMMANDS` commands,
the newest extension of each domain. `forgotten` counts the others; they stay in the segment.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.journal.entry import SEGMENT_START, Entry

KEPT = 1000
KEPT_COMMANDS = 100


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
    forgotten: int = 0

    @property
    def commands(self) -> tuple[Item, ...]:
        """The operator's commands, oldest first."""
        return tuple(item for item in self.history if item.kind == RunKind.COMMAND)

    @property
    def open_commits(self) -> tuple[Item, ...]:
        """Commits that were started and have no result: nobody knows whether the sink has them."""
        return tuple(_open_commits(self.history))

    def newest(self, keep: int) -> RunState:
        """The same with at most *keep* items of each list, beside those that a restart needs."""
        history, extensions = _history(self.history, keep), _extensions(self.extensions, keep)
        metrics = _newest(self.metrics, keep)
        before = len(self.history) + len(self.extensions) + len(self.metrics)
        return replace(
            self,
            history=tuple(history),
            extensions=tuple(extensions),
            metrics=tuple(metrics),
            forgotten=self.forgotten + before - len(history) - len(extensions) - len(metrics),
        )

    def to_json(self) -> dict[str, Any]:
        """What a child carries: everything but ids and counts of entries."""
        return {
            "history": [item.to_json() for item in self.history],
            "extensions": [item.to_json() for item in self.extensions],
            "metrics": [item.to_json() for item in self.metrics],
            "epoch_count": self.epoch_count,
            "interrupted": self.interrupted,
            "forgotten": self.forgotten,
        }


def _newest(items: Sequence[Item], keep: int) -> Sequence[Item]:
    return items[max(0, len(items) - keep) :]


def _history(items: Sequence[Item], keep: int) -> Sequence[Item]:
    if len(items) <= keep:
        return items
    commands = [item for item in items if item.kind == RunKind.COMMAND]
    needed = {id(item) for item in (*_open_commits(items), *_newest(commands, min(keep, KEPT_COMMANDS)))}
    return [*(item for item in items[: len(items) - keep] if id(item) in needed), *_newest(items, keep)]


def _extensions(items: Sequence[Item], keep: int) -> Sequence[Item]:
    if len(items) <= keep:
        return items
    latest = {_hashable(item.fields.get("domain")): id(item) for item in items}
    needed = set(latest.values())
    return [*(item for item in items[: len(items) - keep] if id(item) in needed), *_newest(items, keep)]


def _open_commits(history: Iterable[Item]) -> list[Item]:
    started: dict[Any, Item] = {}
    for item in history:
        if item.kind == RunKind.COMMIT_STARTED or item.kind == RunKind.COMMIT_FINISHED:
            name = (_hashable(item.fields.get("sink")), _hashable(item.fields.get("epoch")))
            if item.kind == RunKind.COMMIT_STARTED:
                started[name] = item
            else:
                started.pop(name, None)
    return list(started.values())


def _hashable(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


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
        self.history: list[Item] = []
        self.extensions: list[Item] = []
        self.metrics: list[Item] = []
        self.config: Mapping[str, Any] = {}
        self.epoch_count = 0
        self.interrupted = False
        self.last_commit = 0  # seq of the newest commit_started
        self.forgotten = 0
        self._room = 6 * KEPT
        self.count = 0
        self.unknown = 0

    def copy(self) -> Fold:
        """One that goes on by itself."""
        other = Fold()
        other.__dict__.update(self.__dict__)
        other.history, other.extensions, other.metrics = list(self.history), list(self.extensions), list(self.metrics)
        return other

    def state(self) -> RunState:
        whole = replace(
            self._state,
            config=self.config,
            history=tuple(self.history),
            extensions=tuple(self.extensions),
            metrics=tuple(self.metrics),
            epoch_count=self.epoch_count,
            interrupted=self.interrupted,
            entries_count=self.count,
            unknown_count=self.unknown,
            forgotten=self.forgotten,
        )
        return whole.newest(KEPT)

    def add(self, entry: Entry) -> None:
        """One entry more."""
        self.count += 1
        step = _STEPS.get(entry.kind)
        if step is None:
            self.unknown += 1
            return
        try:
            step(self, entry)
        except (TypeError, ValueError, KeyError):
            self.unknown += 1
        if self._size() > self._room:
            state = self.state()
            self.history, self.extensions = list(state.history), list(state.extensions)
            self.metrics, self.forgotten = list(state.metrics), state.forgotten
            self._room = max(6 * KEPT, 2 * self._size())  # rarely enough to cost nothing

    def _size(self) -> int:
        return len(self.history) + len(self.extensions) + len(self.metrics)

    # Each step reads all that it needs before it changes anything: an entry of another shape changes nothing.

    def start(self, entry: Entry) -> None:
        fields = entry.fields
        config, carried = _mapping(fields.get("config")), _mapping(fields.get("state"))
        history, extensions = _items(carried.get("history")), _items(carried.get("extensions"))
        metrics, epochs = _items(carried.get("metrics")), _number(carried.get("epoch_count", 0))
        self.forgotten = _number(carried.get("forgotten", 0))
        self._state = RunState(fields.get("session_id"), fields.get("segment_id"), fields.get("pipeline"))
        self.history, self.extensions, self.metrics = history, extensions, metrics
        self.config, self.epoch_count, self.interrupted = config, epochs, bool(carried.get("interrupted", False))

    def push(self, entry: Entry) -> None:
        self.history.append(Item(entry.kind, entry.fields, entry.seq))

    def commit_started(self, entry: Entry) -> None:
        self.push(entry)
        self.last_commit = entry.seq

    def command(self, entry: Entry) -> None:
        extensions = [
            Item(RunKind.EXTENSION, _mapping(extension), entry.seq)
            for extension in _sequence(entry.fields.get("extensions"))
        ]
        self.push(entry)
        self.extensions += extensions

    def extension(self, entry: Entry) -> None:
        self.extensions.append(Item(entry.kind, entry.fields, entry.seq))

    def metric(self, entry: Entry) -> None:
        self.metrics.append(Item(entry.kind, entry.fields, entry.seq))

    def epoch_end(self, entry: Entry) -> None:
        self.epoch_count = _number(entry.fields.get("epoch_count", self.epoch_count + 1))

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
        self.config = _mapping(entry.fields.get("config"))

    def rollback(self, entry: Entry) -> None:
        gone = {_number(seq) for seq in _sequence(entry.fields.get("seqs"))} - {0}
        self.history = [item for item in self.history if item.seq not in gone]
        self.extensions = [item for item in self.extensions if item.seq not in gone]
        self.interrupted = bool(entry.fields.get("interrupted", False))


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None):
        raise TypeError
    return value or {}


def _sequence(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple | None):
        raise TypeError
    return value or ()


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError
    return value


def _items(carried: Any) -> list[Item]:
    return [Item(str(item["kind"]), _mapping(item.get("fields"))) for item in map(_mapping, _sequence(carried))]


_STEPS: dict[str, Callable[[Fold, Entry], None]] = {
    RunKind.SEGMENT_START: Fold.start,
    RunKind.RUN_STARTED: Fold.run_started,
    RunKind.COMMAND: Fold.command,
    RunKind.BARRIER: Fold.push,
    RunKind.COMMIT_STARTED: Fold.commit_started,
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
