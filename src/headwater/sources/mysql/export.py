"""MySqlSnapshot: a place in the log that tasks read at (:mod:`.offset`), and what is planned there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from headwater.sources.mysql.catalog import CatalogTable, read_table
from headwater.sources.mysql.connection import Connection, Dsn, ask, server_errors
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.offset import MySqlMark
from headwater.sources.mysql.places import seen_place
from headwater.sources.mysql.server import Server
from headwater.sources.mysql.sessions import borrow, give_back
from headwater.sources.mysql.splitting import page_end, plan_splits
from headwater.sources.mysql.types import source_column
from headwater.sources.position_snapshots import PositionSnapshot, with_columns
from headwater.sources.table import SourceTable, SpecialValues


class MySqlSnapshot(PositionSnapshot[Connection, CatalogTable, MySqlMark]):
    """A place. One thread.

    :param lock_seconds: how long a question waits for a locked table, which then is ``SourceBusy``; ``None``: until it
        is free.
    :raises SourceUnreachable: no answer. :raises AccessDenied: refused. :raises SourceBusy: see :mod:`.places`.
    """

    def __init__(self, dsn: Dsn, lock_seconds: float | None = None) -> None:
        super().__init__(plan_splits, page_end)
        self._dsn, self._lock_seconds = dsn, lock_seconds
        self._session: Connection | None = None
        try:
            with self._asked() as session:
                self._mark = MySqlMark(seen_place(session, Server.ask(session)))
        except BaseException:
            self.close()
            raise

    def table(self, table: SourceTable) -> SourceTable:
        """*table* with the columns that it has now, those that came new at the end.

        :raises SourceNotFound: the server has no such table.
        """
        catalog = self._catalog(table)
        known = {column.name: column for column in table.columns}
        following = max(column.field_id for column in table.columns) + 1
        columns = []
        for column in catalog.columns:
            was = known.get(column.name)
            columns.append(
                source_column(
                    column.name,
                    column.type_text,
                    following if was is None else was.field_id,
                    nullable=column.nullable,
                    special_values=SpecialValues.STOP if was is None else was.special_values,
                    tinyint1_is_boolean=self._dsn.tinyint1_is_boolean,
                )
            )
            following += was is None
        return with_columns(table, columns)

    def close(self) -> None:
        """Let the session go. Closing twice is fine."""
        if self._session is not None:
            give_back(self._dsn, self._session)
        self._session = None

    def _ping(self, session: Connection) -> None:
        ask(session, "SELECT 1")

    def _read(self, session: Connection, table: SourceTable) -> CatalogTable:
        name = TableName(table.namespace, table.name)
        ask(session, f"SELECT 1 FROM {name.sql} LIMIT 0")  # who has locked it holds who plans, not the tasks
        return read_table(session, name)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[Connection]:
        if self._session is None or not self._session.open:
            self._session = borrow(self._dsn)
            seconds = "DEFAULT" if self._lock_seconds is None else max(1, round(self._lock_seconds))
            with server_errors(self._dsn):
                ask(self._session, f"SET SESSION lock_wait_timeout = {seconds}")
        with server_errors(self._dsn):
            yield self._session
