"""What a synced log store has done since it was opened, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.log_store.counters import ReadCounters


@dataclass(slots=True)
class SyncedCounters:
    """Figures that only grow, beside those of the store (:class:`~headwater.log_store.counters.LogCounters`).

    :ivar clean: how often it caught up; *dirty* how often it fell behind.
    :ivar wait_next_poll_ns: time between an item and the next poll: what is emitted is worked on.
    :ivar write_pause_ns: time that checkpoints were held so that nothing had to be written.
    :ivar buffer: rows that were emitted from memory.
    """

    clean: int = 0
    dirty: int = 0
    wait_next_poll_ns: int = 0
    write_pause_ns: int = 0
    buffer: ReadCounters = field(default_factory=ReadCounters)
