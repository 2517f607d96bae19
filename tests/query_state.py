"""The state of queries, as tests open it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headwater.log_store import KvLogStoreReader
from headwater.log_store.consumers import ProgressRow, rows_of_group
from headwater.sinks.coordinator import Coordinator
from headwater.sinks.delivery import unpark
from headwater.state import open_reader
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QueryReader, open_query_store, own_state


@contextmanager
def coordinating(state: str, query: str) -> Iterator[Coordinator]:
    """The coordinator of *query*; one that was opened before is fenced."""
    with open_query_store(state, query, takeover=True) as store:
        yield Coordinator(store)


def coordinator(state: str, query: str) -> Coordinator:
    """As :func:`coordinating`, for who lets it be fenced by a later one."""
    return Coordinator(open_query_store(state, query, takeover=True))


@contextmanager
def grouped(location: str, query: str, *logs: str, takeover: bool = False) -> Iterator[KvLogStoreReader]:
    """The reader *query* of *logs* in the store at *location*, with a state of its own."""
    with (
        open_query_store(own_state(location, query), query, takeover=takeover) as store,
        open_reader(location) as source,
    ):
        reader = KvLogStoreReader(source, store)
        reader.init(logs)
        yield reader


def group_rows(state: str, query: str) -> dict[str, ProgressRow]:
    """How far *query* is, by log."""
    with suppress(StoreNotFound), QueryReader(state, query) as reader, reader.snapshot() as view:
        return rows_of_group(view)
    return {}


def unparked(state: str, query: str, names: Any) -> None:
    """Let the parked tables *names* return."""
    with open_query_store(state, query, takeover=True) as store:
        unpark(store, names)
