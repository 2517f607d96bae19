"""``headwater runs``: what the runs of a pipeline did, from its journal. Works while nothing runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from headwater.cli.journal import entry_line, printable
from headwater.cli.terminal import err, out
from headwater.errors import InputError
from headwater.journal.entry import Entry
from headwater.pipeline.config import DEFAULT_FILE, PipelineConfig, load
from headwater.pipeline.errors import NotStarted
from headwater.pipeline.run_journal import Run, RunCommand, read_runs, run_entries, run_traces
from headwater.pipeline.supervision import LOCK_FILE, RUN_FOLDER
from headwater.system.owner_lock import current_owner

_LOOK_SECONDS: Final = 0.5
_STYLES: Final = {"running": "green", "failed": "bold red", "interrupted": "yellow"}


def runs(
    run: Annotated[int | None, typer.Argument(help="Show one run, by its number; -1 is the newest.")] = None,
    pipeline: Annotated[Path, typer.Option("--pipeline", "-p", help="The pipeline.")] = Path(DEFAULT_FILE),
    limit: Annotated[int, typer.Option(min=1, help="Number of runs in the list, from the newest.")] = 20,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print entries as they are written: of RUN until it ends, else of all."),
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print the tracebacks of the errors of RUN (default: the newest).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for machines; with --follow one entry a line.")
    ] = False,
) -> None:
    """Show what the runs of a pipeline did: begin, end, rows, restarts, errors, commands and who gave them."""
    if follow and trace:
        raise InputError("--follow prints entries and --trace tracebacks.", next_step="Name one of the two.")
    config = load(pipeline)
    known = _read(config)
    if run is not None or follow or trace:
        if not known:
            raise NotStarted(f"{config.name} has never run.", next_step="Start it: headwater run")
        chosen = _choose(known, run)
        if follow:
            _follow(config, chosen, only=run is not None, as_json=as_json)
        elif trace:
            _print_traces(config, chosen, as_json=as_json)
        elif as_json:
            typer.echo(json.dumps(chosen.to_json()))
        else:
            _print_run(chosen)
    elif as_json:
        typer.echo(json.dumps([each.to_json() for each in known[-limit:]]))
    elif not known:
        out.print(f"{escape(config.name)} has never run.")
    else:
        out.print(_table(known[-limit:]))


def _read(config: PipelineConfig) -> list[Run]:
    owner = current_owner(config.work / RUN_FOLDER / LOCK_FILE)
    return read_runs(config.work, is_running=owner is not None)


def _choose(known: list[Run], number: int | None) -> Run:
    if number is None or number == -1:
        return known[-1]
    if not 1 <= number <= len(known):
        raise InputError(f"There is no run {number}.", next_step=f"Name one of 1 … {len(known)}: headwater runs")
    return known[number - 1]


def _table(known: list[Run]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in ("run", "begin (UTC)", "end (UTC)", "state", "rows", "restarts", "errors", "commands"):
        table.add_column(column, justify="left" if column[:3] in ("beg", "end", "sta") else "right", no_wrap=True)
    for run in known:
        style = _STYLES.get(run.state, "")
        state = f"[{style}]{run.state}[/]" if style else run.state
        counts = (run.total_rows, run.restarts, len(run.errors), len(run.commands))
        table.add_row(str(run.number), _time(run.begin_ms), _time(run.end_ms), state, *(f"{n:,}" for n in counts))
    return table


def _time(ms: int | None) -> str:
    if ms is None:
        return ""
    with suppress(ValueError, OverflowError, OSError):
        return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
    return f"{ms} ms"


def _print_run(run: Run) -> None:
    end = "" if run.end_ms is None else f", ended {_time(run.end_ms)}"
    by = f" by {run.started_by}" if run.started_by else ""
    for line in (f"run {run.number} · {run.state}", f"begun {_time(run.begin_ms)}{by}{end} (UTC)"):
        out.print(line, markup=False, soft_wrap=True)
    for name, rows in run.rows.items():
        out.print(f"{name}: {rows:,} rows delivered", markup=False, soft_wrap=True)
    out.print(f"{run.restarts:,} restarts", markup=False)
    lines = [(error.at_ms, f"{error.part}: {error.text}") for error in run.errors]
    lines += [(command.at_ms, _command(command)) for command in run.commands]
    for at_ms, line in sorted(lines):
        out.print(f"{_time(at_ms)}  {line}", markup=False, soft_wrap=True)


def _command(command: RunCommand) -> str:
    detail = ", ".join(f"{name}={value}" for name, value in command.detail.items() if value)
    words = f"{command.name}({detail}) by {command.asked_by}"
    return words if command.problem is None else f"{words}, refused: {command.problem}"


def _print_traces(config: PipelineConfig, run: Run, *, as_json: bool) -> None:
    traces = run_traces(config.work, run)
    if as_json:
        typer.echo(json.dumps([asdict(trace) for trace in traces]))
        return
    if not traces:
        out.print(f"run {run.number} has no tracebacks", markup=False)
    for trace in traces:
        head = f"{_time(trace.at_ms)}  {trace.part}: {trace.event}"
        for line in (head, *trace.trace.splitlines(), ""):
            typer.echo(printable(line))


def _follow(config: PipelineConfig, run: Run, *, only: bool, as_json: bool) -> None:
    for number, entry in _entries(config, run, only=only):
        if as_json:
            line = json.dumps({"run": number, "seq": entry.seq, "ts": entry.ts, "kind": entry.kind, **entry.fields})
        else:
            line = entry_line(entry)
        typer.echo(line)


def _entries(config: PipelineConfig, run: Run, *, only: bool) -> Iterator[tuple[int, Entry]]:
    """The entries of *run* as they are written, and, unless *only*, of those that follow it."""
    while True:
        for entry in run_entries(config.work, run, follow=run.state == "running" or not only):
            yield run.number, entry
        if only:
            return
        while len(known := _read(config)) <= run.number:
            time.sleep(_LOOK_SECONDS)
        run = known[run.number]
        err.print(f"run {run.number}")
