"""Backfill: a table of Postgres through Spark, against two ``psql`` that copy it to nowhere, and Spark's JDBC reader.

The table is the ten-column one of change capture. Everything goes by TCP on one machine, with two Spark tasks, and all
read the same ten columns; by default ours adds four, which is measured beside. The
bounds are measured in turns with the values. The rest of the figures is of a pipeline into a Delta mirror: its rate,
the memory of its processes, the log that the server keeps for it while the table is being changed, and the time from
a commit to the mirror at a thousand changes per second, beside a micro-batch that does nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from numpy.typing import NDArray

from _backfill_delivery import Delivery, forget_slot, watched_slot
from _backfill_floor import micro_batch_floor
from _backfill_latency import latencies
from _backfill_memory import CAPTURE, PLANNER, WORKER, PeakMemory
from _backfill_table import Orders
from _backfill_writer import FIRST_STAMP, LiveWriter
from _harness import Figure, best_of, main, progress, scratch
from _servers import PostgresServer
from headwater.sinks.parquet import committed_files
from headwater.spark.session import session

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
JDBC = Path(__file__).parents[1] / "scripts" / "install_jdbc.sh"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; *small* and *large* are the tables between which the cost may grow with the rows alone.

    Without *large* that is left out, and what takes another pipeline: of few rows, what a start costs is most.
    """

    rows: int
    turns: int
    small: int
    large: int | None
    live_seconds: float
    floor_batches: int
    spans: int = 2


FULL = Scale(rows=5_000_000, turns=3, small=1_000_000, large=10_000_000, live_seconds=60.0, floor_batches=200)
QUICK = Scale(rows=1_000_000, turns=1, small=100_000, large=None, live_seconds=3.0, floor_batches=10, spans=1)


class Bench:
    """A table, a session, and the ways from one to the other."""

    def __init__(self, spark: Any, orders: Orders, folder: Path) -> None:
        self.spark, self.orders, self.folder = spark, orders, folder
        folder.mkdir()
        self._streams = count(1)

    def typed(self) -> None:
        """Our data source, a batch of the table's own columns, to nowhere."""
        _to_nowhere(self._headwater(self.spark.read).option("columns", "*").load())

    def typed_with_ours(self) -> None:
        """The same with the columns that we add."""
        _to_nowhere(self._headwater(self.spark.read).load())

    def warm_up(self, *, delivers: bool) -> None:
        """Read once each way, so that nobody pays for the first time; and all rows are there."""
        found = self._headwater(self.spark.read).load().count()
        if found != self.orders.rows:
            raise RuntimeError(f"{found} rows were read, not {self.orders.rows}.")
        self.typed()
        self.jdbc()
        self.jdbc(self.folder / "jdbc")
        if delivers:
            self.deliver("parquet")

    def typed_stream(self) -> float:
        """Our data source, a stream that ends when all is delivered, to nowhere; the seconds until it has ended."""
        name = f"typed{next(self._streams)}"
        place = self.folder / name
        reader = self._headwater(self.spark.readStream).option("columns", "*").option("store", str(place / "store"))
        start = time.perf_counter()
        rows = reader.option("slot", name).option("publication", name).load()
        writer = rows.writeStream.format("noop").option("checkpointLocation", str(place / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
        seconds = time.perf_counter() - start
        forget_slot(self.orders, name)
        return seconds

    def jdbc(self, target: Path | None = None) -> None:
        """Spark's own reader, two partitions, to nowhere or to Parquet."""
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
        rows = self.spark.read.format("jdbc").options(**options).load()
        if target is None:
            _to_nowhere(rows)
        else:
            rows.write.mode("overwrite").parquet(str(target))

    def deliver(self, kind: str) -> Delivered:
        """A pipeline from its start to the end of the history."""
        with Delivery(self.spark, self.orders, kind, self.folder) as delivery:
            return Delivered(delivery.wait_for_history(), delivery.history_seconds(), delivery.target)

    def _headwater(self, reader: Any) -> Any:
        named = reader.format("headwater").option("source", self.orders.database.dsn)
        return named.option("table", self.orders.full_name)


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a pipeline took: from the start of its query to the end of its last batch with history, and those alone."""

    seconds: float
    batches: float
    target: Path


def _to_nowhere(rows: Any) -> None:
    rows.write.format("noop").mode("overwrite").save()


# -- the figures -------------------------------------------------------------------------------------------------------


def readers(bench: Bench, turns: int) -> tuple[list[Figure], float]:
    """Snapshots to nowhere and to Parquet; the second is the seconds of the copies."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    spark_parquet = bench.folder / "jdbc"
    for _ in range(turns):
        seconds["copy"].append(best_of(1, bench.orders.copy_halves))
        # Spark ends Python workers that were idle for a minute: the first of these starts them
        seconds["typed with ours"].append(best_of(1, bench.typed_with_ours))
        seconds["typed"].append(best_of(1, bench.typed))
        seconds["stream"].append(bench.typed_stream())
        seconds["jdbc"].append(best_of(1, bench.jdbc))
        delivered = bench.deliver("parquet")
        seconds["parquet"].append(delivered.seconds)
        _check_rows(delivered.target, bench.orders)
        shutil.rmtree(delivered.target)
        seconds["jdbc to parquet"].append(best_of(1, lambda: bench.jdbc(spark_parquet)))
    rate = {name: bench.orders.rows / min(taken) for name, taken in seconds.items()}

    def figure(name: str, value: str, bound: str, goal: float | None) -> Figure:
        return Figure(name, rate[value], rate[bound], goal, "higher", "rows/s")

    copies = "two \\copy to /dev/null"
    made = [
        figure(f"snapshot, typed, to noop / {copies}", "typed", "copy", 0.5),
        figure("the same / Spark's JDBC reader to noop", "typed", "jdbc", 1.0),
        figure(
            f"the same with the four columns that we add, by new workers / {copies}", "typed with ours", "copy", None
        ),
        figure("the same / Spark's JDBC reader to noop, which has not got them", "typed with ours", "jdbc", None),
        figure(f"the table's own columns as a stream, from its start to its end / {copies}", "stream", "copy", None),
        figure(f"snapshot by the query of a pipeline to Parquet / {copies}", "parquet", "copy", 0.5),
        figure("the same / Spark's JDBC reader to Parquet", "parquet", "jdbc to parquet", 1.0),
    ]
    return made, min(seconds["copy"])


def _check_rows(folder: Path, orders: Orders) -> None:
    found = sum(pq.read_metadata(file).num_rows for file in committed_files(folder / orders.full_name))
    if found != orders.rows:
        raise RuntimeError(f"{found} rows were delivered, not {orders.rows}.")


def mirror(bench: Bench, copy_seconds: float) -> list[Figure]:
    """A backfill into a Delta mirror, with nobody writing."""
    delivered = bench.deliver("delta")
    rows = DeltaTable(delivered.target / bench.orders.full_name).to_pyarrow_table()
    if rows.num_rows != bench.orders.rows:
        raise RuntimeError(f"The mirror has {rows.num_rows} rows, not {bench.orders.rows}.")
    written = best_of(1, lambda: write_deltalake(bench.folder / "rows", rows))
    count = bench.orders.rows
    name = "source to Delta mirror"
    return [
        Figure(f"{name} / two \\copy", count / delivered.seconds, count / copy_seconds, None, "higher", "rows/s"),
        Figure(
            f"{name} / delta-rs that writes the same rows from memory",
            count / delivered.seconds,
            count / written,
            None,
            "higher",
            "rows/s",
        ),
    ]


def under_writes(bench: Bench, scale: Scale, floor: Floor) -> list[Figure]:
    """A backfill, and what follows it, while the table is being changed: first all over, then its last rows alone."""
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

    def lower(name: str, value: float, bound: float, goal: float | None, unit: str) -> Figure:
        return Figure(name, value, bound, goal, "lower", unit)

    figures = [lower("log that the server kept during a backfill / 256 MB", most_held, HELD_BYTES, 1.0, "B")]
    for where, live in followed:
        name = f"commit to mirror, {rate} changes/s {where}"
        figures += [
            Figure(f"changes/s {where}: reached / wanted", live.rate, rate, None, "higher", "changes/s"),
            *(
                lower(f"{name}, p{part} / empty micro-batch", live.p(part), floor.seconds, None, "s")
                for part in (50, 99)
            ),
        ]
    return [
        *figures,
        lower("memory of the capture / 300 MB", memory.of(CAPTURE), 300e6, None, "B"),
        lower("memory of the planner / of one that plans nothing", memory.of(PLANNER), floor.planner, None, "B"),
        lower("memory of a worker / of one that does nothing", memory.of(WORKER), floor.worker, None, "B"),
    ]


@dataclass(frozen=True, slots=True)
class Live:
    """How a mirror followed: seconds from commit to mirror of each transaction, and changes per second."""

    waited: NDArray[np.float64]
    rate: float
    next_stamp: int

    def p(self, part: int) -> float:
        return float(np.percentile(self.waited, part))


def _follow(delivery: Delivery, writer: LiveWriter, mirror: Path, seconds: float) -> Live:
    delivery.wait_until_live()
    since = time.time()
    time.sleep(seconds)
    commits = writer.stop()
    return Live(latencies(mirror, commits, since), commits.rate_since(since), commits.next_stamp)


def growth(small: Bench, large: Bench, turns: int) -> Figure:
    """Seconds per row of a large table to those of a small one."""

    def seconds(bench: Bench) -> float:
        return min(bench.deliver("delta").batches for _ in range(turns)) / bench.orders.rows

    name = f"cost per row of {large.orders.rows:,} rows / of {small.orders.rows:,}"
    return Figure(name, seconds(large), seconds(small), 1.15, "lower", "s")


@dataclass(frozen=True, slots=True)
class Floor:
    """What a micro-batch costs that does nothing: its median seconds, the bytes of its processes."""

    seconds: float
    planner: int
    worker: int


def empty_batches(spark: Any, folder: Path, batches: int) -> Floor:
    with PeakMemory() as memory:
        median = micro_batch_floor(spark, folder, batches)
    return Floor(median, memory.of(PLANNER), memory.of(WORKER))


@contextmanager
def spark_session(folder: Path) -> Iterator[Any]:
    """Two tasks side by side, and Postgres' JDBC driver."""
    jar = subprocess.run(["sh", str(JDBC)], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    config = {
        "spark.jars": jar,
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


def measure(quick: bool) -> list[Figure]:
    scale = QUICK if quick else FULL
    with (
        progress("backfill from a real Postgres"),
        scratch() as folder,
        PostgresServer(settings=SETTINGS) as server,
        server.database() as database,
        spark_session(folder) as spark,
    ):
        floor = empty_batches(spark, folder, scale.floor_batches)
        small, bench = (
            Bench(spark, Orders.load(database, name, rows), folder / name)
            for name, rows in (("few_orders", scale.small), ("orders", scale.rows))
        )
        small.warm_up(delivers=scale.large is not None)
        figures, copy_seconds = readers(bench, scale.turns)
        if scale.large is not None:
            figures += mirror(bench, copy_seconds)
            many = Bench(spark, Orders.load(database, "many_orders", scale.large), folder / "many_orders")
            figures.append(growth(small, many, scale.turns - 1))
            database.execute(f"DROP TABLE {many.orders.name}")
        figures += under_writes(bench, scale, floor)
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
