"""``headwater sink``: the sinks of a pipeline, one by one; ``headwater add-sink``: one more."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from headwater.cli.terminal import err, out
from headwater.control.command import DropSink, RetrySink, RewindSink
from headwater.errors import InputError
from headwater.pipeline.commands import steer
from headwater.pipeline.config import DEFAULT_FILE, load
from headwater.pipeline.sink_commands import add_sink as add
from headwater.pipeline.sink_commands import dead_letters, replay
from headwater.pipeline.status import read_status
from headwater.sinks.dead_letters import REASON

app = typer.Typer(help="Look after the sinks of a pipeline, one by one.", no_args_is_help=True)

FileOption = Annotated[Path, typer.Option("--pipeline", "-p", help="The pipeline.")]
Name = Annotated[str, typer.Argument(help="Its name, as status shows it.", metavar="SINK")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command("list")
def list_sinks(pipeline: FileOption = Path(DEFAULT_FILE), as_json: Json = False) -> None:
    """The sinks: what they are, what they do, how far behind they are, their last error."""
    found = read_status(load(pipeline))
    rows = [
        {
            "name": sink.name,
            "kind": sink.kind,
            "mode": sink.mode,
            "state": sink.state,
            "tables": len(sink.tables),
            "lag_rows": sum(table.lag_rows for table in sink.tables),
            "lag_seconds": max((one.lag_seconds for one in sink.tables if one.lag_seconds is not None), default=None),
            "error": sink.error,
        }
        for sink in found.sinks
    ]
    rows += [
        {
            "name": one.name,
            "kind": "derived",
            "mode": "mirror",
            "state": one.state,
            "tables": 1,
            "lag_rows": one.lag_rows,
            "lag_seconds": one.lag_seconds,
            "error": one.error,
        }
        for one in found.derived
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    shown = Table(box=None, pad_edge=False)
    for title in ("sink", "kind", "mode", "state", "tables", "rows behind", "for", "last error"):
        shown.add_column(title, overflow="fold")
    for row in rows:
        lag = "unknown" if row["lag_seconds"] is None else f"{row['lag_seconds']:.1f} s" if row["lag_seconds"] else ""
        cells = (row["name"], row["kind"], row["mode"], row["state"], row["tables"], f"{row['lag_rows']:,}", lag)
        shown.add_row(*map(str, cells), str(row["error"] or ""))
    out.print(shown)


@app.command()
def retry(sink: Name, pipeline: FileOption = Path(DEFAULT_FILE), as_json: Json = False) -> None:
    """Start a sink that failed, or waits after a failure, now. Tables that it parked come back, read once more."""
    result = steer(load(pipeline), RetrySink(sink))
    back = f"; read once more: {', '.join(result['tables'])}" if result["tables"] else ""
    _done(as_json, sink, result, f"is started{back}")


@app.command()
def letters(
    sink: Name,
    rows: Annotated[int, typer.Option(help="Show so many rows of each table, with their values.", min=0)] = 0,
    pipeline: FileOption = Path(DEFAULT_FILE),
    as_json: Json = False,
) -> None:
    """The rows that a sink refused and that were parked, and why."""
    told: list[dict[str, Any]] = []
    for name, table in dead_letters(load(pipeline), sink).items():
        reasons = table.group_by(REASON).aggregate([([], "count_all")]).to_pylist()
        told.append(
            {
                "table": name,
                "rows": table.num_rows,
                "reasons": {one[REASON]: one["count_all"] for one in reasons},
                "shown": [{key: str(value) for key, value in row.items()} for row in table.slice(0, rows).to_pylist()],
            }
        )
    if as_json:
        typer.echo(json.dumps(told))
        return
    for one in told:
        out.print(f"{one['table']}: {one['rows']:,} rows", highlight=False)
        for reason, count in one["reasons"].items():
            out.print(f"  {count:,} × {reason}", markup=False, highlight=False)
        for row in one["shown"]:
            out.print(f"  {row}", markup=False, highlight=False)
    if not told:
        err.print(f"{sink}: no row was refused")


@app.command("replay")
def replay_letters(sink: Name, pipeline: FileOption = Path(DEFAULT_FILE), as_json: Json = False) -> None:
    """Read the rows once more that a sink refused, as they are now; what it refuses again is parked again."""
    done = replay(load(pipeline), sink)
    text = ", ".join(f"{count:,} rows of {table}" for table, count in done.items()) or "nothing"
    _done(as_json, sink, {"tables": done}, f"read once more: {text}")


@app.command()
def rewind(
    sink: Name,
    to_epoch: Annotated[
        int | None, typer.Option("--to-epoch", help="Deliver again what came after it; by default what the sink lacks.")
    ] = None,
    pipeline: FileOption = Path(DEFAULT_FILE),
    as_json: Json = False,
) -> None:
    """Deliver again what a sink lost, as after it was restored from a backup. What it has it leaves out."""
    result = steer(load(pipeline), RewindSink(sink, to_epoch))
    _done(as_json, sink, result, f"is delivered again what came after epoch {result['epoch']}")


@app.command()
def drop(
    sink: Name,
    pipeline: FileOption = Path(DEFAULT_FILE),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Let the logs wait for a sink no longer, and forget what was delivered. What the sink has stays there."""
    config = load(pipeline)
    if not yes:
        typer.confirm(f"Sink {sink} begins anew if it comes back. Drop it?", abort=True, err=True)
    text = f"is dropped. Take its [[sink]] out of {pipeline}; to begin anew with it: headwater resume --sink {sink}"
    _done(as_json, sink, steer(config, DropSink(sink)), text)


def add_sink(
    kind: Annotated[str, typer.Argument(help="delta, parquet, postgres, … or module:Class.")],
    options: Annotated[
        list[str] | None, typer.Option("--set", help="An option of its kind, as key=value; again for more.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name; its kind by default.")] = None,
    mode: Annotated[str | None, typer.Option(help="mirror, changes or history.")] = None,
    table: Annotated[list[str] | None, typer.Option(help="Only this table, or pattern; again for more.")] = None,
    origin: Annotated[
        str | None, typer.Option("--from", help="Where its history comes from: auto, source, or the tables we keep.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="No history; changes from this epoch or time (2026-05-31T12:00:00Z) on.")
    ] = None,
    pipeline: FileOption = Path(DEFAULT_FILE),
    as_json: Json = False,
) -> None:
    """Deliver to one more place: it is written to the pipeline's file, and a pipeline that runs begins at once."""
    given: dict[str, Any] = {"name": name, "mode": mode, "tables": table, "from": origin, "since": since}
    told = {key: value for key, value in given.items() if value} | dict(map(_option, options or ()))
    section = add(pipeline, kind, told)
    running = read_status(load(pipeline)).running
    if as_json:
        typer.echo(json.dumps({"sink": section.label, "running": running}))
        return
    first = "history first" if section.since is None else f"changes since {section.since_text}"
    then = f"{first}. Look: headwater status --watch" if running else "from the next start on. Run: headwater run"
    err.print(f"{section.label}: added to {pipeline}; it is delivered to, {then}")


def _option(text: str) -> tuple[str, Any]:
    """``key=value``: a value that TOML reads as a number, boolean or array is one; all others are texts."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise InputError(f"Received --set {text.split('=')[0]!r} without a value.", next_step="Write --set key=value")
    try:
        read = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    return key, read if isinstance(read, bool | int | float | list | dict | str) else value


def _done(as_json: bool, sink: str, result: dict[str, Any], text: str) -> None:
    if as_json:
        typer.echo(json.dumps({"sink": sink, **result}))
    else:
        err.print(f"{sink}: {text}")
