"""The rows and watermarks of a synced log that were not emitted yet: in order, bounded in rows and bytes.

A chunk is taken in if it fits as a whole; one that does not is in the store, and a reference stands for it
(:class:`~headwater.log_store.buffer.SpilledRef`). What was emitted is gone. One thread uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from headwater.log_store.buffer import CHUNK_ROWS, BufferedChunk, SpilledRef
from headwater.log_store.log import Log
from headwater.log_store.watermarks import Watermark
from headwater.stream import Chunk, Epoch, VnodeBitmap


@dataclass(frozen=True, slots=True)
class HeldWatermark:
    """A watermark in its place."""

    epoch: Epoch
    watermark: Watermark


Held: TypeAlias = BufferedChunk | SpilledRef | HeldWatermark


@dataclass(frozen=True, slots=True)
class SyncedBufferStatistics:
    """Figures for metrics."""

    items: int
    rows: int
    spilled_rows: int
    epochs: int
    oldest_epoch: Epoch | None
    bytes_held: int


class SyncedBuffer:
    """Items in the order in which they came."""

    def __init__(self, max_rows: int, max_bytes: int, chunk_rows: int = CHUNK_ROWS) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._chunk_rows = chunk_rows
        self._items: deque[Held] = deque()
        self._unwritten: deque[BufferedChunk] = deque()
        self._rows = 0
        self._bytes = 0
        self._watermarks = 0
        self.spilled_rows = 0

    def add_chunk(self, epoch: Epoch, first_seq: int, chunk: Chunk) -> bool:
        """Keep *chunk* in memory; ``False`` when it does not fit: spill it."""
        if self._rows + chunk.num_rows > self._max_rows or self._bytes + chunk.nbytes > self._max_bytes:
            return False
        item = BufferedChunk(epoch, 0, first_seq, chunk)
        self._items.append(item)
        self._unwritten.append(item)
        self._rows += chunk.num_rows
        self._bytes += chunk.nbytes
        return True

    def add_spilled(self, epoch: Epoch, first_seq: int, last_seq: int, log: Log, vnodes: VnodeBitmap) -> None:
        """Stand for rows that are in the store; small neighbours become one item."""
        rows = last_seq - first_seq + 1
        self.spilled_rows += rows
        last = self._items[-1] if self._items else None
        if (
            isinstance(last, SpilledRef)
            and (last.epoch, last.last_seq + 1, last.log) == (epoch, first_seq, log)
            and last.last_seq - last.first_seq + 1 + rows <= self._chunk_rows
        ):
            self._items[-1] = replace(last, last_seq=last_seq)
        else:
            self._items.append(SpilledRef(epoch, 0, first_seq, last_seq, log, vnodes))

    def add_watermark(self, epoch: Epoch, watermark: Watermark) -> None:
        """Keep a watermark behind what came before it; one that it directly follows, of its column, says no more."""
        last = self._items[-1] if self._items else None
        if isinstance(last, HeldWatermark) and last.epoch == epoch and last.watermark.column == watermark.column:
            self._items[-1] = HeldWatermark(epoch, watermark)
        else:
            self._items.append(HeldWatermark(epoch, watermark))
            self._watermarks += 1

    def oldest(self, upto: Epoch | None = None) -> Held | None:
        """The next item to emit; ``None`` when there is none, or it is of an epoch after *upto*."""
        if not self._items or (upto is not None and self._items[0].epoch > upto):
            return None
        return self._items[0]

    def drop_oldest(self) -> None:
        """It was emitted."""
        item = self._items.popleft()
        if isinstance(item, BufferedChunk):
            self._rows -= item.chunk.num_rows
            self._bytes -= item.chunk.nbytes
            if self._unwritten and self._unwritten[0] is item:
                self._unwritten.popleft()
        elif isinstance(item, SpilledRef):
            self.spilled_rows -= item.last_seq - item.first_seq + 1
        else:
            self._watermarks -= 1

    def oldest_row(self) -> tuple[Epoch, int] | None:
        """Epoch and seq of the first row that was not emitted."""
        for item in self._items:
            if not isinstance(item, HeldWatermark):
                return item.epoch, item.first_seq
        return None

    def next_unwritten(self, upto: Epoch) -> BufferedChunk | None:
        """The oldest chunk of epochs up to *upto* that is in memory only."""
        return self._unwritten[0] if self._unwritten and self._unwritten[0].epoch <= upto else None

    def written(self) -> None:
        """The chunk of :meth:`next_unwritten` is in the store as well."""
        self._unwritten.popleft()

    def watermarks(self, upto: Epoch) -> dict[str, Watermark]:
        """The newest watermark of each column in epochs up to *upto*."""
        found = self._held_watermarks() if self._watermarks else ()
        return {item.watermark.column: item.watermark for item in found if item.epoch <= upto}

    def _held_watermarks(self) -> Iterator[HeldWatermark]:
        return (item for item in self._items if isinstance(item, HeldWatermark))

    def statistics(self) -> SyncedBufferStatistics:
        return SyncedBufferStatistics(
            len(self._items),
            self._rows,
            self.spilled_rows,
            len({item.epoch for item in self._items}),
            self._items[0].epoch if self._items else None,
            self._bytes,
        )
