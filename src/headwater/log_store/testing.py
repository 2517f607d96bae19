"""Helpers for tests of the log store and of what is built on it: rows to write, a writer and reader to drive."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from headwater.log_store.buffer import MAX_ROWS
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.item import BarrierItem, ChunkItem, LogItem
from headwater.log_store.log import Log
from headwater.log_store.reader import KvLogStoreReader
from headwater.log_store.writer import FlushOptions, KvLogStoreWriter
from headwater.state import StateStore
from headwater.stream import Chunk, Epoch, EpochPair, Op, VnodeBitmap

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
KEY = ("id",)


def epoch(number: int) -> Epoch:
    """A small epoch, for reading tests."""
    return Epoch.from_ms(number)


def random_chunk(
    rng: random.Random, rows: int = 10, vnode_count: int = 256, vnodes: VnodeBitmap | None = None
) -> Chunk:
    """Inserts, deletes and update pairs of random keys; of *vnodes* only, when given."""
    ids: list[int] = []
    ops: list[Op] = []
    while len(ids) < rows:
        key = rng.randrange(1 << 40)
        if rng.random() < 0.3 and len(ids) + 2 <= rows:
            ids += (key, key)
            ops += (Op.UPDATE_DELETE, Op.UPDATE_INSERT)
        else:
            ids.append(key)
            ops.append(rng.choice((Op.INSERT, Op.DELETE)))
    names = [f"name {rng.randrange(1000)}" for _ in ids]
    batch = pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array(names)], schema=SCHEMA)
    chunk = Chunk.build(batch, pa.array([int(op) for op in ops], pa.int8()), KEY, vnode_count)
    return chunk if vnodes is None else chunk.filter_vnodes(vnodes)


def numbered_chunk(first: int, rows: int, vnode_count: int = 256) -> Chunk:
    """Inserts of the keys from *first* on."""
    ids = pa.array(range(first, first + rows), pa.int64())
    batch = pa.RecordBatch.from_arrays([ids, pa.array([f"name {number}" for number in ids])], schema=SCHEMA)
    return Chunk.inserts(batch, KEY, vnode_count)


def rows_of(chunks: Chunk | Sequence[Chunk]) -> list[tuple[int, int, str]]:
    """Rows as sorted tuples (op, id, name): what was delivered, whatever the order between vnodes."""
    found: list[tuple[int, int, str]] = []
    for chunk in [chunks] if isinstance(chunks, Chunk) else chunks:
        columns = (chunk.ops, chunk.rows.column("id"), chunk.rows.column("name"))
        found += zip(*(column.to_pylist() for column in columns), strict=True)
    return sorted(found)


@dataclass
class Instance:
    """One writer with its reader, and the epoch that it writes."""

    factory: KvLogStoreFactory
    log: Log
    reader: KvLogStoreReader
    writer: KvLogStoreWriter

    @classmethod
    def open(
        cls,
        store: StateStore,
        at: int,
        *,
        log_format: int = 2,
        consumer: str = "sink",
        vnodes: VnodeBitmap | None = None,
        factory: KvLogStoreFactory | None = None,
        vnode_count: int = 256,
        max_rows: int = MAX_ROWS,
    ) -> Instance:
        """Begin at epoch number *at*, reader started where it stopped."""
        made = factory or KvLogStoreFactory(store)
        log = made.log("orders", SCHEMA, KEY, log_format, vnode_count)
        reader, writer = made.pair(log, consumer, vnodes, max_rows=max_rows, sleep=lambda seconds: None)
        writer.init(EpochPair(curr=epoch(at), prev=epoch(at - 1)))
        reader.init(timeout=5)
        reader.start_from()
        return cls(made, log, reader, writer)

    def flush(self, following: int, *, checkpoint: bool = True, seal: bool = True, **options: object) -> None:
        """End the current epoch, and seal it when it is a checkpoint."""
        ended = self.writer.epoch
        chosen = FlushOptions(is_checkpoint=checkpoint, **options)  # type: ignore[arg-type]
        self.writer.flush_current_epoch(epoch(following), chosen).finish()
        if checkpoint and seal:
            self.factory.sealer.seal(ended)

    def next(self, timeout: float = 0.0) -> LogItem | None:
        return self.reader.next_item(timeout)

    def next_chunk(self) -> ChunkItem:
        item = self.next(2.0)
        assert isinstance(item, ChunkItem), item
        return item

    def next_barrier(self) -> BarrierItem:
        item = self.next(2.0)
        assert isinstance(item, BarrierItem), item
        return item

    def until_barrier(self) -> tuple[list[Chunk], BarrierItem]:
        """The chunks up to the next barrier, and it."""
        chunks: list[Chunk] = []
        while isinstance(item := self.next(2.0), ChunkItem):
            chunks.append(item.chunk)
        assert isinstance(item, BarrierItem), item
        return chunks, item
