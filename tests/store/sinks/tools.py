"""A log with its writer and its reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwater.log_store import FlushOptions, KvLogStoreFactory, KvLogStoreReader, KvLogStoreWriter
from headwater.log_store.rewind import RewindDelay
from headwater.log_store.testing import KEY, SCHEMA, epoch
from headwater.log_store.writer import Flush
from headwater.state import StateStore
from headwater.stream import Chunk, EpochPair, VnodeBitmap


@dataclass
class Pipe:
    """One writer and its reader, which is for a sink to begin."""

    factory: KvLogStoreFactory
    reader: KvLogStoreReader
    writer: KvLogStoreWriter

    @classmethod
    def open(
        cls,
        store: StateStore,
        at: int,
        log_format: int,
        *,
        vnodes: VnodeBitmap | None = None,
        factory: KvLogStoreFactory | None = None,
        max_rows: int = 65_536,
    ) -> Pipe:
        made = factory or KvLogStoreFactory(store)
        log = made.log("orders", SCHEMA, KEY, log_format)
        # The log's own delays are shown elsewhere.
        reader, writer = made.pair(log, "sink", vnodes, max_rows=max_rows, delays=RewindDelay(jitter=lambda: 0.0))
        writer.init(EpochPair(curr=epoch(at), prev=epoch(at - 1)))
        return cls(made, reader, writer)

    def write(self, following: int, *chunks: Chunk, **options: Any) -> None:
        """An epoch of *chunks*, sealed if it is a checkpoint."""
        ended = self.writer.epoch
        self.end(following, *chunks, **options).finish()
        if options.get("is_checkpoint", True):
            self.factory.sealer.seal(ended)

    def end(self, following: int, *chunks: Chunk, **options: Any) -> Flush:
        """The same, not finished and not sealed."""
        for chunk in chunks:
            self.writer.write_chunk(chunk)
        return self.writer.flush_current_epoch(epoch(following), FlushOptions(**options))
