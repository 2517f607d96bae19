"""The databases of the fuzzer: how a script runs on them, and the rows that a table has."""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from typing import Any, Final, Protocol

import psycopg
import pymysql
from tests.fuzz.values import Rows
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import start_server
from tests.servers.postgres import Database, PostgresServer

_POSTGRES_KINDS: Final = {
    **dict.fromkeys(("smallint", "integer", "bigint"), "int"),
    "numeric": "decimal",
    "real": "real",
    "double precision": "double",
    "boolean": "bool",
    "bytea": "bytes",
    "date": "date",
    "time without time zone": "time",
    "timestamp without time zone": "moment",
    "timestamp with time zone": "moment",
}
_MYSQL_KINDS: Final = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint", "year"), "int"),
    "decimal": "decimal",
    "float": "real",
    "double": "double",
    "date": "date",
    "time": "time",
    "bit": "bits",
    **dict.fromkeys(("datetime", "timestamp"), "moment"),
    **dict.fromkeys(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"), "bytes"),
    "json": "json",
}
_COLUMNS: Final = (
    "SELECT a.attname, format_type(a.atttypid, NULL) FROM pg_attribute a"
    " WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"
)
_LEFT: Final = (
    "SELECT format('DROP TABLE IF EXISTS %%I CASCADE', relname) FROM pg_class"
    " WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
    " AND (relname = %(t)s OR starts_with(relname, %(t)s || '_'))"
)


class Writer(Protocol):
    """A session of a script. A statement that fails is left out, with the transaction that it was in."""

    def execute(self, text: str) -> str | None:
        """Why the database refused it; ``None``: it did not."""
        ...

    def close(self) -> None: ...


class FuzzSource(Protocol):
    """A database with the tables of a pipeline. :ivar kind: which."""

    kind: str

    @property
    def dsn(self) -> str: ...
    def renew(self) -> None:
        """A database that has nothing."""
        ...

    def remove(self, table: str) -> None:
        """Drop a table and what was created with it."""
        ...

    def writer(self) -> Writer: ...
    def rows(self, table: str) -> Rows: ...
    def close(self) -> None: ...


class PostgresWriter:
    def __init__(self, database: Database) -> None:
        self._session = database.connect()
        self._session.execute("SET lock_timeout = '15s'; SET statement_timeout = '30s'; SET timezone = 'UTC'")

    def execute(self, text: str) -> str | None:
        try:
            self._session.execute(text.encode())
        except psycopg.Error as error:
            with suppress(psycopg.Error):
                self._session.execute("ROLLBACK")
            return str(error).splitlines()[0]
        return None

    def close(self) -> None:
        self._session.close()


class PostgresFuzz:
    """A :class:`FuzzSource` on Postgres."""

    kind = "postgres"

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.server = self._stack.enter_context(PostgresServer(settings={"max_connections": "200"}))
        self._fresh = ExitStack()
        self.renew()

    def renew(self) -> None:
        self._fresh.close()
        self._fresh = ExitStack()
        self.database = self._fresh.enter_context(self.server.database())

    @property
    def dsn(self) -> str:
        return self.database.dsn

    def remove(self, table: str) -> None:
        with self.database.connect() as session:
            for (text,) in session.execute(_LEFT, {"t": table}).fetchall():
                session.execute(text)
            session.execute(f"DROP TYPE IF EXISTS {table}_mood, {table}_pair CASCADE".encode())

    def writer(self) -> Writer:
        return PostgresWriter(self.database)

    def rows(self, table: str) -> Rows:
        with self.database.connect() as session, session.transaction():
            session.execute("SET LOCAL timezone = 'UTC'; SET LOCAL lock_timeout = '15s'")
            session.execute(f"LOCK TABLE {table} IN ACCESS SHARE MODE".encode())
            return postgres_rows(session, f"public.{table}")

    def close(self) -> None:
        self._fresh.close()
        self._stack.close()


def postgres_rows(session: psycopg.Connection[Any], table: str) -> Rows:
    """The rows of a table of Postgres; what has no kind of its own as the server's text."""
    columns = session.execute(_COLUMNS, [table]).fetchall()
    kinds = [_postgres_kind(str(type_)) for _, type_ in columns]
    shown = [_shown(str(name), kind) for (name, _), kind in zip(columns, kinds, strict=True)]
    rows = session.execute(f"SELECT {', '.join(shown)} FROM {table}".encode()).fetchall() if shown else []
    return Rows(tuple(name for name, _ in columns), tuple(kinds), tuple(rows))


def _shown(name: str, kind: str) -> str:
    """As the server writes it: a cast to text is something else for some types."""
    return f'CASE WHEN num_nulls("{name}") = 0 THEN format(\'%s\', "{name}") END' if kind == "text" else f'"{name}"'


def _postgres_kind(type_: str) -> str:
    if type_.endswith("[]"):
        return f"list:{_postgres_kind(type_[:-2])}"
    return _POSTGRES_KINDS.get(type_, "text")


class MySqlWriter:
    def __init__(self, server: MariaDbServer) -> None:
        settings = "SET lock_wait_timeout = 15, innodb_lock_wait_timeout = 10, time_zone = '+00:00', sql_mode = ''"
        self._session = server.connect(database="public", init_command=settings)
        self.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")  # sessions lock their own rows alone

    def execute(self, text: str) -> str | None:
        try:
            with self._session.cursor() as cursor:
                cursor.execute(text)
        except pymysql.MySQLError as error:
            with suppress(pymysql.MySQLError):
                self._session.rollback()
            return str(error).splitlines()[0][:200]
        return None

    def close(self) -> None:
        self._session.close()


class MySqlFuzz:
    """A :class:`FuzzSource` on MariaDB or MySQL."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.server = start_server(kind, {"max-connections": "200"})
        self.renew()

    @property
    def dsn(self) -> str:
        return f"{self.server.dsn}public"

    def renew(self) -> None:
        self.server.execute("DROP DATABASE IF EXISTS `public`", "CREATE DATABASE `public`")

    def remove(self, table: str) -> None:
        tables = [str(name) for (name,) in self.server.execute("SHOW TABLES IN `public`")]
        for name in tables:
            if re.fullmatch(rf"{table}(_.*)?", name):
                self.server.execute(f"DROP TABLE `public`.`{name}`")

    def writer(self) -> Writer:
        return MySqlWriter(self.server)

    def rows(self, table: str) -> Rows:
        zone = "SET time_zone = '+00:00'"
        with self.server.connect(database="public", init_command=zone) as session, session.cursor() as cursor:
            cursor.execute(
                "SELECT column_name, data_type, column_type FROM information_schema.columns"
                " WHERE table_schema = 'public' AND table_name = %s ORDER BY ordinal_position",
                (table,),
            )
            columns = cursor.fetchall()
            names = tuple(str(name) for name, _, _ in columns)
            cursor.execute(f"SELECT {', '.join(f'`{name}`' for name in names)} FROM `{table}`")
            return Rows(names, tuple(_MYSQL_KINDS.get(kind, "text") for _, kind, _ in columns), cursor.fetchall())

    def close(self) -> None:
        self.server.close()


def open_source(kind: str) -> FuzzSource:
    """A server of *kind*, started."""
    return PostgresFuzz() if kind == "postgres" else MySqlFuzz(kind)
