"""Makes the writers and readers of logs; everything of one state store goes through one factory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar
from weakref import WeakSet

import pyarrow as pa

from headwater.log_store.buffer import MAX_BYTES, MAX_ROWS, LogStoreBuffer
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.consumers import ConsumerBook
from headwater.log_store.link import ReaderLink
from headwater.log_store.log import DEFAULT_FORMAT, Log, LogRegistry
from headwater.log_store.reader import KvLogStoreReader
from headwater.log_store.remote_consumers import RemoteConsumers
from headwater.log_store.retention import RetentionPolicies
from headwater.log_store.rewind import RewindDelay
from headwater.log_store.sealer import STAGE_BYTES, Sealer
from headwater.log_store.state import LogStoreState, now_ms
from headwater.log_store.truncation import Truncation
from headwater.log_store.writer import KvLogStoreWriter, WriterState
from headwater.state import Catalog, StateStore
from headwater.stream import DEFAULT_VNODE_COUNT, Epoch, VnodeBitmap


class KvLogStoreFactory:
    """The logs of one state store, for the process that writes it."""

    ALLOW_REWIND: ClassVar = True
    REBUILD_SINK_ON_UPDATE_VNODE_BITMAP: ClassVar = True

    def __init__(
        self,
        store: StateStore,
        *,
        stage_bytes: int = STAGE_BYTES,
        compression: Compression = Compression.NONE,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._store = store
        self._compression = compression
        self._clock = clock
        self.sealer = Sealer(store, stage_bytes)
        self.remote = RemoteConsumers(store.location)
        with store.snapshot() as view:
            self._catalog = Catalog.load(view)  # one for all: it gives each new table a number of its own
            self._registry = LogRegistry.load_or_create(self._catalog, view, self.sealer.batch)
            self.consumers = ConsumerBook(self._catalog, view, self.sealer.batch)
            self.truncation = Truncation(self._registry, self.consumers, self.remote)
            self.retention = RetentionPolicies(self._catalog, view, self.sealer.batch, store, self.truncation, clock)
        self.sealer.parts += (self.retention, self.truncation)
        self._writers: WeakSet[KvLogStoreWriter] = WeakSet()

    def log(
        self,
        name: str,
        schema: pa.Schema,
        key_columns: tuple[str, ...],
        log_format: int = DEFAULT_FORMAT,
        vnode_count: int = DEFAULT_VNODE_COUNT,
    ) -> Log:
        """The log *name*, made when it does not exist. :raises ForeignSchema: it exists with other columns."""
        return self._registry.create(self.sealer.batch, name, schema, key_columns, log_format, vnode_count)

    def existing(self, name: str) -> Log:
        """:raises LogNotFound: no such log."""
        return self._registry.get(name)

    def writer(self, log: Log, vnodes: VnodeBitmap | None = None) -> KvLogStoreWriter:
        """A writer whose readers are in other processes: nothing is kept in memory beyond the next seal."""
        state = self._state(log, vnodes)
        writer = KvLogStoreWriter(state, self.sealer, self._registry, self.consumers, None, None)
        self._writers.add(writer)
        return writer

    def pair(
        self,
        log: Log,
        consumer: str,
        vnodes: VnodeBitmap | None = None,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        start: Epoch | None = None,
        delays: RewindDelay | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> tuple[KvLogStoreReader, KvLogStoreWriter]:
        """A writer and a reader of this process, with a live buffer between them."""
        state = self._state(log, vnodes)
        known = self.consumers.register(log, consumer, start)
        buffer = LogStoreBuffer(max_rows, max_bytes)
        link = ReaderLink(consumer, buffer)
        writer = KvLogStoreWriter(state, self.sealer, self._registry, self.consumers, buffer, link)
        self._writers.add(writer)
        reader = KvLogStoreReader(self._store, state, buffer, link, known, delays, sleep)
        return reader, writer

    @property
    def store(self) -> StateStore:
        return self._store

    @property
    def registry(self) -> LogRegistry:
        return self._registry

    @property
    def catalog(self) -> Catalog:
        """For other state tables of the same store: one catalog numbers them all."""
        return self._catalog

    def live_writers(self, log: str) -> list[KvLogStoreWriter]:
        """The writers of *log* that have not stopped."""
        return [
            writer
            for writer in self._writers
            if writer.state is not WriterState.STOPPED and writer.store_state.log.name == log
        ]

    def close(self) -> None:
        """Wait for the seal that is under way, let go of the consumers' stores; the state store stays open."""
        self.sealer.close()
        self.remote.close()

    def _state(self, log: Log, vnodes: VnodeBitmap | None) -> LogStoreState:
        current = self._registry.get(log.name)  # a migration may have changed its format since
        owned = VnodeBitmap.full(log.vnode_count) if vnodes is None else vnodes
        return LogStoreState(self.sealer, current, owned, self._compression, self._clock)
