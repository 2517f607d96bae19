"""ConsumerGroup: one consumer of many logs of a store, whose progress in all of them becomes durable together.

A query with hundreds of tables has one store and one seal for them, not hundreds. Each log's consumer starts, reads,
goes back and ends as any other (:class:`~headwater.log_store.remote.LogConsumer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from headwater.log_store.bounds import announced
from headwater.log_store.errors import LogNotFound
from headwater.log_store.log_view import LogView
from headwater.log_store.progress_book import SINGLE_FOLDER, ProgressBook, single_row
from headwater.log_store.remote import LogConsumer, check_start
from headwater.state import open_reader, stores_beside
from headwater.state.beside import open_beside_reader, remove_beside
from headwater.state.errors import StoreNotFound
from headwater.state.query_store import QueryStore
from headwater.stream import Epoch


class ConsumerGroup:
    """The consumer of any logs of the store at *location* whose progress is in *store*, the state of a query.

    :ivar name: of the consumer: that of the query.
    """

    def __init__(self, location: str, store: QueryStore) -> None:
        self._location, self.name = location, store.query
        name = store.query
        self._source, self._book = open_reader(location), ProgressBook(store, name, None)
        self._consumers: dict[str, LogConsumer] = {}
        self._alone = {log for log, consumer in stores_beside(location, SINGLE_FOLDER, 2) if consumer == name}

    def consumer(self, log: str, *, start: Epoch | None = None) -> LogConsumer:
        """The consumer of *log*; a new one begins after epoch *start*. It is closed with the group.

        :raises LogNotFound: no such log. :raises EpochGone: *start* is before what the log holds.
        :raises InvalidOffset: *start* is not sealed yet.
        """
        known = self._consumers.get(log)
        if known is None:
            with self._source.snapshot() as view:
                LogView.open(view, log)
                place = announced(view, log), view.epoch
            if log in self._alone:
                self._adopt(log)
            if start is not None and self._book.get(log) is None:
                check_start(log, self.name, start, *place)
            known = self._consumers[log] = LogConsumer(log, self.name, self._source, self._book, start, shared=True)
        return known

    def commit(self, upto: Mapping[str, Epoch], *, defer: bool = False) -> None:
        """The epochs up to those of *upto* are delivered, by log. Durable on return, for all of them or none.

        :param defer: … with the next seal of the query's state.
        :raises InvalidOffset: an epoch that is not sealed.
        """
        made = {log: self._consumers[log].committing(epoch) for log, epoch in upto.items()}
        if made:
            self._book.put({log: self._consumers[log].row(progress) for log, progress in made.items()}, defer=defer)
            for log, progress in made.items():
                self._consumers[log].moved(progress)

    def drop(self, log: str, *, defer: bool = False) -> None:
        """Forget the consumer of *log*: the log waits for it no longer.

        :param defer: … with the next seal of the query's state.
        """
        self._consumers.pop(log, None)
        with suppress(LogNotFound):
            if log in self._alone:
                self._adopt(log)
        self._book.delete(log, defer=defer)

    def _adopt(self, log: str) -> None:
        """A consumer that has a store of its own becomes one of the group: it holds its epochs all the time."""
        try:
            with open_beside_reader(self._location, SINGLE_FOLDER, log, self.name) as reader, reader.snapshot() as view:
                row = single_row(view, self.name)
        except StoreNotFound:
            row = None
        if row is not None and self._book.get(log) is None:
            self._book.put({log: row})
        remove_beside(self._location, SINGLE_FOLDER, log, self.name)
        self._alone.discard(log)

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
