"""A store whose log a stream writes: a delivery loop over it needs no database."""

from __future__ import annotations

import pyarrow as pa

from headwater.backfill.query import QueryOptions
from headwater.capture.stream_log import StreamTable, write_batch
from headwater.capture.stream_records import StreamBatch
from headwater.log_store.columns import OP
from headwater.sources.table import SourceColumn

TABLE = StreamTable("main", "t", (SourceColumn("id", pa.int64(), "bigint", 0),), ("id",))


def write(location: str, number: int) -> int:
    """One epoch of ten rows, from ``10 * number`` on."""
    ids = pa.array(range(10 * number, 10 * number + 10), pa.int64())
    rows = pa.record_batch([ids, pa.array([1] * 10, pa.int8())], names=["id", OP])
    epoch = write_batch(location, TABLE, StreamBatch("q", "run", number), lambda: [rows])
    assert epoch is not None
    return epoch


def options(location: str, max_epochs: int = 1) -> QueryOptions:
    """Of a query over its changes."""
    return QueryOptions(location, "", "mirror", ("main.t",), history=False, max_epochs=max_epochs)
