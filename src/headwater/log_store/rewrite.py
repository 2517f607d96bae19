"""Rewrites what a sealed epoch holds, inside a seal: its rows and its barrier change together, or not at all.

For migrations and compactions. The epoch is read from a snapshot; what is new goes into the sealer's batch. Chunks of
a large epoch are staged ahead: until the barrier names their format nobody reads them, and a rewrite that starts
again after a crash removes what the one before had staged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pyarrow as pa

from headwater import failpoints
from headwater.log_store import row_codec
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.columns import stored_schema
from headwater.log_store.log import Log
from headwater.log_store.sealer import Sealer
from headwater.log_store.serde import MAX_SEQ, BarrierRecord, LogStoreRowSerde, barrier_key, chunk_key, rows_from
from headwater.state import WriteBatch
from headwater.stream import Epoch

STAGED = failpoints.register("log_store.migrate_staged")

STAGE_BYTES = 64 << 20
"""Chunks of a new format are staged ahead of their seal above this."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What came of one barrier's rows."""

    epoch: Epoch
    rows_before: int
    rows: int
    bytes_before: int
    bytes: int


def rewrite_epoch(
    sealer: Sealer,
    log: Log,
    epoch: Epoch,
    writer: int,
    record: BarrierRecord,
    batches: Iterable[pa.RecordBatch],
    log_format: int,
    *,
    compacted: bool = False,
    compression: Compression = Compression.NONE,
    stage_bytes: int = STAGE_BYTES,
) -> Rewritten:
    """Put *batches* in the place of what *writer* wrote in *epoch*, in *log_format*.

    Only a change of format may be staged: while the barrier says the old format, the new one is not looked at.
    """
    serde = LogStoreRowSerde(log, log_format, compression)
    ahead = WriteBatch()
    _forget(ahead, log, epoch, writer, record, log_format)
    rows = size = chunks = waiting = 0
    for batch in batches:
        items = serde.encode_batch(epoch, writer, batch, _schema_version(log, record, batch))
        ahead.put_many(items)
        added = sum(len(value) for _, value in items)
        rows, size, chunks, waiting = rows + batch.num_rows, size + added, chunks + len(items), waiting + added
        if waiting > stage_bytes and log_format != record.format:
            sealer.store.stage(ahead)
            failpoints.hit(STAGED)
            ahead, waiting = WriteBatch(), 0
    if log_format != record.format:
        _forget(ahead, log, epoch, writer, record, record.format)
    new = replace(
        record, rows=rows, size=size, chunks=chunks, format=log_format, compacted=record.compacted or compacted
    )
    ahead.put(barrier_key(log.number, epoch, writer), new.to_bytes())
    sealer.batch.extend(ahead)
    return Rewritten(epoch, record.rows, rows, record.size, size)


def _schema_version(log: Log, record: BarrierRecord, batch: pa.RecordBatch) -> int:
    """The version of the columns that *batch* has: where they changed inside the epoch, not all have the record's."""
    versions = range(record.schema_version, (record.first_schema_version or record.schema_version) - 1, -1)
    return next(version for version in versions if stored_schema(log.schema_of(version)).equals(batch.schema))


def _forget(batch: WriteBatch, log: Log, epoch: Epoch, writer: int, record: BarrierRecord, log_format: int) -> None:
    number = log.number
    if log_format == row_codec.FORMAT:
        for vnode in record.vnodes:
            batch.delete_range(rows_from(number, vnode, epoch), rows_from(number, vnode, epoch + 1))
    else:
        low = chunk_key(number, epoch, writer, 0)
        batch.delete_range(low, chunk_key(number, epoch, writer, MAX_SEQ) + b"\0")
