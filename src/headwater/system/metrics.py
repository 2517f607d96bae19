"""Figures for Prometheus: read when it asks for them. No registry of the process, no state between two scrapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.errors import InputError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

Labels = tuple[tuple[str, str], ...]

_HISTOGRAM = re.compile(r"(.+_delay)_(?:bucket|sum|count)")
_help: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure. A name that ends with ``_total`` is that of a counter, any other one that of a gauge."""

    name: str
    labels: Labels
    value: float


def describe(texts: Mapping[str, str]) -> None:
    """What metrics mean, by name: the help that Prometheus shows."""
    _help.update(texts)


class Figures:
    """What *read* returns, as families of Prometheus: a collector."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        from prometheus_client.metrics_core import Metric as Family

        families: dict[str, Family] = {}
        for metric in self._read():
            histogram = _HISTOGRAM.fullmatch(metric.name)
            name = histogram[1] if histogram else metric.name
            if name not in families:
                kind = "histogram" if histogram else "counter" if name.endswith("_total") else "gauge"
                families[name] = Family(name.removesuffix("_total"), _help.get(name, ""), kind)
            families[name].add_sample(metric.name, dict(metric.labels), metric.value)
        yield from families.values()


def render(metrics: Iterable[Metric]) -> str:
    """*metrics* in the text format of Prometheus."""
    from prometheus_client import generate_latest

    return generate_latest(Figures(lambda: metrics)).decode()


class MetricsServer:
    """Serves figures on loopback, from its own thread.

    :param read: returns the figures, at each scrape. :param port: 0 for any free port; :attr:`port` is that port.
    :raises InputError: the port is taken.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]], port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server  # commands that serve nothing start faster

        registry = CollectorRegistry()
        registry.register(Figures(read))
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise InputError(f"Port {port} cannot be used: {error.strerror}.", next_step="Choose another.") from None
        self.port = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
