"""Consumers: who reads the logs of a store and how far each is, as any process sees them.

==============================  ==========================================================================
``queries/<consumer>``          a row for each log in the state of a query, one seal for all of them
``pipelines/<pipeline>``        … in the state of a query of a pipeline (:mod:`headwater.state.query_store`)
``consumers/<log>/<consumer>``  of one log, written by an earlier release: read until the consumer comes again
==============================  ==========================================================================

A consumer's reader (:mod:`headwater.log_store.reader`) is the one fenced writer of its rows; the writer of the logs
reads them at each seal, and forgets only what all consumers have delivered.
"""

from __future__ import annotations

import resource
from collections.abc import Hashable, Iterable, Mapping
from contextlib import closing
from dataclasses import astuple, dataclass
from typing import Any, Final, TypeAlias

from headwater import failpoints
from headwater.log_store.errors import LogCorrupt
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.state import Catalog, Field, FieldType, Snapshot, StateReader, StateTable, TableSchema, WriteBatch
from headwater.state.beside import beside, marks_beside, open_beside_reader, open_small_reader, stores_beside
from headwater.state.errors import StateError, StoreNotFound
from headwater.state.query_store import PIPELINES, QUERIES, Sealed, sections
from headwater.stream import DEFAULT_VNODE_COUNT, Epoch, VnodeBitmap

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


@dataclass(slots=True)
class Consumer:
    """One consumer of one log.

    :ivar started: the epoch after which it began.
    :ivar unreadable: its progress cannot be read: it holds the whole log.
    """

    log: str
    name: str
    progress: LogStoreVnodeProgress
    started: Epoch
    unreadable: bool = False

    @property
    def vnode_count(self) -> int:
        return self.progress.vnode_count

    def delivered(self) -> Epoch:
        """The newest epoch that all vnodes have delivered as a whole."""
        least = self.progress.minimum(VnodeBitmap.full(self.progress.vnode_count))
        if least is None:
            return self.started
        return least.epoch if least.seq is None else least.epoch.prev()


class ProgressBook:
    """The rows of one consumer, by log; open for writing."""

    def __init__(self, store: Sealed) -> None:
        self._store = store
        self._table: StateTable = store.catalog.open_or_create(GROUP, WriteBatch())

    def all(self) -> dict[str, ProgressRow]:
        with self._store.snapshot() as view:
            rows: Any = self._table.scan(view, 0)
            return {log: ProgressRow(*row) for (log,), row in rows}

    def put(self, rows: Mapping[str, ProgressRow], *, defer: bool = False) -> None:
        """Make the rows durable, all of them or none; with *defer* by the next seal of the store."""
        batch = WriteBatch()
        for log, row in rows.items():
            self._table.put(batch, 0, (log,), astuple(row))
        failpoints.hit(BEFORE_COMMIT)
        self._write(batch, defer)
        failpoints.hit(AFTER_COMMIT)

    def delete(self, logs: Iterable[str], *, defer: bool = False) -> None:
        """Forget the rows of *logs*; with *defer* by the next seal of the store."""
        batch = WriteBatch()
        for log in logs:
            self._table.delete(batch, 0, (log,))
        self._write(batch, defer)

    def _write(self, batch: WriteBatch, defer: bool) -> None:
        if defer:
            self._store.defer(batch)
        else:
            self._store.seal(batch)


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


def state_of(location: str, name: str, log: str) -> str | None:
    """Where the state of the consumer *name* of *log* is, from any process; ``None``: there is none."""
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


_Names: TypeAlias = tuple[str, ...]


@dataclass(slots=True)
class _Known:
    """A store as it was read last, its mark of just before, and its reader if that is kept open."""

    mark: Hashable = None
    consumers: tuple[Consumer, ...] = ()
    was_read: bool = False
    reader: StateReader | None = None


class Consumers:
    """All consumers of a store. One that has not changed costs a look at its mark."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._known: dict[_Names, _Known] = {}
        self._may_open = _stores_kept_open(location)

    def all(self) -> list[Consumer]:
        """Every consumer, with its progress of this moment.

        :raises StateError: the state of a query cannot be read, and it is not known which logs it needs.
        """
        marks: dict[_Names, Hashable] = {}
        for folder, depth in ((SINGLE_FOLDER, 2), *((folder, 1) for folder in GROUP_FOLDERS)):
            marks |= {(folder, *names): mark for names, mark in marks_beside(self._location, folder, depth).items()}
        for names in self._known.keys() - marks.keys():
            self._close(self._known.pop(names))
        return [
            one for names, mark in sorted(marks.items(), key=lambda item: item[0]) for one in self._look(names, mark)
        ]

    def of(self, log: str) -> list[Consumer]:
        """Those of *log*."""
        return [consumer for consumer in self.all() if consumer.log == log]

    def _look(self, names: _Names, mark: Hashable) -> Iterable[Consumer]:
        known = self._known.setdefault(names, _Known())
        if mark is not None and mark == known.mark:
            return known.consumers
        folder, *rest = names
        try:
            rows = self._rows(known, names)
        except StoreNotFound:
            return ()  # it begins this instant: it starts after what is announced then
        except StateError:
            # It is there, but cannot be read now, and may have gone back: its logs must stay as they are.
            known.mark = None
            self._close(known)
            if folder == SINGLE_FOLDER:
                return [_unreadable(*rest)]
            if not known.was_read:
                raise
            return [_unreadable(consumer.log, consumer.name) for consumer in known.consumers]
        known.mark, known.was_read = mark, True
        known.consumers = tuple(_consumer(log, name, row) for (log, name), row in rows.items())
        return known.consumers

    def _rows(self, known: _Known, names: _Names) -> dict[tuple[str, str], ProgressRow]:
        """By log and consumer."""
        reader = known.reader or open_beside_reader(self._location, *names)
        try:
            if names[0] in GROUP_FOLDERS:
                with closing(sections(reader)) as groups:
                    return {(log, query): row for query, view in groups for log, row in rows_of_group(view).items()}
            with reader.snapshot() as view:
                row = single_row(view, names[-1])
                return {} if row is None else {(names[1], names[2]): row}
        finally:
            if known.reader is None and self._may_open:
                known.reader = reader
                self._may_open -= 1
            elif known.reader is None:
                reader.close()

    def _close(self, known: _Known) -> None:
        if known.reader is not None:
            known.reader.close()
            self._may_open += 1
        known.reader = None

    def close(self) -> None:
        for known in self._known.values():
            self._close(known)
        self._known.clear()


def _consumer(log: str, name: str, row: ProgressRow) -> Consumer:
    try:
        return Consumer(log, name, LogStoreVnodeProgress.from_json(row.progress), Epoch(row.started))
    except LogCorrupt:
        return _unreadable(log, name)


def _unreadable(log: str, name: str) -> Consumer:
    return Consumer(log, name, LogStoreVnodeProgress(DEFAULT_VNODE_COUNT), Epoch(0), unreadable=True)


def _stores_kept_open(location: str) -> int:
    """An eighth of the file descriptors, two for each; a reader of an object store never rests, so only a few."""
    return 32 if location.startswith("slatedb") else resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16
