"""Figures of a pipeline, its sinks and its logs, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from headwater.backfill.cdc.metrics import CdcBackfillMetrics
from headwater.capture.metrics import of_logs
from headwater.pipeline.config import PipelineConfig
from headwater.pipeline.status import DerivedStatus, PipelineStatus, SinkStatus, read_status
from headwater.sinks.dead_letters import DeadLetters
from headwater.sinks.delivery import DeliveryState, read_deliveries
from headwater.system.metrics import Metric, MetricsServer, describe
from headwater.versioned.status import KeptStatus

describe(
    {
        "pipeline_up": "1 while the pipeline runs and responds.",
        "sink_up": "1 while the sink's query runs; 0 while it waits, is paused, or has failed.",
        "sink_state": "1 for the current state, a label.",
        "sink_batches_total": "Batches that were delivered since the start.",
        "sink_restarts_total": "Restarts of the sink's query.",
        "sink_delivered_epoch": "The newest epoch that was delivered.",
        "sink_lag_rows": "Changes of a table that are not delivered.",
        "sink_lag_seconds": "Age of the oldest change at the source that is not delivered; absent: unknown.",
        "sink_parked_tables": "Tables that the sink does not take.",
        "sink_table_phase": "1 for the current phase of a table, a label; with reason and next step where it stopped.",
        "sink_refused_rows": "Rejected rows in the dead letters, by table.",
        "sink_pending_batches": "Batches that are staged and not committed.",
        "sink_pending_seconds": "Age of the oldest batch that is staged and not committed.",
        "kept_base_epoch": "The oldest epoch of a versioned table that can be read.",
        "kept_pins": "Pins that retain epochs of a versioned table.",
        "kept_oldest_pin_seconds": "Age of the oldest pin.",
        "kept_bytes": "Size of a versioned table.",
        "derived_up": "1 while a derived table is maintained.",
        "derived_state": "1 for the current state of a derived table, a label.",
        "derived_batches_total": "Batches of a derived table since the start.",
        "derived_restarts_total": "Restarts of a derived table.",
        "derived_rows_total": "Rows of a derived table that were delivered.",
        "derived_delivered_epoch": "The newest epoch that a derived table contains.",
        "derived_batch_seconds": "Seconds that the last batch took.",
        "derived_lag_rows": "Changes of its tables that a derived table does not contain.",
        "derived_lag_seconds": "Age of the oldest such change; absent: unknown.",
    }
)


def pipeline_metrics(config: PipelineConfig) -> Iterator[Metric]:
    """The figures of the pipeline at this moment."""
    found: PipelineStatus = read_status(config)
    labels = (("pipeline", config.name),)
    yield Metric("pipeline_up", labels, float(found.running and found.silent_since_ms is None))
    if found.capture:
        yield Metric("capture_up", labels, float(found.capture["state"] == "running"))
        if found.capture["lag_seconds"] is not None:
            yield Metric("capture_lag_seconds", labels, found.capture["lag_seconds"])
    for sink in found.sinks:
        yield from sink_metrics(sink)
    for one in found.derived:
        yield from _of_derived(one)
    for section in config.sink:
        yield from _of_deliveries(config.state, config.query(section), section.label)
        letters = DeadLetters(str(config.dead_letters(section)))
        for table, rows in letters.counts().items():
            yield Metric("sink_refused_rows", (("sink", section.label), ("table", table)), float(rows))
    yield from of_logs(config.store)


def sink_metrics(sink: SinkStatus) -> Iterator[Metric]:
    """The figures of one sink and its tables."""
    labels = (("sink", sink.name),)
    yield Metric("sink_up", labels, float(sink.state == "running"))
    yield Metric("sink_state", (*labels, ("state", sink.state)), 1.0)
    yield Metric("sink_batches_total", labels, float(sink.batches))
    yield Metric("sink_restarts_total", labels, float(sink.restarts))
    yield Metric("sink_delivered_epoch", labels, float(sink.epoch))
    yield Metric("sink_parked_tables", labels, float(sum(table.parked for table in sink.tables)))
    for table in sink.tables:
        of_table = (*labels, ("table", table.name))
        why = (("reason", table.reason or ""), ("next_step", table.next_step or "")) if table.reason else ()
        yield Metric("sink_table_phase", (*of_table, ("phase", table.phase), *why), 1.0)
        yield Metric("sink_lag_rows", of_table, float(table.lag_rows))
        if table.lag_seconds is not None:
            yield Metric("sink_lag_seconds", of_table, table.lag_seconds)
        backfill = CdcBackfillMetrics(
            table.rows,
            table.total,
            table.splits_done,
            table.splits,
            table.rows_per_second,
            table.paused,
            table.lag_epochs,
        )
        yield from backfill.figures(of_table)
        if table.kept is not None:
            yield from _of_kept(table.kept, of_table)


def _of_kept(kept: KeptStatus, labels: tuple[tuple[str, str], ...]) -> Iterator[Metric]:
    yield Metric("kept_base_epoch", labels, float(kept.base_epoch))
    yield Metric("kept_bytes", labels, float(kept.size))
    yield Metric("kept_pins", labels, float(len(kept.pins)))
    yield Metric("kept_oldest_pin_seconds", labels, max((pin.age_seconds for pin in kept.pins), default=0.0))


def _of_derived(derived: DerivedStatus) -> Iterator[Metric]:
    labels = (("derived", derived.name),)
    yield Metric("derived_up", labels, float(derived.state == "running"))
    yield Metric("derived_state", (*labels, ("state", derived.state)), 1.0)
    yield Metric("derived_batches_total", labels, float(derived.batches))
    yield Metric("derived_restarts_total", labels, float(derived.restarts))
    yield Metric("derived_rows_total", labels, float(derived.rows))
    yield Metric("derived_delivered_epoch", labels, float(derived.epoch))
    yield Metric("derived_batch_seconds", labels, derived.seconds)
    yield Metric("derived_lag_rows", labels, float(derived.lag_rows))
    if derived.lag_seconds is not None:
        yield Metric("derived_lag_seconds", labels, derived.lag_seconds)


def _of_deliveries(location: str, query: str, sink: str) -> Iterator[Metric]:
    waiting = [record for record in read_deliveries(location, query) if record.state is DeliveryState.PENDING]
    labels = (("sink", sink),)
    yield Metric("sink_pending_batches", labels, float(len(waiting)))
    oldest = min((record.since_ms for record in waiting), default=None)
    yield Metric("sink_pending_seconds", labels, 0.0 if oldest is None else max(0.0, time.time() - oldest / 1000))


def serve_metrics(config: PipelineConfig, port: int) -> MetricsServer:
    """Serve them on loopback. :raises InputError: the port is taken."""
    return MetricsServer(lambda: pipeline_metrics(config), port)
