"""Snapshot backfill: kept tables, their lookups and their compaction, against pyarrow on the same rows.

The rows are those of ten columns that other benchmarks have. A compaction reads eight sorted runs from disk and writes
one; beside it pyarrow sorts the same rows, which it has in memory, by vnode and key, and writes them as one file of the
same format. A lookup is of one key of a table with a log after its base; what it reads was read before.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from _backfill_table import Orders
from _harness import Figure, interleaved, main, progress, scratch
from _kept_table import KeptOrders
from _servers import PostgresServer
from _sink_rows import TABLE
from _snapshot_capture import beside_capture
from _snapshot_spark import through_spark
from _spark import spark_session
from headwater.stream import vnodes_of
from headwater.versioned.compaction import compact

LOOKUP_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rows: int
    turns: int
    changes: int
    lookups: int
    captured: int
    seconds: float


FULL = Scale(rows=5_000_000, turns=3, changes=20_000, lookups=2000, captured=200_000, seconds=20.0)
QUICK = Scale(rows=400_000, turns=2, changes=5_000, lookups=500, captured=50_000, seconds=3.0)


def lookups(kept: KeptOrders, count: int, changes: int) -> list[Figure]:
    """Keys of which half were changed after the base."""
    table = kept.open()
    keys = kept.rows.column("id").slice(changes // 2, min(changes, 200)).to_pylist()
    asked = [pa.table({"id": [key]}) for key in keys]
    for one in asked:
        assert table.lookup(one).num_rows == 1
    taken: list[float] = []
    for number in range(count):
        start = time.perf_counter()
        table.lookup(asked[number % len(asked)])
        taken.append(time.perf_counter() - start)
    table.close()
    return [
        Figure("lookup of one key, warm, p50 / 1 ms", float(np.median(taken)), LOOKUP_SECONDS, 1.0, "lower", "s"),
        Figure(
            "lookup of one key, warm, p99 / 1 ms", float(np.quantile(taken, 0.99)), LOOKUP_SECONDS, None, "lower", "s"
        ),
    ]


def compaction(kept: KeptOrders, folder: Path, turns: int) -> Figure:
    """Eight runs to one."""
    source = kept.sink.folder(TABLE)
    vnodes = vnodes_of(kept.rows, TABLE.key_columns)
    numbered = kept.rows.append_column("_vnode", vnodes)
    copies: list[Path] = []

    def prepare() -> Path:
        copy = folder / f"copy{len(copies)}"
        shutil.copytree(source.root, copy, copy_function=os.link)
        copies.append(copy)
        return copy

    ready = [prepare() for _ in range(turns)]

    def ours() -> None:
        from headwater.versioned.folder import TableFolder

        assert compact(TableFolder(ready.pop(), TABLE.full_name), everything=True) == 1

    def theirs() -> None:
        path = folder / "sorted.arrow"
        ordered = numbered.sort_by([("_vnode", "ascending"), ("id", "ascending")])
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with path.open("wb") as file, pa.ipc.new_file(file, ordered.schema, options=options) as writer:
            writer.write_table(ordered, max_chunksize=16 * 1024)
            file.flush()
            os.fsync(file.fileno())

    mine, bound = interleaved(turns, ours, theirs)
    rows = kept.rows.num_rows
    return Figure("compaction / pyarrow sorts and writes", rows / mine, rows / bound, 0.3, "higher", "rows/s", turns)


def on_spark(kept: KeptOrders, folder: Path, scale: Scale) -> list[Figure]:
    """Its snapshot through Spark; and what that costs a capture beside it."""
    with spark_session(folder) as spark:
        figures = [through_spark(spark, kept, folder, scale.turns)]
        with PostgresServer() as server, server.database() as database:
            orders = Orders.load(database, "steady", scale.captured)
            return [*figures, beside_capture(spark, kept, orders, folder, scale.seconds, scale.turns)]


def measure(quick: bool) -> list[Figure]:
    scale = QUICK if quick else FULL
    with progress("kept tables"), scratch() as folder:
        kept = KeptOrders.make(folder, scale.rows, scale.changes)
        figures = [compaction(kept, folder, scale.turns), *lookups(kept, scale.lookups, scale.changes)]
        return figures + on_spark(kept, folder, scale)


if __name__ == "__main__":
    main(__doc__, measure)
