"""The key-value log store: a table's changes, durable, replayed from the right place, forgotten after delivery.

The process that captures makes logs and writes them (:class:`KvLogStoreFactory`, :class:`KvLogStoreWriter`); any other
reads sealed ranges (:func:`read_range`, :class:`LogView`), or is a consumer with progress of its own
(:class:`LogConsumer`).

>>> import pyarrow as pa
>>> from headwater.log_store import KvLogStoreFactory, read_range
>>> from headwater.state import open_writer
>>> from headwater.stream import Chunk, Epoch, EpochPair
>>> store = open_writer("memory://log_store_example")
>>> factory = KvLogStoreFactory(store)
>>> log = factory.log("orders", pa.schema([("id", pa.int64())]), ("id",))
>>> writer = factory.writer(log)
>>> first, second = Epoch.from_ms(1), Epoch.from_ms(2)
>>> writer.init(EpochPair(curr=first, prev=Epoch(0)))
>>> writer.write_chunk(Chunk.inserts(pa.record_batch({"id": [7]}), ("id",)))
>>> writer.flush_current_epoch(second).finish()
>>> factory.sealer.seal(first)
>>> [batch.column("id").to_pylist() for batch in read_range(store.location, "orders", 0, first)]
[[7]]
"""

from __future__ import annotations

from headwater.log_store.buffer import BufferStatistics, LogStoreBuffer
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.errors import (
    DrainTimeout,
    EpochGone,
    ForeignSchema,
    ForeignVnode,
    InvalidOffset,
    LogClosed,
    LogCorrupt,
    LogNotFound,
    LogStoreError,
    ProgressConflict,
    RetentionMiss,
    RetentionRefused,
    UnknownVersion,
    VnodesMoved,
    WrongCall,
)
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.group import ConsumerGroup
from headwater.log_store.item import BarrierItem, ChunkItem, LogItem
from headwater.log_store.log import Log
from headwater.log_store.log_view import EpochEnd, LogView, read_range
from headwater.log_store.offset import LogOffset, StoragePlace
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.log_store.reader import KvLogStoreReader
from headwater.log_store.remote import LogConsumer
from headwater.log_store.serde import LogStoreRowSerde
from headwater.log_store.state import LogStoreState
from headwater.log_store.writer import FlushOptions, KvLogStoreWriter

__all__ = [
    "BarrierItem",
    "BufferStatistics",
    "ChunkItem",
    "Compression",
    "ConsumerGroup",
    "DrainTimeout",
    "EpochEnd",
    "EpochGone",
    "FlushOptions",
    "ForeignSchema",
    "ForeignVnode",
    "InvalidOffset",
    "KvLogStoreFactory",
    "KvLogStoreReader",
    "KvLogStoreWriter",
    "Log",
    "LogClosed",
    "LogConsumer",
    "LogCorrupt",
    "LogItem",
    "LogNotFound",
    "LogOffset",
    "LogStoreBuffer",
    "LogStoreError",
    "LogStoreRowSerde",
    "LogStoreState",
    "LogStoreVnodeProgress",
    "LogView",
    "ProgressConflict",
    "RetentionMiss",
    "RetentionRefused",
    "StoragePlace",
    "UnknownVersion",
    "VnodesMoved",
    "WrongCall",
    "read_range",
]
