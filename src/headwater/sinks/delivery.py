"""Ways to bring the items of a log to a sink: which barriers commit, and when the log is truncated.

===========================  ==============================================================================
:class:`CheckpointDelivery`  commits at each checkpoint, or at each N-th; the log is truncated with the commit
:class:`AsyncDelivery`       delivers chunks at the same time; the log is truncated as they finish
===========================  ==============================================================================

A commit is *forced* by a checkpoint barrier that moves vnodes, stops or drains the writer, or changes the schema; and
by a checkpoint after which nothing comes for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from headwater.log_store.delivery import DeliveryFutures
from headwater.log_store.errors import LogClosed
from headwater.log_store.item import BarrierItem, ChunkItem
from headwater.log_store.protocols import LogReader
from headwater.sinks.control import SinkControl
from headwater.sinks.errors import SinkInputError
from headwater.sinks.writer import AsyncSinkWriter, SinkWriter

POLL_SECONDS = 0.2
"""How long a sink that has nothing to do waits before it looks for requests."""
DELIVERY_POLL_SECONDS = 0.02
"""The same while deliveries are under way."""
IDLE_SECONDS = 2.0
"""After this long without an item a checkpoint is committed that was not due yet. Longer than between two barriers."""


class Ended(Enum):
    """Why a delivery ended without an error."""

    STOPPED = "stopped"
    """The writer of the log stopped, and everything was read."""
    ASKED = "asked"
    """Something was asked of the sink: see :class:`~headwater.sinks.control.SinkControl`."""


class Delivery(Protocol):
    """One life of a sink."""

    def run(self, reader: LogReader, control: SinkControl) -> Ended:
        """Deliver and truncate until there is nothing more to do here. Raises whatever the sink or the log raises."""

    def abort(self) -> None:
        """Throw away what is not committed and let go of everything; the last call."""


class CheckpointDelivery:
    """Delivers in order; commits at each *interval*-th checkpoint. After an error up to *interval* checkpoints replay.

    A log in memory hands out nothing between a checkpoint and its commit: use an interval of 1 there.

    :raises SinkInputError: an interval below 1.
    """

    def __init__(
        self,
        writer: SinkWriter,
        interval: int = 1,
        *,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if interval < 1:
            raise SinkInputError(
                f"Received interval={interval}.", next_step="Commit at each checkpoint (1) or at each N-th."
            )
        self._writer = writer
        self._interval = interval
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._checkpoints = 0
        self._undecided: BarrierItem | None = None
        self._undecided_since = 0.0

    def run(self, reader: LogReader, control: SinkControl) -> Ended:
        while not control.is_asked:
            try:
                item = reader.next_item(POLL_SECONDS)
            except LogClosed:
                self._commit_undecided(reader)
                return Ended.STOPPED
            if item is None:
                if self._clock() - self._undecided_since >= self._idle_seconds:
                    self._commit_undecided(reader)
                continue
            self._pass_undecided()
            if isinstance(item, ChunkItem):
                self._writer.write(item.epoch, item.chunk)
                continue
            self._barrier(reader, item)
            if item.is_stop:
                return Ended.STOPPED
        return Ended.ASKED

    def abort(self) -> None:
        self._writer.abort()

    def _barrier(self, reader: LogReader, item: BarrierItem) -> None:
        self._checkpoints += item.is_checkpoint
        if item.forces_commit or (item.is_checkpoint and self._checkpoints >= self._interval):
            self._commit(reader, item)
        elif item.is_checkpoint:
            self._undecided, self._undecided_since = item, self._clock()
        else:
            self._writer.barrier(item.epoch, False)

    def _commit(self, reader: LogReader, item: BarrierItem) -> None:
        self._checkpoints = 0
        self._writer.barrier(item.epoch, True)
        reader.truncate(item.offset)

    def _commit_undecided(self, reader: LogReader) -> None:
        if self._undecided is not None:
            item, self._undecided = self._undecided, None
            self._commit(reader, item)

    def _pass_undecided(self) -> None:
        if self._undecided is not None:
            item, self._undecided = self._undecided, None
            self._writer.barrier(item.epoch, False)


class AsyncDelivery:
    """Delivers up to *limit* chunks at the same time; each offset is truncated once all before it are delivered."""

    def __init__(self, writer: AsyncSinkWriter, limit: int) -> None:
        self._writer = writer
        self._futures = DeliveryFutures(limit)

    def run(self, reader: LogReader, control: SinkControl) -> Ended:
        while not control.is_asked:
            self._truncate(reader, 0.0)
            try:
                item = reader.next_item(DELIVERY_POLL_SECONDS if self._futures.under_way else POLL_SECONDS)
            except LogClosed:
                self._truncate(reader, None)
                return Ended.STOPPED
            if isinstance(item, ChunkItem):
                self._futures.add(item.offset, self._writer.write(item.epoch, item.chunk))
            elif item is not None:
                self._writer.barrier(item.epoch, item.is_checkpoint)
                self._futures.add_barrier(item.offset)
                if item.is_stop:
                    self._truncate(reader, None)
                    return Ended.STOPPED
        return Ended.ASKED

    def abort(self) -> None:
        self._futures.clear()
        self._writer.abort()

    def _truncate(self, reader: LogReader, timeout: float | None) -> None:
        while (offset := self._futures.next_offset(timeout)) is not None:
            reader.truncate(offset)
