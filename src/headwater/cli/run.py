"""``headwater run``: run a pipeline until Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwater.pipeline.config import DEFAULT_FILE, load
from headwater.pipeline.spark_host import launch_spark
from headwater.system.files import make_private, make_root, open_private


def run(
    pipeline: Annotated[Path, typer.Argument(help="The pipeline.", show_default=True)] = Path(DEFAULT_FILE),
    seconds: Annotated[float | None, typer.Option(help="Stop after this many seconds.", min=0.0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of a live view.")] = False,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve http://127.0.0.1:PORT/metrics for Prometheus.", min=0, max=65535)
    ] = None,
) -> None:
    """Run a pipeline: capture the changes, read the history, deliver both. Ctrl-C stops it; run it again to go on."""
    config = load(pipeline)
    make_root(config.work)
    make_private(config.logs)
    with _spark_is_quiet(config.logs / "spark.log") as console:
        if config.sink:
            launch_spark(config)
        from headwater.cli.run_view import run_shown  # these imports take a second: Java starts meanwhile
        from headwater.pipeline.pipeline import Pipeline

        runs = Pipeline.from_toml(pipeline)
        run_shown(runs, console, seconds, as_json, metrics_port)
    runs.wait()


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
