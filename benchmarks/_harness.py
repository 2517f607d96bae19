"""Code that all benchmarks share: figures as ratios against a bound of the same run, printed as a table or as JSON.

A benchmark module creates :class:`Figure` values and ends with ``main(__doc__, measure)``. The bound is measured beside
the value, on the same machine, in the same run: a slow machine changes both. ``--quick`` keeps the whole run under a
minute on two free cores; ``--json`` prints a list of ``{name, value, bound, ratio, goal, better}`` and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

ENOUGH_RUNS = 3
"""A bound is the best of this many runs. A figure of fewer runs says so in its name."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured ratio. ``goal`` limits ``ratio``; ``better`` says on which side of it is good.

    :ivar runs: of which value and bound are the best, or the median.
    """

    name: str
    value: float
    bound: float
    goal: float | None
    better: Literal["higher", "lower"]
    unit: str = ""
    runs: int = ENOUGH_RUNS

    @property
    def ratio(self) -> float:
        return self.value / self.bound

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.better == "higher" else self.ratio <= self.goal

    @property
    def label(self) -> str:
        """The name, with the number of runs where they are few."""
        if self.runs >= ENOUGH_RUNS:
            return self.name
        return f"{self.name} ({'one run' if self.runs == 1 else f'{self.runs} runs'})"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.label,
            "value": self.value,
            "bound": self.bound,
            "ratio": self.ratio,
            "goal": self.goal,
            "better": self.better,
        }


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds until the first rows are visible, and the rows per second after them."""

    start: float
    rate: float

    @classmethod
    def of_batches(cls, began: float, batches: Sequence[tuple[float, int]]) -> Speed:
        """:param batches: when each became visible, and its rows.

        :raises RuntimeError: there is only one batch, so that nothing is known but the start.
        """
        if len(batches) < 2:
            raise RuntimeError(f"{len(batches)} batch was visible; a rate needs two. Measure more rows.")
        (first, _), (last, _) = batches[0], batches[-1]
        return cls(first - began, sum(rows for _, rows in batches[1:]) / (last - first))

    @classmethod
    def of_sizes(cls, few: tuple[int, float], many: tuple[int, float]) -> Speed:
        """The speed of a job whose batches cannot be seen, from the seconds that it takes for *few* and *many* rows.

        :raises RuntimeError: more rows did not take longer, because the machine was busy.
        """
        (few_rows, few_seconds), (many_rows, many_seconds) = few, many
        if many_seconds <= few_seconds:
            raise RuntimeError(
                f"{many_rows} rows took {many_seconds:.3g} s, {few_rows} rows took {few_seconds:.3g} s: no rate can be "
                "measured. Other programs use the machine. Run the benchmark again when it is idle."
            )
        return cls(few_seconds, (many_rows - few_rows) / (many_seconds - few_seconds))

    @classmethod
    def best(cls, speeds: Sequence[Speed]) -> Speed:
        return cls(min(speed.start for speed in speeds), max(speed.rate for speed in speeds))


def seconds_of(job: Callable[[], object]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def interleaved(times: int, *jobs: Callable[[], object]) -> list[float]:
    """Best seconds of each job. The jobs run in turns, so that a slow phase of the machine affects all of them."""
    return best_in_turns(times, *(lambda job=job: seconds_of(job) for job in jobs))


def best_in_turns(times: int, *jobs: Callable[[], float]) -> list[float]:
    """The least that each job returns. For jobs that measure a part of their work themselves."""
    least = [float("inf")] * len(jobs)
    for _ in range(times):
        for number, job in enumerate(jobs):
            least[number] = min(least[number], job())
    return least


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for one measurement, removed at the end. ``HEADWATER_BENCH_DIR`` selects the disk."""
    folder = Path(tempfile.mkdtemp(prefix="headwater-bench-", dir=os.environ.get("HEADWATER_BENCH_DIR")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show on stderr what is being measured."""
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
            figure.label,
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
    parser.add_argument("--quick", action="store_true", help="measure less: under 60 seconds on two free cores")
    parser.add_argument("--json", action="store_true", help="print a JSON list and nothing else")
    arguments = parser.parse_args()
    figures = measure(arguments.quick)
    if arguments.json:
        print(json.dumps([figure.to_json() for figure in figures]))
    else:
        _print_table(title, figures)
    sys.exit(any(figure.met is False for figure in figures))
