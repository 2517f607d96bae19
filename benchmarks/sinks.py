"""Sinks: rows into Postgres, MySQL, Kafka, Delta, Parquet and Iceberg, against the tools that load the same rows there.

The rows are those of ten columns that other benchmarks have, in memory, one batch, staged by one task and committed.
The bounds are measured in turns with the values. Then a pipeline on Spark from Postgres to Postgres: the time from a
commit to the transaction of the sink that has it, beside a Spark job that does nothing, and from ``kill -9`` to the
first commit after it (not with ``--quick``: it starts Spark twice more).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

from _backfill_delivery import Delivery
from _backfill_floor import job_floor
from _backfill_latency import sql_latencies
from _backfill_table import Orders
from _backfill_writer import LiveWriter
from _harness import Figure, interleaved, main, progress, scratch
from _servers import Database, PostgresServer
from _sink_recovery import start_and_recovery
from _sink_rows import TABLE, as_inserts, deliver_history, deliver_inserts, orders
from _sink_servers import into_kafka, into_mysql, into_postgres
from _spark import spark_session
from headwater.sinks.change_rows import change_rows
from headwater.sinks.open import open_sink
from headwater.sinks.types import conform, sink_schema

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


FULL = Scale(rows=1_000_000, turns=3, live_rows=1_000_000, live_seconds=60.0, floor_batches=70)
QUICK = Scale(rows=100_000, turns=1, live_rows=50_000, live_seconds=3.0, floor_batches=10)


# -- rows in memory ----------------------------------------------------------------------------------------------------


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
        mine, bound = interleaved(turns, ours, theirs)
        rate = rows.num_rows / mine, rows.num_rows / bound
        figures.append(Figure(name, *rate, goal, "higher", "rows/s", turns))
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
        waited = sql_latencies(target, table.full_name, commits, since)
    name = f"commit to Postgres sink, {CHANGES_PER_SECOND} changes/s"
    reached = commits.rate_since(since)
    return [
        Figure("changes/s: reached / wanted", reached, CHANGES_PER_SECOND, None, "higher", "changes/s"),
        *(
            Figure(
                f"{name}, p{part} / empty Spark job",
                float(np.percentile(waited, part)),
                floor,
                None,
                "lower",
                "s",
                scale.turns,
            )
            for part in (50, 99)
        ),
    ]


def recovery(source: Database, target: Database, folder: Path, rows: int) -> Figure:
    """A separate process that is killed and started again."""
    started, recovered = start_and_recovery(Orders.load(source, "killed", rows), target, folder / "recovery")
    return Figure("kill -9 to first commit / first start to first commit", recovered, started, None, "lower", "s", 1)


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
        figures = [
            into_postgres(rows, target, folder, scale.turns),
            into_mysql(rows, folder, scale.turns),
            into_kafka(rows, folder, scale.turns),
            *into_files(rows, folder, scale.turns),
        ]
        with spark_session(folder) as spark:
            floor = job_floor(spark, scale.floor_batches, scale.turns)
            figures += commit_to_sink(spark, source, target, folder, scale, floor)
        if not quick:
            with server.database() as other:
                figures.append(recovery(source, other, folder, scale.live_rows // 10))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
