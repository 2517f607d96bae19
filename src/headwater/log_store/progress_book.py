"""ProgressBook: how far a consumer of another process is, in a small store beside that of the logs.

==============================  =================================================================
``consumers/<log>/<consumer>``  of one log: a store of its own
``consumer_groups/<consumer>``  of many logs: one store, a row for each, one seal for all of them
==============================  =================================================================

Its consumer is its one fenced writer; the writer of the logs reads it at each seal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, Final, Self

from headwater import failpoints
from headwater.state import Catalog, Field, FieldType, Snapshot, StateStore, StateTable, TableSchema, WriteBatch
from headwater.state.beside import open_beside_reader, open_beside_writer, stores_beside
from headwater.state.errors import StoreNotFound
from headwater.stream import EpochClock

BEFORE_COMMIT = failpoints.register("log_store.consumer_before_commit")
AFTER_COMMIT = failpoints.register("log_store.consumer_after_commit")

SINGLE_FOLDER: Final = "consumers"
GROUP_FOLDER: Final = "consumer_groups"

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

    def __init__(self, store: StateStore, name: str, log: str | None) -> None:
        self._store, self._name, self._log = store, name, log
        self._clock = EpochClock(lambda: time.time_ns() // 1_000_000, store.committed_epoch())
        with store.snapshot() as view:
            catalog = Catalog.load(view)
            schema = GROUP if log is None else SINGLE
            self._table: StateTable = catalog.open_or_create(schema, WriteBatch(), {} if log is None else _MIGRATIONS)

    @classmethod
    def open(cls, location: str, name: str, log: str | None, *, takeover: bool = False) -> Self:
        """That of *name* for *log*, or of its group if it is of one; with ``None`` always that of the group.

        :raises StoreOwned: another process is this consumer.
        """
        if log is None or log in group_rows(location, name):
            return cls(open_beside_writer(location, GROUP_FOLDER, name, takeover=takeover), name, None)
        return cls(open_beside_writer(location, SINGLE_FOLDER, log, name, takeover=takeover), name, log)

    def get(self, log: str) -> ProgressRow | None:
        with self._store.snapshot() as view:
            row: Any = self._table.get(view, 0, (self._key(log),))
        return None if row is None else ProgressRow(*row)

    def put(self, rows: Mapping[str, ProgressRow]) -> None:
        """Make the rows durable, all of them or none."""
        batch = WriteBatch()
        for log, row in rows.items():
            self._table.put(batch, 0, (self._key(log),), astuple(row))
        failpoints.hit(BEFORE_COMMIT)
        self._store.seal(self._clock.next(), batch)
        failpoints.hit(AFTER_COMMIT)

    def delete(self, log: str) -> None:
        """Forget the row."""
        batch = WriteBatch()
        self._table.delete(batch, 0, (self._key(log),))
        self._store.seal(self._clock.next(), batch)

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


def group_rows(location: str, name: str) -> dict[str, ProgressRow]:
    """The rows of the group *name*, from any process; none where there is no such group."""
    with suppress(StoreNotFound), open_beside_reader(location, GROUP_FOLDER, name) as reader, reader.snapshot() as view:
        return rows_of_group(view)
    return {}


def is_known(location: str, log: str, name: str) -> bool:
    """Whether there is such a consumer."""
    return (log, name) in stores_beside(location, SINGLE_FOLDER, 2) or log in group_rows(location, name)
