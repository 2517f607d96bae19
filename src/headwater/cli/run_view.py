"""Runs a pipeline and shows how it is, until it ends: for ``headwater run``."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Final

import typer
from rich.console import Console
from rich.live import Live

from headwater.cli.status import Rates, duration, phase_of, problems, view
from headwater.pipeline.metrics import serve_metrics
from headwater.pipeline.pipeline import Pipeline
from headwater.pipeline.status import LIVE, REREADING, PipelineStatus
from headwater.stopping import stop_on_signals

_LOOK_SECONDS: Final = 0.5
_LONGEST_LOOK_SECONDS: Final = 2.0
_LOOK_SHARE: Final = 20
"""The pause after a look is this many times longer than the look: one at many tables takes long."""
_LINE_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 9.5
"""How long a stop can take; then the process ends, and the next run repeats the batch that was not delivered."""


def run_shown(
    pipeline: Pipeline, console: Console, seconds: float | None, as_json: bool, metrics_port: int | None
) -> None:
    """Run *pipeline* until it ends, a signal stops it, or *seconds* are over."""
    metrics = None if metrics_port is None else serve_metrics(pipeline.config, metrics_port)
    if metrics is not None:
        console.print(f"metrics: http://127.0.0.1:{metrics.port}/metrics")
    pipeline.start()
    if threading.current_thread() is threading.main_thread():
        stop_on_signals(pipeline.ask_to_stop, signal.SIGTERM, signal.SIGINT, seconds=_STOP_SECONDS)
    end = None if seconds is None else time.monotonic() + seconds
    show = _json_lines if as_json else _live if console.is_terminal else _lines
    for _ in show(pipeline, console):
        if end is not None and time.monotonic() >= end:
            pipeline.ask_to_stop()
    if metrics is not None:
        metrics.close()


def _looks(made: Pipeline) -> Iterator[PipelineStatus]:
    """How it is, again and again until it has ended."""
    while made.is_running:
        began = time.monotonic()
        found = made.status()
        pause = min(max(_LOOK_SECONDS, _LOOK_SHARE * (time.monotonic() - began)), _LONGEST_LOOK_SECONDS)
        yield found
        time.sleep(pause)
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
        news = dict(news_of(found))
        due = time.monotonic() - spoken >= _LINE_SECONDS
        for about, (key, text) in news.items():
            repeats = due and isinstance(about, tuple) and key != LIVE
            if said.get(about) != key or repeats:
                said[about] = key
                console.print(f"{time.strftime('%H:%M:%S')} {text}", soft_wrap=True, markup=False, highlight=False)
        if due:
            spoken = time.monotonic()
        yield


def news_of(found: PipelineStatus) -> Iterator[tuple[object, tuple[str, str]]]:
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
