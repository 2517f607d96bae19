"""Commands: what a person asks of a pipeline, from the command line and from Python alike.

Each becomes a request (:mod:`headwater.control`). Where the pipeline runs, its answer is waited for. Where it does not
run, what is about the sinks is done here, and what is about the backfill is queued: it is done at the next start,
unless it is withdrawn before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from headwater.capture import TableState
from headwater.capture.renewal import renew
from headwater.control.command import (
    AddSink,
    DropSink,
    PauseBackfill,
    PauseSinks,
    QueryCommand,
    ResnapshotTable,
    ResumeBackfill,
    ResumeSinks,
    RetrySink,
    RewindSink,
    SinkCommand,
    StopPipeline,
    ThrottleBackfill,
)
from headwater.control.request import Request, ask_query, leave, queued, withdraw_step
from headwater.control.request import withdraw as withdraw_request
from headwater.errors import InputError
from headwater.pipeline.config import DeriveSection, PipelineConfig, SinkSection, matching
from headwater.pipeline.derived_query import cannot_rewind, forget_derived
from headwater.pipeline.errors import ConfigError, NotStarted
from headwater.pipeline.sink_control import DesiredState, SinkControl, ask_pipeline
from headwater.pipeline.sink_state import forget_sink, let_back, rewind_sink
from headwater.pipeline.status import SinkStatus, read_status
from headwater.pipeline.supervised_query import SinkState
from headwater.pipeline.supervision import LOCK_FILE, RUN_FOLDER, make_folders
from headwater.pipeline.tables import captured_tables
from headwater.sinks.delivery import read_parked
from headwater.system.owner_lock import OwnedElsewhereError, OwnerLock, current_owner

ANSWER_SECONDS: Final = 180.0
_STOP_LOOK_SECONDS: Final = 0.1
_ANSWERING: Final = {SinkState.STARTING.value, SinkState.RUNNING.value}
"""States of a sink whose query looks at its requests."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command for one sink, or for one of its tables.

    :ivar sink: its name; empty: the capture. :ivar table: its full name; ``None``: all.
    :ivar text: what was done, for a person.
    :ivar queued: the id of the request that is done at the next start; ``None``: it is done.
    """

    sink: str
    table: str | None
    text: str
    queued: str | None = None

    def __str__(self) -> str:
        return f"{', '.join(filter(None, (self.sink, self.table))) or 'all tables'}: {self.text}"


def is_running(config: PipelineConfig) -> bool:
    """Whether a process runs the pipeline."""
    return current_owner(config.work / RUN_FOLDER / LOCK_FILE) is not None


# -- delivery and backfill, paused and limited -------------------------------------------------------------------------


def pause(
    config: PipelineConfig, table: str | None = None, sink: str | None = None, *, backfill: bool = False
) -> list[Outcome]:
    """Deliver nothing to *sink*, or to all, until :func:`resume`; or read no backfill. It stays so over restarts.

    :param table: of which the backfill is paused. :param backfill: pause only that; changes flow on.
    :raises InputError: the delivery of one table cannot be paused. :raises RequestFailed: it cannot be done.
    """
    if backfill:
        text = "the backfill is paused; changes flow on"
        return _ask_queries(config, sink, table, PauseBackfill, text)
    _refuse_table("paused", table)
    return _states(steer(config, PauseSinks(sink)))


def resume(
    config: PipelineConfig, table: str | None = None, sink: str | None = None, *, backfill: bool = False
) -> list[Outcome]:
    """Undo :func:`pause`, with the same parameters. A sink that is named and was dropped begins again."""
    if backfill:
        return _ask_queries(config, sink, table, ResumeBackfill, "the backfill is resumed")
    _refuse_table("resumed", table)
    return _states(steer(config, ResumeSinks(sink)))


def throttle(
    config: PipelineConfig, rows_per_second: int | None, table: str | None = None, sink: str | None = None
) -> list[Outcome]:
    """Read at most this many rows of backfill per second, for each table; ``None``: no limit."""
    limit = "no limit" if rows_per_second is None else f"at most {rows_per_second:,} rows per second and table"
    return _ask_queries(config, sink, table, lambda name: ThrottleBackfill(rows_per_second, name), limit)


def resnapshot(
    config: PipelineConfig,
    table: str | None = None,
    sink: str | None = None,
    *,
    start: Sequence[str] = (),
    end: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> list[Outcome]:
    """Read a table once more, or a range of its keys (both included), or some of its columns, while changes flow.

    A table whose capture has stopped, that a sink has parked, or that has special_values in the pipeline, is captured
    again first; without a table and while nothing runs, the whole source is.

    :param start: the values of a key, one for each key column. :raises InputError: a range, and no table.
    """
    has_part = bool(start or end or columns)
    if has_part and table is None:
        raise InputError("A range or a column is of one table.", next_step="Name the table.")
    recaptured = None if has_part else _recaptured(config, table, sink)
    if recaptured is not None:
        return [recaptured]

    def command(name: str | None) -> QueryCommand:
        return ResnapshotTable(name, tuple(map(str, start)), tuple(map(str, end)), tuple(columns))

    return _ask_queries(config, sink, table, command, "is read once more. Look: headwater status --watch")


def _refuse_table(what: str, table: str | None) -> None:
    if table is not None:
        raise InputError(
            f"The delivery of one table cannot be {what}: the tables of a sink are delivered together.",
            next_step="Name the sink with --sink, or only the backfill of the table with --backfill.",
        )


def _states(effect: dict[str, Any]) -> list[Outcome]:
    text = {"paused": "paused; changes wait in the log", "dropped": "dropped"}
    return [Outcome(name, None, text.get(state, state)) for name, state in effect["sinks"].items()]


def _ask_queries(
    config: PipelineConfig,
    sink: str | None,
    table: str | None,
    command: Callable[[str | None], QueryCommand],
    text: str,
) -> list[Outcome]:
    """Ask the query of each sink that it is about; queue it where that does not run."""
    status = read_status(config)
    chosen = [each for each in status.sinks if sink in (None, each.name) and each.state != SinkState.DROPPED.value]
    if not chosen:
        known = ", ".join(each.name for each in status.sinks)
        raise ConfigError(f"The pipeline delivers to no sink {sink!r}.", key="sink", next_step=f"It has {known}.")
    wanted = [(each, name) for each in chosen for name in _names(config, each, table)]
    if not wanted:
        known = ", ".join(dict.fromkeys(one.name for each in chosen for one in each.tables))
        raise InputError(
            f"No sink has a table {table}.",
            next_step=f"The tables are {known}." if known else "Start the pipeline first: headwater run",
        )
    outcomes = []
    for each, name in wanted:
        query = _query(config, each)
        if status.running and each.tables and each.state in _ANSWERING:
            ask_query(config.state, query, command(name), ANSWER_SECONDS)
            outcomes.append(Outcome(each.name, name, text))
            continue
        request = Request(command(name), query)
        leave(config.state, request)
        outcomes.append(Outcome(each.name, name, _queued_text(config.state, request), request.id))
    return outcomes


def _queued_text(location: str, request: Request) -> str:
    return f"queued until it runs. To withdraw it: {withdraw_step(location, request.id)}"


def _names(config: PipelineConfig, sink: SinkStatus, table: str | None) -> list[str | None]:
    """The full name of *table* as *sink* has it; nothing when it has none of it."""
    if table is None:
        return [None]
    known = [one.name for one in sink.tables] or list(captured_tables(config.store))
    return list(matching([table], known, config.home)[:1])


def _recaptured(config: PipelineConfig, table: str | None, sink: str | None) -> Outcome | None:
    """Have the capture begin again where it has stopped, or a policy counts from now on; ``None``: it need not."""
    status = read_status(config)
    known = captured_tables(config.store)
    if not known:
        return None
    if table is None:
        if status.running:
            return None
        request = renew(config.store, None)
        text = "the source is captured again at the next start, and every table read once more. Run: headwater run"
        return Outcome("", None, text, request)
    stopped = [name for name, captured in known.items() if captured.state is not TableState.ACTIVE]
    wanted = matching([table], stopped, config.home)
    held = [each.name for each in status.sinks if _holds(config, each, table)]
    special = [name for name in known if any(f"{column}.".startswith(f"{name}.") for column in config.special_values)]
    if held:  # its log may have to take other columns before its backfill can be read
        wanted = matching([table], list(known), config.home)
    elif not wanted and sink is None:
        wanted = matching([table], special, config.home)
    if not wanted:
        return None
    request = renew(config.store, wanted, ANSWER_SECONDS)
    for name in held:
        steer(config, RetrySink(name))
    now = "is captured again and read once more"
    later = "is captured again at the next start. Run: headwater run"
    return Outcome("", wanted[0], now if request is None else later, request)


def _holds(config: PipelineConfig, sink: SinkStatus, table: str) -> bool:
    """Whether a sink has failed, with *table* among its tables, or has parked it."""
    held = [one.name for one in sink.tables] if sink.error else list(read_parked(config.state, _query(config, sink)))
    return bool(matching([table], held, config.home))


def _query(config: PipelineConfig, sink: SinkStatus) -> str:
    return next(config.query(section) for section in config.sink if section.label == sink.name)


# -- sinks, as a whole -------------------------------------------------------------------------------------------------


def steer(config: PipelineConfig, command: SinkCommand) -> dict[str, Any]:
    """Have *command* done by the process that runs the pipeline, or here when none does; what was done.

    :raises ConfigError: there is no such sink. :raises RequestFailed: it cannot be done.
    """
    sections = [section for section in config.parts if command.sink in (None, section.label)]
    if not sections:
        known = ", ".join(section.label for section in config.parts)
        raise ConfigError(f"The pipeline has no sink {command.sink!r}.", key="sink", next_step=f"It has {known}.")
    if not is_running(config):
        make_folders(config)
        try:
            lock = OwnerLock(config.work / RUN_FOLDER / LOCK_FILE, str(config.work))
            with lock, closing(SinkControl(config.state)) as control:
                effects = {section.label: _do(config, section, command, control) for section in sections}
        except OwnedElsewhereError:
            pass  # it was started just now
        else:
            states = {label: effect["state"] for label, effect in effects.items()}
            return {key: value for effect in effects.values() for key, value in effect.items()} | {"sinks": states}
    return ask_pipeline(config.state, command, ANSWER_SECONDS)


def _do(
    config: PipelineConfig, section: SinkSection | DeriveSection, command: SinkCommand, control: SinkControl
) -> dict[str, Any]:
    label = section.label
    desired = control.desired_state(label)
    match command:
        case PauseSinks():
            if desired is not DesiredState.DROPPED:
                desired = DesiredState.PAUSED
                control.set_desired_state(label, desired)
            return {"state": desired.value}
        case ResumeSinks(sink=sink):
            if desired is DesiredState.DROPPED:
                if sink is None:
                    return {"state": desired.value}
                _forget(config, section)  # a process that died can have left something
            control.set_desired_state(label, DesiredState.RUNNING)
            return {"state": "not running"}
        case RetrySink():
            tables: list[str] = []
            if isinstance(section, SinkSection):
                tables = let_back(config.store, config.state, config.query(section))
            return {"state": "not running", "tables": tables}
        case RewindSink(epoch=epoch):
            if isinstance(section, DeriveSection):
                raise cannot_rewind(label)
            return {"state": "not running"} | rewind_sink(config, section, epoch)
        case DropSink():
            control.set_desired_state(label, DesiredState.DROPPED)
            return {"state": DesiredState.DROPPED.value, "tables": _forget(config, section)}


def _forget(config: PipelineConfig, section: SinkSection | DeriveSection) -> list[str]:
    """Forget all that is known of it; its tables."""
    return forget_derived(config, section) if isinstance(section, DeriveSection) else forget_sink(config, section)


# -- the pipeline as a whole -------------------------------------------------------------------------------------------


def announce(config: PipelineConfig, label: str) -> None:
    """Have the process that runs the pipeline deliver to a part that is new in its file; nothing when none runs."""
    if is_running(config):
        ask_pipeline(config.state, AddSink(label), ANSWER_SECONDS)


def stop(config: PipelineConfig) -> None:
    """End the process that runs the pipeline, and wait until it has ended: batches end, the capture seals.

    :raises NotStarted: none runs it.
    """
    if not is_running(config):
        raise NotStarted("The pipeline is not running.")
    ask_pipeline(config.state, StopPipeline(), ANSWER_SECONDS)
    while is_running(config):
        time.sleep(_STOP_LOOK_SECONDS)


def requests(config: PipelineConfig) -> list[tuple[str, Request]]:
    """The requests that are not done yet, each with the location of the store whose owner has to do it."""
    return [(location, request) for location in (config.state, config.store) for request in queued(location)]


def withdraw(config: PipelineConfig, request: str) -> None:
    """Take back the queued request with this id: it is never done.

    :raises NoSuchRequest: it is not queued. :raises RequestBegun: its owner has begun with it.
    """
    owners = [location for location, each in requests(config) if each.id == request]
    withdraw_request(owners[0] if owners else config.state, request)
