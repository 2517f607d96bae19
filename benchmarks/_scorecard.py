"""The scorecard: one table of what the product is and does, measured now. ``make scorecard`` prints it, and writes
``benchmarks/SCORECARD.md``, except with ``--quick``.

What is counted (parts of the design on the path, the crash matrix, lines) is read from this checkout. What is measured
(:mod:`_pipeline_runs`) runs ``headwater run`` as it is by default, and with small batches in the driver. With
``--before FOLDER``, a checkout of another version that has its ``.venv``, each scene runs there, too, in turn. A
busy machine makes the measured values worse; the table shows its load.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from _harness import progress
from _pipeline_runs import FULL, QUICK, SCENES, Metric, Scale, Version
from headwater.spark.session import prepare

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "headwater"
SCORECARD = ROOT / "benchmarks" / "SCORECARD.md"
MISSION = (
    *("KvLogStoreFactory", "KvLogStoreReader", "KvLogStoreWriter", "LogStoreBuffer", "LogStoreRowSerde"),
    *("LogStoreState", "LogStoreVnodeProgress", "SnapshotBackfillExecutor", "UpstreamTableExecutor"),
    *("UpstreamStream", "UpstreamTable", "StateTable", "VnodeStream", "BackfillState", "CdcBackfillExecutor"),
    *("ParallelizedCdcBackfillExecutor", "CdcBackfillState", "CdcBackfillMetrics", "ExternalStorageTable"),
    *("CdcOffset", "mark_chunk", "mark_cdc_chunk", "Store"),
)


class Row(NamedTuple):
    """One line of what is counted."""

    name: str
    value: str


def names_on_the_path() -> tuple[list[str], list[str]]:
    """The parts of the design that the product uses outside of their own definition, and those that it does not."""
    used: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path.name != "__init__.py":
            for statement in ast.parse(path.read_text()).body:
                own = getattr(statement, "name", None)
                names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                used |= names - {own}
    on = [name for name in MISSION if name in used]
    return on, [name for name in MISSION if name not in on]


def crash_matrix() -> str:
    summary = re.search(r"on (\S+): ([\d,]+) rows, (\d+) failures", (ROOT / "docs" / "crash_matrix.md").read_text())
    return f"{summary[2]} kills and freezes, {summary[3]} failures ({summary[1]})" if summary else "unknown"


def packages() -> Iterator[Row]:
    """Lines and modules of each package."""
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        package = parts[0] if len(parts) > 1 else "(top)"
        lines[package] += len(path.read_text().splitlines())
        modules[package] += 1
    for package, count in lines.most_common():
        yield Row(f"lines, modules: {package}", f"{count:,}, {modules[package]}")
    yield Row("lines, modules: all", f"{sum(lines.values()):,}, {sum(modules.values())}")


def counted() -> Iterator[Row]:
    """What is read from the files of this checkout."""
    on, off = names_on_the_path()
    missing = f"; not: {', '.join(off)}" if off else ""
    yield Row("named parts on the path of a row", f"{len(on)} of {len(MISSION)}{missing}")
    yield Row("crash matrix", crash_matrix())
    yield from packages()


def measured(versions: Sequence[Version], scenes: Sequence[str], scale: Scale) -> Iterator[tuple[Metric, ...]]:
    """Each metric of *scenes*, for each version: a scene runs for one version after the other."""
    for name in scenes:
        results: list[list[Metric]] = []
        for version in versions:
            with progress(f"{name}: {version.name}"):
                results.append(list(SCENES[name](version, scale)))
        yield from zip(*results, strict=True)


def write(facts: dict[str, Any], tables: Sequence[Table]) -> None:
    """As Markdown, for readers of the repository."""
    lines = ["# Scorecard", "", '`make scorecard` measures it again. *Driver*: with `small_batches = "driver"`.', ""]
    lines += [f"- {name.capitalize()}: {value}" for name, value in facts.items()]
    for table in tables:
        rows = zip(*(column.cells for column in table.columns), strict=True)
        lines += ["", f"| {' | '.join(str(column.header) for column in table.columns)} |"]
        lines += ["|" + "---|" * len(table.columns), *(f"| {' | '.join(map(str, row))} |" for row in rows)]
    SCORECARD.write_text("\n".join(lines) + "\n")


def tables(versions: Sequence[Version], metrics: Sequence[tuple[Metric, ...]], rows: Sequence[Row]) -> list[Table]:
    """What was measured, and what was counted; ratios are against the last version."""
    compared = versions[:-1] if versions[-1].name.startswith("before") else ()
    first = Table("measured", *(version.name for version in versions), *(f"ratio: {one.name}" for one in compared))
    for values in metrics:
        shown = [f"{metric.value:.3g} {metric.unit}".strip() for metric in values]
        ratios = [f"{metric.value / values[-1].value:.2f}" for metric in values[: len(compared)]]
        first.add_row(values[0].name, *shown, *ratios)
    second = Table("counted", "value")
    for row in rows:
        second.add_row(*row)
    return [first, second]


def version_before(folder: Path) -> Version:
    """The Headwater of another checkout."""
    commit = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return Version(f"before ({commit.stdout.strip()})", str((folder / ".venv/bin/python").absolute()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and seconds; writes nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of another version, to compare with")
    parser.add_argument("--scene", action="append", choices=list(SCENES), help="measure this one (repeatable)")
    options = parser.parse_args()
    versions = [
        Version("now", sys.executable),
        Version("now, driver", sys.executable, 'small_batches = "driver"'),
    ]
    if options.before is not None:
        versions.append(version_before(options.before))
    with progress("creating the archive of Spark's classes"):
        prepare()  # else the first run does it in the background
    metrics = list(measured(versions, options.scene or list(SCENES), QUICK if options.quick else FULL))
    rows = list(counted())
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(
            ["make scorecard", *([f'SCORECARD_ARGS="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else [])]
        ),
        "load at the end": round(os.getloadavg()[2], 1),
    }
    if options.json:
        values = [
            {"name": one.name, "version": version.name, "value": one.value, "unit": one.unit}
            for row in metrics
            for version, one in zip(versions, row, strict=True)
        ]
        print(json.dumps(facts | {"measured": values, "counted": [row._asdict() for row in rows]}))
        return
    shown = tables(versions, metrics, rows)
    if not (options.quick or options.scene):
        write(facts, shown)
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    for table in shown:
        Console().print(table)


if __name__ == "__main__":
    main()
