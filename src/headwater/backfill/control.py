"""Requests to a running query, and its status: from any process, through the query's state.

A request (:mod:`headwater.control.request`) becomes the mutation of a barrier of the query, once, and its answer is
sealed with what the barrier did.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headwater.backfill.errors import InvalidQuery
from headwater.backfill.plans import QueryState
from headwater.backfill.snapshot.consume_upstream.stream import StreamPhase
from headwater.control.command import (
    PauseBackfill,
    QueryCommand,
    ResnapshotTable,
    ResumeBackfill,
    ThrottleBackfill,
    command_name,
)
from headwater.control.request import Answers, Request, inbox_of
from headwater.errors import HeadwaterError
from headwater.state.beside import stores_beside
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QUERIES, QueryReader, own_state
from headwater.stream import Barrier
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


@dataclass(frozen=True, slots=True)
class QueryStatus:
    """What a query has written of itself."""

    query: str
    value: dict[str, Any]

    @property
    def age_seconds(self) -> float:
        """How old it is: a query that runs tells every few seconds."""
        updated: int = self.value["updated_ms"]
        return max(0.0, time.time() - updated / 1000)


class QueryRequests:
    """The requests to one query, as its planner sees them."""

    def __init__(self, location: str, query: str, state: QueryState) -> None:
        self._inbox, self._query = inbox_of(location), query
        self._state = state
        self._answers = Answers(state.catalog, state.store, state.batch)

    def open(self) -> list[Request]:
        return self._inbox.open(self._answers, self._query)

    def serve(self, request: Request, apply: Callable[[str, QueryCommand], Barrier]) -> None:
        """Do what *request* asks: *apply* it with the next barrier; the answer is sealed with the next save."""
        problem: HeadwaterError | None = None
        effect: dict[str, Any] = {}
        try:
            barrier = apply(request.id, query_command(request))
            effect = {"barrier": json.loads(barrier.to_json())}
        except HeadwaterError as error:
            problem = error
        self._answers.put(self._state.batch, request.id, problem, effect)

    def finish(self, request: Request) -> None:
        """Remove *request* once its answer is sealed."""
        self._inbox.finish(request, self._answers)


def query_command(request: Request) -> QueryCommand:
    """What *request* asks of a query. :raises InvalidQuery: it is for a capture or a pipeline."""
    command = request.command
    if isinstance(command, PauseBackfill | ResumeBackfill | ThrottleBackfill | ResnapshotTable):
        return command
    raise InvalidQuery(f"A query cannot do {command_name(type(command))!r}.")


def status(state: str, query: str) -> QueryStatus | None:
    """What the query *query* whose state is at *state* has reported last; ``None``: nothing yet."""
    try:
        with QueryReader(state, query) as reader, reader.snapshot() as view:
            value = QueryState.read_status(view)
    except StoreNotFound:
        return None
    return None if value is None else QueryStatus(query, value)


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
