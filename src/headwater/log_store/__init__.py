"""The key-value log store: a table's changes, durable, read in sealed ranges, forgotten after delivery.

The process that captures makes logs and writes them (:class:`KvLogStoreFactory`, :class:`KvLogStoreWriter`). A query
reads those of its tables (:class:`KvLogStoreReader`) and says what it has delivered; any process may look at sealed
ranges (:func:`read_range`, :class:`LogView`).

>>> import pyarrow as pa
>>> from headwater.log_store import KvLogStoreFactory, read_range
>>> from headwater.state import open_writer
>>> from headwater.stream import Chunk, Epoch, EpochPair
>>> store = open_writer("memory://log_store_example")
>>> factory = KvLogStoreFactory(store)
>>> writer = factory.writer(factory.log("orders", pa.schema([("id", pa.int64())]), ("id",)))
>>> first, second = Epoch.from_ms(1), Epoch.from_ms(2)
>>> writer.init(EpochPair(curr=first, prev=Epoch(0)))
>>> writer.write_chunk(Chunk.inserts(pa.record_batch({"id": [7]}), ("id",)))
>>> writer.end_epoch(second)
>>> factory.sealer.seal(first)
>>> [batch.column("id").to_pylist() for batch in read_range(store.location, "orders", 0, first)]
[[7]]
"""

from __future__ import annotations

from headwater.log_store.buffer import BufferStatistics, LogStoreBuffer
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.consumers import Consumer
from headwater.log_store.errors import (
    EpochGone,
    ForeignSchema,
    ForeignVnode,
    InvalidOffset,
    LogCorrupt,
    LogNotFound,
    LogStoreError,
    ProgressConflict,
    RetentionMiss,
    RetentionRefused,
    UnknownVersion,
    WrongCall,
)
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log import Log
from headwater.log_store.log_view import EpochEnd, LogView, read_range
from headwater.log_store.progress import LogStoreVnodeProgress, StoragePlace
from headwater.log_store.reader import KvLogStoreReader, ReaderStatistics, ReadLimits, SealedRange
from headwater.log_store.serde import LogStoreRowSerde
from headwater.log_store.state import LogStoreState
from headwater.log_store.writer import KvLogStoreWriter

__all__ = [
    "BufferStatistics",
    "Compression",
    "Consumer",
    "EpochEnd",
    "EpochGone",
    "ForeignSchema",
    "ForeignVnode",
    "InvalidOffset",
    "KvLogStoreFactory",
    "KvLogStoreReader",
    "KvLogStoreWriter",
    "Log",
    "LogCorrupt",
    "LogNotFound",
    "LogStoreBuffer",
    "LogStoreError",
    "LogStoreRowSerde",
    "LogStoreState",
    "LogStoreVnodeProgress",
    "LogView",
    "ProgressConflict",
    "ReadLimits",
    "ReaderStatistics",
    "RetentionMiss",
    "RetentionRefused",
    "SealedRange",
    "StoragePlace",
    "UnknownVersion",
    "WrongCall",
    "read_range",
]
