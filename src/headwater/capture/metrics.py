"""Figures of a capture and its logs, for Prometheus.

=====================================  ==================================================================
metric                                 meaning
=====================================  ==================================================================
``capture_up``                         1 while changes flow, 0 while it starts, waits or has stopped
``capture_rows_total``                 changes that were written, by log
``capture_stopped_tables``             tables whose changes are captured no longer; the store says why
``capture_transactions_total``         transactions of the source
``capture_epochs_total``               epochs that were ended
``capture_restarts_total``             sessions that ended in a failure that passes
``capture_received_bytes_total``       of the source's log, in this session
``capture_lag_bytes``                  of the source's log, not read yet
``capture_lag_seconds``                age of the oldest change that is not durable; absent: the source does not answer
``capture_source_log_held_bytes``      of its log that the source keeps for us
``capture_spilled_bytes``              of transactions that have not committed yet
=====================================  ==================================================================

The metrics of the logs follow (:mod:`headwater.log_store.metrics`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from headwater.capture.capture import Capture, CaptureState
from headwater.errors import HeadwaterError, InputError
from headwater.log_store.metrics import Metric, log_metrics, render


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


class MetricsServer:
    """Serves ``/metrics`` on loopback, from a thread of its own.

    :param figures: what is served, asked for at each scrape.
    :param port: 0 for any that is free; :attr:`port` tells which.
    :raises InputError: the port is taken.
    """

    def __init__(self, figures: Callable[[], Iterable[Metric]], port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404)
                    return
                body = render(list(figures())).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """A scrape is no news."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise InputError(f"Port {port} cannot be used: {error.strerror}.", next_step="Choose another.") from None
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="headwater-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def serve_capture(capture: Capture, location: str, port: int) -> MetricsServer:
    """Serve the figures of *capture* and of the logs at *location*. :raises InputError: the port is taken."""
    return MetricsServer(lambda: [*capture_metrics(capture), *of_logs(location)], port)


def of_logs(location: str) -> list[Metric]:
    """The figures of the logs at *location*; none where there are no logs yet."""
    try:
        return log_metrics(location)
    except HeadwaterError:  # no log yet
        return []
