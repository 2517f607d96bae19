"""SqlServerSnapshot: a number of the log that tasks read at (:mod:`.offset`), and what is planned there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from headwater.sources.position_snapshots import PositionSnapshot, with_columns
from headwater.sources.sqlserver.catalog import CatalogTable, read_table
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.instances import read_instances
from headwater.sources.sqlserver.log_watch import settled_end
from headwater.sources.sqlserver.names import TableName
from headwater.sources.sqlserver.offset import SqlServerMark
from headwater.sources.sqlserver.server import Server
from headwater.sources.sqlserver.sessions import borrow, give_back
from headwater.sources.sqlserver.splitting import page_end, plan_splits
from headwater.sources.sqlserver.types import source_column
from headwater.sources.table import SourceTable, SpecialValues

COMMIT_SECONDS: Final = 0.1
"""How long a commit that is on disk, where the capture job has read it, may take until versions of rows show it."""


class SqlServerSnapshot(PositionSnapshot[Session, CatalogTable, SqlServerMark]):
    """A place. One thread.

    :param lock_seconds: how long a question waits for a locked table; ``None``: until it is free.
    :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    :raises SourceMisconfigured: the user may not ask how far the log is, without which no row can be placed.
    :raises SourceBusy: the capture job does not come to the end of the log.
    """

    def __init__(self, dsn: Dsn, lock_seconds: float | None = None) -> None:
        super().__init__(plan_splits, page_end)
        self._dsn, self._lock_seconds = dsn, lock_seconds
        self._session: Session | None = None
        try:
            with self._asked() as session:
                Server.ask(session).require_cdc(session)
                self._mark = SqlServerMark(settled_end(session))
                time.sleep(COMMIT_SECONDS)
        except BaseException:
            self.close()
            raise

    def table(self, table: SourceTable) -> SourceTable:
        """*table* with the columns that it has now and that are captured, those that came new at the end.

        :raises SourceNotFound: the database has no such table.
        """
        catalog = self._catalog(table)
        with self._asked() as session:
            instances = read_instances(session, [catalog.id]).get(catalog.id, [])
        captured = {column.number for instance in instances[-1:] for column in instance.columns}
        known = {column.field_id: column for column in table.columns}
        columns = [
            source_column(
                column.name,
                column.type,
                column.number,
                nullable=column.nullable,
                special_values=known[column.number].special_values if column.number in known else SpecialValues.STOP,
                ticks=self._dsn.ticks,
            )
            for column in catalog.columns
            if not column.computed and (column.number in captured or column.number in known)
        ]
        return replace(with_columns(table, columns), source_id=catalog.id)

    def close(self) -> None:
        """Let the session go. Closing twice is fine."""
        if self._session is not None:
            give_back(self._session)
        self._session = None

    def _ping(self, session: Session) -> None:
        session.ask("SELECT 1 AS [one]")

    def _read(self, session: Session, table: SourceTable) -> CatalogTable:
        return read_table(session, TableName(table.namespace, table.name))

    @contextlib.contextmanager
    def _asked(self) -> Iterator[Session]:
        if self._session is None or not self._session.is_open:
            self._session = borrow(self._dsn)
            waits = -1 if self._lock_seconds is None else max(1, round(self._lock_seconds * 1000))
            self._session.run(f"SET LOCK_TIMEOUT {waits};")
        yield self._session
