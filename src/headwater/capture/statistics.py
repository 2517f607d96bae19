"""What a capture counts; one thread adds, any thread reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.sources.events import StreamStatus


@dataclass(slots=True)
class CaptureStatistics:
    """Since the process started.

    :ivar commit_time_us: of the newest transaction that is durable, microseconds since 1970; 0 before the first.
    :ivar caught_up: the source had nothing more when it was last asked.
    :ivar behind_bytes: of the source's log, not read yet.
    :ivar held_bytes: of the source's log, kept for us.
    :ivar stopped_tables: why, by log.
    :ivar checked_time: when the source's catalog was last compared with the captured tables, seconds since 1970.
    """

    rows: int = 0
    bytes: int = 0
    transactions: int = 0
    epochs: int = 0
    restarts: int = 0
    epoch: int = 0
    commit_time_us: int = 0
    caught_up: bool = False
    bytes_received: int = 0
    behind_bytes: int | None = None
    held_bytes: int | None = None
    spilled_bytes: int = 0
    last_error: str = ""
    checked_time: float = 0.0
    rows_by_table: dict[str, int] = field(default_factory=dict)
    stopped_tables: dict[str, str] = field(default_factory=dict)

    def count(self, table: str, rows: int, size: int) -> None:
        """Rows of a table were written."""
        self.rows += rows
        self.bytes += size
        self.rows_by_table[table] = self.rows_by_table.get(table, 0) + rows

    def sealed(self, epoch: int, commit_time_us: int) -> None:
        """An epoch is durable."""
        self.epoch = int(epoch)
        self.commit_time_us = commit_time_us

    def look(self, status: StreamStatus) -> None:
        """How far the stream is."""
        self.bytes_received = status.bytes_received
        self.behind_bytes = status.behind_bytes
        self.held_bytes = status.held_bytes
        self.spilled_bytes = status.spilled_bytes

    def lag_seconds(self, now_us: int) -> float:
        """How old the newest durable transaction is, or 0 when there is nothing newer in the source."""
        if self.caught_up or self.behind_bytes == 0 or not self.commit_time_us:
            return 0.0
        return max(0, now_us - self.commit_time_us) / 1e6
