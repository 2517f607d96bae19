"""The scorecard: one table of what the product is and does, measured now. ``make scorecard`` prints it, and writes
``benchmarks/SCORECARD.md``, except with ``--quick``.

What is counted (parts of the design on the path, the crash matrix, lines) is read from this checkout. What is measured
runs ``headwater run`` on a real Postgres, into Delta: the start, a mirrored backfill, 1,000
changes per second, and then nothing. A busy machine makes the measured rows worse; the table shows its load.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from _backfill_latency import latencies
from _backfill_table import Orders
from _backfill_writer import LiveWriter
from _harness import progress, scratch
from _servers import PostgresServer
from headwater.spark.session import prepare
from start import visible_rows

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
CHANGES_PER_SECOND = 1000
_WAIT_SECONDS = 600.0
_LOOK_SECONDS = 0.1
_SAMPLE_SECONDS = 0.5
_SETTINGS = {"wal_level": "logical", "max_wal_size": "4GB"}
_TOML = """
[source]
dsn_env = "BENCH_DSN"
tables = ["{table}"]
slot = "{name}"
publication = "{name}"
[spark]
master = "local[2]"
small_batches = "{small_batches}"
[[sink]]
kind = "delta"
mode = "{mode}"
path = "lake"
"""


class Row(NamedTuple):
    """One line of the scorecard."""

    name: str
    value: str


class Scale(NamedTuple):
    """How much is measured."""

    rows: int
    live_seconds: float
    idle_seconds: float


FULL = Scale(1_000_000, 60.0, 60.0)
QUICK = Scale(100_000, 10.0, 5.0)


# -- what is counted ---------------------------------------------------------------------------------------------------


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
    summary = re.search(r"on (\S+): ([\d,]+) kills, (\d+) failures", (ROOT / "docs" / "crash_matrix.md").read_text())
    return f"{summary[2]} kills, {summary[3]} failures ({summary[1]})" if summary else "unknown"


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


# -- what is measured --------------------------------------------------------------------------------------------------


class Run:
    """``headwater run`` of one table into Delta."""

    def __init__(self, folder: Path, orders: Orders, mode: str, small_batches: str) -> None:
        folder.mkdir()
        self.lake = folder / "lake" / orders.full_name
        self._folder, self._orders = folder, orders
        self._ticks: dict[tuple[int, str], int] = {}
        name = re.sub(r"\W", "_", folder.name)
        toml = _TOML.format(table=orders.full_name, name=name, mode=mode, small_batches=small_batches)
        (folder / "pipeline.toml").write_text(toml)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.began = time.monotonic()
        environment = os.environ | {"BENCH_DSN": self._orders.database.dsn}
        command = [sys.executable, "-m", "headwater.cli.main", "run"]
        with (self._folder / "out").open("ab") as out:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        self.pid = process.pid
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()

    def wait_for_rows(self) -> float:
        """Seconds from the start until all rows of the table are visible.

        :raises RuntimeError: they are not there in time.
        """
        while visible_rows(self.lake) < self._orders.rows:
            self.cpu()
            if time.monotonic() - self.began > _WAIT_SECONDS:
                raise RuntimeError(f"The rows did not arrive: {(self._folder / 'out').read_text()[-2000:]}")
            time.sleep(_LOOK_SECONDS)
        return time.monotonic() - self.began

    def cpu(self, seconds: float = 0.0) -> float:
        """Processor time of all its processes so far, those included that have ended, after *seconds*."""
        end = time.monotonic() + seconds
        while True:
            for pid in self.processes():
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                except OSError:  # it has ended meanwhile
                    continue
                self._ticks[pid, fields[19]] = int(fields[11]) + int(fields[12])
            left = end - time.monotonic()
            if left <= 0:
                return sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")
            time.sleep(min(left, _SAMPLE_SECONDS))

    def processes(self) -> list[int]:
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:  # it has ended meanwhile
                    continue
        tree = [self.pid]
        for pid in tree:
            tree += [child for child, parent in parents.items() if parent == pid]
        return tree

    def memory(self) -> int:
        """Bytes of all its processes; what they share counts once."""
        total = 0
        for pid in self.processes():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            pss = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
            total += 1024 * int(pss[1]) if pss else 0
        return total


def measured(scale: Scale, small_batches: str) -> Iterator[Row]:
    """What one setting of ``small_batches`` does."""
    label = "" if small_batches == "spark" else ', small_batches = "driver"'
    with scratch() as folder, PostgresServer(settings=_SETTINGS) as server, server.database() as database:
        small = Orders.load(database, "small", 1000)
        run = Run(folder / f"live_{small_batches}", small, "changes", small_batches)
        with progress(f"1,000 changes per second{label}"), run.running():
            seconds = run.wait_for_rows()
            yield Row(f"first rows of a table of 1,000{label}", f"{seconds:.1f} s, {run.cpu():.1f} CPU s")
            with LiveWriter(small, CHANGES_PER_SECOND, folder, span=small.rows) as writer:
                cpu = run.cpu(scale.live_seconds / 4)  # warm
                since = time.time()
                cores = (run.cpu(scale.live_seconds) - cpu) / scale.live_seconds
                yield Row(f"processes, memory (PSS){label}", f"{len(run.processes())}, {run.memory() / 1e9:.2f} GB")
                commits = writer.stop()
            waited = latencies(run.lake, commits, since)
            p50, p99 = np.percentile(waited, (50, 99))
            yield Row(
                f"latency at 1,000 changes/s, Delta changes, p50, p99, cores{label}",
                f"{p50:.2f} s, {p99:.2f} s, {cores:.2f}",
            )
            cpu = run.cpu(5.0)  # what waited is done
            idle = (run.cpu(scale.idle_seconds) - cpu) / scale.idle_seconds
            yield Row(f"idle, one table{label}", f"{100 * idle:.1f} % of a core")
        if small_batches == "spark":
            orders = Orders.load(database, "large", scale.rows)
            run = Run(folder / "backfill", orders, "mirror", small_batches)
            with progress(f"backfill of {scale.rows:,} rows"), run.running():
                seconds = run.wait_for_rows()
                per_million = run.cpu() * 1e6 / scale.rows
                yield Row(f"backfill of {scale.rows:,} rows", f"{seconds:.1f} s, {per_million:.0f} CPU s per million")


def rows(quick: bool) -> Iterator[Row]:
    """All of them."""
    on, off = names_on_the_path()
    missing = f"; not: {', '.join(off)}" if off else ""
    yield Row("named parts on the path of a row", f"{len(on)} of {len(MISSION)}{missing}")
    yield Row("crash matrix", crash_matrix())
    scale = QUICK if quick else FULL
    with progress("creating the archive of Spark's classes"):
        prepare()  # else the first run does it in the background
    for small_batches in ("spark", "driver"):
        yield from measured(scale, small_batches)
    yield from packages()


def write(facts: dict[str, Any], card: list[Row]) -> None:
    """As Markdown, for readers of the repository."""
    lines = ["# Scorecard", "", "`make scorecard` measures it again.", ""]
    lines += [f"- {name.capitalize()}: {value}" for name, value in facts.items()]
    lines += ["", "| | |", "|---|---|", *(f"| {row.name} | {row.value} |" for row in card)]
    SCORECARD.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and seconds: two minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    card = list(rows(options.quick))
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["make scorecard", *sys.argv[1:]]),
        "load": round(os.getloadavg()[2], 1),
    }
    if options.json:
        print(json.dumps(facts | {"rows": [row._asdict() for row in card]}))
        return
    if not options.quick:
        write(facts, card)
    table = Table(title=", ".join(f"{name}: {value}" for name, value in facts.items()))
    table.add_column("what")
    table.add_column("value", overflow="fold")
    for row in card:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
