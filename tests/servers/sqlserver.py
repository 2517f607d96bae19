"""The SQL Server that tests run on: the double of :mod:`tests.servers.sqlserver_double`, or a real one.

No server of SQL Server can be had from package registries. By default tests run on the double; with
``HEADWATER_TEST_SQLSERVER=sqlserver://user:password@host/database`` those that can run on a real one do. SQL Server
Agent must run; its user must be ``sysadmin``, or ``db_owner`` of a database in which change data capture is on already.
Everything in the schema ``shop`` of that database is dropped, and its capture job is made to look every second.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final, Self

from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.errors import HeadwaterError
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.log_watch import settled_end
from headwater.sources.sqlserver.server import log_end

ADDRESS: Final = os.environ.get("HEADWATER_TEST_SQLSERVER", "")
SCHEMA: Final = "shop"
_WAIT_SECONDS: Final = 120.0


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
        """Run batches one after the other in one session, each to its end; the rows of the last one."""
        with Session(Dsn(self.dsn)) as session:
            rows: list[Any] = []
            for batch in batches:
                rows = []
                with session._asked(batch) as cursor:
                    while True:  # who closes it before the last answer ends the statements that follow
                        if cursor.description is not None:
                            rows = [tuple(row) for row in cursor.fetchall()]
                        if not cursor.nextset():
                            break
            return rows

    def settle_instances(self) -> None:
        """Until every capture instance has its first number, and the job looks every second.

        The job is made with the first instance, and reads its settings when it starts.
        """
        end = time.monotonic() + _WAIT_SECONDS
        while self.execute("SELECT COUNT(*) AS n FROM cdc.change_tables WHERE start_lsn IS NULL")[0][0]:
            assert time.monotonic() < end, "a capture instance has no first number: does SQL Server Agent run?"
            time.sleep(0.2)
        jobs = "FROM msdb.dbo.cdc_jobs WHERE database_id = DB_ID() AND job_type = N'capture'"
        if self.execute(f"SELECT pollinginterval AS n {jobs}")[0][0] == 1:
            return
        self.execute(
            "EXEC sys.sp_cdc_change_job @job_type = N'capture', @pollinginterval = 1",
            "BEGIN TRY EXEC sys.sp_cdc_stop_job @job_type = N'capture' END TRY BEGIN CATCH END CATCH",
        )
        while True:  # it takes a moment to end, and is refused until then
            try:
                self.execute("EXEC sys.sp_cdc_start_job @job_type = N'capture'")
                return
            except HeadwaterError:
                assert time.monotonic() < end, "the capture job cannot be started"
                time.sleep(1)

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
    if isinstance(server, RealSqlServer):
        server.settle_instances()
