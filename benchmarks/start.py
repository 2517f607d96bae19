"""The start of `headwater run`: until 1,000 rows of a Postgres table are visible in a Delta table.

The bound is a bare PySpark session and its first job, one task in one Python worker. Both are processes of their own.
Processor time is that of the process and all its children. The archive of Spark's classes is created outside of the
measured time; the bound never uses it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import NamedTuple

from _harness import ENOUGH_RUNS, Figure, main, progress, scratch
from _servers import Database, PostgresServer
from headwater.spark.class_archive import OFF

ROWS = 1000
_LOOK_SECONDS = 0.05
_WAIT_SECONDS = 300.0
_PREPARE = "from headwater.spark.session import prepare; assert prepare()"
_BARE = """
import sys, time
from pathlib import Path
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
assert spark.sparkContext.parallelize([1], 1).map(lambda value: value + 1).collect() == [2]
Path(sys.argv[1]).touch()
time.sleep(600)
"""
_TOML = """
[source]
dsn_env = "BENCH_DSN"
tables = ["public.orders"]
slot = "{name}"
publication = "{name}"
[spark]
master = "local[2]"
[[sink]]
kind = "delta"
path = "lake"
"""


class Cost(NamedTuple):
    """What a start took: seconds, and seconds of processors."""

    wall: float
    cpu: float

    @classmethod
    def best(cls, costs: list[Cost]) -> Cost:
        return cls(min(cost.wall for cost in costs), min(cost.cpu for cost in costs))


def cpu_seconds(root: int) -> float:
    """Processor time of *root*, its children that run, and those that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return sum(ticks.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


def timed(command: list[str], folder: Path, settings: Mapping[str, str], is_done: Callable[[], bool]) -> Cost:
    """Run *command* until *is_done*, then end it.

    :raises RuntimeError: it ended before.
    """
    began = time.monotonic()
    with (folder / "out").open("ab") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | settings, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while not is_done():
            if process.poll() is not None or time.monotonic() - began > _WAIT_SECONDS:
                raise RuntimeError(f"{command} did not get there: {(folder / 'out').read_text()[-2000:]}")
            time.sleep(_LOOK_SECONDS)
        return Cost(time.monotonic() - began, cpu_seconds(process.pid))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def bare_start(folder: Path, cache: Path) -> Cost:
    """A PySpark session without Headwater."""
    ready = folder / "ready"
    settings = {"PYSPARK_PYTHON": sys.executable, "XDG_CACHE_HOME": str(cache)}
    return timed([sys.executable, "-c", _BARE, str(ready)], folder, settings, ready.exists)


def pipeline_start(folder: Path, cache: Path, database: Database, name: str, *, archive: bool) -> Cost:
    """`headwater run` of a new pipeline."""
    (folder / "pipeline.toml").write_text(_TOML.format(name=name))
    settings = {"BENCH_DSN": database.dsn, "XDG_CACHE_HOME": str(cache)} | ({} if archive else {OFF: "off"})
    command = [sys.executable, "-m", "headwater.cli.main", "run"]
    return timed(command, folder, settings, lambda: visible_rows(folder / "lake/public.orders") == ROWS)


def visible_rows(table: Path) -> int:
    rows = 0
    for commit in sorted((table / "_delta_log").glob("[0-9]*.json")):
        for action in map(json.loads, commit.read_text().splitlines()):
            if "add" in action:
                rows += json.loads(action["add"]["stats"])["numRecords"]
    return rows


def measure(quick: bool) -> list[Figure]:
    """All figures."""
    turns = 1 if quick else ENOUGH_RUNS
    bare: list[Cost] = []
    first: list[Cost] = []
    later: list[Cost] = []
    numbers = count(1)
    with scratch() as root, PostgresServer() as server, server.database() as database:
        database.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, customer text, total numeric(12,2), placed timestamptz)",
            f"INSERT INTO orders SELECT n, 'customer ' || n % 97, n * 1.25, now() FROM generate_series(1, {ROWS}) n",
            "ANALYZE",
        )
        cache = root / "cache"
        with progress("creating the archive of Spark's classes"):
            subprocess.run(
                [sys.executable, "-c", _PREPARE], env=os.environ | {"XDG_CACHE_HOME": str(cache)}, check=True
            )

        def folder() -> Path:
            made = root / f"run{next(numbers)}"
            made.mkdir()
            return made

        for turn in range(turns):
            with progress(f"starting, turn {turn + 1} of {turns}"):
                bare.append(bare_start(folder(), cache))
                first.append(pipeline_start(folder(), cache, database, f"first{turn}", archive=False))
                later.append(pipeline_start(folder(), cache, database, f"later{turn}", archive=True))
    bound = Cost.best(bare)
    return [
        figure
        for name, costs in (("first run", first), ("later run, with the archive", later))
        for figure in (
            Figure(f"{name}: processor time", Cost.best(costs).cpu, bound.cpu, None, "lower", "s", turns),
            Figure(f"{name}: time", Cost.best(costs).wall, bound.wall, None, "lower", "s", turns),
        )
    ]


if __name__ == "__main__":
    main(__doc__, measure)
