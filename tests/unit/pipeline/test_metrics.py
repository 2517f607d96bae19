"""The figures of a sink: those of its tables' backfills are CdcBackfillMetrics."""

from __future__ import annotations

from headwater.backfill.cdc.metrics import CdcBackfillMetrics
from headwater.pipeline.metrics import sink_metrics
from headwater.pipeline.status import SinkStatus, TableStatus
from headwater.system.metrics import render

TABLE = TableStatus(
    "public.orders", "reading", rows=30, total=120, rows_per_second=7.5, splits_done=2, splits=9, paused=True
)
LABELS = (("sink", "lake"), ("table", "public.orders"))


def test_the_figures_of_a_sink_have_rows_splits_and_rate_of_each_backfill() -> None:
    sink = SinkStatus("lake", "delta", "mirror", "/lake", "running", (TABLE,))
    backfill = [one for one in sink_metrics(sink) if one.name.startswith("sink_backfill")]
    assert backfill == list(CdcBackfillMetrics(30, 120, 2, 9, 7.5, True).figures(LABELS))
    assert {one.name.removeprefix("sink_backfill_"): one.value for one in backfill} == {
        "rows": 30.0,
        "total_rows": 120.0,
        "splits": 2.0,
        "total_splits": 9.0,
        "rows_per_second": 7.5,
        "paused": 1.0,
    }


def test_every_figure_of_a_backfill_is_described_and_what_is_unknown_is_absent() -> None:
    text = render(CdcBackfillMetrics(30, 120, 2, 9, 7.5, True, 4).figures(LABELS))
    described = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP") and len(line.split()) > 3]
    assert len(described) == 7
    assert [one.name for one in CdcBackfillMetrics(0).figures(LABELS)] == ["sink_backfill_rows", "sink_backfill_paused"]
