"""MongoSnapshot: a cluster time that tasks read at, and what is planned there.

It keeps nothing open: the time is enough to read at, for as long as the server keeps what was
(``minSnapshotHistoryWindowInSeconds``, 5 minutes by default).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from headwater.sources.mongodb import catalog
from headwater.sources.mongodb.connection import Client, Dsn, server_errors, shared
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import MongoMark, MongoOffset
from headwater.sources.mongodb.part import read_concern
from headwater.sources.mongodb.server import Server, operation_time
from headwater.sources.mongodb.splitting import page_end, plan_splits
from headwater.sources.position_snapshots import PositionSnapshot
from headwater.sources.table import SourceTable

LATE_SECONDS: Final = 0.2
"""In which shards write a transaction over several of them that readers see already; see :mod:`.offset`."""


class MongoSnapshot(PositionSnapshot[Client, int, MongoMark]):
    """A time. One thread. :raises SourceUnreachable: no answer. :raises AccessDenied: refused."""

    def __init__(self, dsn: Dsn) -> None:
        super().__init__(plan_splits, page_end)
        self._dsn = dsn
        with server_errors(dsn):
            client = shared(dsn)
            at, until = MongoOffset(operation_time(client)), None
            if Server.ask(client, dsn).commit_options:
                time.sleep(LATE_SECONDS)
                until = MongoOffset(operation_time(client))
            self._mark = MongoMark(at, until)

    def table(self, table: SourceTable) -> SourceTable:
        """*table*, whose columns are settled here; with the number that the collection has now.

        :raises SourceNotFound: the server has no such collection.
        """
        with self._asked() as client:
            collection = catalog.find(client, CollectionName(table.namespace, table.name))
        self._catalog(table)
        return replace(table, source_id=collection.source_id)

    def close(self) -> None:
        """Nothing is held. Closing twice is fine."""

    @contextmanager
    def _asked(self) -> Iterator[Client]:
        with server_errors(self._dsn):
            yield shared(self._dsn)

    def _ping(self, session: Client) -> None:
        """Whether the server still shows a table that was asked for as it was."""
        for namespace, name in list(self._catalogs)[-1:]:
            session[namespace].command(
                {
                    "find": name,
                    "limit": 1,
                    "singleBatch": True,
                    "projection": {"_id": 1},
                    "readConcern": read_concern(self._mark.at.time),
                }
            )

    def _read(self, session: Client, table: SourceTable) -> int:
        return self._mark.at.time
