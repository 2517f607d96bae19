"""``headwater state``: look into a state store, release a pin, compact it."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from headwater.cli.terminal import amount, out
from headwater.state import Catalog, open_reader
from headwater.state.engines.compaction import compact_embedded

app = typer.Typer(help="Look inside a state store: epochs, pins, tables.", no_args_is_help=True)

Location = Annotated[str, typer.Argument(help="Directory or URL of the store (slatedb+s3://bucket/prefix).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)


@app.command()
def status(location: Location, as_json: Json = False) -> None:
    """Newest epoch, size, writer and pins of a store."""
    with open_reader(location) as store:
        figures = store.statistics()
    if as_json:
        typer.echo(json.dumps(asdict(figures), default=_plain))
        return
    epoch = figures.committed_epoch
    sealed = f"{int(epoch)}  ({epoch.to_datetime():%Y-%m-%d %H:%M:%S} UTC)" if epoch.is_valid else "none sealed yet"
    table = Table(title=f"State store {figures.location}", title_justify="left", show_header=False)
    table.add_row("engine", figures.engine)
    table.add_row("newest epoch", sealed)
    table.add_row("keys", "not counted" if figures.keys is None else f"{figures.keys:,}")
    table.add_row("on disk", amount(figures.bytes_on_disk))
    table.add_row("free inside", amount(figures.bytes_free_inside))
    owner = figures.owner
    written = (
        f"host {owner.host}, pid {owner.pid}, started {owner.started:%Y-%m-%d %H:%M:%S} UTC" if owner else "nobody yet"
    )
    table.add_row("last writer", written)
    out.print(table)
    if figures.pins:
        held = Table(title="Pins: epochs kept readable", title_justify="left")
        for column in ("name", "epoch", "held by", "age"):
            held.add_column(column)
        for pin in figures.pins:
            age = datetime.now(UTC) - pin.created
            held.add_row(pin.name, str(int(pin.epoch)), f"host {pin.host}, pid {pin.pid}", str(age).partition(".")[0])
        out.print(held)


@app.command()
def tables(location: Location, as_json: Json = False) -> None:
    """The state tables of a store, with their fields and rows."""
    found = []
    with open_reader(location) as store, store.snapshot() as view:
        catalog = Catalog.load(view)
        for name in catalog.names():
            schema = catalog.schema(name)
            rows = sum(1 for _ in view.scan_prefix(catalog.prefix(name)))
            found.append((schema, rows))
    if as_json:
        rows_of = [
            {
                "name": schema.name,
                "version": schema.version,
                "key": [[field.name, field.type.value] for field in schema.key],
                "value": [[field.name, field.type.value] for field in schema.value],
                "rows": rows,
            }
            for schema, rows in found
        ]
        typer.echo(json.dumps(rows_of))
        return
    table = Table(title=f"State tables of {location}", title_justify="left")
    for column in ("table", "version", "key", "value", "rows"):
        table.add_column(column, justify="right" if column in ("version", "rows") else "left")
    for schema, rows in found:
        key, value = (
            ", ".join(f"{field.name} {field.type.value}" for field in fields) for fields in (schema.key, schema.value)
        )
        table.add_row(schema.name, str(schema.version), key, value, f"{rows:,}")
    out.print(table)


@app.command()
def unpin(location: Location, name: Annotated[str, typer.Argument(help="Name of the pin.")]) -> None:
    """Release a pin that its owner left behind; the space it holds becomes free."""
    with open_reader(location) as store:
        store.unpin(name)
    out.print(f"Released pin [bold]{name}[/].")


@app.command()
def compact(
    directory: Annotated[Path, typer.Argument(help="Directory of an embedded store.")], as_json: Json = False
) -> None:
    """Give unused space of an embedded store back to the disk; nobody may have it open."""
    done = compact_embedded(directory)
    if as_json:
        typer.echo(json.dumps({"bytes_before": done.before, "bytes_after": done.after}))
        return
    out.print(f"Compacted {directory}: {amount(done.before)} → {amount(done.after)}.")
