"""Sinks: rows into Postgres, Delta, Parquet and Iceberg, against COPY and the libraries that write the same Arrow data.

The rows are those of ten columns that other benchmarks have, in memory, one batch, staged by one task and committed.
The bounds are measured in turns with the values. Then a pipeline on Spark from Postgres to Postgres: the time from a
commit to the transaction of the sink that has it, beside a micro-batch that does nothing, and from ``kill -9`` to the
first commit after it (not with ``--quick``: it starts Spark twice more).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake
from numpy.typing import NDArray

from _backfill_delivery import Delivery
from _backfill_floor import micro_batch_floor
from _backfill_table import Orders
from _backfill_writer import Commits, LiveWriter
from _harness import Figure, interleaved, main, progress, scratch
from _servers import Database, PostgresServer
from _sink_recovery import start_and_recovery
from _sink_rows import TABLE, as_inserts, deliver_history, deliver_inserts, orders
from headwater.sinks import open_sink
from headwater.sinks.change_rows import change_rows
from headwater.sinks.postgres import SESSIONS
from headwater.sinks.types import conform, sink_schema
from headwater.spark.session import session

SETTINGS = {
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "synchronous_commit": "off",
    "shared_buffers": "1GB",
    "track_commit_timestamp": "on",
}
CHANGES_PER_SECOND = 1000


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rows: int
    turns: int
    live_rows: int
    live_seconds: float
    floor_batches: int


FULL = Scale(rows=1_000_000, turns=3, live_rows=1_000_000, live_seconds=60.0, floor_batches=200)
QUICK = Scale(rows=100_000, turns=1, live_rows=50_000, live_seconds=3.0, floor_batches=10)


# -- rows in memory ----------------------------------------------------------------------------------------------------


def into_postgres(rows: pa.Table, database: Database, folder: Path, turns: int) -> list[Figure]:
    """A mirror of inserts, and COPY of the same rows into a table with a primary key."""
    inserts = list(as_inserts(rows))
    sink = open_sink("postgres", dsn=database.dsn)
    file = folder / "rows.copy"

    def mirror() -> None:
        database.execute("DROP TABLE IF EXISTS public.orders", "DROP SCHEMA IF EXISTS headwater CASCADE")
        SESSIONS.close()
        timer.run(lambda: deliver_inserts(sink, inserts))

    def copy() -> None:
        database.execute("DROP TABLE IF EXISTS copied", "CREATE TABLE copied (LIKE public.orders INCLUDING ALL)")
        timer.run(lambda: _psql(database, f"\\copy copied FROM '{file}'"))

    timer = _Timer()
    mirror()
    found = database.value("SELECT count(*) FROM public.orders")
    if found != rows.num_rows:
        raise RuntimeError(f"The mirror has {found} rows.")
    _psql(database, f"\\copy public.orders TO '{file}'")
    values = timer.turns(turns, mirror, copy)
    database.execute("DROP TABLE copied, public.orders")
    name = "Postgres: mirror of inserts / COPY of the same rows into a table with a primary key"
    return [_rate(name, rows, values, 0.35)]


def into_files(rows: pa.Table, folder: Path, turns: int) -> list[Figure]:
    """History and changes into tables of files, and the libraries that write the same rows."""
    history = rows.to_batches(max_chunksize=65_536)
    inserts = list(as_inserts(rows))
    own = sink_schema(TABLE)
    plain = conform(rows, own)
    changes = pa.concat_tables([change_rows(batch, own) for batch in inserts]).combine_chunks()
    names = count(1)

    def fresh() -> str:
        return str(folder / f"files{next(names)}")

    def sink(kind: str, mode: str, place: str = "path") -> Any:
        return open_sink(kind, mode=mode, **{place: fresh()})

    def to_parquet(table: pa.Table) -> None:
        made = Path(fresh())
        made.mkdir()
        pq.write_table(table, made / "rows.parquet")

    jobs: list[tuple[str, Callable[[], object], Callable[[], object], float | None]] = [
        (
            "Delta: history into a mirror / delta-rs",
            lambda: deliver_history(sink("delta", "mirror"), history),
            lambda: write_deltalake(fresh(), plain),
            0.5,
        ),
        (
            "Delta: changes / delta-rs",
            lambda: deliver_inserts(sink("delta", "changes"), inserts),
            lambda: write_deltalake(fresh(), changes),
            0.5,
        ),
        (
            "Parquet: history as changes / pyarrow",
            lambda: deliver_history(sink("parquet", "changes"), history),
            lambda: to_parquet(changes),
            0.5,
        ),
        (
            "Parquet: changes / pyarrow",
            lambda: deliver_inserts(sink("parquet", "changes"), inserts),
            lambda: to_parquet(changes),
            0.5,
        ),
        (
            "Iceberg: history into a mirror / pyiceberg's append",
            lambda: deliver_history(sink("iceberg", "mirror", "warehouse"), history),
            lambda: _iceberg_append(fresh(), plain),
            None,
        ),
        (
            "Iceberg: changes / pyiceberg's append",
            lambda: deliver_inserts(sink("iceberg", "changes", "warehouse"), inserts),
            lambda: _iceberg_append(fresh(), changes),
            None,
        ),
    ]
    figures = []
    for name, ours, theirs, goal in jobs:
        figures.append(_rate(name, rows, interleaved(turns, ours, theirs), goal))
        for made in folder.glob("files*"):
            shutil.rmtree(made)
    return figures


def _iceberg_append(place: str, rows: pa.Table) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    Path(place).mkdir()
    catalog = SqlCatalog("bench", uri=f"sqlite:///{place}/catalog.db", warehouse=f"file://{place}")
    try:
        catalog.create_namespace("public")
        catalog.create_table("public.orders", rows.schema).append(rows)
    finally:
        catalog.engine.dispose()


def _rate(name: str, rows: pa.Table, seconds: Sequence[float], goal: float | None) -> Figure:
    """:param seconds: ours, and those of the bound."""
    ours, theirs = seconds
    return Figure(name, rows.num_rows / ours, rows.num_rows / theirs, goal, "higher", "rows/s")


class _Timer:
    """Times a part of each job."""

    def __init__(self) -> None:
        self._last = 0.0

    def run(self, job: Callable[[], object]) -> None:
        start = time.perf_counter()
        job()
        self._last = time.perf_counter() - start

    def turns(self, turns: int, *jobs: Callable[[], object]) -> list[float]:
        """The best seconds of what each job timed, in turns."""
        fastest = [float("inf")] * len(jobs)
        for _ in range(turns):
            for place, job in enumerate(jobs):
                job()
                fastest[place] = min(fastest[place], self._last)
        return fastest


def _psql(database: Database, command: str) -> None:
    from tests.servers.binaries import postgres_binaries

    binaries = postgres_binaries(database.server.major)
    environment = dict(os.environ)
    if binaries.libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(binaries.libraries)
    arguments = [binaries.program("psql"), "-qX", "-v", "ON_ERROR_STOP=1", "-d", database.dsn, "-c", command]
    subprocess.run(arguments, check=True, env=environment, stdout=subprocess.DEVNULL)


# -- a pipeline on Spark -----------------------------------------------------------------------------------------------


def commit_to_sink(
    spark: Any, source: Database, target: Database, folder: Path, scale: Scale, floor: float
) -> list[Figure]:
    """From the commit of a transaction to that of the sink that has it, at a steady rate all over the table."""
    table = Orders.load(source, "live", scale.live_rows)
    delivery = Delivery(spark, table, "postgres", folder, dsn=target.dsn)
    with LiveWriter(table, CHANGES_PER_SECOND, folder, span=table.rows) as writer, delivery:
        delivery.wait_for_history()
        delivery.wait_until_live()
        since = time.time()
        time.sleep(scale.live_seconds)
        commits = writer.stop()
        waited = _latencies(target, table, commits, since)
    name = f"commit to Postgres sink, {CHANGES_PER_SECOND} changes/s"
    reached = commits.rate_since(since)
    return [
        Figure("changes/s: reached / wanted", reached, CHANGES_PER_SECOND, None, "higher", "changes/s"),
        Figure(f"{name}, p50 / empty micro-batch", float(np.percentile(waited, 50)), floor, 4.0, "lower", "s"),
        Figure(f"{name}, p99 / empty micro-batch", float(np.percentile(waited, 99)), floor, None, "lower", "s"),
    ]


def _latencies(target: Database, table: Orders, commits: Commits, since: float) -> NDArray[np.float64]:
    """Seconds of each transaction after *since*: the server keeps when the transaction of the sink was committed.

    A row that a later transaction changed once more tells the later one: that is never too short.

    :raises RuntimeError: the sink has not got them all.
    """
    query = (
        f"SELECT max(quantity), extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 FROM {table.full_name} "
        f"WHERE quantity >= {commits.first} GROUP BY xmin"
    )
    end = time.monotonic() + 120
    while True:
        found = sorted((moment, stamp) for stamp, moment in target.execute(query))
        if found and max(stamp for _, stamp in found) >= commits.next_stamp - 1:
            break
        if time.monotonic() > end:
            raise RuntimeError("Some transactions did not come to the sink.")
        time.sleep(0.5)
    times, visible, seen = np.array(commits.times), np.full(len(commits.times), np.inf), 0
    for moment, stamp in found:
        upto = commits.before(stamp)
        visible[seen:upto] = moment
        seen = max(seen, upto)
    waited: NDArray[np.float64] = (visible - times)[times > since]
    return waited


@contextmanager
def spark_session(folder: Path) -> Iterator[Any]:
    """Two tasks side by side."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    config = {
        "spark.driver.memory": "2g",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    spark = session("local[2]", checkpoints=folder, config=config)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def recovery(source: Database, target: Database, folder: Path, rows: int) -> Figure:
    """A process of its own that is killed."""
    started, recovered = start_and_recovery(Orders.load(source, "killed", rows), target, folder / "recovery")
    return Figure("kill -9 to first commit / first start to first commit", recovered, started, None, "lower", "s")


def measure(quick: bool) -> list[Figure]:
    scale = QUICK if quick else FULL
    with (
        progress("sinks"),
        scratch() as folder,
        PostgresServer(settings=SETTINGS) as server,
        server.database() as source,
        server.database() as target,
    ):
        rows = orders(scale.rows)
        figures = [*into_postgres(rows, target, folder, scale.turns), *into_files(rows, folder, scale.turns)]
        with spark_session(folder) as spark:
            floor = micro_batch_floor(spark, folder, scale.floor_batches)
            figures += commit_to_sink(spark, source, target, folder, scale, floor)
        if not quick:
            with server.database() as other:
                figures.append(recovery(source, other, folder, scale.live_rows // 10))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
