"""DeliveryLook: what a query has delivered and what it left out, from any process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from headwater.sinks.delivery_record import (
    DELIVERIES,
    DELIVERY_STATE,
    PARKED,
    SUSPECT,
    TABLE,
    DeliveryRecord,
    of_tables,
)
from headwater.sinks.sink import Committed, Sink
from headwater.sources.table import SourceTable
from headwater.state import Catalog, WriteBatch
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QueryReader, QueryStore


def read_deliveries(state: str, query: str) -> tuple[DeliveryRecord, ...]:
    """What is known of the deliveries of *query*, from any process; nothing where there were none."""
    try:
        with QueryReader(state, query) as reader, reader.snapshot() as view:
            catalog = Catalog.load(view)
            if DELIVERIES.name not in catalog.names():
                return ()
            rows = catalog.open(DELIVERIES).scan(view, 0)
            found = [DeliveryRecord.from_json(key[0], values[0]) for key, values in rows]
    except StoreNotFound:
        return ()
    return tuple(sorted(found, key=lambda record: record.number))


def behind_of(
    state: str, query: str, backfill: str, sink: Sink, tables: Sequence[SourceTable]
) -> list[tuple[SourceTable, Committed]]:
    """The tables of which *sink* has less than what *query* committed to it, and what it has; from any process."""
    try:
        with QueryReader(state, query) as reader, reader.snapshot() as view:
            catalog = Catalog.load(view)
            known = DELIVERY_STATE.name in catalog.names()
            epochs = of_tables(catalog.open(DELIVERY_STATE), view, TABLE) if known else {}
    except StoreNotFound:
        return []
    found = behind(sink, query, backfill, tables, epochs)
    return [(table, has) for table, has in found if has != Committed()]


def behind(
    sink: Sink, query: str, backfill: str, tables: Sequence[SourceTable], epochs: Mapping[str, int]
) -> Iterator[tuple[SourceTable, Committed]]:
    """The tables of which *sink* has less than *epochs* tell, and what it has."""
    for table in tables:
        wanted = epochs.get(table.full_name, 0)
        if wanted:
            has = sink.committed(table, query, backfill)
            if has.epoch < wanted:
                yield table, has


class DeliveryLook:
    """What the coordinator of *query* has told of its tables, read again and again by one process."""

    def __init__(self, state: str, query: str) -> None:
        self._state, self._query = state, query
        self._reader: QueryReader | None = None

    def parked(self) -> dict[str, dict[str, Any]]:
        """The tables that are parked: ``reason``, ``next_step`` and ``since_ms`` of each."""
        return self._read(PARKED)

    def suspects(self) -> frozenset[str]:
        """The tables of which the sink refused rows at the commit."""
        return frozenset(self._read(SUSPECT))

    def _read(self, prefix: str) -> dict[str, Any]:
        try:
            if self._reader is None:
                self._reader = QueryReader(self._state, self._query)
            with self._reader.snapshot() as view:
                catalog = Catalog.load(view)
                if DELIVERY_STATE.name not in catalog.names():
                    return {}
                return of_tables(catalog.open(DELIVERY_STATE), view, prefix)
        except StoreNotFound:
            return {}

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def read_parked(state: str, query: str) -> dict[str, dict[str, Any]]:
    """The tables that *query* has parked, once."""
    with closing(DeliveryLook(state, query)) as look:
        return look.parked()


def unpark(store: QueryStore, names: Collection[str]) -> None:
    """Let the parked tables *names* return with the next seal of *store*."""
    batch = WriteBatch()
    state = store.catalog.open_or_create(DELIVERY_STATE, batch)
    for name in names:
        state.delete(batch, 0, (f"{PARKED}{name}",))
    store.defer(batch)
