"""One suite for all databases: a shop is a fresh database of any family, and takes the SQL of Postgres.

What MySQL and MariaDB write otherwise is written so here: the tests say it once. Tables are in the schema, or database,
``public``. By default a test runs on the servers that it names, and the suite on all of them; in a soak each test runs
on every one that it can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import psycopg
import pymysql
import pytest
from tests.db.capture.running import RunningCapture
from tests.db.mysql.running import MySqlCapture
from tests.sampled import SOAK
from tests.servers.mariadb import MariaDbServer
from tests.servers.postgres import Database

POSTGRES, MARIADB, MYSQL = "postgres", "mariadb", "mysql"
ALL: Final = (POSTGRES, MARIADB, MYSQL)

_MEANT: Final = (
    (r"generate_series\((-?\d+), (-?\d+)\) n", r"(WITH RECURSIVE s(n) AS (SELECT \1 UNION ALL SELECT n + 1 FROM s WHERE"
     r" n < \2) SELECT n FROM s) s"),
    (r"ON CONFLICT \(\w+\) DO UPDATE SET", "ON DUPLICATE KEY UPDATE"),
    (r"^(\s*)INSERT INTO(.*)ON CONFLICT DO NOTHING", r"\1INSERT IGNORE INTO\2"),
    (r"ALTER COLUMN (\w+) TYPE (\w+)( USING \w+)?", r"MODIFY \1 \2"),
    (r"LOCK TABLE (\w+) IN ACCESS EXCLUSIVE MODE", r"LOCK TABLES \1 WRITE"),
    (r' COLLATE "C"', " COLLATE utf8mb4_bin"),
)  # fmt: skip


def on(*servers: str, never: Sequence[str] = ()) -> list[str]:
    """Parameters for the fixture ``shop``: *servers*, and in a soak all that can."""
    return [server for server in ALL if (server in servers or SOAK) and server not in never]


class Session(Protocol):
    """Its transaction stays open until it is told to end; then the next one begins."""

    def execute(self, statement: str) -> object: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...


class Shop(Protocol):
    """A fresh database. :ivar kind: one of :data:`ALL`."""

    kind: str

    @property
    def dsn(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def password(self) -> str: ...

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own; the rows of the last."""
        ...

    def transaction(self) -> AbstractContextManager[Session]:
        """A session whose transaction is rolled back at the end."""
        ...

    def capture(self, folder: Path, tables: Sequence[str], **source: Any) -> RunningCapture: ...

    def reader(self, table: str) -> str:
        """The address of a new user with the same password, who may read *table* and the log."""
        ...

    def change_password(self, password: str) -> None:
        """Of the new user."""
        ...


class PostgresShop:
    """A :class:`Shop` on Postgres."""

    kind = POSTGRES

    def __init__(self, database: Database) -> None:
        self.database = database
        self._role = ""

    @property
    def dsn(self) -> str:
        return self.database.dsn

    @property
    def port(self) -> int:
        return self.database.server.port

    @property
    def password(self) -> str:
        return self.database.server.password

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        return self.database.execute(*statements)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with psycopg.connect(self.dsn) as session:
            yield _PostgresSession(session)
            session.rollback()

    def capture(self, folder: Path, tables: Sequence[str], **source: Any) -> RunningCapture:
        return RunningCapture(self.database, folder, tables, **source)

    def reader(self, table: str) -> str:
        self._role = self.database.role("reader")
        self.execute(f'GRANT SELECT ON {table} TO "{self._role}"')
        return self.database.dsn_of(self._role)

    def change_password(self, password: str) -> None:
        self.execute(f"ALTER ROLE \"{self._role}\" PASSWORD '{password}'")


class _PostgresSession:
    def __init__(self, session: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._session = session

    def execute(self, statement: str) -> object:
        return self._session.execute(statement.encode())

    def commit(self) -> None:
        self._session.commit()

    def rollback(self) -> None:
        self._session.rollback()


class MySqlShop:
    """A :class:`Shop` on MariaDB or MySQL."""

    def __init__(self, server: MariaDbServer) -> None:
        self.server = server
        self.kind = MARIADB if server.kind == "MariaDB" else MYSQL

    @property
    def dsn(self) -> str:
        return f"{self.server.dsn}public"

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def password(self) -> str:
        return self.server.password

    @contextmanager
    def _session(self) -> Iterator[pymysql.Connection[Any]]:
        depth = "max_recursive_iterations" if self.kind == MARIADB else "cte_max_recursion_depth"
        settings = f"SET sql_mode = 'PIPES_AS_CONCAT', time_zone = '+00:00', {depth} = 1000000"
        with self.server.connect(database="public", init_command=settings) as session:
            yield session

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        with self._session() as session, session.cursor() as cursor:
            for text in statements:
                parts = [part for part in text.split(";") if part.strip()]
                if len(parts) > 1:
                    session.begin()
                for part in parts:
                    cursor.execute(_meant(part))
                    rows = list(cursor.fetchall())
                session.commit()
        return rows

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with self._session() as session:
            session.cursor().execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")  # as Postgres
            session.begin()
            yield _MySqlSession(session)
            session.rollback()

    def capture(self, folder: Path, tables: Sequence[str], **source: Any) -> RunningCapture:
        return MySqlCapture(self, folder, tables, **source)

    def reader(self, table: str) -> str:
        right = "BINLOG MONITOR" if self.kind == MARIADB else "REPLICATION CLIENT"
        self.execute(
            "DROP USER IF EXISTS reader@'%'",
            f"CREATE USER reader@'%' IDENTIFIED BY '{self.password}'",
            f"GRANT SELECT ON {table} TO reader@'%'",
            f"GRANT REPLICATION SLAVE, {right} ON *.* TO reader@'%'",
        )
        return self.dsn.replace("//headwater:", "//reader:")

    def change_password(self, password: str) -> None:
        self.execute(f"ALTER USER reader@'%' IDENTIFIED BY '{password}'")
        for (number,) in self.execute("SELECT id FROM information_schema.processlist WHERE user = 'reader'"):
            self.execute(f"KILL {number}")  # who is logged in stays so


class _MySqlSession:
    def __init__(self, session: pymysql.Connection[Any]) -> None:
        self._session = session

    def execute(self, statement: str) -> object:
        return self._session.cursor().execute(_meant(statement))

    def commit(self) -> None:
        self._session.commit()
        self._session.begin()

    def rollback(self) -> None:
        self._session.cursor().execute("UNLOCK TABLES")
        self._session.rollback()


def _meant(statement: str) -> str:
    """A statement of Postgres as MySQL and MariaDB write it."""
    for pattern, meant in _MEANT:
        statement = re.sub(pattern, meant, statement, flags=re.DOTALL)
    return statement


@contextmanager
def running(shop: Shop, folder: Path, *tables: str, **source: Any) -> Iterator[RunningCapture]:
    """A capture that runs, and is stopped at the end."""
    made = shop.capture(folder, tables, **source)
    made.start()
    if made.failure is not None:
        raise made.failure
    try:
        yield made
    finally:
        made.capture.stop()
        made._thread.join(60)


def only(*servers: str) -> pytest.MarkDecorator:
    """For a test that is about these alone."""
    return pytest.mark.parametrize("shop", list(servers), indirect=True)


def shared(*servers: str, never: Sequence[str] = ()) -> pytest.MarkDecorator:
    """For a test that runs on *servers* by default, and on all that can in a soak."""
    return pytest.mark.parametrize("shop", on(*servers, never=never), indirect=True)
