"""How a pipeline is, from its stores alone: in any process, also when nothing runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.backfill.control import status as query_status
from headwater.backfill.query_tables import PARKED
from headwater.capture import SourceState
from headwater.capture.source_state import CapturedTable
from headwater.capture.statistics import SILENT_SECONDS
from headwater.derive.state import DerivedRecord, read_record
from headwater.errors import HeadwaterError
from headwater.log_store import LogView
from headwater.log_store.errors import LogNotFound
from headwater.log_store.log_events import SCHEMA, TRUNCATE, events_of
from headwater.log_store.log_view import EpochEnd
from headwater.pipeline.config import KEPT_KIND, DeriveSection, PipelineConfig, SinkSection
from headwater.pipeline.supervision import LOCK_FILE, RUN_FOLDER, STATUS
from headwater.sinks.dead_letters import DeadLetters
from headwater.sinks.delivery import ParkedTable, read_parked
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN
from headwater.sources.target_names import chosen_directory
from headwater.state import Snapshot, StateReader, open_reader
from headwater.state.board import open_board
from headwater.state.errors import StoreNotFound
from headwater.system.owner_lock import current_owner
from headwater.system.process import host_name, status_fields
from headwater.versioned.status import KeptStatus, kept_status

LIVE: Final = "live"
"""The phase of a table whose history is read: changes alone flow."""
STOPPED: Final = "stopped"
REREADING: Final = "rereading"
INCOMPLETE: Final = "incomplete"
NOT_RESPONDING: Final = "not responding"
UNKNOWN: Final = "unknown"
_MOST_COMMITTED: Final = 1000
_COMMITTED: dict[tuple[str, int, int], int] = {}
"""Commit times of epochs that were looked at: who shows the status again and again reads each once."""
_RUN: Final = "Run: "
_COMMAND: Final = re.compile(r"\bheadwater [a-z]")


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table of one sink.

    :ivar phase: ``waiting``, ``reading``, ``settling`` (history), ``live``; ``stopped``: it is not captured, or the
        sink does not take it; ``rereading``: it is read again; ``incomplete``: the sink refused rows of it.
    :ivar reason: why it is not live, where something must be done. :ivar next_step: what.
    :ivar columns: that are read again; empty: all.
    :ivar rows: of history, read so far; *total* is an estimate.
    :ivar lag_rows: changes in the log that are not delivered: rows, truncations and changes of columns.
    :ivar lag_seconds: the age of the oldest change at the source that is not delivered; ``None``: unknown, because the
        source cannot be asked.
    :ivar origin: where its history comes from: the ``source``, or ``tables`` that we keep. :ivar lag_epochs: after a
        snapshot of those, how many epochs of the log are left.
    :ivar kept: of a sink that keeps tables: base, runs and pins.
    """

    name: str
    phase: str
    rows: int = 0
    total: int | None = None
    rows_per_second: float | None = None
    eta_seconds: float | None = None
    splits_done: int | None = None
    splits: int | None = None
    paused: bool = False
    limit: int | None = None
    waiting: str | None = None
    lag_rows: int = 0
    lag_seconds: float | None = None
    reason: str | None = None
    next_step: str | None = None
    parked: bool = False
    columns: tuple[str, ...] = ()
    origin: str = "source"
    lag_epochs: int | None = None
    kept: KeptStatus | None = None


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """One sink.

    :ivar state: as its supervisor has it; ``not running`` when there is none, ``not responding`` since
        *silent_since_ms* when its process or Spark does not answer, ``unknown`` when the supervisor does not.
    :ivar problem: what its query waits for. :ivar waits_for: ``Spark`` or ``the sink``: what has not answered since
        *waits_since_ms*, where that is longer than a batch should take.
    """

    name: str
    kind: str
    mode: str
    path: str
    state: str
    tables: tuple[TableStatus, ...] = ()
    batches: int = 0
    restarts: int = 0
    epoch: int = 0
    error: str | None = None
    next_step: str | None = None
    problem: str | None = None
    silent_since_ms: int | None = None
    waits_for: str | None = None
    waits_since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class DerivedStatus:
    """One derived table.

    :ivar phase: ``waiting`` for the history of its tables, ``snapshot`` while its first result is made, or ``live``.
    :ivar epoch: up to which it is delivered. :ivar rows: that were delivered, of results and changes.
    :ivar lag_rows: changes of its tables since. :ivar seconds: that its last batch took.
    """

    name: str
    table: str
    tables: tuple[str, ...]
    by: tuple[str, ...]
    sink: str
    state: str
    phase: str
    epoch: int = 0
    rows: int = 0
    seconds: float = 0.0
    batches: int = 0
    restarts: int = 0
    lag_rows: int = 0
    lag_seconds: float | None = None
    error: str | None = None
    next_step: str | None = None


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """One pipeline.

    :ivar running: a process runs it now. :ivar owner: which. :ivar silent_since_ms: when it answered last, where its
        state is ``not responding``.
    :ivar capture: what the capture reports of itself, or reported last. Its ``state`` is ``down`` where its process
        has ended, ``not responding`` since ``silent_since_ms`` where it is frozen or hangs.
    """

    name: str
    store: str
    running: bool
    owner: str | None
    state: str
    error: str | None = None
    next_step: str | None = None
    capture: Mapping[str, Any] = field(default_factory=dict)
    sinks: tuple[SinkStatus, ...] = ()
    derived: tuple[DerivedStatus, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    silent_since_ms: int | None = None

    @property
    def is_live(self) -> bool:
        """Every table and derived table is live, nothing has failed, and no sink waits for a batch that takes long."""
        phases = [table.phase for sink in self.sinks for table in sink.tables]
        derived = [one.phase for one in self.derived]
        waits = any(sink.waits_for for sink in self.sinks)
        return bool(phases) and all(phase == LIVE for phase in (*phases, *derived)) and self.error is None and not waits

    @property
    def lag_rows(self) -> int:
        """Changes that some sink, or derived table, has not got yet."""
        lags = [sum(table.lag_rows for table in sink.tables) for sink in self.sinks]
        return max((*lags, *(one.lag_rows for one in self.derived)), default=0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"live": self.is_live, "lag_rows": self.lag_rows}


def read_status(config: PipelineConfig) -> PipelineStatus:
    """How the pipeline of *config* is now."""
    owner = current_owner(config.work / RUN_FOLDER / LOCK_FILE)
    facts = _facts(config)
    running = owner is not None
    if owner is not None and owner.pid not in (0, facts.get("pid", owner.pid)):
        facts = {}  # of the run before this one
    silent = _silent_since(facts.get("updated_ms")) if running else None
    here = owner is not None and owner.host == host_name()
    capture = _capture(facts.get("capture") or {}, running, silent, here)
    lag = capture.get("lag_seconds")
    failure = facts.get("failure") or {}
    sinks = (
        facts.get("sinks", {})
        if silent is None
        else {name: one | {"state": UNKNOWN} for name, one in facts.get("sinks", {}).items()}
    )
    state = str(facts.get("state", "starting")) if running else _resting(facts)
    return PipelineStatus(
        name=config.name,
        store=config.store,
        running=running,
        owner=None if owner is None else str(owner),
        state=state if silent is None else NOT_RESPONDING,
        error=failure.get("message"),
        next_step=failure.get("next_step"),
        capture=capture,
        sinks=_sinks(config, sinks, running, lag),
        derived=_derived(config, sinks, running, lag),
        left_out=facts.get("left_out", {}),
        silent_since_ms=silent,
    )


def _facts(config: PipelineConfig) -> dict[str, Any]:
    """What the process that runs the pipeline, or ran it last, says of itself."""
    record = open_board(config.state).read(STATUS)
    facts: dict[str, Any] = json.loads((record and record.data) or b"{}")
    return facts


def _silent_since(*beats_ms: int | None) -> int | None:
    """When it answered last, where that is too long ago."""
    newest = max((beat for beat in beats_ms if beat), default=None)
    return newest if newest is not None and time.time() - newest / 1000 > SILENT_SECONDS else None


def _capture(facts: Mapping[str, Any], running: bool, supervisor_silent: int | None, here: bool) -> dict[str, Any]:
    """What is true of the capture: what it reported last may be old. :param here: it runs on this machine."""
    if not facts:
        return {}
    state, silent = facts["state"], None
    if not running:
        state = "not running"
    elif here and "pid" in facts and status_fields(facts["pid"])[:1] in ([], ["Z"]):
        state = "down"
    elif supervisor_silent is not None:
        state = UNKNOWN
    else:
        silent = _silent_since(facts.get("beat_ms"))
        state = state if silent is None else NOT_RESPONDING
    lag = facts.get("lag_seconds") if state == "running" else None
    return {**facts, "state": state, "lag_seconds": lag, "silent_since_ms": silent}


def _resting(facts: Mapping[str, Any]) -> str:
    if not facts:
        return "never run"
    return str(facts["state"]) if facts["state"] in ("stopped", "failed") else "interrupted"


def _sinks(
    config: PipelineConfig, facts: Mapping[str, Any], running: bool, lag: float | None
) -> tuple[SinkStatus, ...]:
    try:
        with open_reader(config.store) as reader:
            return tuple(_sink(config, sink, facts.get(sink.label, {}), running, reader, lag) for sink in config.sink)
    except StoreNotFound:
        return tuple(_sink(config, sink, facts.get(sink.label, {}), running, None, lag) for sink in config.sink)


def _sink(
    config: PipelineConfig,
    sink: SinkSection,
    facts: Mapping[str, Any],
    running: bool,
    reader: StateReader | None,
    lag: float | None,
) -> SinkStatus:
    told = None if reader is None else query_status(config.state, config.query(sink))
    value = {} if told is None else told.value
    epoch = max(int(facts.get("epoch", 0)), int(value.get("epoch", 0)))
    failure = facts.get("failure") or {}
    tables: tuple[TableStatus, ...] = ()
    if reader is not None and value:
        parked = read_parked(config.state, config.query(sink))
        letters = set(DeadLetters(str(config.dead_letters(sink))).tables())
        with reader.snapshot() as view:
            captured = SourceState.read(view)[1]
            tables = tuple(
                _state_of(_table(view, name, one, epoch, lag), one, captured.get(name), parked, letters, sink.label)
                for name, one in value["tables"].items()
            )
    if sink.kind == KEPT_KIND:
        tables = tuple(replace(one, kept=kept_status(sink.options["path"], one.name)) for one in tables)
    state = facts.get("state", "starting") if running else "not running"
    silent = None
    if state == "running":
        silent = _silent_since(facts.get("seen_ms"), value.get("updated_ms"))
    waits_for, waits_since = facts.get("waits_for") or (None, None)
    if state != "running" or silent is not None or _silent_since(waits_since) is None:
        waits_for = waits_since = None
    return SinkStatus(
        name=sink.label,
        kind=sink.kind,
        mode=sink.delivery.value,
        path=sink.place,
        state=state if silent is None else NOT_RESPONDING,
        tables=tables,
        batches=int(facts.get("batches", 0)),
        restarts=int(facts.get("restarts", 0)),
        epoch=epoch,
        error=failure.get("message"),
        next_step=failure.get("next_step"),
        problem=value.get("problem"),
        silent_since_ms=silent,
        waits_for=waits_for,
        waits_since_ms=waits_since,
    )


def _derived(
    config: PipelineConfig, facts: Mapping[str, Any], running: bool, lag: float | None
) -> tuple[DerivedStatus, ...]:
    if not config.derive:
        return ()
    return tuple(_derived_one(config, one, facts.get(one.label, {}), running, lag) for one in config.derive)


def _derived_one(
    config: PipelineConfig, section: DeriveSection, facts: Mapping[str, Any], running: bool, lag: float | None
) -> DerivedStatus:
    record = read_record(config.state, config.query(section)) or DerivedRecord()
    derivation = section.derivation
    lags: list[tuple[int, float | None]] = []
    if record.delivered:
        with open_reader(config.store) as reader, reader.snapshot() as view:
            lags = [_lag(view, name, record.delivered, lag) for name in derivation.tables]
    failure = facts.get("failure") or {}
    return DerivedStatus(
        name=section.label,
        table=derivation.full_name,
        tables=derivation.tables,
        by=derivation.by[0],
        sink=section.sink or "",
        state=facts.get("state", "starting") if running else "not running",
        phase=LIVE if record.delivered else "snapshot" if record.start else "waiting",
        epoch=record.delivered,
        rows=record.rows,
        seconds=record.seconds,
        batches=int(facts.get("batches", 0)),
        restarts=int(facts.get("restarts", 0)),
        lag_rows=sum(rows for rows, _ in lags),
        lag_seconds=max((seconds for _, seconds in lags if seconds is not None), default=None),
        error=failure.get("message"),
        next_step=failure.get("next_step"),
    )


def _state_of(
    table: TableStatus,
    told: Mapping[str, Any],
    captured: CapturedTable | None,
    parked: Mapping[str, ParkedTable],
    letters: Set[str],
    sink: str,
) -> TableStatus:
    """*table* with the phase that is true: ``live`` only where its capture, its sink and all of its rows are well.

    :param captured: how the capture has it. :param parked: the tables that the sink does not take, and why.
    :param letters: directories of the tables of which the sink refused rows.
    """
    if captured is not None and captured.state.value != "active":
        phase = REREADING if captured.state.value == REREADING else STOPPED
        reason, step = split_step(captured.reason)
        return replace(table, phase=phase, reason=reason, next_step=step, lag_seconds=None)
    if table.name in parked or table.phase == PARKED:
        why = parked.get(table.name) or ParkedTable(told.get("waiting") or "", None, 0)
        retry = f"{_RUN}headwater sink retry {sink}"
        step = why.next_step or retry
        if not _COMMAND.search(step):  # one that reads the table again retries it, too
            step = f"{step} Then {retry[0].lower()}{retry[1:]}"
        return replace(table, phase=STOPPED, parked=True, reason=why.reason or None, next_step=step, waiting=None)
    known = told.get("since")
    if told.get("rereading") or (known and captured is not None and captured.since.to_json() != known):
        return replace(table, phase=REREADING)  # captured again after a gap, which the query may not have seen yet
    directory = None if captured is None else chosen_directory(captured.namespace, captured.name, letters.__contains__)
    if table.phase == LIVE and directory in letters:
        return replace(
            table,
            phase=INCOMPLETE,
            reason="The sink refused rows of it, which are kept as dead letters.",
            next_step=f"To see why, run: headwater sink letters {sink}. Correct the cause, then run:"
            f" headwater sink replay {sink}",
        )
    return table


def split_step(text: str) -> tuple[str, str | None]:
    """The reason in *text*, and what to do: from its first ``Run:``, or the sentence with a command of ours, on."""
    place = text.find(_RUN)
    if place < 0:
        command = _COMMAND.search(text)
        place = len(text) if command is None else _sentence(text, command.start())
        if text.startswith("Then ", place):
            place = _sentence(text, place - 2)
    reason = text[:place].rstrip()
    return (reason, text[place:] or None) if reason else (text, None)


def _sentence(text: str, place: int) -> int:
    """Where the sentence begins that *place* is in."""
    found = text.rfind(". ", 0, place)
    return found + 2 if found >= 0 else 0


def _table(view: Snapshot, name: str, told: Mapping[str, Any], epoch: int, lag: float | None) -> TableStatus:
    after = max(epoch, int(told.get("delivered", 0)))
    rows, seconds = _lag(view, name, after, lag)
    phase = str(told["phase"])
    return TableStatus(
        name=name,
        phase=LIVE if phase == "done" else phase,
        rows=int(told.get("rows") or 0),
        total=told.get("total_rows"),
        rows_per_second=told.get("rows_per_second"),
        eta_seconds=told.get("eta_seconds"),
        splits_done=told.get("splits"),
        splits=told.get("total_splits"),
        paused=bool(told.get("paused")),
        limit=told.get("limit"),
        waiting=told.get("waiting") or None,
        lag_rows=rows,
        lag_seconds=seconds,
        columns=tuple(told.get("columns") or ()),
        origin=told.get("origin") or "source",
        lag_epochs=told.get("lag_epochs"),
    )


def _lag(view: Snapshot, log: str, after: int, lag: float | None) -> tuple[int, float | None]:
    """Changes in the log after the epoch *after*, and the age of the oldest change that is not delivered.

    Truncating the table and changing its columns count as one change each.

    :param lag: the age of the oldest change that the log does not have yet; ``None``: unknown, and so is the whole.
    """
    try:
        logged = LogView.open(view, log)
    except LogNotFound:
        return 0, lag
    events = [one for one in events_of(view, log, after, view.epoch) if one.kind in (SCHEMA, TRUNCATE)]
    ends = [end for end in logged.epochs(after) if end.rows]
    changes = sum(end.rows for end in ends) + len(events)
    if not changes or lag is None:
        return changes, lag
    oldest_ms = [event.epoch.unix_ms for event in events[:1]] + [_committed_ms(logged, end) for end in ends[:1]]
    return changes, round(max(0.0, time.time() - min(oldest_ms) / 1000, lag), 3)


def _committed_ms(log: LogView, end: EpochEnd) -> int:
    """When the source committed the first changes of an epoch; where it does not say, when they were sealed."""
    key = (log.log.name, end.epoch, end.sealed_ms)
    if key not in _COMMITTED:
        if len(_COMMITTED) >= _MOST_COMMITTED:
            _COMMITTED.clear()
        _COMMITTED[key] = _first_commit_ms(log, end) or end.sealed_ms
    return _COMMITTED[key]


def _first_commit_ms(log: LogView, end: EpochEnd) -> int | None:
    try:
        rows = next(log.read_epoch(end, end.vnodes), None)
    except HeadwaterError:  # damaged: who reads it says so
        return None
    if rows is None or COMMIT_TIMESTAMP_COLUMN not in rows.schema.names:
        return None
    first = pc.min(rows.column(COMMIT_TIMESTAMP_COLUMN).cast(pa.int64())).as_py()
    return None if first is None else int(first) // 1000
