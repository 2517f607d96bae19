"""CdcBackfillMetrics: the figures of one table's backfill, for Prometheus, as its query reported them last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwater.system.metrics import Labels, Metric, describe

describe(
    {
        "sink_backfill_rows": "Rows of the backfill that were read.",
        "sink_backfill_total_rows": "Estimated rows of the backfill; absent: unknown.",
        "sink_backfill_splits": "Splits of the backfill that were read.",
        "sink_backfill_total_splits": "Splits of the backfill.",
        "sink_backfill_rows_per_second": "Rows of the backfill per second in the last minute; absent: not reading.",
        "sink_backfill_paused": "1 while the backfill is paused.",
        "sink_backfill_lag_epochs": "Epochs of the log that are left after the snapshot of a versioned table.",
    }
)


@dataclass(frozen=True, slots=True)
class CdcBackfillMetrics:
    """One table of one sink.

    :ivar total_rows: an estimate; ``None``: unknown. :ivar splits: that were read; ``None``: the table has no splits.
    :ivar lag_epochs: of a backfill from a versioned table.
    """

    rows: int
    total_rows: int | None = None
    splits: int | None = None
    total_splits: int | None = None
    rows_per_second: float | None = None
    paused: bool = False
    lag_epochs: int | None = None

    def figures(self, labels: Labels) -> Iterator[Metric]:
        """What is known, under *labels*."""
        values = {
            "rows": self.rows,
            "total_rows": self.total_rows,
            "splits": self.splits,
            "total_splits": self.total_splits,
            "rows_per_second": self.rows_per_second,
            "paused": self.paused,
            "lag_epochs": self.lag_epochs,
        }
        for name, value in values.items():
            if value is not None:
                yield Metric(f"sink_backfill_{name}", labels, float(value))
