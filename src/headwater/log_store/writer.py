"""KvLogStoreWriter: the writer of one log, in the process that captures.

It has all vnodes of its log, waits for no reader, and what it writes is durable with the seal that all logs share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from headwater.log_store.errors import InvalidOffset, WrongCall
from headwater.log_store.log import Log, LogRegistry
from headwater.log_store.log_events import FORMER_VERSION, SCHEMA, LogEvent, LogEvents
from headwater.log_store.sealer import Sealer
from headwater.log_store.state import LogStoreState
from headwater.stream import Chunk, Epoch, EpochPair


class KvLogStoreWriter:
    """The writer of one log, from :class:`~headwater.log_store.factory.KvLogStoreFactory`.

    :ivar store_state: its pending writes. :ivar epoch: that is being written; 0 before :meth:`init`.
    """

    def __init__(self, state: LogStoreState, sealer: Sealer, registry: LogRegistry, events: LogEvents) -> None:
        self.store_state = state
        self._sealer = sealer
        self._registry = registry
        self._events = events
        self.epoch = Epoch(0)
        self._rows = self._bytes = self._chunks = 0

    @property
    def log(self) -> Log:
        """As the rows that are written now have it."""
        return self.store_state.log

    def init(self, epochs: EpochPair) -> None:
        """Begin to write at ``epochs.curr``; what a dead writer left unsealed is removed first.

        :raises InvalidOffset: that epoch is sealed. :raises WrongCall: it has begun, or the log has another writer.
        """
        if self.epoch:
            raise WrongCall(f"The writer of log {self.log.name!r} has begun already.")
        sealed = self._sealer.store.committed_epoch()
        if epochs.curr <= sealed:
            raise InvalidOffset(f"Epoch {epochs.curr} cannot be written: epoch {sealed} is sealed.")
        if self._sealer.writers.get(self.log.number) is not None:
            raise WrongCall(f"Log {self.log.name!r} has a writer in this process.", next_step="Use that one.")
        self.store_state.discard_unsealed()
        self._sealer.writers[self.log.number] = self
        self.epoch = epochs.curr

    def write_chunk(self, chunk: Chunk) -> None:
        """Add rows to the current epoch. An error has added nothing.

        :raises ForeignSchema: other columns than the log has. :raises ForeignVnode: a vnode that it does not have.
        """
        self._check_begun()
        if not chunk.num_rows:
            return
        self.store_state.check(chunk)
        self._bytes += self.store_state.write_chunk(self.epoch, self._rows, chunk)
        self._chunks += 1
        self._rows += chunk.num_rows

    def note(self, kind: str, detail: Mapping[str, Any]) -> None:
        """An event between the rows before it and those after it: see :mod:`headwater.log_store.log_events`."""
        self._check_begun()
        self._events.add(self._sealer.batch, self.log.name, LogEvent(self.epoch, self._rows, kind, detail))

    def change_schema(
        self, schema: pa.Schema, key_columns: tuple[str, ...], detail: Mapping[str, Any] | None = None
    ) -> None:
        """The chunks that follow have other columns, from the middle of an epoch on: each chunk names its own.

        :param detail: of the event that is noted with it.
        :raises ForeignSchema: columns that the log cannot hold.
        """
        self._check_begun()
        before = self.log
        log = before.with_schema(schema, key_columns)
        self.note(SCHEMA, {**(detail or {}), FORMER_VERSION: before.schema_version})
        self._registry.update(self._sealer.batch, log)
        self.store_state.change_schema(log, has_rows=self._rows > 0)

    def end_epoch(self, next_epoch: Epoch) -> None:
        """End the current epoch: it is durable once the sealer has sealed it, or a later one. No rows need no barrier.

        :raises InvalidOffset: *next_epoch* is not after the current one.
        """
        self._check_begun()
        if next_epoch <= self.epoch:
            raise InvalidOffset(f"Epoch {next_epoch} cannot follow epoch {self.epoch}.")
        if self._rows or self.store_state.next_format is not None:
            self.store_state.write_barrier(self.epoch, rows=self._rows, size=self._bytes, chunks=self._chunks)
        self._sealer.ended = max(self._sealer.ended, self.epoch)
        self.epoch = next_epoch
        self._rows = self._bytes = self._chunks = 0

    def _check_begun(self) -> None:
        if not self.epoch:
            raise WrongCall(f"The writer of log {self.log.name!r} has not begun.", next_step="Call init() first.")
