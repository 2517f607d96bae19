"""``headwater pins``: who holds kept tables at an epoch, and how to let go of what nobody comes back for."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from headwater.cli.status import duration
from headwater.cli.terminal import err, out
from headwater.errors import NotFoundError
from headwater.pipeline.config import DEFAULT_FILE, KEPT_KIND, load
from headwater.versioned.pins import PinInfo, all_pins, release_pins
from headwater.versioned.status import pin_status

app = typer.Typer(help="Who holds kept tables at an epoch; let go of what nobody needs.", no_args_is_help=True)

FileOption = Annotated[Path, typer.Option("--pipeline", "-p", help="The pipeline that keeps the tables.")]
Folder = Annotated[Path | None, typer.Option("--tables", help="The folder of kept tables, where there is no pipeline.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON list on stdout.")]


@app.command("list")
def list_pins(pipeline: FileOption = Path(DEFAULT_FILE), tables: Folder = None, as_json: Json = False) -> None:
    """The pins: whose they are, of which epoch, since when, and whether their process is gone."""
    found = [pin for root in _roots(pipeline, tables) for pin in all_pins(root)]
    if as_json:
        typer.echo(json.dumps([_told(pin) for pin in found]))
        return
    if not found:
        err.print("Nothing is pinned.")
        return
    shown = Table(box=None, pad_edge=False)
    for title in ("table", "owner", "epoch", "since", "process", "pin"):
        shown.add_column(title, overflow="fold")
    for pin in found:
        process = pin_status(pin).process + (", which is gone" if pin.is_lost else "")
        shown.add_row(pin.table, pin.owner, str(pin.epoch), f"{duration(pin.age_seconds)} ago", process, pin.id)
    out.print(shown)


@app.command()
def release(
    pin: Annotated[str, typer.Argument(help="A pin, or an owner: all of its pins.", metavar="PIN|OWNER")],
    pipeline: FileOption = Path(DEFAULT_FILE),
    tables: Folder = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Let the tables go on past an epoch that somebody had pinned.

    Who comes back for it finds it gone, says so, and names the command that begins anew.
    """
    roots = _roots(pipeline, tables)
    found = [one for root in roots for one in all_pins(root) if pin in (one.id, one.owner)]
    if not found:
        raise NotFoundError(f"Nothing is pinned by {pin!r}.", next_step="Look: headwater pins list")
    living = sorted({one.owner for one in found if not one.is_lost})
    if not yes:
        runs = f" {', '.join(living)} may still read it." if living else ""
        typer.confirm(f"Release {len(found)} pins of {found[0].owner}?{runs}", abort=True, err=True)
    released = [one for root in roots for one in release_pins(root, lambda one: pin in (one.id, one.owner))]
    if as_json:
        typer.echo(json.dumps([_told(one) for one in released]))
        return
    for one in released:
        err.print(f"{one.table}: no longer held at epoch {one.epoch} by {one.owner}", soft_wrap=True)


def _roots(pipeline: Path, tables: Path | None) -> list[Path]:
    """:raises NotFoundError: the pipeline keeps no tables."""
    if tables is not None:
        return [tables]
    found = [Path(sink.options["path"]) for sink in load(pipeline).sink if sink.kind == KEPT_KIND]
    if not found:
        raise NotFoundError(f"{pipeline} keeps no tables.", next_step='Add [[sink]] with kind = "table".')
    return found


def _told(pin: PinInfo) -> dict[str, Any]:
    return {"table": pin.table} | asdict(pin_status(pin))
