"""What ``headwater run`` does, measured from outside: start, latency, processors, memory, rest.

Each scene runs one version of Headwater on a real Postgres: this checkout, or another one that has an environment of
its own. So two versions can be measured side by side, in one run, on the same machine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from _backfill_latency import latencies, sql_latencies
from _backfill_table import Orders
from _backfill_writer import Commits, LiveWriter
from _harness import scratch
from _servers import Database, PostgresServer
from start import visible_rows

CHANGES_PER_SECOND = 1000
_SINKS = 5
_TABLES = 200
_SMALL_ROWS = 1000
_MIRROR_ROWS = 100_000
"""With fewer, most rows are changed twice: the mirror shows the later change alone, and the wait seems longer."""
_WAIT_SECONDS = 600.0
_LOOK_SECONDS = 0.1
_SAMPLE_SECONDS = 0.5
_SETTINGS = {"wal_level": "logical", "max_wal_size": "4GB", "track_commit_timestamp": "on"}
_TOML = """
[source]
dsn_env = "BENCH_DSN"
tables = ["public.*"]
slot = "{name}"
publication = "{name}"
[spark]
master = "local[2]"
{spark}
"""
_DELTA = """
[[sink]]
name = "{name}"
kind = "delta"
mode = "{mode}"
path = "{name}"
"""
_POSTGRES = """
[[sink]]
kind = "postgres"
dsn = "{dsn}"
"""


class Version(NamedTuple):
    """A Headwater that is measured. :ivar python: that has it. :ivar spark: lines of its ``[spark]``."""

    name: str
    python: str
    spark: str = ""


class Scale(NamedTuple):
    """How much is measured."""

    rows: int
    live_seconds: float
    idle_seconds: float


FULL = Scale(1_000_000, 30.0, 20.0)
QUICK = Scale(100_000, 5.0, 3.0)


class Metric(NamedTuple):
    """One measured value; less is better."""

    name: str
    value: float
    unit: str


class Run:
    """``headwater run`` of all tables of *database* in the directory *folder*."""

    def __init__(self, version: Version, folder: Path, database: Database, sinks: str) -> None:
        folder.mkdir()
        self.folder, self._version, self._dsn = folder, version, database.dsn
        self._ticks: dict[tuple[int, str], int] = {}
        name = re.sub(r"\W", "_", folder.name)
        (folder / "pipeline.toml").write_text(_TOML.format(name=name, spark=version.spark) + sinks)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.began = time.monotonic()
        settings = {"BENCH_DSN": self._dsn, "PYSPARK_PYTHON": self._version.python}
        command = [self._version.python, "-m", "headwater.cli.main", "run"]
        with (self.folder / "out").open("ab") as out:
            process = self._process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | settings, stdout=out, stderr=out, start_new_session=True
            )
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()

    def wait(self, is_done: Callable[[], bool]) -> float:
        """Seconds from the start until *is_done*.

        :raises RuntimeError: the run ended, or it is not in time.
        """
        while not is_done():
            self.cpu()
            if self._process.poll() is not None or time.monotonic() - self.began > _WAIT_SECONDS:
                raise RuntimeError(f"The rows did not arrive: {(self.folder / 'out').read_text()[-2000:]}")
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

    def cores(self, seconds: float) -> float:
        """Processors that it uses in the next *seconds*."""
        before = self.cpu()
        return (self.cpu(seconds) - before) / seconds

    def processes(self) -> list[int]:
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:  # it has ended meanwhile
                    continue
        tree = [self._process.pid]
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


class Loaded(NamedTuple):
    """What a run did under steady changes."""

    commits: Commits
    since: float
    cores: float


def under_load(run: Run, orders: Orders, scale: Scale, look: Callable[[], None] = lambda: None) -> Loaded:
    """Change *orders* at a steady rate. :param look: called before the writer stops."""
    with LiveWriter(orders, CHANGES_PER_SECOND, run.folder, span=orders.rows) as writer:
        run.cpu(scale.live_seconds / 3)  # warm
        since = time.time()
        cores = run.cores(scale.live_seconds)
        look()
        return Loaded(writer.stop(), since, cores)


def delta_changes(version: Version, scale: Scale) -> Iterator[Metric]:
    """One small table into Delta: the start, 1,000 changes per second, then nothing."""
    with scratch() as folder, PostgresServer(settings=_SETTINGS) as server, server.database() as database:
        orders = Orders.load(database, "orders", _SMALL_ROWS)
        run = Run(version, folder / "one", database, _DELTA.format(name="lake", mode="changes"))
        lake = run.folder / "lake" / orders.full_name
        with run.running():
            seconds = run.wait(lambda: visible_rows(lake) >= orders.rows)
            yield Metric("first rows of a table of 1,000", seconds, "s")
            yield Metric("first rows of a table of 1,000, CPU", run.cpu(), "s")
            counts: list[float] = []
            loaded = under_load(run, orders, scale, lambda: counts.extend((len(run.processes()), run.memory() / 1e9)))
            yield Metric("processes", counts[0], "")
            yield Metric("memory (PSS)", counts[1], "GB")
            yield from _latency("1,000 changes/s, Delta changes", latencies(lake, loaded.commits, loaded.since))
            yield Metric("1,000 changes/s, Delta changes, cores", loaded.cores, "")
            run.cpu(5.0)  # what waited is done
            yield Metric("idle, one table", 100 * run.cores(scale.idle_seconds), "% of a core")


def postgres_mirror(version: Version, scale: Scale) -> Iterator[Metric]:
    """A table into a mirror in another Postgres database, 1,000 changes per second."""
    with (
        scratch() as folder,
        PostgresServer(settings=_SETTINGS) as server,
        server.database() as database,
        server.database() as target,
    ):
        orders = Orders.load(database, "orders", _MIRROR_ROWS)
        run = Run(version, folder / "mirror", database, _POSTGRES.format(dsn=target.dsn))
        with run.running():
            run.wait(lambda: _rows_in(target, orders) >= orders.rows)
            loaded = under_load(run, orders, scale)
            waited = sql_latencies(target, orders.full_name, loaded.commits, loaded.since)
            yield from _latency("1,000 changes/s, Postgres mirror", waited)
            yield Metric("1,000 changes/s, Postgres mirror, cores", loaded.cores, "")


def five_sinks(version: Version, scale: Scale) -> Iterator[Metric]:
    """Five Delta sinks in one driver, 1,000 changes per second."""
    with scratch() as folder, PostgresServer(settings=_SETTINGS) as server, server.database() as database:
        orders = Orders.load(database, "orders", _SMALL_ROWS)
        names = [f"lake{number}" for number in range(_SINKS)]
        sinks = "".join(_DELTA.format(name=name, mode="changes") for name in names)
        run = Run(version, folder / "five", database, sinks)
        lakes = [run.folder / name / orders.full_name for name in names]
        with run.running():
            run.wait(lambda: all(visible_rows(lake) >= orders.rows for lake in lakes))
            loaded = under_load(run, orders, scale)
            waited = np.concatenate([latencies(lake, loaded.commits, loaded.since) for lake in lakes])
            yield from _latency("1,000 changes/s, five Delta sinks", waited)
            yield Metric("1,000 changes/s, five Delta sinks, cores", loaded.cores, "")


def idle_tables(version: Version, scale: Scale) -> Iterator[Metric]:
    """Many tables without changes."""
    with scratch() as folder, PostgresServer(settings=_SETTINGS) as server, server.database() as database:
        names = [f"t{number}" for number in range(_TABLES)]
        database.execute(*(f"CREATE TABLE {name} AS SELECT n AS id FROM generate_series(1, 10) n" for name in names))
        database.execute(*(f"ALTER TABLE {name} ADD PRIMARY KEY (id)" for name in names), "ANALYZE")
        run = Run(version, folder / "idle", database, _DELTA.format(name="lake", mode="changes"))
        with run.running():
            run.wait(lambda: all(visible_rows(run.folder / "lake" / f"public.{name}") >= 10 for name in names))
            run.cpu(5.0)  # what waited is done
            yield Metric(f"idle, {_TABLES} tables", 100 * run.cores(scale.idle_seconds), "% of a core")


def backfill(version: Version, scale: Scale) -> Iterator[Metric]:
    """A large table into a Delta mirror."""
    with scratch() as folder, PostgresServer(settings=_SETTINGS) as server, server.database() as database:
        orders = Orders.load(database, "orders", scale.rows)
        run = Run(version, folder / "backfill", database, _DELTA.format(name="lake", mode="mirror"))
        lake = run.folder / "lake" / orders.full_name
        with run.running():
            yield Metric(f"backfill of {scale.rows:,} rows", run.wait(lambda: visible_rows(lake) >= orders.rows), "s")
            yield Metric("backfill, CPU per million rows", run.cpu() * 1e6 / scale.rows, "s")


Scene = Callable[[Version, Scale], Iterator[Metric]]
SCENES: Mapping[str, Scene] = {
    scene.__name__: scene for scene in (delta_changes, postgres_mirror, five_sinks, idle_tables, backfill)
}


def _latency(name: str, waited: np.ndarray) -> Iterator[Metric]:
    for part in (50, 99):
        yield Metric(f"{name}, p{part}", float(np.percentile(waited, part)), "s")


def _rows_in(target: Database, orders: Orders) -> int:
    if target.value(f"SELECT to_regclass('{orders.full_name}') IS NULL"):
        return 0
    return int(target.value(f"SELECT count(*) FROM {orders.full_name}"))
