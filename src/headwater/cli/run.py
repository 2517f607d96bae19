"""``headwater run``: run a pipeline until Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from headwater.cli.status import PipelineFile, Rates, duration, phase_of, problems, view
from headwater.cli.terminal import err
from headwater.pipeline.config import DEFAULT_FILE
from headwater.pipeline.metrics import serve_metrics
from headwater.pipeline.pipeline import Pipeline
from headwater.pipeline.status import LIVE, REREADING, PipelineStatus
from headwater.pipeline.supervision import LOG_FOLDER
from headwater.private_files import make_private, make_root, open_private
from headwater.stopping import stop_on_signals

_LOOK_SECONDS = 0.5
_LINE_SECONDS = 10.0
_STOP_SECONDS = 9.5
"""How long a stop may take; then the process ends, and the next run repeats the batch that was not delivered."""


def run(
    pipeline: PipelineFile = Path(DEFAULT_FILE),
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.", min=0.0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of a live view.")] = False,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve http://127.0.0.1:PORT/metrics for Prometheus.", min=0, max=65535)
    ] = None,
) -> None:
    """Run a pipeline: capture the changes, read the history, deliver both. Ctrl-C stops it; run it again to go on."""
    made = Pipeline.from_toml(pipeline)
    logs = made.config.work / LOG_FOLDER
    make_root(made.config.work)
    make_private(logs)
    metrics = None if metrics_port is None else serve_metrics(made.config, metrics_port)
    if metrics is not None:
        err.print(f"metrics: http://127.0.0.1:{metrics.port}/metrics")
    with _spark_is_quiet(logs / "spark.log") as console:
        made.start()
        if threading.current_thread() is threading.main_thread():
            stop_on_signals(made.ask_to_stop, signal.SIGTERM, signal.SIGINT, seconds=_STOP_SECONDS)
        end = None if seconds is None else time.monotonic() + seconds
        show = _json_lines if as_json else _live if console.is_terminal else _lines
        for _ in show(made, console):
            if end is not None and time.monotonic() >= end:
                made.ask_to_stop()
    if metrics is not None:
        metrics.close()
    made.wait()


@contextmanager
def _spark_is_quiet(log: Path) -> Iterator[Console]:
    """Spark's processes write their messages to *log*; what is for a person goes to the console as before."""
    sys.stderr.flush()
    shown = os.dup(2)
    with open_private(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        with os.fdopen(os.dup(shown), "w", buffering=1) as stream:
            yield Console(file=stream)
    finally:
        with suppress(OSError):  # the disk of the log is full
            sys.stderr.flush()
        os.dup2(shown, 2)
        os.close(shown)


def _looks(made: Pipeline) -> Iterator[PipelineStatus]:
    """How it is, again and again until it has ended."""
    while made.is_running:
        yield made.status()
        time.sleep(_LOOK_SECONDS)
    yield made.status()


def _json_lines(made: Pipeline, console: Console) -> Iterator[None]:
    del console
    for found in _looks(made):
        typer.echo(json.dumps(found.to_json()))
        yield


def _live(made: Pipeline, console: Console) -> Iterator[None]:
    rates = Rates()
    with Live(console=console, auto_refresh=False) as live:
        for found in _looks(made):
            live.update(view(found, rates), refresh=True)
            yield


def _lines(made: Pipeline, console: Console) -> Iterator[None]:
    """A line for each thing that changes, and for each table every few seconds."""
    said: dict[object, str] = {}
    spoken = time.monotonic()
    for found in _looks(made):
        news = dict(_news(found))
        due = time.monotonic() - spoken >= _LINE_SECONDS
        for about, (key, text) in news.items():
            repeats = due and isinstance(about, tuple) and key != LIVE
            if said.get(about) != key or repeats:
                said[about] = key
                console.print(f"{time.strftime('%H:%M:%S')} {text}", soft_wrap=True, markup=False, highlight=False)
        if due:
            spoken = time.monotonic()
        yield


def _news(found: PipelineStatus) -> Iterator[tuple[object, tuple[str, str]]]:
    """What there is to say: about what, a word that changes when it must be said again, and the words."""
    yield "pipeline", (found.state, f"{found.name}: {found.state}")
    if found.capture:
        state = found.capture["state"]
        yield "capture", (state, f"capture: {state}")
    for sink in found.sinks:
        yield sink.name, (sink.state, f"{sink.name}: {sink.state}")
        for table in sink.tables:
            phase = phase_of(table)
            text = f"{sink.name}: {table.name}: {phase}"
            if table.phase != LIVE and table.total:
                text += f", {table.rows:,} of {table.total:,} rows"
                if table.rows_per_second:
                    text += f", {table.rows_per_second:,.0f} rows/s"
                if table.eta_seconds:
                    text += f", {duration(table.eta_seconds)} left"
            yield (sink.name, table.name), (table.phase if table.phase == REREADING else phase, text)
    told = " ".join(str(text) for text in problems(found))
    if told:
        yield "problems", (told, told)
