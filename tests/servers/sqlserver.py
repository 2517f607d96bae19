"""The SQL Server that tests run on: the double of :mod:`tests.servers.sqlserver_double`, or a real one.

No server of SQL Server can be had from package registries. By default tests run on the double; with
``HEADWATER_TEST_SQLSERVER=sqlserver://user:password@host/database`` those that can run on a real one do. Its user must
be ``db_owner`` there, SQL Server Agent must run, and everything in the schema ``shop`` of that database is dropped.
"""

from __future__ import annotations

import os
from typing import Any, Final, Self

from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.log_watch import settled_end
from headwater.sources.sqlserver.server import log_end

ADDRESS: Final = os.environ.get("HEADWATER_TEST_SQLSERVER", "")
SCHEMA: Final = "shop"


class RealSqlServer:
    """The server of ``HEADWATER_TEST_SQLSERVER``, its schema ``shop`` emptied."""

    is_double = False

    def __init__(self, dsn: str = ADDRESS) -> None:
        self.dsn = dsn
        self._empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._empty()

    def _empty(self) -> None:
        for (name,) in self.execute(
            "SELECT t.name FROM sys.tables AS t JOIN sys.schemas AS s ON s.schema_id = t.schema_id"
            f" WHERE s.name = N'{SCHEMA}'"
        ):
            self.execute(
                f"IF EXISTS (SELECT 1 FROM sys.tables WHERE object_id = OBJECT_ID(N'{SCHEMA}.{name}') AND"
                f" is_tracked_by_cdc = 1) EXEC sys.sp_cdc_disable_table @source_schema = N'{SCHEMA}',"
                f" @source_name = N'{name}', @capture_instance = N'all'",
                f"DROP TABLE [{SCHEMA}].[{name}]",
            )
        self.execute(
            f"IF SCHEMA_ID(N'{SCHEMA}') IS NULL EXEC(N'CREATE SCHEMA {SCHEMA}')",
            "IF (SELECT is_cdc_enabled FROM sys.databases WHERE database_id = DB_ID()) = 0 EXEC sys.sp_cdc_enable_db",
            "ALTER DATABASE CURRENT SET ALLOW_SNAPSHOT_ISOLATION ON",
        )

    def execute(self, *batches: str) -> list[Any]:
        """Run batches one after the other in one session; the rows of the last one."""
        with Session(Dsn(self.dsn)) as session:
            rows: list[Any] = []
            for batch in batches:
                rows = [tuple(row.values()) for row in session.ask(batch)]
            return rows

    def last_change(self) -> int:
        """The end of the log: nobody tells which commit was the last one before it."""
        with Session(Dsn(self.dsn)) as session:
            return log_end(session)

    def wait_for_scan(self) -> None:
        """Until the capture job has read all that is committed by now."""
        with Session(Dsn(self.dsn)) as session:
            settled_end(session, 120)


AnySqlServer = SqlServerDouble | RealSqlServer


def start_sqlserver() -> AnySqlServer:
    """A fresh server with the schema ``shop`` and change data capture on."""
    if ADDRESS:
        return RealSqlServer()
    double = SqlServerDouble()
    double.execute("EXEC sys.sp_cdc_enable_db;")
    return double


def track(server: AnySqlServer, *names: str, instance: str | None = None) -> None:
    """Switch change data capture on for tables of ``shop``."""
    for name in names:
        named = "" if instance is None else f", @capture_instance = N'{instance}'"
        server.execute(
            f"EXEC sys.sp_cdc_enable_table @source_schema = N'{SCHEMA}', @source_name = N'{name}', @role_name = NULL,"
            f" @supports_net_changes = 0{named}"
        )
