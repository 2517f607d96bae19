"""Run benchmarks and write RESULTS.md: one table per benchmark, and each table is of one run.

Above each table are the date, the machine and the command of its run. The tables of benchmarks that are not run stay as
they are. ``make results`` runs all; ``make results BENCH="mysql sinks"`` runs two of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
INTRO = """# Benchmark results

Each table is one run of one benchmark. A ratio compares with a bound that the same run measured: the best of three,
unless the name says otherwise. Absolute numbers belong to the machine. [README.md](README.md) says what each figure is.
"""


def names() -> list[str]:
    """All benchmarks."""
    return sorted(path.stem for path in HERE.glob("[a-z]*.py"))


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return f"{os.cpu_count()} × {model}, {memory:.0f} GiB, {system}, Python {platform.python_version()}"


def run(name: str, options: Sequence[str]) -> list[dict[str, Any]]:
    """The figures of one run. A missed goal is no error here.

    :raises RuntimeError: the benchmark failed.
    """
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"Benchmark {name} failed with exit code {done.returncode}.")
    figures: list[dict[str, Any]] = json.loads(done.stdout)
    return figures


def row(figure: Mapping[str, Any]) -> str:
    goal = figure["goal"]
    sign = "≥" if figure["better"] == "higher" else "≤"
    met = None if goal is None else (figure["ratio"] >= goal if sign == "≥" else figure["ratio"] <= goal)
    verdict = {None: "", True: "met", False: "**missed**"}[met]
    wanted = "" if goal is None else f"{sign} {goal:g}"
    numbers = f"{figure['value']:.4g} | {figure['bound']:.4g} | {figure['ratio']:.3g}"
    return f"| {figure['name']} | {numbers} | {wanted} | {verdict} |"


def section(name: str, figures: Sequence[Mapping[str, Any]], date: str, on: str, command: str) -> str:
    """One table with the facts of its run."""
    lines = [
        f"## {name}",
        "",
        f"- Date: {date}",
        f"- Machine: {on}",
        f"- Command: `{command}`",
        "",
        "| figure | value | bound | ratio | goal | |",
        "|---|---:|---:|---:|---:|---|",
        *map(row, figures),
    ]
    return "\n".join(lines) + "\n"


def sections(text: str) -> dict[str, str]:
    """The sections of a file of results, by the name of the benchmark."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## ").strip(): part.strip() + "\n" for part in parts}


def merged(text: str, new: Mapping[str, str]) -> str:
    """The file *text* with the *new* sections in place of the old ones. Sections of unknown benchmarks are removed."""
    parts = {**sections(text), **new}
    return "\n".join([INTRO, *(parts[name] for name in names() if name in parts)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Run benchmarks and write RESULTS.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="run them with --quick")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names()))
    if unknown:
        parser.error(f"Unknown benchmark {unknown[0]!r}; known are: {', '.join(names())}.")
    options = ["--quick"] if arguments.quick else []
    for name in arguments.names or names():
        print(f"measuring {name} …", file=sys.stderr)
        command = " ".join([".venv/bin/python", f"benchmarks/{name}.py", *options])
        table = section(name, run(name, options), f"{datetime.now(UTC):%Y-%m-%d}", machine(), command)
        # after each benchmark: a later one that fails does not lose it
        RESULTS.write_text(merged(RESULTS.read_text() if RESULTS.exists() else "", {name: table}))


if __name__ == "__main__":
    main()
