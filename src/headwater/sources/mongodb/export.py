"""MongoSnapshot: a cluster time that tasks read at, and what is planned there.

It keeps nothing open: the time is enough to read at, for as long as the server keeps what was
(``minSnapshotHistoryWindowInSeconds``, 5 minutes by default).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final, Self

from headwater.errors import HeadwaterError
from headwater.sources.mongodb import catalog
from headwater.sources.mongodb.connection import Dsn, server_errors, shared
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import MongoMark, MongoOffset
from headwater.sources.mongodb.part import read_concern
from headwater.sources.mongodb.server import Server, operation_time
from headwater.sources.mongodb.splitting import page_end, plan_splits
from headwater.sources.splits import Cut, KeyRange, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

LATE_SECONDS: Final = 0.2
"""In which shards write a transaction over several of them that readers see already; see :mod:`.offset`."""


class MongoSnapshot:
    """A time. One thread. :raises SourceUnreachable: no answer. :raises AccessDenied: refused."""

    def __init__(self, dsn: Dsn) -> None:
        self._dsn = dsn
        with server_errors(dsn):
            client = shared(dsn)
            at, until = MongoOffset(operation_time(client)), None
            if Server.ask(client, dsn).commit_options:
                time.sleep(LATE_SECONDS)
                until = MongoOffset(operation_time(client))
            self._mark = MongoMark(at, until)
        self._tables: list[SourceTable] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """What readers need: the time."""
        return self._mark.to_json()

    @property
    def mark(self) -> MongoMark:
        """What it contains."""
        return self._mark

    def is_open(self) -> bool:
        """Whether the server still shows the tables that were asked for as they were."""
        try:
            with server_errors(self._dsn):
                for table in self._tables[-1:]:
                    shared(self._dsn)[table.namespace].command(
                        {
                            "find": table.name,
                            "limit": 1,
                            "singleBatch": True,
                            "projection": {"_id": 1},
                            "readConcern": read_concern(self._mark.at.time),
                        }
                    )
        except HeadwaterError:
            return False
        return True

    def table(self, table: SourceTable) -> SourceTable:
        """*table*, whose columns are settled here; with the number that the collection has now.

        :raises SourceNotFound: the server has no such collection.
        """
        with server_errors(self._dsn):
            found = catalog.find(shared(self._dsn), CollectionName(table.namespace, table.name))
        self._tables.append(table)
        return replace(table, source_id=found.source_id)

    def has_key(self, table: SourceTable) -> bool:
        """Whether it has: every document has an ``_id``."""
        return True

    def files(self, table: SourceTable) -> str:
        """Nothing: no range is one of blocks."""
        return ""

    def plan(self, table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        """Splits of about *split_rows* documents; see :func:`~headwater.sources.mongodb.splitting.plan_splits`.

        :raises UnsupportedTable: it cannot be split in that way.
        """
        self._tables.append(table)
        with server_errors(self._dsn):
            return plan_splits(shared(self._dsn), table, self._mark.at.time, split_rows=split_rows, kind=kind)

    def page_end(self, table: SourceTable, kind: SplitKind, part: KeyRange, rows: int) -> Cut | None:
        """The cut after the first *rows* documents of *part*; ``None`` when it has no more than that."""
        with server_errors(self._dsn):
            return page_end(shared(self._dsn), table, self._mark.at.time, part, rows)

    def close(self) -> None:
        """Nothing is held. Closing twice is fine."""
