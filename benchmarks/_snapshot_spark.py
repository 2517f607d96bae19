"""A kept table through Spark, beside the same rows as Parquet: both to nowhere, in one session with two tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from _harness import Figure, interleaved
from _kept_table import KeptOrders
from _sink_rows import TABLE
from _spark import to_nowhere
from headwater.versioned.compaction import compact

_GROUP_ROWS = 128 * 1024
_PARTS = 4


def kept_rows(spark: Any, kept: KeptOrders) -> Any:
    """All rows of the table as of its newest epoch."""
    reader = spark.read.format("headwater").option("table", TABLE.full_name).option("store", kept.store)
    return reader.option("tables", str(kept.folder)).option("asOfEpoch", "newest").load()


def through_spark(spark: Any, kept: KeptOrders, folder: Path, turns: int) -> Figure:
    """The snapshot of a table that was compacted, with the log after its base."""
    compact(kept.sink.folder(TABLE), everything=True)
    files = folder / "parquet"
    files.mkdir()
    share = -(-kept.rows.num_rows // _PARTS)
    for part in range(_PARTS):
        piece = kept.rows.slice(part * share, share)
        pq.write_table(piece, files / f"{part}.parquet", row_group_size=_GROUP_ROWS)

    def ours() -> None:
        to_nowhere(kept_rows(spark, kept))

    def theirs() -> None:
        to_nowhere(spark.read.parquet(str(files)))

    ours()
    theirs()
    assert kept_rows(spark, kept).count() == kept.rows.num_rows
    mine, bound = interleaved(turns, ours, theirs)
    rows = kept.rows.num_rows
    name = "snapshot through Spark / Spark reads Parquet"
    return Figure(name, rows / mine, rows / bound, 0.4, "higher", "rows/s", turns)
