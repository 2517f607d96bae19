"""What one instance of a log has done since it was opened, for metrics. Each figure has one thread that adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ReadCounters:
    """Rows that were decoded, and the stored bytes that were read for them."""

    rows: int = 0
    bytes: int = 0

    def add(self, rows: int, size: int) -> None:
        self.rows += rows
        self.bytes += size


@dataclass(slots=True)
class LogCounters:
    """Figures that only grow.

    :ivar storage_write_count: rows (with *storage_write_size* bytes) that were encoded for the store.
    :ivar persistent_log: read as history, from sealed epochs.
    :ivar flushed_buffer: read again at the live end, because the buffer had no room.
    :ivar drain_seconds: time that the writer was blocked by drains.
    """

    write_rows: int = 0
    storage_write_count: int = 0
    storage_write_size: int = 0
    read_rows: int = 0
    persistent_log: ReadCounters = field(default_factory=ReadCounters)
    flushed_buffer: ReadCounters = field(default_factory=ReadCounters)
    drain_count: int = 0
    drain_seconds: float = 0.0

    def stored(self, rows: int, size: int) -> int:
        """Rows were written; returns *size*."""
        self.storage_write_count += rows
        self.storage_write_size += size
        return size

    def drained(self, seconds: float) -> None:
        self.drain_count += 1
        self.drain_seconds += seconds
