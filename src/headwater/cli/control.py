"""What can be asked of a pipeline: ``headwater pause``, ``resume``, ``throttle``, ``resnapshot``, ``stop``.

``headwater requests`` lists what is not done yet. With ``--store`` and ``--query`` the first four are for a query of
``headwater upstream run`` instead.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from headwater.cli.terminal import err, out
from headwater.control.command import (
    PauseBackfill,
    QueryCommand,
    ResnapshotTable,
    ResumeBackfill,
    ThrottleBackfill,
    command_to_json,
)
from headwater.control.request import ask_query, queued
from headwater.control.request import withdraw as withdraw_request
from headwater.errors import InputError
from headwater.pipeline import commands
from headwater.pipeline.config import DEFAULT_FILE, load
from headwater.state.query_store import own_state

_ANSWER_SECONDS = 60.0
FileOption = Annotated[Path, typer.Option("--pipeline", "-p", help="Pipeline file.")]
SinkOption = Annotated[str | None, typer.Option("--sink", help="Only this sink (default: all).")]
TableArgument = Annotated[str | None, typer.Argument(help="Only this table (default: all).")]
BackfillOption = Annotated[bool, typer.Option("--backfill", help="Only the reading of backfills; changes flow on.")]
StoreOption = Annotated[str | None, typer.Option("--store", help="Store of an upstream query, with --query.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON array on stdout.")]
QueryOption = Annotated[str, typer.Option("--query", help="Name of an upstream query, with --store.")]


def pause(
    table: TableArgument = None,
    pipeline: FileOption = Path(DEFAULT_FILE),
    sink: SinkOption = None,
    backfill: BackfillOption = False,
    store: StoreOption = None,
    query: QueryOption = "upstream",
    as_json: JsonOption = False,
) -> None:
    """Deliver nothing until resume; changes wait in the log. Restarts keep the pause."""
    if store is not None:
        _refuse(table, sink, backfill)
        _show(
            [
                _ask_upstream(
                    store, query, PauseBackfill(), f"paused. Go on: headwater resume --store {store} --query {query}"
                )
            ],
            as_json,
        )
        return
    _show(commands.pause(load(pipeline), table, sink, backfill=backfill), as_json)


def resume(
    table: TableArgument = None,
    pipeline: FileOption = Path(DEFAULT_FILE),
    sink: SinkOption = None,
    backfill: BackfillOption = False,
    store: StoreOption = None,
    query: QueryOption = "upstream",
    as_json: JsonOption = False,
) -> None:
    """Undo a pause. A sink that is named and was dropped begins again."""
    if store is not None:
        _refuse(table, sink, backfill)
        _show([_ask_upstream(store, query, ResumeBackfill(), "resumed")], as_json)
        return
    _show(commands.resume(load(pipeline), table, sink, backfill=backfill), as_json)


def throttle(
    rows: Annotated[str, typer.Argument(help="Rows of backfill per second and table, or none.", metavar="ROWS|none")],
    table: TableArgument = None,
    pipeline: FileOption = Path(DEFAULT_FILE),
    sink: SinkOption = None,
    store: StoreOption = None,
    query: QueryOption = "upstream",
    as_json: JsonOption = False,
) -> None:
    """Limit how fast backfills are read, in rows per second and table."""
    limit = _limit(rows)
    if store is not None:
        _refuse(table, sink)
        text = "no limit" if limit is None else f"at most {limit:,} rows per second"
        _show([_ask_upstream(store, query, ThrottleBackfill(limit), text)], as_json)
        return
    _show(commands.throttle(load(pipeline), limit, table, sink), as_json)


def resnapshot(
    table: Annotated[str | None, typer.Argument(help="Table to read once more (default: all).")] = None,
    start: Annotated[list[str] | None, typer.Option("--from", help="First key (repeat for each key column).")] = None,
    end: Annotated[list[str] | None, typer.Option("--to", help="Last key (repeat for each key column).")] = None,
    column: Annotated[list[str] | None, typer.Option(help="Only this column (repeatable).")] = None,
    pipeline: FileOption = Path(DEFAULT_FILE),
    sink: SinkOption = None,
    store: StoreOption = None,
    query: QueryOption = "upstream",
    as_json: JsonOption = False,
) -> None:
    """Read a table, a range of its keys or some of its columns once more, while changes flow.

    A table whose capture has stopped, that a sink has parked, or that has special_values in the pipeline is captured
    again first; without a table and while nothing runs, the whole source is.
    """
    part = {"start": tuple(start or ()), "end": tuple(end or ()), "columns": tuple(column or ())}
    if store is not None:
        _refuse(table, sink)
        text = f"is read once more. Look: headwater upstream status --store {store}"
        _show([_ask_upstream(store, query, ResnapshotTable(None, **part), text)], as_json)
        return
    _show(commands.resnapshot(load(pipeline), table, sink, **part), as_json)


def stop(pipeline: FileOption = Path(DEFAULT_FILE)) -> None:
    """Stop a running pipeline, as Ctrl-C in its terminal does, and wait until it has ended."""
    config = load(pipeline)
    commands.stop(config)
    err.print(f"{config.name}: stopped. To start it again: headwater run")


def requests(
    withdraw: Annotated[str | None, typer.Option(help="Take back the request with this id.", metavar="ID")] = None,
    pipeline: FileOption = Path(DEFAULT_FILE),
    store: Annotated[str | None, typer.Option("--store", help="Of this store, instead of a pipeline.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List the requests that are not done yet, or withdraw one."""
    config = None if store is not None else load(pipeline)
    if withdraw is not None:
        if config is None:
            withdraw_request(str(store), withdraw)
        else:
            commands.withdraw(config, withdraw)
        err.print(f"Request {withdraw} is withdrawn: it is never done.")
        return
    found = queued(str(store)) if config is None else [request for _, request in commands.requests(config)]
    rows = [
        {
            "id": request.id,
            "asked_at": datetime.fromtimestamp(request.asked_us / 1e6, UTC).isoformat(timespec="seconds"),
            "asked_by": request.asked_by,
            "target": request.target,
            "command": command_to_json(request.command),
        }
        for request in found
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    shown = Table(box=None, pad_edge=False)
    for title in ("request", "at", "by", "query", "command"):
        shown.add_column(title, overflow="fold")
    for row, request in zip(rows, found, strict=True):
        command = command_to_json(request.command)
        fields = " ".join(f"{name}={value}" for name, value in command.items() if name != "type" and value)
        shown.add_row(request.id, str(row["asked_at"]), request.asked_by, request.target, f"{command['type']} {fields}")
    out.print(shown)


def _show(outcomes: list[commands.Outcome], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(outcome) for outcome in outcomes]))
        return
    for outcome in outcomes:
        err.print(str(outcome), soft_wrap=True, highlight=False, markup=False)


def _limit(text: str) -> int | None:
    number = text.lower().removesuffix("/s").replace("_", "").replace(",", "")
    if number in ("none", "off"):
        return None
    if not number.isdecimal():
        raise InputError(f"Received {text!r} for the rows per second.", next_step="Write a number, or none.")
    return int(number)


def _refuse(table: str | None, sink: str | None, backfill: bool = False) -> None:
    if table is not None or sink is not None or backfill:
        raise InputError(
            "A query over an upstream table delivers one table to one sink, and is asked as a whole.",
            next_step="Leave out the table, --sink and --backfill.",
        )


def _ask_upstream(store: str, query: str, command: QueryCommand, text: str) -> commands.Outcome:
    ask_query(own_state(store, query), query, command, _ANSWER_SECONDS)
    return commands.Outcome(query, None, text)
