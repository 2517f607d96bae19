"""``headwater status``: how a pipeline is, from its stores alone. Also what ``headwater run`` shows while it runs."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headwater.cli.terminal import amount, out
from headwater.pipeline.config import DEFAULT_FILE, load
from headwater.pipeline.status import (
    INCOMPLETE,
    LIVE,
    NOT_RESPONDING,
    REREADING,
    STOPPED,
    DerivedStatus,
    PipelineStatus,
    SinkStatus,
    TableStatus,
    read_status,
)

_WATCH_SECONDS = 1.0
_RATE_SECONDS = 5.0
_BAR_WIDTH = 20
_NAME_WIDTH = 16
_UNLIMITED = 1000
_ABANDONED_SECONDS = 60.0
_HISTORY = ("waiting", "reading")
_KEPT_PHASES = {"reading": "snapshot", "settling": "change log"}
"""What the phases are of a table whose history comes from our own."""
_STYLES = {
    "running": "green",
    "waiting": "yellow",
    "failed": "bold red",
    "down": "bold red",
    NOT_RESPONDING: "bold red",
    "stopped": "dim",
    "not running": "dim",
}
_SLOW_STEPS = {
    "Spark": "If no task of its job runs or ends, free task slots, or stop the pipeline and run: headwater run",
    "the sink": "If its server does not answer, restart it; the batch is then delivered again.",
}
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
        for part in parts(found, Rates()):
            out.print(part, soft_wrap=isinstance(part, Text))  # statements are there to be copied: in one line each
    if found.error is not None or "failed" in [
        *(one.state for one in found.sinks),
        *(one.state for one in found.derived),
    ]:
        raise typer.Exit(1)


class Rates:
    """Changes per second, from looks at a capture: over seconds, as it tells its rows less often than one looks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: deque[tuple[float, int]] = deque()

    def changes(self, found: PipelineStatus) -> float | None:
        rows, now, looks = found.capture.get("rows"), self._clock(), self._looks
        if rows is None or (looks and rows < looks[-1][1]):  # it has begun anew
            looks.clear()
        if rows is None:
            return None
        looks.append((now, int(rows)))
        while len(looks) > 2 and now - looks[1][0] >= _RATE_SECONDS:
            looks.popleft()
        then, before = looks[0]
        return (rows - before) / (now - then) if now > then else None


def view(found: PipelineStatus, rates: Rates) -> RenderableType:
    """A pipeline for a person, as one that can be drawn again."""
    return Group(*parts(found, rates))


def parts(found: PipelineStatus, rates: Rates) -> Iterator[RenderableType]:
    """A pipeline for a person: a line, a table, and lines for what is wrong."""
    yield _headline(found, rates.changes(found))
    if any(sink.tables for sink in found.sinks):
        yield _Tables(found)
    if any(table.kept is not None for sink in found.sinks for table in sink.tables):
        yield _kept(found)
    if found.derived:
        yield _derived(found)
    yield from problems(found)


def _headline(found: PipelineStatus, rate: float | None) -> Text:
    capture = found.capture
    state = _since(found.state, found.silent_since_ms) if found.running else f"not running ({found.state})"
    text = Text.assemble((found.name, "bold"), " · ", (state, _STYLES.get(found.state, "")))
    if capture:
        state = _since(capture["state"], capture.get("silent_since_ms"))
        text.append(f" · capture {state}", _STYLES.get(capture["state"], ""))
        lag = capture.get("lag_seconds")
        text.append(f" · lag {'unknown' if lag is None else f'{lag:.1f} s'}")
    if capture.get("checked_time"):
        text.append(f" · schemas checked {time.strftime('%H:%M:%S', time.localtime(capture['checked_time']))}")
    if capture.get("wal_held_bytes") is not None:
        text.append(f" · WAL held {amount(capture['wal_held_bytes'])}")
    if (buffer := capture.get("buffer")) is not None:
        text.append(f" · buffer {amount(buffer['bytes'] + buffer['sealing_bytes'])}")
        if buffer["spilled_bytes"]:
            text.append(f", spilled {amount(buffer['spilled_bytes'])}")
    if rate is not None:
        text.append(f" · {rate:,.0f} changes/s")
    return text


def _since(state: str, silent_since_ms: int | None) -> str:
    if silent_since_ms is None:
        return state
    return f"{state} since {time.strftime('%H:%M:%S', time.localtime(silent_since_ms / 1000))}"


class _Tables:
    """A row for each table; where the names would not fit, the bars go first."""

    def __init__(self, found: PipelineStatus) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._made(bars=True)
        fits = Measurement.get(console, options.update(width=_UNLIMITED), whole).maximum <= options.max_width
        yield whole if fits else self._made(bars=False)

    def _made(self, *, bars: bool) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("sink", no_wrap=True)
        table.add_column("table", overflow="fold", min_width=_NAME_WIDTH)
        table.add_column("phase", no_wrap=True)
        if bars:
            table.add_column("history", no_wrap=True, min_width=_BAR_WIDTH if self._is_reading else None)
        for name in ("rows", "rows/s", "left", "lag"):
            table.add_column(name, justify="right", no_wrap=name == "left")
        for sink in self._found.sinks:
            for one in sink.tables:
                bar = [_bar(one)] if bars else []
                numbers = (_rows(one), _rate(one), _left(one), _lag(one))
                table.add_row(sink.name, one.name, phase_of(one), *bar, *numbers)
        return table

    @property
    def _is_reading(self) -> bool:
        return any(table.phase != LIVE and table.total for sink in self._found.sinks for table in sink.tables)


def _kept(found: PipelineStatus) -> Table:
    """The tables that are kept, and who holds them at an epoch."""
    made = Table(box=None, pad_edge=False)
    for name in ("kept", "base epoch", "runs", "size", "pinned by"):
        made.add_column(name, justify="right" if name in ("runs", "size") else "left", overflow="fold")
    for table in (one for sink in found.sinks for one in sink.tables):
        if (kept := table.kept) is None:
            continue
        base = str(kept.base_epoch) if kept.complete else "not complete"
        lines = [f"{pin.owner} at {pin.epoch}, {duration(pin.age_seconds)} ago" for pin in kept.pins]
        made.add_row(table.name, base, f"{kept.runs:,}", amount(kept.size), "\n".join(lines))
    return made


def _derived(found: PipelineStatus) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("derived", "of", "sink", "phase", "rows", "batch", "lag"):
        right = name in ("rows", "batch", "lag")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for one in found.derived:
        took = duration(one.seconds) if one.seconds else ""
        phase = one.state if one.state in ("paused", "dropped", "failed") else one.phase
        lag = _ago(one.lag_rows, None, one.lag_seconds)
        table.add_row(one.table, ", ".join(one.tables), one.sink, phase, f"{one.rows:,}", took, lag)
    return table


def phase_of(table: TableStatus) -> str:
    """The phase of a table in a word or two."""
    if table.paused and table.phase not in (LIVE, STOPPED, INCOMPLETE):
        return "paused"
    if table.phase == REREADING:
        percent = f"{min(100, 100 * table.rows // table.total)} %" if table.total else ""
        return " ".join(filter(None, (REREADING, ", ".join(table.columns), percent)))
    if table.origin == "tables":
        return _KEPT_PHASES.get(table.phase, table.phase)
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
    return _ago(table.lag_rows, table.lag_epochs, table.lag_seconds)


def _ago(rows: int, epochs: int | None, seconds: float | None) -> str:
    if not rows and not epochs and seconds == 0:
        return "0"
    counts = [f"{number:,} {what}" for number, what in ((rows, "rows"), (epochs, "epochs")) if number]
    return ", ".join([*counts, "unknown" if seconds is None else duration(seconds)])


def duration(seconds: float) -> str:
    """Seconds for a person."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def problems(found: PipelineStatus) -> Iterator[Text]:
    """What is wrong, each with what to do."""
    if found.silent_since_ms is not None:
        text = f"It is {_since(found.state, found.silent_since_ms)}; what follows was reported before."
        step = f"If that does not pass, kill {found.owner}, then run: headwater run"
        yield from _problem("", text, step, failed=True)
    if (silent := found.capture.get("silent_since_ms")) is not None:
        text = f"it is {_since(NOT_RESPONDING, silent)}: it is frozen, or the source does not answer."
        step = f"If that does not pass: kill -9 {found.capture['pid']}; it is started again by the pipeline."
        yield from _problem("capture: ", text, step, failed=True)
    if found.error is not None:
        yield from _problem("", found.error, found.next_step, failed=True)
    elif found.capture.get("last_error"):
        yield from _problem("capture: ", found.capture["last_error"], found.capture.get("next_step"))
    shown: list[tuple[str, str, str | None]] = []
    for sink in found.sinks:
        if sink.silent_since_ms is not None:
            text = f"it is {_since(sink.state, sink.silent_since_ms)}: Spark or its process does not answer."
            step = "If that does not pass, stop the pipeline, then run: headwater run"
            yield from _problem(f"{sink.name}: ", text, step, failed=True)
        if sink.waits_for and sink.waits_since_ms is not None:
            text = f"waiting for {sink.waits_for} since {duration(time.time() - sink.waits_since_ms / 1000)}."
            yield from _problem(f"{sink.name}: ", text, _SLOW_STEPS[sink.waits_for])
        if sink.error is not None and sink.error != found.error:
            yield from _problem(_about(sink), sink.error, sink.next_step, failed=sink.state == "failed")
        if sink.problem:
            yield from _problem(f"{sink.name}: ", sink.problem, None)
        for table in sink.tables:
            if table.reason:
                is_of_sink = table.parked or table.phase == INCOMPLETE
                about = f"{sink.name}, {table.name}: " if is_of_sink else f"{table.name}: "
                problem = about, table.reason, table.next_step
                if problem not in shown:  # a table that is not captured is so in every sink
                    yield from _problem(*problem, failed=table.phase == STOPPED)
                shown.append(problem)
            elif table.waiting and table.phase in _HISTORY and not table.paused:
                yield from _problem(f"{sink.name}, {table.name}: ", table.waiting, None)
    for one in found.derived:
        if one.error is not None and one.error != found.error:
            yield from _problem(_about(one), one.error, one.next_step, failed=one.state == "failed")
        if one.state == "failed" and one.epoch:
            held = f"{', '.join(one.tables)} are held at epoch {one.epoch} for it, and their logs grow."
            yield from _problem(f"{one.name}: ", held, f"To let go of them: headwater sink drop {one.name}")
    if found.running:
        yield from _abandoned(found)
    for name, reason in found.left_out.items():
        yield from _problem(f"{name} is left out: ", reason, None)


def _abandoned(found: PipelineStatus) -> Iterator[Text]:
    """Pins that outlived their process: who made them may never come back."""
    tables: dict[str, list[str]] = {}
    for table in (one for sink in found.sinks for one in sink.tables):
        for pin in () if table.kept is None else table.kept.pins:
            if pin.lasting and pin.is_lost and pin.age_seconds >= _ABANDONED_SECONDS:
                tables.setdefault(pin.owner, []).append(table.name)
    for owner, names in tables.items():
        held = f"it holds {', '.join(names)}, and its process is gone."
        yield from _problem(f"{owner}: ", held, f"If it does not come back: headwater pins release '{owner}'")


def _about(sink: SinkStatus | DerivedStatus) -> str:
    times = f", {sink.restarts} restarts" if sink.restarts else ""
    return f"{sink.name} ({sink.state}{times}): "


def _problem(about: str, text: str, next_step: str | None, *, failed: bool = False) -> Iterator[Text]:
    yield Text.assemble((about, "bold red" if failed else "yellow"), text)
    if next_step:
        yield Text.assemble((" next: ", "bold cyan"), next_step)
