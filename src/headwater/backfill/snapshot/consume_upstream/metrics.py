"""Figures of the queries over upstream tables, for Prometheus, as the queries reported them last."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.backfill.control import QueryStatus, status
from headwater.backfill.snapshot.consume_upstream.stream import StreamPhase
from headwater.state.beside import stores_beside
from headwater.state.query_store import QUERIES, own_state
from headwater.system.metrics import Metric, describe

describe(
    {
        "upstream_stopped": "1: the table no longer has the changes that come next; the status says what to do.",
        "upstream_consumed_version": "The version that every vnode has; 0 while the snapshot is read.",
        "upstream_newest_version": "The newest version of the table; absent while it is stopped.",
        "upstream_lag_versions": "Versions between the two.",
        "upstream_snapshot_rows": "Rows of the snapshot that were read, about.",
        "upstream_snapshot_done": "1 once the snapshot is read.",
        "upstream_paused": "1 while the query is paused by a command.",
        "upstream_age_seconds": "Age of these figures; a query that runs writes them every few seconds.",
    }
)


def upstream_queries(location: str) -> Iterator[QueryStatus]:
    """The queries over upstream tables whose state is at *location*."""
    for (name,) in stores_beside(location, QUERIES, 1):
        found = status(own_state(location, name), name)
        if found is not None and "upstream" in found.value:
            yield found


def upstream_metrics(location: str) -> Iterator[Metric]:
    """The figures of all of them at this moment."""
    for found in upstream_queries(location):
        value, labels = found.value, (("query", found.query), ("upstream", found.value["upstream"]))
        consumed, newest = value["consumed_version"], value["newest_version"]
        yield Metric("upstream_stopped", labels, float(value["phase"] == StreamPhase.STOPPED.value))
        yield Metric("upstream_consumed_version", labels, float(consumed or 0))
        if newest is not None:
            yield Metric("upstream_newest_version", labels, float(newest))
            yield Metric("upstream_lag_versions", labels, float(newest - (consumed or 0)))
        yield Metric("upstream_snapshot_rows", labels, float(value["snapshot_rows"]))
        yield Metric("upstream_snapshot_done", labels, float(value["snapshot_done"]))
        yield Metric("upstream_paused", labels, float(value["paused"]))
        yield Metric("upstream_age_seconds", labels, found.age_seconds)
