"""Requests to a running query, and its status: from any process, through the query's state.

A request (:mod:`headwater.control.request`) becomes the mutation of a barrier of the query, once, and its answer is
sealed with what the barrier did.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from headwater.backfill.cdc.state import Renewal
from headwater.backfill.errors import InvalidQuery
from headwater.backfill.plans import QueryState
from headwater.backfill.query import QueryOptions
from headwater.backfill.query_tables import QueryTables
from headwater.control.command import (
    PauseBackfill,
    QueryCommand,
    ResnapshotTable,
    ResumeBackfill,
    ThrottleBackfill,
    command_name,
)
from headwater.control.mutation import mutation_of
from headwater.control.request import Answers, Request, inbox_of
from headwater.errors import HeadwaterError
from headwater.sources.snapshots import SnapshotSource
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceTable
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QueryReader
from headwater.stream import Barrier


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

    def serve(self, request: Request, tables: QueryTables) -> None:
        """Do what *request* asks, with the next barrier of *tables*; the answer is sealed with the next save."""
        problem: HeadwaterError | None = None
        effect: dict[str, Any] = {}
        try:
            effect = effect_of(self._apply(request.id, query_command(request), tables))
        except HeadwaterError as error:
            problem = error
        self._answers.put(self._state.batch, request.id, problem, effect)

    def _apply(self, request_id: str, command: QueryCommand, tables: QueryTables) -> Barrier:
        """:raises InvalidQuery: no such table. :raises SourceError: the source does not know such a range."""
        name = command.table
        if name is not None and name not in tables:
            raise InvalidQuery(
                f"Table {name} is not of this query; its tables are {', '.join(tables)}.",
                next_step="Name one of them, or none for all.",
            )
        renewals: dict[str, Renewal] = {}
        if isinstance(command, ResnapshotTable):
            if not self._has_source:
                raise InvalidQuery("A stream writes the store: there is no database to read the table from once more.")
            wanted = list(tables) if name is None else [name]
            renewals = {each: _renewal(request_id, command, tables[each].table, self._source) for each in wanted}
        barrier = tables.mutate(mutation_of(command, name))
        for each, renewal in renewals.items():
            tables[each].renew(renewal)
        return barrier

    def finish(self, request: Request) -> None:
        """Remove *request* once its answer is sealed."""
        self._inbox.finish(request, self._answers)


def query_command(request: Request) -> QueryCommand:
    """What *request* asks of a query. :raises InvalidQuery: it is for a capture or a pipeline."""
    command = request.command
    if isinstance(command, PauseBackfill | ResumeBackfill | ThrottleBackfill | ResnapshotTable):
        return command
    raise InvalidQuery(f"A query cannot do {command_name(type(command))!r}.")


def effect_of(barrier: Barrier) -> dict[str, Any]:
    """What an answer says of the *barrier* that did what was asked."""
    return {"barrier": json.loads(barrier.to_json())}


def _renewal(request_id: str, command: ResnapshotTable, table: SourceTable, source: SnapshotSource) -> Renewal:
    columns, names = command.columns, table.schema.names
    for column in columns:
        if column not in names:
            raise InvalidQuery(
                f"Table {table.full_name} has no column {column!r}.", next_step=f"It has {', '.join(names)}."
            )
    sides = ((command.start, False), (command.end, True))
    cuts = [Cut(values, after) if values else None for values, after in sides]
    part = None if cuts == [None, None] else source.key_range(table, KeyRange(*cuts))
    return Renewal(request_id, part, tuple(table.column(name).field_id for name in columns) if columns else None)


def status(state: str, query: str) -> QueryStatus | None:
    """What the query *query* whose state is at *state* has reported last; ``None``: nothing yet."""
    try:
        with QueryReader(state, query) as reader, reader.snapshot() as view:
            value = QueryState.read_status(view)
    except StoreNotFound:
        return None
    return None if value is None else QueryStatus(query, value)
