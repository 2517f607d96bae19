"""``headwater verify``: every row of the source against what the sinks show, while the pipeline runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from headwater.cli.terminal import err, out
from headwater.pipeline.config import DEFAULT_FILE, load
from headwater.pipeline.verify import Findings, Options, Verification
from headwater.sources.splits import KeyRange

_KEYS_SHOWN = 20
_COMMANDS_SHOWN = 5


def verify(
    pipeline: Annotated[Path, typer.Argument(help="The pipeline.")] = Path(DEFAULT_FILE),
    table: Annotated[list[str] | None, typer.Option(help="A table to compare; again for more. Default: all.")] = None,
    sink: Annotated[list[str] | None, typer.Option(help="A sink to compare; again for more. Default: all.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for a sink that is behind.", min=0.0)] = 60.0,
    show_keys: Annotated[bool, typer.Option(help="Print the keys of differences: they are your data.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Compare every row of the source with what the sinks show, while both move. Changes nothing.

    Rows that differ are read again until they rest: what is only on its way is no difference. Ends with 1 where there
    is one, or where a sink did not come up to the source.
    """
    verification = Verification(load(pipeline), table or (), sink or ())
    options = Options(patience=wait, keys=_KEYS_SHOWN if show_keys else 0)
    with _Bars(quiet=as_json) as bars:
        found = list(verification.run(options, bars.show))
    if as_json:
        typer.echo(json.dumps(to_json(found)))
    else:
        _show(found, pipeline)
    if not all(one.is_right for one in found):
        raise typer.Exit(1)


class _Bars:
    """A bar for each table."""

    def __init__(self, *, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=err, disable=quiet or not err.is_terminal, transient=True)
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, sink: str, table: str, done: int, total: int) -> None:
        task = self._tasks.get((sink, table))
        if task is None:
            task = self._tasks[sink, table] = self._bars.add_task(f"{table} at {sink}")
        self._bars.update(task, completed=done, total=total)


def to_json(found: Sequence[Findings]) -> dict[str, Any]:
    """What was found, as JSON."""
    tables = [{**asdict(one), "ranges": [part.to_json() for part in one.ranges], "keys": _texts(one)} for one in found]
    return {"right": all(one.is_right for one in found), "tables": tables}


def _texts(one: Findings) -> list[dict[str, str]]:
    return [{name: str(value) for name, value in key.items()} for key in one.keys]


def _show(found: Sequence[Findings], pipeline: Path) -> None:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("table", overflow="fold")
    table.add_column("sink", overflow="fold")
    for name in ("rows", "at sink", "changed", "missing", "extra", "doubled", "moving", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        wrong = (one.mismatches, one.missing, one.extra, one.doubled)
        table.add_row(
            Text(one.table, "green" if one.is_right else "bold red"),
            one.sink,
            f"{one.source_rows:,}",
            f"{one.mirror_rows:,}",
            *(Text(f"{count:,}", "bold red" if count else "") for count in wrong),
            f"{one.unsettled:,}",
            f"{one.seconds:.1f}",
        )
    out.print(table)
    for one in found:
        _explain(one, pipeline)


def _explain(one: Findings, pipeline: Path) -> None:
    if one.is_behind:
        err.print(
            Text.assemble(
                ("behind: ", "bold yellow"),
                f"{one.sink} did not come up to the source; {one.unsettled:,} keys of {one.table} differ so far.",
            ),
            soft_wrap=True,
        )
        err.print(Text.assemble((" next: ", "bold cyan"), "Look at headwater status; is the pipeline running?"))
    if not one.differences:
        return
    for key in _texts(one):
        out.print(Text(f"  {one.table}: " + ", ".join(f"{name}={value}" for name, value in key.items())))
    for part in one.ranges[:_COMMANDS_SHOWN]:
        err.print(Text.assemble((" next: ", "bold cyan"), resnapshot(one.table, part, pipeline)), soft_wrap=True)
    if len(one.ranges) > _COMMANDS_SHOWN:
        err.print(f"       … and {len(one.ranges) - _COMMANDS_SHOWN:,} more ranges; all of them: --json")


def resnapshot(table: str, part: KeyRange, pipeline: Path) -> str:
    """The command that reads a range once more."""
    words = ["headwater", "resnapshot", table]
    for option, cut in (("--from", part.start), ("--to", part.end)):
        words += [f"{option}={value}" for value in (() if cut is None else cut.values)]
    if str(pipeline) != DEFAULT_FILE:
        words += ["--pipeline", str(pipeline)]
    return shlex.join(words)
