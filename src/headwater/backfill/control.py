"""Requests to a running query, and its status: from any process, through the query's state.

=============  ==========================================  ======================================================
request        detail                                      effect
=============  ==========================================  ======================================================
``pause``      ``{"table": name or None}``                 no more history is read; changes flow on
``resume``     ``{"table": name or None}``                 history goes on
``throttle``   ``{"table": …, "rows_per_second": n|None}`` so many rows of history in a second, for each table
``resnapshot`` ``{"table", "start", "end", "columns"}``    the table, a range of its keys, or columns of it are read
                                                           once more
=============  ==========================================  ======================================================

A request is done once, at a barrier, and its answer is sealed with what it did (:mod:`headwater.state.requests`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headwater.backfill.cdc.executor import Renewal
from headwater.backfill.errors import InvalidQuery
from headwater.backfill.plans import QueryState
from headwater.backfill.query import QueryOptions
from headwater.errors import HeadwaterError
from headwater.sources.snapshots import SnapshotSource
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceTable
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QueryReader
from headwater.state.requests import Answers, Request, ask, inbox_of
from headwater.stream import Mutation, Pause, Resume, Throttle
from headwater.stream.mutation import ALL_TARGETS

PAUSE, RESUME, THROTTLE, RESNAPSHOT = "pause", "resume", "throttle", "resnapshot"


class _Table(Protocol):
    @property
    def table(self) -> SourceTable: ...


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

    def __init__(self, options: QueryOptions, state: QueryState, source: SnapshotSource) -> None:
        self._source, self._has_source = source, bool(options.source)
        self._inbox, self._query = inbox_of(options.state_location), options.query
        self._state = state
        self._answers = Answers(state.catalog, state.store, state.batch)

    def open(self) -> list[Request]:
        return self._inbox.open(self._answers, self._query)

    def mutation(self, request: Request, tables: Mapping[str, _Table]) -> tuple[Mutation | None, dict[str, Renewal]]:
        """What *request* means: a mutation of the next barrier, and the tables that are read once more.

        :raises InvalidQuery: no such table or request. :raises SourceError: the source does not know such a range.
        """
        name = request.detail.get("table")
        if name is not None and name not in tables:
            raise InvalidQuery(
                f"Table {name} is not of this query; its tables are {', '.join(tables)}.",
                next_step="Name one of them, or none for all.",
            )
        if request.kind == PAUSE:
            return Pause(), {}
        if request.kind == RESUME:
            return Resume(), {}
        if request.kind == THROTTLE:
            return Throttle(request.detail["rows_per_second"], name or ALL_TARGETS), {}
        if request.kind == RESNAPSHOT:
            if not self._has_source:
                raise InvalidQuery("A stream writes the store: there is no database to read the table from once more.")
            wanted = list(tables) if name is None else [name]
            return None, {each: _renewal(request, tables[each].table, self._source) for each in wanted}
        raise InvalidQuery(f"A query cannot do {request.kind!r}.")

    def answer(self, request: Request, problem: HeadwaterError | None) -> None:
        """Seal the answer with the next save."""
        self._answers.put(self._state.batch, request.id, problem)

    def remove(self, request: Request) -> None:
        """Once its answer is sealed."""
        self._inbox.remove(request)


def _renewal(request: Request, table: SourceTable, source: SnapshotSource) -> Renewal:
    columns = request.detail.get("columns")
    names = table.schema.names
    for column in columns or ():
        if column not in names:
            raise InvalidQuery(
                f"Table {table.full_name} has no column {column!r}.", next_step=f"It has {', '.join(names)}."
            )
    cuts = []
    for side, after in (("start", False), ("end", True)):
        values = request.detail.get(side)
        cuts.append(Cut(tuple(map(str, values)), after) if values else None)
    part = None if cuts == [None, None] else source.key_range(table, KeyRange(*cuts))
    return Renewal(request.id, part, tuple(table.column(name).field_id for name in columns) if columns else None)


def ask_query(state: str, query: str, kind: str, detail: dict[str, Any], seconds: float = 30.0) -> dict[str, Any]:
    """Ask the running query whose state is at *state*, and wait for its answer.

    :raises RequestFailed: what it answered. :raises NoAnswer: none in time.
    :raises StoreNotFound: there is no such query.
    """
    with QueryReader(state, query) as reader:
        reader.snapshot().close()
    return ask(state, Request(kind, detail, query), lambda: QueryReader(state, query), seconds, f"query {query!r}")


def status(state: str, query: str) -> QueryStatus | None:
    """What the query *query* whose state is at *state* has reported last; ``None``: nothing yet."""
    try:
        with QueryReader(state, query) as reader, reader.snapshot() as view:
            value = QueryState.read_status(view)
    except StoreNotFound:
        return None
    return None if value is None else QueryStatus(query, value)
