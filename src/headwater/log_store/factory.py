"""KvLogStoreFactory: the logs of one state store and their writers, which share one buffer and one seal."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from headwater.log_store.buffer import MAX_BYTES, MAX_ROWS, LogStoreBuffer
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.consumers import Consumers
from headwater.log_store.log import DEFAULT_FORMAT, Log, LogRegistry
from headwater.log_store.retention import RetentionPolicies
from headwater.log_store.sealer import Sealer
from headwater.log_store.state import LogStoreState, now_ms
from headwater.log_store.truncation import Truncation
from headwater.log_store.writer import KvLogStoreWriter
from headwater.state import Catalog, StateStore
from headwater.stream import DEFAULT_VNODE_COUNT


class KvLogStoreFactory:
    """The logs of one state store, for the process that writes it.

    :param max_rows: of all logs together that wait in memory, and *max_bytes* of them: above that they are spilled.
    :ivar catalog: for other state tables of the same store: one catalog numbers them all.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_BYTES,
        compression: Compression = Compression.NONE,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self.store = store
        self._compression = compression
        self._clock = clock
        self.buffer = LogStoreBuffer(store, max_rows, max_bytes)
        self.sealer = Sealer(self.buffer)
        self.consumers = Consumers(store.location)
        batch = self.sealer.batch
        with store.snapshot() as view:
            self.catalog = Catalog.load(view)
            self.registry = LogRegistry.load_or_create(self.catalog, view, batch)
            self.truncation = Truncation(self.catalog, view, batch, self.registry, self.consumers)
            self.retention = RetentionPolicies(self.catalog, view, batch, store, self.truncation, clock)
        self.sealer.parts += (self.retention, self.truncation)

    def log(
        self,
        name: str,
        schema: pa.Schema,
        key_columns: tuple[str, ...],
        log_format: int = DEFAULT_FORMAT,
        vnode_count: int = DEFAULT_VNODE_COUNT,
    ) -> Log:
        """The log *name*, created when it does not exist. :raises ForeignSchema: it exists with other columns."""
        return self.registry.create(self.sealer.batch, name, schema, key_columns, log_format, vnode_count)

    def existing(self, name: str) -> Log:
        """:raises LogNotFound: no such log."""
        return self.registry.get(name)

    def writer(self, log: Log) -> KvLogStoreWriter:
        current = self.registry.get(log.name)  # a migration may have changed its format since
        state = LogStoreState(self.sealer, current, self._compression, self._clock)
        return KvLogStoreWriter(state, self.sealer, self.registry, self.truncation.events)

    def live_writer(self, log: str) -> KvLogStoreWriter | None:
        """The writer of *log* in this process."""
        return self.sealer.writers.get(self.registry.get(log).number)

    def close(self) -> None:
        """Wait for the seal that is under way, close the consumers' stores; the state store stays open."""
        self.sealer.close()
        self.consumers.close()
