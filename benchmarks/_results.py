"""Run every benchmark and write RESULTS.md: date, machine, command, and a table per benchmark.

Each benchmark runs three times; the figure with the median ratio is kept, so that one slow spell of the machine decides
nothing. ``make results`` calls it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUNS = int(os.environ.get("HEADWATER_BENCH_RUNS", "3"))


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return f"{os.cpu_count()} × {model}, {memory:.0f} GiB, {system}, Python {platform.python_version()}"


def measured(path: Path) -> list[dict[str, Any]]:
    """The median run of each figure; a missed goal is no error here."""
    runs = []
    for _ in range(RUNS):
        done = subprocess.run([sys.executable, str(path), "--json"], stdout=subprocess.PIPE, text=True, check=False)
        runs.append(json.loads(done.stdout))
    return [sorted(figures, key=lambda figure: figure["ratio"])[RUNS // 2] for figures in zip(*runs, strict=True)]


def row(figure: dict[str, Any]) -> str:
    goal = figure["goal"]
    sign = "≥" if figure["better"] == "higher" else "≤"
    met = None if goal is None else (figure["ratio"] >= goal if sign == "≥" else figure["ratio"] <= goal)
    verdict = {None: "", True: "met", False: "**missed**"}[met]
    wanted = "" if goal is None else f"{sign} {goal:g}"
    numbers = f"{figure['value']:.4g} | {figure['bound']:.4g} | {figure['ratio']:.3g}"
    return f"| {figure['name']} | {numbers} | {wanted} | {verdict} |"


def main() -> None:
    lines = [
        "# Benchmark results",
        "",
        "Ratios against a bound that the same run measures; absolute numbers belong to the machine below.",
        "One run each." if RUNS == 1 else f"Each figure is the median of {RUNS} runs.",
        "",
        f"- Date: {datetime.now(UTC):%Y-%m-%d}",
        f"- Machine: {machine()}",
        f"- Command: `HEADWATER_BENCH_RUNS={RUNS} make results`; one alone: "
        "`.venv/bin/python benchmarks/NAME.py [--quick] [--json]`",
    ]
    for path in sorted(HERE.glob("[a-z]*.py")):
        print(f"measuring {path.stem} …", file=sys.stderr)
        lines += [
            "",
            f"## {path.stem}",
            "",
            "| figure | value | bound | ratio | goal | |",
            "|---|---:|---:|---:|---:|---|",
        ]
        lines += map(row, measured(path))
    (HERE / "RESULTS.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
