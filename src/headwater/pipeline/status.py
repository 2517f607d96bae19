"""How a pipeline is, from its stores alone: in any process, also when nothing runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from headwater.backfill.control import status as query_status
from headwater.capture import SourceState, TableState
from headwater.derive.state import DerivedRecord, read_record
from headwater.journal.owner import current_owner
from headwater.log_store import LogView
from headwater.log_store.errors import LogNotFound
from headwater.pipeline.config import KEPT_KIND, DeriveSection, PipelineConfig, SinkSection
from headwater.pipeline.supervision import FACTS_FILE, LOCK_FILE, RUN_FOLDER
from headwater.state import Snapshot, StateReader, open_reader
from headwater.state.errors import StoreNotFound
from headwater.versioned.status import KeptStatus, kept_status

LIVE: Final = "live"
"""The phase of a table whose history is read: changes alone flow."""


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table of one sink.

    :ivar phase: ``waiting``, ``reading``, ``settling`` (history) or ``live``.
    :ivar rows: of history, read so far; *total* is an estimate.
    :ivar lag_rows: changes in the log that are not delivered. :ivar lag_seconds: how old the oldest of them is.
    :ivar stopped: why nobody captures it any more.
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
    lag_seconds: float = 0.0
    stopped: str | None = None
    origin: str = "source"
    lag_epochs: int | None = None
    kept: KeptStatus | None = None


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """One sink.

    :ivar state: as its supervisor has it; ``not running`` when there is none.
    :ivar problem: what its query waits for.
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
    lag_seconds: float = 0.0
    error: str | None = None
    next_step: str | None = None


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """One pipeline.

    :ivar running: a process runs it now. :ivar owner: which.
    :ivar capture: what the capture tells of itself, or told last.
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

    @property
    def is_live(self) -> bool:
        """The history of every table is delivered, derived ones are made, and nothing has failed."""
        phases = [table.phase for sink in self.sinks for table in sink.tables]
        derived = [one.phase for one in self.derived]
        return bool(phases) and all(phase == LIVE for phase in (*phases, *derived)) and self.error is None

    @property
    def lag_rows(self) -> int:
        """Changes that some sink, or derived table, has not got yet."""
        lags = [sum(table.lag_rows for table in sink.tables) for sink in self.sinks]
        return max((*lags, *(one.lag_rows for one in self.derived)), default=0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"live": self.is_live, "lag_rows": self.lag_rows}


def read_status(config: PipelineConfig) -> PipelineStatus:
    """How the pipeline of *config* is now."""
    folder = config.work / RUN_FOLDER
    owner = current_owner(folder / LOCK_FILE)
    facts = _facts(folder / FACTS_FILE)
    running = owner is not None
    capture = dict(facts.get("capture") or {})
    if capture and not running:
        capture["state"] = "not running"
    failure = facts.get("failure") or {}
    return PipelineStatus(
        name=config.name,
        store=config.store,
        running=running,
        owner=None if owner is None else str(owner),
        state=str(facts.get("state", "starting")) if running else _resting(facts),
        error=failure.get("message"),
        next_step=failure.get("next_step"),
        capture=capture,
        sinks=_sinks(config, facts.get("sinks", {}), running),
        derived=_derived(config, facts.get("sinks", {}), running),
        left_out=facts.get("left_out", {}),
    )


def _resting(facts: Mapping[str, Any]) -> str:
    if not facts:
        return "never run"
    return str(facts["state"]) if facts["state"] in ("stopped", "failed") else "interrupted"


def _facts(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _sinks(config: PipelineConfig, facts: Mapping[str, Any], running: bool) -> tuple[SinkStatus, ...]:
    try:
        with open_reader(config.store) as reader:
            return tuple(_sink(config, sink, facts.get(sink.label, {}), running, reader) for sink in config.sink)
    except StoreNotFound:
        return tuple(_sink(config, sink, facts.get(sink.label, {}), running, None) for sink in config.sink)


def _sink(
    config: PipelineConfig, sink: SinkSection, facts: Mapping[str, Any], running: bool, reader: StateReader | None
) -> SinkStatus:
    told = None if reader is None else query_status(config.store, config.query(sink))
    value = {} if told is None else told.value
    epoch = max(int(facts.get("epoch", 0)), int(value.get("epoch", 0)))
    failure = facts.get("failure") or {}
    tables: tuple[TableStatus, ...] = ()
    if reader is not None and value:
        with reader.snapshot() as view:
            captured = SourceState.read(view)[1]
            stopped = {name: one.reason for name, one in captured.items() if one.state is TableState.STOPPED}
            tables = tuple(_table(view, name, one, epoch, stopped) for name, one in value["tables"].items())
    if sink.kind == KEPT_KIND:
        tables = tuple(replace(one, kept=kept_status(sink.options["path"], one.name)) for one in tables)
    return SinkStatus(
        name=sink.label,
        kind=sink.kind,
        mode=sink.delivery.value,
        path=sink.place,
        state=facts.get("state", "starting") if running else "not running",
        tables=tables,
        batches=int(facts.get("batches", 0)),
        restarts=int(facts.get("restarts", 0)),
        epoch=epoch,
        error=failure.get("message"),
        next_step=failure.get("next_step"),
        problem=value.get("problem"),
    )


def _derived(config: PipelineConfig, facts: Mapping[str, Any], running: bool) -> tuple[DerivedStatus, ...]:
    if not config.derive:
        return ()
    return tuple(_derived_one(config, one, facts.get(one.label, {}), running) for one in config.derive)


def _derived_one(
    config: PipelineConfig, section: DeriveSection, facts: Mapping[str, Any], running: bool
) -> DerivedStatus:
    record = read_record(config.store, config.query(section)) or DerivedRecord()
    derivation = section.derivation
    lags: list[tuple[int, float]] = []
    if record.delivered:
        with open_reader(config.store) as reader, reader.snapshot() as view:
            lags = [_lag(view, name, record.delivered) for name in derivation.tables]
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
        lag_seconds=max((seconds for _, seconds in lags), default=0.0),
        error=failure.get("message"),
        next_step=failure.get("next_step"),
    )


def _table(view: Snapshot, name: str, told: Mapping[str, Any], epoch: int, stopped: Mapping[str, str]) -> TableStatus:
    after = max(epoch, int(told.get("delivered", 0)))
    rows, seconds = _lag(view, name, after)
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
        stopped=stopped.get(name),
        origin=told.get("origin") or "source",
        lag_epochs=told.get("lag_epochs"),
    )


def _lag(view: Snapshot, log: str, after: int) -> tuple[int, float]:
    """Changes after the epoch *after*, and for how long the oldest of them has been there."""
    try:
        ends = [end for end in LogView.open(view, log).epochs(after) if end.rows]
    except LogNotFound:
        return 0, 0.0
    if not ends:
        return 0, 0.0
    return sum(end.rows for end in ends), round(max(0.0, time.time() - ends[0].sealed_ms / 1000), 3)
