"""ProgressBook: how far a consumer of another process is, in a small store beside that of the logs.

==============================  ==========================================================================
``consumers/<log>/<consumer>``  of one log: a separate store
``queries/<consumer>``          of many logs: a row for each in the state of a query, one seal for all of them
``pipelines/<pipeline>``        … in the state of a query of a pipeline (:mod:`headwater.state.query_store`)
==============================  ==========================================================================

Its consumer is its one fenced writer; the writer of the logs reads it at each seal.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import astuple, dataclass
from typing import Any, Final, Self

from headwater import failpoints
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch
from headwater.state.beside import beside, open_beside_writer, open_small_reader, stores_beside
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import PIPELINES, QUERIES, Sealed, WholeStore, open_query_store, sections

BEFORE_COMMIT = failpoints.register("log_store.consumer_before_commit")
AFTER_COMMIT = failpoints.register("log_store.consumer_after_commit")

SINGLE_FOLDER: Final = "consumers"
GROUP_FOLDERS: Final = (QUERIES, PIPELINES)

_VALUE = (
    Field("progress", FieldType.JSON),
    Field("started", FieldType.UINT),
    Field("before", FieldType.JSON, nullable=True),
)
SINGLE = TableSchema("consumer_progress", 2, key=(Field("consumer", FieldType.TEXT),), value=_VALUE)
GROUP = TableSchema("group_progress", 1, key=(Field("log", FieldType.TEXT),), value=_VALUE)
_MIGRATIONS = {1: lambda values: (*values, None)}


@dataclass(frozen=True, slots=True)
class ProgressRow:
    """How far a consumer is in one log.

    :ivar progress: as JSON. :ivar started: the epoch after which it began.
    :ivar before: where it was, while it goes back.
    """

    progress: Any
    started: int
    before: Any = None


class ProgressBook:
    """The rows of one consumer, open for writing.

    :param log: the one log that it is about; ``None``: it is of a group.
    """

    def __init__(self, store: Sealed, name: str, log: str | None) -> None:
        self._store, self._name, self._log = store, name, log
        schema = GROUP if log is None else SINGLE
        migrations = {} if log is None else _MIGRATIONS
        self._table: StateTable = store.catalog.open_or_create(schema, WriteBatch(), migrations)

    @classmethod
    def open(cls, location: str, name: str, log: str, *, takeover: bool = False) -> Self:
        """That of *name* for *log*, or of its group if it is of one.

        :raises StoreOwned: another process is this consumer.
        """
        state = group_state(location, name, log)
        if state is not None:
            return cls(open_query_store(state, name, takeover=takeover), name, None)
        return cls(WholeStore(open_beside_writer(location, SINGLE_FOLDER, log, name, takeover=takeover)), name, log)

    def get(self, log: str) -> ProgressRow | None:
        with self._store.snapshot() as view:
            row: Any = self._table.get(view, 0, (self._key(log),))
        return None if row is None else ProgressRow(*row)

    def put(self, rows: Mapping[str, ProgressRow], *, defer: bool = False) -> None:
        """Make the rows durable, all of them or none; with *defer* by the next seal of the group's store."""
        batch = WriteBatch()
        for log, row in rows.items():
            self._table.put(batch, 0, (self._key(log),), astuple(row))
        failpoints.hit(BEFORE_COMMIT)
        self._write(batch, defer)
        failpoints.hit(AFTER_COMMIT)

    def delete(self, log: str, *, defer: bool = False) -> None:
        """Forget the row; with *defer* by the next seal of the group's store."""
        batch = WriteBatch()
        self._table.delete(batch, 0, (self._key(log),))
        self._write(batch, defer)

    def _write(self, batch: WriteBatch, defer: bool) -> None:
        if defer:
            self._store.defer(batch)
        else:
            self._store.seal(batch)

    def close(self) -> None:
        self._store.close()

    def _key(self, log: str) -> str:
        return log if self._log is None else self._name


def single_row(view: Snapshot, name: str) -> ProgressRow | None:
    """The row of the consumer *name* in its own store."""
    catalog = Catalog.load(view)
    if SINGLE.name not in catalog.names():
        return None
    row: Any = catalog.open(SINGLE, _MIGRATIONS).get(view, 0, (name,))
    return None if row is None else ProgressRow(*row)


def rows_of_group(view: Snapshot) -> dict[str, ProgressRow]:
    """The rows of a group, by log."""
    catalog = Catalog.load(view)
    if GROUP.name not in catalog.names():
        return {}
    return {key[0]: ProgressRow(*values) for key, values in catalog.open(GROUP).scan(view, 0)}


def group_state(location: str, name: str, log: str) -> str | None:
    """Where the group *name* is that consumes *log*, from any process; ``None``: there is none."""
    for folder in GROUP_FOLDERS:
        for (found,) in stores_beside(location, folder, 1):
            state = beside(location, folder, found)
            try:
                with open_small_reader(state) as reader, closing(sections(reader)) as groups:
                    if any(query == name and log in rows_of_group(view) for query, view in groups):
                        return state
            except StoreNotFound:
                continue
    return None


def is_known(location: str, log: str, name: str) -> bool:
    """Whether there is such a consumer."""
    return (log, name) in stores_beside(location, SINGLE_FOLDER, 2) or group_state(location, name, log) is not None
