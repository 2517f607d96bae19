"""Figures of a capture and its logs, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.capture.capture import Capture, CaptureState
from headwater.errors import HeadwaterError
from headwater.log_store.metrics import log_metrics
from headwater.system.metrics import Metric, MetricsServer, describe

describe(
    {
        "capture_up": "1 while changes flow, 0 while the capture starts, waits or has stopped.",
        "capture_rows_total": "Changes that were written, by log.",
        "capture_stopped_tables": "Tables whose changes are no longer captured; `headwater status` says why.",
        "capture_transactions_total": "Transactions of the source.",
        "capture_epochs_total": "Epochs that were ended.",
        "capture_restarts_total": "Sessions that ended in an error that passes.",
        "capture_received_bytes_total": "Bytes of the source's log that this session received.",
        "capture_lag_bytes": "Bytes of the source's log that are not read yet.",
        "capture_lag_seconds": "Age of the oldest change that is not durable; absent when the source does not answer.",
        "capture_source_log_held_bytes": "Bytes of its log that the source retains for the capture.",
        "capture_spilled_bytes": "Bytes of transactions that are not committed yet.",
        "kv_log_store_buffer_row_count": "Rows of all logs that wait in memory for the next seal.",
        "kv_log_store_buffer_memory_bytes": "Bytes of all logs in memory: those that wait, and those being sealed.",
        "kv_log_store_buffer_spilled_rows_total": "Rows that the buffer moved into the store ahead of their seal.",
    }
)


def capture_metrics(capture: Capture) -> Iterator[Metric]:
    """The figures of *capture* at this moment."""
    seen, labels = capture.statistics, (("source", capture.source.name),)
    yield Metric("capture_up", labels, float(capture.state is CaptureState.RUNNING))
    for log, rows in sorted(seen.rows_by_table.items()):
        yield Metric("capture_rows_total", (("log", log),), float(rows))
    yield Metric("capture_stopped_tables", labels, float(len(seen.stopped_tables)))
    yield Metric("capture_transactions_total", labels, float(seen.transactions))
    yield Metric("capture_epochs_total", labels, float(seen.epochs))
    yield Metric("capture_restarts_total", labels, float(seen.restarts))
    yield Metric("capture_received_bytes_total", labels, float(seen.bytes_received))
    if seen.behind_bytes is not None:
        yield Metric("capture_lag_bytes", labels, float(seen.behind_bytes))
    lag = capture.lag_seconds()
    if lag is not None:
        yield Metric("capture_lag_seconds", labels, lag)
    if seen.held_bytes is not None:
        yield Metric("capture_source_log_held_bytes", labels, float(seen.held_bytes))
    yield Metric("capture_spilled_bytes", labels, float(seen.spilled_bytes))
    if seen.buffer is not None:
        yield Metric("kv_log_store_buffer_row_count", labels, float(seen.buffer.rows))
        yield Metric("kv_log_store_buffer_memory_bytes", labels, float(seen.buffer.bytes + seen.buffer.sealing_bytes))
        yield Metric("kv_log_store_buffer_spilled_rows_total", labels, float(seen.buffer.spilled_rows))


def serve_capture(capture: Capture, location: str, port: int) -> MetricsServer:
    """Serve the figures of *capture* and of the logs at *location*. :raises InputError: the port is taken."""
    return MetricsServer(lambda: [*capture_metrics(capture), *of_logs(location)], port)


def of_logs(location: str) -> list[Metric]:
    """The figures of the logs at *location*; none where there are no logs yet."""
    try:
        return log_metrics(location)
    except HeadwaterError:  # no log yet
        return []
