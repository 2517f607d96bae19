"""``headwater derive``: a table that a PySpark function makes of kept ones, maintained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwater.cli.terminal import err
from headwater.errors import InputError
from headwater.pipeline.config import DEFAULT_FILE, load
from headwater.pipeline.sink_commands import add_derivation
from headwater.pipeline.status import read_status


def derive(
    name: Annotated[str, typer.Argument(help="Of the new table: it is called derived.NAME.")],
    function: Annotated[str, typer.Argument(help="module:function; a DataFrame for each table in, one out.")],
    table: Annotated[list[str], typer.Option(help="A kept table, in the order of the parameters; again for more.")],
    by: Annotated[
        list[str],
        typer.Option(help="A column that it goes by, in all tables; table.column for one of a table. Again for more."),
    ],
    key: Annotated[list[str] | None, typer.Option(help="A column of the result's key; by otherwise.")] = None,
    sink: Annotated[
        str | None, typer.Option(help="To which it is delivered; where there is one only, to that.")
    ] = None,
    interval_seconds: Annotated[float | None, typer.Option(help="So long between two batches.", min=0.1)] = None,
    pipeline: Annotated[Path, typer.Option("--pipeline", "-p", help="The pipeline.")] = Path(DEFAULT_FILE),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Maintain a table that a PySpark function makes of kept ones: all of it first, then what changes.

    It is written to the pipeline's file, and a pipeline that runs begins at once. Afterwards it is looked after like a
    sink: headwater pause --sink NAME, resume --sink NAME, sink retry NAME, sink drop NAME.
    """
    given: dict[str, Any] = {"key": key, "sink": sink, "interval_seconds": interval_seconds}
    told = {"name": name, "function": function, "tables": table, "by": _by(table, by)}
    section = add_derivation(pipeline, told | {name: value for name, value in given.items() if value})
    running = read_status(load(pipeline)).running
    if as_json:
        typer.echo(json.dumps({"derive": section.label, "table": section.derivation.full_name, "running": running}))
        return
    then = "Look: headwater status --watch" if running else "It begins with the next start. Run: headwater run"
    err.print(f"{section.derivation.full_name}: added to {pipeline}, delivered to {section.sink}. {then}")


def _by(tables: list[str], given: list[str]) -> list[str] | dict[str, list[str]]:
    """Columns of all tables, or of each: ``public.orders.customer_id``."""
    found: dict[str, list[str]] = {table: [] for table in tables}
    for text in given:
        owner = next((table for table in tables if text.startswith(f"{table}.")), None)
        if owner is not None:
            found[owner].append(text.removeprefix(f"{owner}."))
    named = sum(map(len, found.values()))
    if named not in (0, len(given)):
        raise InputError(
            "Received --by with a table for some columns, and without for others.",
            next_step="Write --by column, or --by table.column for each table.",
        )
    return found if named else given
