"""``headwater status``: how a pipeline is, from its stores alone. Also what ``headwater run`` shows while it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headwater.cli.terminal import amount, out
from headwater.pipeline.config import DEFAULT_FILE, load
from headwater.pipeline.status import LIVE, PipelineStatus, SinkStatus, TableStatus, read_status

_WATCH_SECONDS = 1.0
_BAR_WIDTH = 20
_HISTORY = ("waiting", "reading")
_STYLES = {"running": "green", "waiting": "yellow", "failed": "bold red", "stopped": "dim", "not running": "dim"}
PipelineFile = Annotated[Path, typer.Argument(help="The pipeline.", show_default=True)]


def status(
    pipeline: PipelineFile = Path(DEFAULT_FILE),
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on looking, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines; one line each time.")] = False,
) -> None:
    """Show how a pipeline is: its capture, and each sink and table. Works when nothing runs, too.

    Ends with 1 where a part of it has failed.
    """
    config = load(pipeline)
    found = read_status(config)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        while watch:
            time.sleep(_WATCH_SECONDS)
            typer.echo(json.dumps(read_status(config).to_json()))
    elif watch:
        rates = Rates()
        with Live(view(found, rates), console=out, auto_refresh=False) as live:
            while True:
                time.sleep(_WATCH_SECONDS)
                live.update(view(read_status(config), rates), refresh=True)
    else:
        out.print(view(found, Rates()))
    if found.error is not None or any(sink.state == "failed" for sink in found.sinks):
        raise typer.Exit(1)


class Rates:
    """Changes per second, from two looks at a capture."""

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None

    def changes(self, found: PipelineStatus) -> float | None:
        rows, now = found.capture.get("rows"), time.monotonic()
        before, self._before = self._before, None if rows is None else (now, int(rows))
        if before is None or rows is None or rows < before[1]:
            return None
        return float((rows - before[1]) / max(now - before[0], 0.001))


def view(found: PipelineStatus, rates: Rates) -> RenderableType:
    """A pipeline for a person."""
    parts: list[RenderableType] = [_headline(found, rates.changes(found))]
    if any(sink.tables for sink in found.sinks):
        parts.append(_tables(found))
    parts += problems(found)
    return Group(*parts)


def _headline(found: PipelineStatus, rate: float | None) -> Text:
    capture = found.capture
    state = found.state if found.running else f"not running ({found.state})"
    text = Text.assemble((found.name, "bold"), " · ", (state, _STYLES.get(found.state, "")))
    if capture:
        text.append(f" · capture {capture['state']}", _STYLES.get(capture["state"], ""))
    if found.running and capture.get("lag_seconds") is not None:
        text.append(f" · lag {capture['lag_seconds']:.1f} s")
    if capture.get("wal_held_bytes") is not None:
        text.append(f" · WAL held {amount(capture['wal_held_bytes'])}")
    if rate is not None:
        text.append(f" · {rate:,.0f} changes/s")
    return text


def _tables(found: PipelineStatus) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("sink", "table", "phase"):
        table.add_column(name, no_wrap=name != "table")
    table.add_column("history")
    for name in ("rows", "rows/s", "left", "lag"):
        table.add_column(name, justify="right", no_wrap=True)
    for sink in found.sinks:
        for one in sink.tables:
            table.add_row(sink.name, one.name, phase_of(one), _bar(one), _rows(one), _rate(one), _left(one), _lag(one))
    return table


def phase_of(table: TableStatus) -> str:
    """The phase of a table in a word or two."""
    if table.stopped:
        return "stopped"
    if table.paused and table.phase != LIVE:
        return "paused"
    return table.phase


def _bar(table: TableStatus) -> RenderableType:
    if table.phase == LIVE or not table.total:
        return Text("")
    return ProgressBar(total=max(table.total, table.rows, 1), completed=table.rows, width=_BAR_WIDTH)


def _rows(table: TableStatus) -> str:
    if table.phase == LIVE or table.total is None:
        return f"{table.rows:,}" if table.rows else ""
    return f"{table.rows:,} of {table.total:,}"


def _rate(table: TableStatus) -> str:
    if table.phase not in _HISTORY or table.rows_per_second is None:
        return ""
    limit = "" if table.limit is None else f" (at most {table.limit:,})"
    return f"{table.rows_per_second:,.0f}{limit}"


def _left(table: TableStatus) -> str:
    return "" if table.phase not in _HISTORY or table.eta_seconds is None else duration(table.eta_seconds)


def _lag(table: TableStatus) -> str:
    return f"{table.lag_rows:,} rows, {duration(table.lag_seconds)}" if table.lag_rows else "0"


def duration(seconds: float) -> str:
    """Seconds for a person."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def problems(found: PipelineStatus) -> Iterator[Text]:
    """What is wrong, each with what to do."""
    if found.error is not None:
        yield from _problem("", found.error, found.next_step, failed=True)
    elif found.capture.get("last_error"):
        yield from _problem("capture: ", found.capture["last_error"], found.capture.get("next_step"))
    for sink in found.sinks:
        if sink.error is not None and sink.error != found.error:
            yield from _problem(_about(sink), sink.error, sink.next_step, failed=sink.state == "failed")
        if sink.problem:
            yield from _problem(f"{sink.name}: ", sink.problem, None)
        for table in sink.tables:
            if table.stopped:
                yield from _problem(f"{table.name}: ", table.stopped, None, failed=True)
            elif table.waiting and table.phase in _HISTORY and not table.paused:
                yield from _problem(f"{sink.name}, {table.name}: ", table.waiting, None)
    for name, reason in found.left_out.items():
        yield from _problem(f"{name} is left out: ", reason, None)


def _about(sink: SinkStatus) -> str:
    times = f", {sink.restarts} restarts" if sink.restarts else ""
    return f"{sink.name} ({sink.state}{times}): "


def _problem(about: str, text: str, next_step: str | None, *, failed: bool = False) -> Iterator[Text]:
    yield Text.assemble((about, "bold red" if failed else "yellow"), text)
    if next_step:
        yield Text.assemble((" next: ", "bold cyan"), next_step)
