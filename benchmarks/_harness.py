"""What every benchmark shares: figures as ratios against a bound of the same run, a table or JSON.

A benchmark module makes :class:`Figure` values and ends with ``main(__doc__, measure)``. The bound is
always measured beside the value, on the same machine, in the same run, so the ratio survives a slow
or busy machine. ``--quick`` keeps the whole run under a minute; ``--json`` prints a list of
``{name, value, bound, ratio, goal, better}`` and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured ratio. ``goal`` bounds ``ratio``; ``better`` says on which side of it is good."""

    name: str
    value: float
    bound: float
    goal: float | None
    better: Literal["higher", "lower"]
    unit: str = ""

    @property
    def ratio(self) -> float:
        return self.value / self.bound

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.better == "higher" else self.ratio <= self.goal


def best_of(times: int, job: Callable[[], object]) -> float:
    """Seconds of the fastest of *times* runs: the one that the machine disturbed least."""
    fastest = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        job()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def interleaved(times: int, *jobs: Callable[[], object]) -> list[float]:
    """Best seconds of each job, run in turns so that a slow spell of the machine hits all of them alike."""
    fastest = [float("inf")] * len(jobs)
    for _ in range(times):
        for place, job in enumerate(jobs):
            fastest[place] = min(fastest[place], best_of(1, job))
    return fastest


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one measurement; ``HEADWATER_BENCH_DIR`` says on which disk."""
    made = Path(tempfile.mkdtemp(prefix="headwater-bench-", dir=os.environ.get("HEADWATER_BENCH_DIR")))
    try:
        yield made
    finally:
        shutil.rmtree(made)


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Say on stderr what is being measured, while it is."""
    with Console(stderr=True).status(text):
        yield


def _amount(value: float, unit: str) -> str:
    for scale, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.2f} {sign}{unit}"
    return f"{value:.3g} {unit}"


def _print_table(title: str, figures: list[Figure]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("figure", "value", "bound", "ratio", "goal", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for figure in figures:
        sign = "≥" if figure.better == "higher" else "≤"
        table.add_row(
            figure.name,
            _amount(figure.value, figure.unit),
            _amount(figure.bound, figure.unit),
            f"{figure.ratio:.3g}",
            "" if figure.goal is None else f"{sign} {figure.goal:g}",
            {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[figure.met],
        )
    Console().print(table)


def main(doc: str | None, measure: Callable[[bool], list[Figure]]) -> None:
    """Run *measure(quick)* and print its figures; exit code 1 when a goal is missed."""
    title = (doc or "").strip().splitlines()[0]
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="smaller inputs, under 60 seconds")
    parser.add_argument("--json", action="store_true", help="print a JSON list and nothing else")
    arguments = parser.parse_args()
    figures = measure(arguments.quick)
    if arguments.json:
        keys = ("name", "value", "bound", "ratio", "goal", "better")
        print(json.dumps([{key: getattr(figure, key) for key in keys} for figure in figures]))
    else:
        _print_table(title, figures)
    sys.exit(any(figure.met is False for figure in figures))
