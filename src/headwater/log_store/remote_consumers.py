"""RemoteConsumers: the consumers of other processes, as the writer of the logs and everybody else sees them."""

from __future__ import annotations

import resource
from collections.abc import Hashable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

from headwater.log_store.consumers import Consumer
from headwater.log_store.errors import LogCorrupt
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.log_store.progress_book import GROUP_FOLDERS, SINGLE_FOLDER, ProgressRow, rows_of_group, single_row
from headwater.state import StateReader
from headwater.state.beside import marks_beside, open_beside_reader
from headwater.state.errors import StateError, StoreNotFound
from headwater.state.query_store import sections
from headwater.stream import DEFAULT_VNODE_COUNT, Epoch

_Names: TypeAlias = tuple[str, ...]


@dataclass(slots=True)
class _Known:
    """A store as it was read last, its mark of just before, and its reader if that is kept open."""

    mark: Hashable = None
    consumers: tuple[Consumer, ...] = ()
    was_read: bool = False
    reader: StateReader | None = None


class RemoteConsumers:
    """The remote consumers of a store. One that has not changed costs a look at its mark."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._known: dict[_Names, _Known] = {}
        self._may_open = _stores_kept_open(location)

    def all(self) -> list[Consumer]:
        """Every remote consumer, with its progress of this moment.

        :raises StateError: a group cannot be looked at, and nobody knows which logs it needs.
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
            return ()  # being made this instant: it starts after what is announced then
        except StateError:
            # It is there, but cannot be looked at now, and may have gone back: its logs must stay as they are.
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
