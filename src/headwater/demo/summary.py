"""What a demo saw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that must be zero is zero when it worked.

    :ivar lost: rows of the source that the mirror does not have. :ivar extra: rows that only the mirror has.
    :ivar doubled: keys that the mirror has twice, and changes that a log has twice.
    :ivar unsettled: keys of which it is not known.
    :ivar latency_p50_ms: from the commit at the source until the mirror shows it, while changes alone flow.
    :ivar backfill_latency_p50_ms: the same while the history was read, and over the kill.
    :ivar recovery_seconds: from the kill of the capture until its next epoch.
    """

    source_rows: int
    sink_rows: int
    mismatches: int
    lost: int
    extra: int
    doubled: int
    unsettled: int
    latency_p50_ms: float
    latency_p99_ms: float
    backfill_latency_p50_ms: float
    backfill_latency_p99_ms: float
    backfill_rows: int
    backfill_seconds: float
    backfill_rows_per_second: int
    changes: int
    changes_per_second: float
    transactions: int
    mirror_commits: int
    kills: int
    recovery_seconds: float
    wal_held_max_bytes: int
    seconds: float

    @property
    def worked(self) -> bool:
        wrong = self.mismatches + self.lost + self.extra + self.doubled + self.unsettled
        return wrong == 0 and self.changes > 0 and self.source_rows == self.sink_rows
