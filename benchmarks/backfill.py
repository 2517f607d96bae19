"""Backfill: a table of Postgres through Spark, against two ``psql`` that copy it to nowhere, and Spark's JDBC reader.

The table is the ten-column one of change capture. All connections are TCP on one machine, with two Spark tasks, and all
read the same ten columns; by default ours adds four, which is measured separately. The start is a separate figure and
no part of a rate: the rate of a pipeline is that between its first and its last visible batch; the rate of a reader is
that of the rows which a large table has more than a small one. The bounds are measured in turns with the values. The
other figures are of a pipeline into a Delta mirror: its rate, the memory of its processes, the log that the server
keeps for it while the table is being changed, and the time from a commit to the mirror at a thousand changes per
second, beside a Spark job that does nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from deltalake import DeltaTable, write_deltalake
from numpy.typing import NDArray

from _backfill_delivery import Delivery, forget_slot, watched_slot
from _backfill_floor import job_floor
from _backfill_latency import Touched, latencies, touched_files
from _backfill_memory import CAPTURE, WORKER, PeakMemory
from _backfill_table import Orders
from _backfill_writer import FIRST_STAMP, LiveWriter
from _harness import Figure, Speed, main, progress, scratch, seconds_of
from _servers import PostgresServer
from _spark import spark_session, to_nowhere

SETTINGS = {
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "synchronous_commit": "off",
    "shared_buffers": "1GB",
    "max_replication_slots": "20",
}
CHANGES_PER_SECOND = 1000
HELD_BYTES = 256e6
RECENT_ROWS = 10_000
FEW_ROWS = 10_000
FEW_TURNS = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    :ivar small: rows of the table for warming up. :ivar large: rows of a table that shows, beside *small*, whether the
        cost of a row grows with the table; ``None`` leaves that out, and the mirror of a table at rest.
    """

    rows: int
    turns: int
    small: int
    large: int | None
    live_seconds: float
    floor_batches: int
    spans: int = 2


FULL = Scale(rows=5_000_000, turns=3, small=1_000_000, large=10_000_000, live_seconds=60.0, floor_batches=70)
QUICK = Scale(rows=600_000, turns=1, small=100_000, large=None, live_seconds=3.0, floor_batches=10, spans=1)


class Bench:
    """A table, a session, and the ways from one to the other."""

    def __init__(self, spark: Any, orders: Orders, folder: Path) -> None:
        self.spark, self.orders, self.folder = spark, orders, folder
        folder.mkdir()
        self._streams = count(1)

    def copy(self) -> float:
        """Two ``\\copy`` to nowhere."""
        return seconds_of(self.orders.copy_halves)

    def typed(self) -> float:
        """Our data source, a batch of the table's own columns, to nowhere."""
        return seconds_of(lambda: to_nowhere(self._headwater(self.spark.read).option("columns", "*").load()))

    def typed_with_ours(self) -> float:
        """The same with the columns that we add."""
        return seconds_of(lambda: to_nowhere(self._headwater(self.spark.read).load()))

    def typed_stream(self) -> Speed:
        """Our data source, a stream that ends when all is delivered, to nowhere."""
        name = f"{self.orders.name}{next(self._streams)}"
        folder = self.folder / name
        reader = self._headwater(self.spark.readStream).option("columns", "*").option("store", str(folder / "store"))
        began = time.time()
        rows = reader.option("slot", name).option("publication", name).load()
        writer = rows.writeStream.format("noop").option("checkpointLocation", str(folder / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        batches = [(_end_of(batch), batch["numInputRows"]) for batch in query.recentProgress]
        forget_slot(self.orders, name)
        return Speed.of_batches(began, [(moment, rows) for moment, rows in batches if rows])

    def jdbc(self) -> float:
        """Spark's own reader, two partitions, to nowhere."""
        return seconds_of(lambda: to_nowhere(self._jdbc()))

    def jdbc_to_parquet(self) -> float:
        """The same, to Parquet."""
        target = str(self.folder / "jdbc")
        return seconds_of(lambda: self._jdbc().write.mode("overwrite").parquet(target))

    def warm_up(self) -> None:
        """Read once each way, so that no figure has the cost of the first time.

        :raises RuntimeError: rows are missing.
        """
        rows = self._headwater(self.spark.read).load().count()
        if rows != self.orders.rows:
            raise RuntimeError(f"{rows} rows were read, not {self.orders.rows}.")
        self.typed()
        self.jdbc()
        self.jdbc_to_parquet()

    def deliver(self, kind: str) -> tuple[Speed, Path]:
        """A pipeline from its start until all rows are visible; and its sink."""
        with Delivery(self.spark, self.orders, kind, self.folder) as delivery:
            return delivery.wait_for_rows(), delivery.target

    def _headwater(self, reader: Any) -> Any:
        named = reader.format("headwater").option("source", self.orders.database.dsn)
        return named.option("table", self.orders.full_name)

    def _jdbc(self) -> Any:
        server = self.orders.database.server
        options = {
            "url": f"jdbc:postgresql://127.0.0.1:{server.port}/{self.orders.database.name}",
            "user": "postgres",
            "password": server.password,
            "driver": "org.postgresql.Driver",
            "dbtable": self.orders.full_name,
            "partitionColumn": "id",
            "lowerBound": "1",
            "upperBound": str(self.orders.rows),
            "numPartitions": "2",
            "fetchsize": "10000",
        }
        return self.spark.read.format("jdbc").options(**options).load()


# Spark ends Python workers that were idle for a minute: the first read of ours in a turn starts them
READERS: dict[str, Callable[[Bench], float]] = {
    "copy": Bench.copy,
    "typed with ours": Bench.typed_with_ours,
    "typed": Bench.typed,
    "jdbc": Bench.jdbc,
    "jdbc to parquet": Bench.jdbc_to_parquet,
}


def _end_of(batch: Any) -> float:
    """When a batch of Spark ended, in seconds since 1970."""
    start = datetime.fromisoformat(batch["timestamp"]).timestamp()
    return float(start + batch["durationMs"]["triggerExecution"] / 1000)


# -- the figures -------------------------------------------------------------------------------------------------------


def readers(few: Bench, bench: Bench, turns: int) -> tuple[list[Figure], float]:
    """Snapshots to nowhere and to Parquet. :returns: the figures, and the rows per second of the copies."""
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in READERS}
    streamed: list[Speed] = []
    delivered: list[Speed] = []
    for _ in range(turns):
        for name, read in READERS.items():
            seconds[name][0].append(min(read(few) for _ in range(FEW_TURNS)))
            seconds[name][1].append(read(bench))
        streamed.append(bench.typed_stream())
        speed, target = bench.deliver("parquet")
        delivered.append(speed)
        shutil.rmtree(target)
    speeds = {
        name: Speed.of_sizes((few.orders.rows, min(of_few)), (bench.orders.rows, min(of_many)))
        for name, (of_few, of_many) in seconds.items()
    }
    speeds["stream"], speeds["pipeline"] = Speed.best(streamed), Speed.best(delivered)

    def rate(name: str, value: str, bound: str, goal: float | None) -> Figure:
        return Figure(name, speeds[value].rate, speeds[bound].rate, goal, "higher", "rows/s", turns)

    def start(name: str, value: str, bound: str) -> Figure:
        return Figure(name, speeds[value].start, speeds[bound].start, None, "lower", "s", turns)

    copies, jdbc, rows = "two \\copy to /dev/null", "Spark's JDBC reader", f"{few.orders.rows:,} rows"
    typed, stream = "snapshot, typed, to noop", "snapshot as a stream, typed, to noop"
    pipeline = "pipeline to Parquet"
    figures = [
        rate(f"{typed}, after the start / {copies}", "typed", "copy", 0.5),
        rate(f"{typed}, after the start / {jdbc} to noop", "typed", "jdbc", 1.0),
        rate(f"{typed}, with the four columns that we add / {copies}", "typed with ours", "copy", None),
        rate(f"{typed}, with the four columns that we add / {jdbc} without them", "typed with ours", "jdbc", None),
        start(f"{typed}: start, {rows} / {jdbc}", "typed", "jdbc"),
        rate(f"{stream}, first to last batch / {copies}", "stream", "copy", None),
        start(f"{stream}: start to first batch / {jdbc}, {rows}", "stream", "jdbc"),
        rate(f"{pipeline}, first to last visible batch / {copies}", "pipeline", "copy", 0.5),
        rate(f"{pipeline}, first to last visible batch / {jdbc} to Parquet", "pipeline", "jdbc to parquet", 1.0),
        start(f"{pipeline}: start to first visible batch / {jdbc} to Parquet, {rows}", "pipeline", "jdbc to parquet"),
    ]
    return figures, speeds["copy"].rate


def mirror(bench: Bench, turns: int, copied: float) -> list[Figure]:
    """A backfill into a Delta mirror of a table at rest. :param copied: rows per second of the copies."""
    delivered: list[Speed] = []
    written: list[float] = []
    for turn in range(turns):
        speed, target = bench.deliver("delta")
        delivered.append(speed)
        rows = DeltaTable(target / bench.orders.full_name).to_pyarrow_table()
        if rows.num_rows != bench.orders.rows:
            raise RuntimeError(f"The mirror has {rows.num_rows} rows, not {bench.orders.rows}.")
        written.append(seconds_of(lambda rows=rows, turn=turn: write_deltalake(bench.folder / f"rows{turn}", rows)))  # type: ignore[misc]
        shutil.rmtree(target)
        shutil.rmtree(bench.folder / f"rows{turn}")
    rate, bound = Speed.best(delivered).rate, bench.orders.rows / min(written)
    name = "source to Delta mirror, first to last visible batch"
    return [
        Figure(f"{name} / two \\copy to /dev/null", rate, copied, None, "higher", "rows/s", turns),
        Figure(
            f"{name} / delta-rs that writes the same rows from memory", rate, bound, None, "higher", "rows/s", turns
        ),
    ]


def under_writes(bench: Bench, scale: Scale, floor: Floor) -> list[Figure]:
    """A backfill, and what follows it, while the table is being changed: first all over, then only its last rows."""
    orders, rate, first = bench.orders, CHANGES_PER_SECOND, FIRST_STAMP
    delivery = Delivery(bench.spark, orders, "delta", bench.folder)
    mirror = delivery.target / orders.full_name
    spans = (("all over the table", orders.rows), (f"to its last {RECENT_ROWS} rows", RECENT_ROWS))[: scale.spans]
    followed: list[tuple[str, Live]] = []
    with PeakMemory() as memory, watched_slot(orders, delivery.name) as held, ExitStack() as running:
        for where, span in spans:
            with LiveWriter(orders, rate, bench.folder, span=span, first=first) as writer:
                if not followed:
                    running.enter_context(delivery)
                    delivery.wait_for_history()
                    most_held = held[0]
                followed.append((where, _follow(delivery, writer, mirror, scale.live_seconds)))
                first = followed[-1][1].next_stamp

    def lower(name: str, value: float, bound: float, goal: float | None, unit: str, runs: int = 1) -> Figure:
        return Figure(name, value, bound, goal, "lower", unit, runs)

    figures = [lower("log that the server kept during a backfill / 256 MB", most_held, HELD_BYTES, 1.0, "B")]
    for where, live in followed:
        name = f"commit to mirror, {rate} changes/s {where}"
        figures += [
            Figure(f"changes/s {where}: reached / wanted", live.rate, rate, None, "higher", "changes/s"),
            *(
                lower(f"{name}, p{part} / empty Spark job", live.p(part), floor.seconds, None, "s", scale.turns)
                for part in (50, 99)
            ),
            Figure(
                f"files touched per batch, {rate} changes/s {where} / all files",
                live.touched.per_version,
                live.touched.files,
                None,
                "higher",
                "files",
            ),
        ]
    return [
        *figures,
        lower("memory of the capture / 300 MB", memory.of(CAPTURE), 300e6, None, "B"),
        lower("memory of a worker / of one that does nothing", memory.of(WORKER), floor.worker, None, "B"),
    ]


@dataclass(frozen=True, slots=True)
class Live:
    """How a mirror followed: seconds from commit to mirror of each transaction, changes per second, files touched."""

    waited: NDArray[np.float64]
    rate: float
    next_stamp: int
    touched: Touched

    def p(self, part: int) -> float:
        return float(np.percentile(self.waited, part))


def _follow(delivery: Delivery, writer: LiveWriter, mirror: Path, seconds: float) -> Live:
    delivery.wait_until_live()
    since = time.time()
    time.sleep(seconds)
    commits = writer.stop()
    waited = latencies(mirror, commits, since)
    return Live(waited, commits.rate_since(since), commits.next_stamp, touched_files(mirror, since))


def growth(small: Bench, large: Bench, turns: int) -> Figure:
    """Seconds per row of a large table to those of a small one, after the first batch."""
    speeds: tuple[list[Speed], list[Speed]] = ([], [])
    for _ in range(turns):
        for bench, taken in zip((small, large), speeds, strict=True):
            speed, target = bench.deliver("delta")
            taken.append(speed)
            shutil.rmtree(target)
    of_small, of_large = (1 / Speed.best(taken).rate for taken in speeds)
    name = f"cost per row of {large.orders.rows:,} rows / of {small.orders.rows:,}"
    return Figure(name, of_large, of_small, 1.15, "lower", "s", turns)


@dataclass(frozen=True, slots=True)
class Floor:
    """What a Spark job costs that does nothing: its seconds, and the bytes of its worker."""

    seconds: float
    worker: int


def empty_jobs(spark: Any, scale: Scale) -> Floor:
    with PeakMemory() as memory:
        seconds = job_floor(spark, scale.floor_batches, scale.turns)
    return Floor(seconds, memory.of(WORKER))


def measure(quick: bool) -> list[Figure]:
    scale = QUICK if quick else FULL
    with (
        progress("backfill from a real Postgres"),
        scratch() as folder,
        PostgresServer(settings=SETTINGS) as server,
        server.database() as database,
        spark_session(folder, jdbc="postgres") as spark,
    ):
        floor = empty_jobs(spark, scale)

        def table(name: str, rows: int) -> Bench:
            return Bench(spark, Orders.load(database, name, rows), folder / name)

        few, small, bench = table("few", FEW_ROWS), table("small", scale.small), table("orders", scale.rows)
        small.warm_up()
        figures, copied = readers(few, bench, scale.turns)
        if scale.large is not None:
            figures += mirror(bench, scale.turns, copied)
            large = table("large", scale.large)
            figures.append(growth(small, large, scale.turns))
            database.execute(f"DROP TABLE {large.orders.name}")
        figures += under_writes(bench, scale, floor)
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
