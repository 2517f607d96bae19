"""What a capture counts; one thread adds, any thread reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.log_store.buffer import BufferStatistics
from headwater.sources.events import StreamStatus

SILENT_SECONDS = 8.0
"""A process or a source that has not answered for this long is not responding: it is seen within 10 s."""


@dataclass(slots=True)
class CaptureStatistics:
    """Since the process started.

    :ivar commit_time_us: of the newest transaction that is durable, microseconds since 1970; 0 before the first.
    :ivar caught_up: the source had nothing more when it was last asked.
    :ivar caught_up_us: when that was so last; 0: never yet. :ivar stepped_us: when the source was last read without
        an error; microseconds since 1970.
    :ivar behind_bytes: of the source's log, not read yet.
    :ivar held_bytes: of the source's log, kept for us.
    :ivar stopped_tables: why, by log. :ivar buffer: what waits in memory for the next seal, and what was spilled.
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
    caught_up_us: int = 0
    stepped_us: int = 0
    bytes_received: int = 0
    behind_bytes: int | None = None
    held_bytes: int | None = None
    spilled_bytes: int = 0
    last_error: str = ""
    checked_time: float = 0.0
    rows_by_table: dict[str, int] = field(default_factory=dict)
    stopped_tables: dict[str, str] = field(default_factory=dict)
    buffer: BufferStatistics | None = None

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

    def begin(self, now_us: int, commit_time_us: int) -> None:
        """A session begins after the transaction of *commit_time_us*; what the source has more is not known yet."""
        self.caught_up, self.behind_bytes = False, None
        self.stepped_us, self.commit_time_us = now_us, commit_time_us

    def stepped(self, now_us: int, *, is_over: bool = True) -> None:
        """The source was read without an error. :param is_over: so the last error is over; not a full disk."""
        self.stepped_us = now_us
        if is_over:
            self.last_error = ""
        if self.caught_up or self.behind_bytes == 0:
            self.caught_up_us = now_us

    def lag_seconds(self, now_us: int) -> float | None:
        """At most how old the oldest change of the source is that is not durable here; ``None``: unknown.

        It is younger than the newest durable transaction, and than the last moment in which there was none.
        """
        if now_us - self.stepped_us > SILENT_SECONDS * 1e6:
            return None
        if self.caught_up or self.behind_bytes == 0:
            return 0.0
        known = max(self.commit_time_us, self.caught_up_us)
        return max(0, now_us - known) / 1e6 if known else None
