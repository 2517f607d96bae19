"""The writer of a log: chunks in, epochs ended by barriers, made durable by the seal that all logs share.

======================  ==========================================================  =================
state                   what may be called                                          goes to
======================  ==========================================================  =================
new                     ``init``                                                    running (paused)
running                 ``write_chunk``, ``flush_current_epoch``, ``pause``         running, flushing, paused
paused                  ``flush_current_epoch``, ``resume``                         flushing, running
flushing                ``Flush.finish``                                            running, paused, stopped
stopped                 nothing
======================  ==========================================================  =================

The writer never waits for a reader, but for a drain that was asked for, and then only as long as was said.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pyarrow as pa

from headwater.log_store.buffer import LogStoreBuffer
from headwater.log_store.consumers import ConsumerBook
from headwater.log_store.errors import DrainTimeout, InvalidOffset, WrongCall
from headwater.log_store.item import BarrierItem
from headwater.log_store.link import ReaderLink, Start
from headwater.log_store.log import LogRegistry
from headwater.log_store.log_events import FORMER_VERSION, SCHEMA, LogEvent
from headwater.log_store.sealer import Sealer
from headwater.log_store.state import LogStoreState
from headwater.stream import Chunk, Epoch, EpochPair, VnodeBitmap


class WriterState(Enum):
    NEW = "new"
    RUNNING = "running"
    PAUSED = "paused"
    FLUSHING = "flushing"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class FlushOptions:
    """What a barrier carries for a log."""

    is_checkpoint: bool = True
    is_stop: bool = False
    schema_change: pa.Schema | None = None
    new_vnode_bitmap: VnodeBitmap | None = None
    drain_seconds: float | None = None

    def barrier(self, ended: Epoch) -> BarrierItem:
        """What a reader is given at the end of epoch *ended*."""
        return BarrierItem(
            ended,
            self.is_checkpoint,
            self.is_stop,
            self.schema_change,
            self.new_vnode_bitmap,
            self.drain_seconds is not None,
        )


class KvLogStoreWriter:
    """The writing end of one instance of a log; made by :class:`~headwater.log_store.factory.KvLogStoreFactory`."""

    def __init__(
        self,
        state: LogStoreState,
        sealer: Sealer,
        registry: LogRegistry,
        book: ConsumerBook,
        buffer: LogStoreBuffer | None,
        link: ReaderLink | None,
    ) -> None:
        self._store_state = state
        self._sealer = sealer
        self._registry = registry
        self._book = book
        self._buffer = buffer
        self._link = link
        self._state = WriterState.NEW
        self._was_paused = False
        self._epoch = self._first_epoch = self._last_epoch = Epoch(0)
        self._next_seq = 0
        self._rows = self._bytes = self._chunks = 0
        if link is not None:
            book.attach(state.log.name, link)

    @property
    def state(self) -> WriterState:
        return self._state

    @property
    def store_state(self) -> LogStoreState:
        """What this writer owns in the store."""
        return self._store_state

    @property
    def buffer(self) -> LogStoreBuffer | None:
        """The live end that its reader takes from, if it has one."""
        return self._buffer

    @property
    def link(self) -> ReaderLink | None:
        """What it shares with its reader, if it has one."""
        return self._link

    @property
    def first_epoch(self) -> Epoch:
        """The first epoch that it wrote: the live end begins there."""
        return self._first_epoch

    @property
    def last_epoch(self) -> Epoch:
        """The newest epoch that it ended."""
        return self._last_epoch

    @property
    def epoch(self) -> Epoch:
        """The epoch that is being written."""
        return self._epoch

    def init(self, epochs: EpochPair, *, pause_read_on_bootstrap: bool = False) -> None:
        """Begin to write at ``epochs.curr``; what a dead writer left unsealed is removed first.

        :raises InvalidOffset: that epoch is sealed. :raises ForeignVnode: another live writer owns one of its vnodes.
        """
        self._expect(WriterState.NEW)
        if epochs.curr <= self._sealer.store.committed_epoch():
            raise InvalidOffset(
                f"Epoch {epochs.curr} cannot be written: epoch {self._sealer.store.committed_epoch()} is sealed."
            )
        log, vnodes = self._store_state.log, self._store_state.vnodes
        self._sealer.owners.check(self, log, vnodes)
        self._store_state.discard_unsealed()
        self._sealer.owners.claim(self, log, vnodes, epochs.curr)
        self._epoch = self._first_epoch = epochs.curr
        self._state = WriterState.PAUSED if pause_read_on_bootstrap else WriterState.RUNNING
        if self._link is not None:
            self._link.started(self._start(), paused=pause_read_on_bootstrap)

    def write_chunk(self, chunk: Chunk) -> None:
        """Add rows to the current epoch.

        :raises ForeignSchema: other columns than the log has. :raises ForeignVnode: rows that this writer does not own.
        """
        self._expect(WriterState.RUNNING)
        if not chunk.num_rows:
            return
        self._store_state.check(chunk)
        state, first = self._store_state, self._next_seq
        # For the store at once, whatever this writer's own reader does with it: there may be other consumers.
        self._bytes += state.write_chunk(self._epoch, first, chunk)
        self._chunks += 1
        if self._buffer is not None and not self._buffer.add_chunk(self._epoch, first, chunk):
            self._buffer.add_spilled(self._epoch, first, first + chunk.num_rows - 1, state.log, state.vnodes)
        self._next_seq += chunk.num_rows
        self._rows += chunk.num_rows
        state.counters.write_rows += chunk.num_rows

    def note(self, kind: str, detail: Mapping[str, Any]) -> None:
        """An event between the rows before it and those after it: see :mod:`headwater.log_store.log_events`."""
        self._expect(WriterState.RUNNING)
        event = LogEvent(self._epoch, self._next_seq, kind, detail)
        self._book.bounds.events.add(self._sealer.batch, self._store_state.log.name, event)

    def change_schema(
        self, schema: pa.Schema, key_columns: tuple[str, ...], detail: Mapping[str, Any] | None = None
    ) -> None:
        """The chunks that follow have other columns, from the middle of an epoch on: each chunk names its own.

        :param detail: of the event that is noted with it.
        :raises ForeignSchema: columns that the log cannot hold.
        :raises WrongCall: a reader of this process takes from the live end; it needs a barrier between.
        """
        self._expect(WriterState.RUNNING)
        if self._buffer is not None:
            raise WrongCall("A log with a reader of this process changes its columns at a barrier.")
        before = self._store_state.log
        log = before.with_schema(schema, key_columns)
        self.note(SCHEMA, {**(detail or {}), FORMER_VERSION: before.schema_version})
        self._registry.update(self._sealer.batch, log)
        self._store_state.change_schema(log, has_rows=self._rows > 0)

    def end_epoch(self, next_epoch: Epoch) -> None:
        """As :meth:`flush_current_epoch` with a checkpoint, for a writer without a reader; no rows need no barrier."""
        if self._rows or self._buffer is not None or self._store_state.next_format is not None:
            self.flush_current_epoch(next_epoch).finish()
            return
        self._expect(WriterState.RUNNING)
        if next_epoch <= self._epoch:
            raise InvalidOffset(f"Epoch {next_epoch} cannot follow epoch {self._epoch}.")
        self._sealer.owners.check(self, self._store_state.log, self._store_state.vnodes, next_epoch)
        self._sealer.owners.claim(self, self._store_state.log, self._store_state.vnodes, next_epoch)
        self._sealer.ended = max(self._sealer.ended, self._epoch)
        self._last_epoch, self._epoch = self._epoch, next_epoch

    def flush_current_epoch(self, next_epoch: Epoch, options: FlushOptions | None = None) -> Flush:
        """End the current epoch. After the barrier was passed on, call :meth:`Flush.finish`.

        The epoch is durable once the sealer has sealed it (or a later one).

        :raises InvalidOffset: *next_epoch* is not after the current one.
        :raises ForeignSchema: columns that the log cannot have. :raises ForeignVnode: vnodes that it cannot own.
        :raises DrainTimeout: the reader did not truncate the barrier in time; the epoch is ended all the same.
        """
        chosen = options or FlushOptions()
        self._expect(WriterState.RUNNING, WriterState.PAUSED)
        if next_epoch <= self._epoch:
            raise InvalidOffset(f"Epoch {next_epoch} cannot follow epoch {self._epoch}.")
        self._check_change(next_epoch, chosen)
        ended, paused = self._epoch, self._state is WriterState.PAUSED
        if not paused or self._rows:  # rows that came before the pause need their barrier
            self._store_state.write_barrier(
                ended,
                is_checkpoint=chosen.is_checkpoint,
                is_stop=chosen.is_stop,
                rows=self._rows,
                size=self._bytes,
                chunks=self._chunks,
            )
        if self._buffer is not None:
            self._buffer.add_barrier(chosen.barrier(ended))
        self._sealer.ended = max(self._sealer.ended, ended)
        self._last_epoch, self._epoch, self._next_seq = ended, next_epoch, 0
        self._rows = self._bytes = self._chunks = 0
        self._was_paused = paused
        self._state = WriterState.FLUSHING
        flush = Flush(self, ended, chosen)
        self._take_progress(ended)
        self._sealer.owners.claim(self, self._store_state.log, self._store_state.vnodes, next_epoch)
        if chosen.drain_seconds is not None:
            self._drain(ended, chosen.drain_seconds)
        if chosen.is_stop:
            self._sealer.owners.release(self, self._store_state.log)
        elif chosen.new_vnode_bitmap is not None:
            self._sealer.owners.claim(self, self._store_state.log, chosen.new_vnode_bitmap, next_epoch)
        return flush

    def _check_change(self, next_epoch: Epoch, options: FlushOptions) -> None:
        """What a barrier asks for, before anything is done."""
        state, vnodes = self._store_state, options.new_vnode_bitmap
        if options.schema_change is not None:
            state.check_schema_change(options.schema_change)
        if vnodes is not None:
            state.check_vnodes(vnodes)
        if not options.is_stop:
            self._sealer.owners.check(self, state.log, state.vnodes if vnodes is None else vnodes, next_epoch)

    def _drain(self, ended: Epoch, seconds: float) -> None:
        begun = time.monotonic()
        drained = self._buffer is not None and self._buffer.wait_until_truncated(ended, seconds)
        self._store_state.counters.drained(time.monotonic() - begun)
        if not drained:
            self._state = WriterState.PAUSED if self._was_paused else WriterState.RUNNING
            raise DrainTimeout(
                f"The reader of log {self._store_state.log.name!r} did not deliver epoch {ended} in {seconds:g} s.",
                next_step="Look at its last error, then drain again.",
            )
        self._take_progress(Epoch(ended).next())

    def _take_progress(self, before: Epoch) -> None:
        """What the reader truncated in epochs before *before* becomes durable with the next seal, not earlier."""
        if self._link is not None:
            log, consumer, owned = self._store_state.log, self._link.consumer, self._store_state.vnodes
            self._link.hand_over(before, lambda done: self._book.apply(log, consumer, done, owned))

    def pause(self) -> None:
        """No more chunks; barriers go on. :raises WrongCall: it is paused already."""
        self._expect(WriterState.RUNNING)
        self._state = WriterState.PAUSED
        if self._link is not None:
            self._link.set_paused(True)

    def resume(self) -> None:
        """:raises WrongCall: it is not paused."""
        self._expect(WriterState.PAUSED)
        self._state = WriterState.RUNNING
        if self._link is not None:
            self._link.set_paused(False)

    def _finish(self, options: FlushOptions) -> None:
        self._expect(WriterState.FLUSHING)
        if options.schema_change is not None:
            log = self._store_state.log.with_schema(options.schema_change)
            self._registry.update(self._sealer.batch, log)
            self._store_state.log = log
        if options.new_vnode_bitmap is not None or options.is_stop:
            self._take_progress(self._epoch)  # what was delivered is so for the vnodes that leave, too
        if options.new_vnode_bitmap is not None:
            self._store_state.own(options.new_vnode_bitmap)
            if self._buffer is not None and self._link is not None:
                self._buffer.clear()
                self._link.moved(self._start())
        self._state = WriterState.PAUSED if self._was_paused else WriterState.RUNNING
        if options.is_stop:
            self._state = WriterState.STOPPED
            if self._buffer is not None and self._link is not None:
                self._buffer.close()
                self._book.detach(self._store_state.log.name, self._link)

    def _start(self) -> Start:
        return Start(self._epoch, self._store_state.vnodes, self._sealer.ended)

    def _expect(self, *allowed: WriterState) -> None:
        if self._state not in allowed:
            names = " or ".join(state.value for state in allowed)
            raise WrongCall(f"This needs a writer that is {names}; it is {self._state.value}.")


@dataclass(frozen=True, slots=True)
class Flush:
    """An ended epoch whose barrier is on its way."""

    writer: KvLogStoreWriter
    epoch: Epoch
    options: FlushOptions

    def finish(self) -> None:
        """The barrier was passed on: take over new vnodes or a new schema, and go on."""
        self.writer._finish(self.options)
