"""``headwater pause``, ``resume``, ``throttle``, ``resnapshot``: what can be asked of a pipeline while it runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headwater.backfill.control import PAUSE, RESNAPSHOT, RESUME, THROTTLE, ask_query
from headwater.capture import TableState
from headwater.capture.renewal import renew
from headwater.cli.terminal import err
from headwater.errors import InputError
from headwater.pipeline.config import DEFAULT_FILE, PipelineConfig, load, matching
from headwater.pipeline.errors import ConfigError, NotStarted
from headwater.pipeline.sink_commands import ask_sink
from headwater.pipeline.sink_control import SinkRequestKind
from headwater.pipeline.status import SinkStatus, read_status
from headwater.pipeline.tables import captured_tables
from headwater.sinks.delivery import read_parked

_ANSWER_SECONDS = 120.0
FileOption = Annotated[Path, typer.Option("--pipeline", "-p", help="The pipeline.")]
SinkOption = Annotated[str | None, typer.Option("--sink", help="Only this sink; all by default.")]
TableArgument = Annotated[str | None, typer.Argument(help="Only this table; all by default.")]


def pause(table: TableArgument = None, pipeline: FileOption = Path(DEFAULT_FILE), sink: SinkOption = None) -> None:
    """Read no more history, until resume; changes flow on. It stays so over restarts."""
    for name in _ask(pipeline, sink, table, PAUSE, {}):
        err.print(f"{name}: no more history is read; changes flow on. Go on: headwater resume", soft_wrap=True)


def resume(table: TableArgument = None, pipeline: FileOption = Path(DEFAULT_FILE), sink: SinkOption = None) -> None:
    """Go on reading history."""
    for name in _ask(pipeline, sink, table, RESUME, {}):
        err.print(f"{name}: history goes on")


def throttle(
    rows: Annotated[str, typer.Argument(help="Rows of history per second and table, or none.", metavar="ROWS|none")],
    table: TableArgument = None,
    pipeline: FileOption = Path(DEFAULT_FILE),
    sink: SinkOption = None,
) -> None:
    """Read history no faster than so many rows per second, for each table."""
    limit = _limit(rows)
    for name in _ask(pipeline, sink, table, THROTTLE, {"rows_per_second": limit}):
        told = "no limit" if limit is None else f"at most {limit:,} rows of history per second and table"
        err.print(f"{name}: {told}", soft_wrap=True)


def resnapshot(
    table: Annotated[str | None, typer.Argument(help="The table to read once more; all by default.")] = None,
    start: Annotated[
        list[str] | None, typer.Option("--from", help="The first key; again for each further key column.")
    ] = None,
    end: Annotated[
        list[str] | None, typer.Option("--to", help="The last key; again for each further key column.")
    ] = None,
    column: Annotated[list[str] | None, typer.Option(help="Only this column; again for more.")] = None,
    pipeline: FileOption = Path(DEFAULT_FILE),
    sink: SinkOption = None,
) -> None:
    """Read a table, a range of its keys or some of its columns once more, while changes flow.

    A table whose capture has stopped, that a sink has parked, or that has special_values in the pipeline, or after a
    slot was lost all tables, are captured anew; that can also be asked for while nothing runs.
    """
    part = start or end or column
    if part and table is None:
        raise InputError("A range or a column is of one table.", next_step="Name the table.")
    if not part and _captured_anew(load(pipeline), table, sink):
        return
    detail = {"start": start or None, "end": end or None, "columns": column or None}
    for name in _ask(pipeline, sink, table, RESNAPSHOT, detail):
        err.print(f"{name}: read once more. Look: headwater status --watch", soft_wrap=True)


def _captured_anew(config: PipelineConfig, table: str | None, sink: str | None) -> bool:
    """Have the capture begin anew where it has stopped, or a policy counts from now on; ``False``: it need not."""
    status = read_status(config)
    running = status.running
    known = captured_tables(config.store)
    if not known:
        return False
    if table is None:
        if running:
            return False
        renew(config.store, None)
        err.print("The source is captured anew at the next start, and every table read once more. Run: headwater run")
        return True
    stopped = [name for name, one in known.items() if one.state is not TableState.ACTIVE]
    wanted = matching([table], stopped, config.home)
    held = [one.name for one in status.sinks if _holds(config, one, table)]
    told = [name for name in known if any(one == name or one.startswith(f"{name}.") for one in config.special_values)]
    if held:  # its log may have to take other columns before its history can be read
        wanted = matching([table], list(known), config.home)
    elif not wanted and sink is None:
        wanted = matching([table], told, config.home)
    if not wanted:
        return False
    done = renew(config.store, wanted, _ANSWER_SECONDS)
    for name in held:
        ask_sink(config, name, SinkRequestKind.RETRY)
    when = "is captured anew and read once more" if done else "is captured anew at the next start. Run: headwater run"
    err.print(f"{wanted[0]} {when}")
    return True


def _holds(config: PipelineConfig, sink: SinkStatus, table: str) -> bool:
    """Whether a sink has failed, with *table* among its tables, or has parked it."""
    held = [one.name for one in sink.tables] if sink.error else list(read_parked(config.state, _query(config, sink)))
    return bool(matching([table], held, config.home))


def _limit(text: str) -> int | None:
    number = text.lower().removesuffix("/s").replace("_", "").replace(",", "")
    if number in ("none", "off"):
        return None
    if not number.isdecimal():
        raise InputError(f"Received {text!r} for the rows per second.", next_step="Write a number, or none.")
    return int(number)


def _ask(pipeline: Path, sink: str | None, table: str | None, kind: str, detail: dict[str, Any]) -> Iterator[str]:
    """Ask each sink that it is about; the names of those that did it, with the table."""
    config = load(pipeline)
    found = read_status(config)
    if not found.running:
        raise NotStarted(
            "The pipeline is not running.", next_step=f"Start it: headwater run {shlex.quote(str(pipeline))}"
        )
    chosen = [one for one in found.sinks if sink in (None, one.name)]
    if not chosen:
        raise ConfigError(
            f"The pipeline has no sink {sink!r}.",
            key="sink",
            next_step=f"It has {', '.join(one.name for one in found.sinks)}.",
        )
    for one in chosen:
        if one.state == "failed":
            err.print(f"{one.name}: not asked, it has failed. Look: headwater status")
    chosen = [one for one in chosen if one.tables and one.state != "failed"]
    wanted = [(one, name) for one in chosen for name in _named(one, table, config.home)]
    if not wanted:
        known = dict.fromkeys(one.name for each in chosen for one in each.tables)
        raise InputError(
            f"No sink has a table {table}." if known else "The pipeline is still starting.",
            next_step=f"Its tables are {', '.join(known)}." if known else "Try again in a moment.",
        )
    for one, name in wanted:
        query = _query(config, one)
        ask_query(config.state, query, kind, {"table": name, **detail}, _ANSWER_SECONDS)
        yield f"{one.name}, {name or 'all tables'}"


def _named(sink: SinkStatus, table: str | None, home: str) -> list[str | None]:
    """The full name of *table* as *sink* has it; nothing when it has none of it."""
    if table is None:
        return [None]
    return list(matching([table], [one.name for one in sink.tables], home)[:1])


def _query(config: PipelineConfig, sink: SinkStatus) -> str:
    return next(config.query(section) for section in config.sink if section.label == sink.name)
