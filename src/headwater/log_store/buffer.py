"""LogStoreBuffer: the memory of all logs that one process writes, until the next seal.

Chunks of all tables wait here together, in the order in which they came. The buffer is bounded in rows and in bytes: a
chunk that finds no room moves what waits into the store first (:meth:`LogStoreBuffer.spill`), so it never waits for a
reader, and an epoch of any size needs bounded memory. Spilled chunks count for nothing without the barrier of their
epoch; a new writer removes those of a dead one. While an epoch is being sealed its chunks stay here beside those of the
next one, so at most twice the bound is held, and one chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwater import failpoints
from headwater.state import StateStore, WriteBatch

BEFORE_STAGE = failpoints.register("log_store.before_stage")
AFTER_STAGE = failpoints.register("log_store.after_stage")

MAX_ROWS = 1 << 20
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """What a buffer holds at a moment, and what it did since it was opened.

    :ivar rows: that wait in memory, and *bytes* of them. :ivar sealing_bytes: of the seal that is under way.
    :ivar rows_in: that came in all. :ivar spills: how often what waited was moved into the store ahead of its seal,
        with *spilled_rows* and *spilled_bytes*.
    """

    rows: int
    bytes: int
    sealing_bytes: int
    rows_in: int
    spills: int
    spilled_rows: int
    spilled_bytes: int
    max_rows: int
    max_bytes: int


class LogStoreBuffer:
    """The chunks that wait for the next seal of *store*; one thread writes, any thread asks for the statistics."""

    def __init__(self, store: StateStore, max_rows: int = MAX_ROWS, max_bytes: int = MAX_BYTES) -> None:
        self.store = store
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._chunks: list[tuple[bytes, bytes]] = []
        self._rows = self._bytes = self._sealing_bytes = 0
        self._rows_in = self._spills = self._spilled_rows = self._spilled_bytes = 0

    def put(self, chunks: Sequence[tuple[bytes, bytes]], rows: int) -> int:
        """Add keys and values with *rows* rows; their bytes. An error has added nothing."""
        size = sum(len(key) + len(value) for key, value in chunks)
        if self._chunks and (self._rows + rows > self._max_rows or self._bytes + size > self._max_bytes):
            self.spill()  # before the new ones: when there is no room on disk they are refused as a whole
        self._chunks += chunks
        self._rows += rows
        self._bytes += size
        self._rows_in += rows
        return size

    def spill(self) -> None:
        """Move the chunks that wait into the store."""
        failpoints.hit(BEFORE_STAGE)
        batch = WriteBatch()
        batch.put_many(self._chunks)
        self.store.stage(batch)
        failpoints.hit(AFTER_STAGE)
        self._spills += 1
        self._spilled_rows += self._rows
        self._spilled_bytes += self._bytes
        self._clear()

    def waiting(self) -> Iterable[tuple[bytes, bytes]]:
        """The chunks that the next seal takes."""
        return self._chunks

    def seal_began(self) -> None:
        """A seal under way has what waited; the next chunks are for the one after it."""
        self._sealing_bytes = self._bytes
        self._clear()

    def seal_ended(self) -> None:
        """No seal is under way."""
        self._sealing_bytes = 0

    def statistics(self) -> BufferStatistics:
        return BufferStatistics(
            self._rows,
            self._bytes,
            self._sealing_bytes,
            self._rows_in,
            self._spills,
            self._spilled_rows,
            self._spilled_bytes,
            self._max_rows,
            self._max_bytes,
        )

    def _clear(self) -> None:
        self._chunks = []
        self._rows = self._bytes = 0
