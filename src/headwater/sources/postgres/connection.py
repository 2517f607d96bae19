"""Connections to Postgres: the address without its password, the session settings, and errors in our own words.

Every session, of SQL and of replication, has the settings of :data:`SESSION`: the text of a value is then the same from
a snapshot and from the log, whatever the role's or the database's defaults are. They are set after the login and not in
the start-up packet, which poolers refuse.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import namedtuple_row

from headwater.databases.timeouts import connect_seconds
from headwater.sources.dsn import SourceAddress, reread
from headwater.sources.errors import (
    AccessDenied,
    LoginRefused,
    SourceBusy,
    SourceError,
    SourceMisconfigured,
    SourceNotFound,
    SourceUnreachable,
)
from headwater.sources.postgres.watched import WatchedConnection

Connection: TypeAlias = WatchedConnection

SESSION: Final[Mapping[str, str]] = {
    "timezone": "UTC",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
    "lc_monetary": "C",
    "quote_all_identifiers": "off",
    "search_path": "",
    "row_security": "off",  # a policy that would hide rows is an error, not fewer rows
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}

OLDEST_VERSION: Final = 150000
"""Older servers lack column lists and row filters of publications, which are looked at."""

_CONNECT: Final[Mapping[str, Any]] = {
    "application_name": "headwater",
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}

_LOGIN_REFUSED: Final = (
    "password authentication failed",
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "pg_hba.conf rejects",
    "is not permitted to log in",
    "permission denied",
    "must be superuser or replication role",
)
_SERVER_REFUSED: Final = (
    "certificate verify failed",
    "does not match host name",
    "server does not support SSL",
    "root certificate file",
)
_MISCONFIGURED: Final = (
    pg.ConfigurationLimitExceeded,
    pg.ObjectNotInPrerequisiteState,
    pg.FeatureNotSupported,
    pg.UndefinedFile,
)
_QUOTED: Final = re.compile('".*"', re.DOTALL)
_SWITCHES: Final = ("starting up", "shutting down", "recovery mode", "not yet accepting connections")


class Dsn(SourceAddress):
    """A libpq connection string: ``postgresql://user:password@host/database`` or ``host=… dbname=…``.

    libpq reads it, and knows which parameters are valid.
    """

    KIND = "Postgres"
    SCHEMES = ("postgresql", "postgres")
    NEXT_STEP = "Write postgresql://user@host:5432/database, with %-escapes for special characters."

    def _read(self, text: str) -> None:
        scheme, separator, _ = text.partition("://")
        if separator and scheme not in self.SCHEMES:
            raise ValueError
        try:
            self._parameters = conninfo_to_dict(text)
        except psycopg.ProgrammingError:
            raise ValueError from None
        self.user = self.parameter("user")
        self.database = self.parameter("dbname") or self.user
        self._secrets = (self.parameter("password"), self.parameter("sslpassword"))

    def conninfo(self, **parameters: object) -> str:
        """For libpq, with the password: for connecting alone, never for a message."""
        settings = {**_CONNECT, "connect_timeout": connect_seconds(self.timeout_seconds)}
        defaults = {name: value for name, value in settings.items() if name not in self._parameters}
        return make_conninfo(**{**self._parameters, **defaults, **parameters})

    def parameter(self, name: str) -> str:
        """One of its parameters other than the password; empty where it was not given."""
        value = self._parameters.get(name)
        return "" if value is None else str(value)

    @property
    def _place(self) -> str:
        host = self.parameter("host") or self.parameter("hostaddr") or "localhost"
        return f"postgresql://{host}:{self.parameter('port') or '5432'}"


def connect(dsn: Dsn, **settings: str) -> Connection:
    """A session for SQL, in autocommit.

    :param settings: of the session, beside those of :data:`SESSION`.
    :raises SourceUnreachable: no answer. :raises AccessDenied: refused. :raises SourceNotFound: no such database.
    :raises SourceMisconfigured: the server is too old, or a pooler stands before it.
    """
    dsn = reread(dsn)
    return _open(dsn, dsn.conninfo(), settings)


def connect_replication(dsn: Dsn) -> Connection:
    """A session of the replication protocol in the database, which also takes SQL.

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused. :raises SourceNotFound: no such database.
    :raises SourceMisconfigured: the server is too old, or a pooler stands before it.
    """
    dsn = reread(dsn)
    return _open(dsn, dsn.conninfo(replication="database"), {})


def open_watched(dsn: Dsn, conninfo: str) -> Connection:
    """A session in autocommit, without settings. :raises psycopg.Error: it cannot be had."""
    connection = WatchedConnection.connect(conninfo, autocommit=True, prepare_threshold=None)
    connection.watch(dsn.conninfo(), dsn.timeout_seconds)
    return connection


def _open(dsn: Dsn, conninfo: str, settings: Mapping[str, str]) -> Connection:
    with server_errors(dsn):
        connection = open_watched(dsn, conninfo)
        try:
            if connection.info.server_version < OLDEST_VERSION:
                raise SourceMisconfigured(
                    f"{dsn} has Postgres {connection.info.server_version // 10000}, which is too old.",
                    next_step=f"Capture from Postgres {OLDEST_VERSION // 10000} or later.",
                )
            wanted = ", ".join(
                f"pg_catalog.set_config('{name}', '{value}', false)" for name, value in {**SESSION, **settings}.items()
            )
            connection.execute(f"SELECT {wanted}".encode())
        except BaseException:
            connection.close()
            raise
    return connection


def ask(session: Connection, query: str, parameters: Sequence[object] = ()) -> list[Any]:
    """The rows of a query of ours, with their columns as attributes."""
    with session.cursor(row_factory=namedtuple_row) as cursor:
        rows: list[Any] = cursor.execute(query.encode(), parameters or None).fetchall()
        return rows


@contextlib.contextmanager
def server_errors(dsn: Dsn) -> Iterator[None]:
    """Errors of the library and the server leave the block as errors of our tree, without the password."""
    try:
        yield
    except psycopg.Error as error:
        raise translated(error, dsn) from None


def translated(error: psycopg.Error, dsn: Dsn) -> SourceError:
    """The error of our tree for one of psycopg: by SQLSTATE, or by its text where a login was refused without one."""
    said = dsn.hide(" ".join((error.diag.message_primary or str(error)).split())).rpartition("FATAL: ")[2].strip()
    state = error.sqlstate or ""
    if not state:
        return _refused_login(said, dsn)
    if isinstance(error, pg.InsufficientPrivilege):
        return AccessDenied(
            f"The user {dsn.user!r} lacks a right at {dsn}: {said}.", next_step=f"Run: headwater doctor {dsn}"
        )
    if state.startswith("28"):
        return _denied(said, dsn)
    if isinstance(error, pg.InvalidCatalogName):
        return _no_database(dsn)
    if isinstance(error, pg.UndefinedTable | pg.UndefinedObject | pg.InvalidSchemaName):
        return SourceNotFound(f"{dsn} does not have it: {said}.")
    if isinstance(error, _MISCONFIGURED):
        return SourceMisconfigured(f"{dsn} does not allow it: {said}.", next_step=f"Run: headwater doctor {dsn}")
    if isinstance(error, pg.TooManyConnections | pg.LockNotAvailable | pg.ObjectInUse) or state.startswith("40"):
        return SourceBusy(f"{dsn} has no room now: {said}.", next_step="Try again, or end the sessions in the way.")
    if state[:2] in ("08", "57", "58", "53") or isinstance(error, psycopg.OperationalError):
        return _unreachable(said, dsn)
    if state.startswith("22"):  # what is wrong with a value, and the value in quotes
        said = _QUOTED.sub("…", said)
    return SourceError(
        f"{dsn} refused a statement: {said} (SQLSTATE {state}).",
        next_step="Look whether the types of the table's columns were changed; the server's log has the statement.",
    )


def _refused_login(said: str, dsn: Dsn) -> SourceError:
    """libpq gives no SQLSTATE for a failed login, only the server's text."""
    if 'database "' in said and "does not exist" in said:
        return _no_database(dsn)
    if "too many clients" in said or "too many connections" in said or "remaining connection slots" in said:
        return SourceBusy(
            f"{dsn} has no room for another connection: {said}.",
            next_step="End idle sessions, or raise max_connections.",
        )
    if "unsupported startup parameter" in said:
        return SourceMisconfigured(
            f"A connection pooler stands before {dsn} and refuses this connection: {said}.",
            next_step="Give the address of the server itself, or capture by SQL: headwater capture --poll …",
        )
    if any(refusal in said for refusal in _SERVER_REFUSED):
        return SourceMisconfigured(
            f"{dsn} was refused before the login: {said}.",
            next_step="Check that sslrootcert has the authority of the server's certificate, which names this host; or "
            "choose another sslmode.",
        )
    if any(switch in said for switch in _SWITCHES):
        return _unreachable(said, dsn)
    if any(refusal in said for refusal in _LOGIN_REFUSED) or ('role "' in said and "does not exist" in said):
        return _denied(said, dsn)
    return _unreachable(said, dsn)


def _denied(said: str, dsn: Dsn) -> LoginRefused:
    step = "Check the user name and its password."
    if "no password supplied" in said:
        step = "Set PGPASSWORD, or write the password into ~/.pgpass or the connection string."
    if "pg_hba.conf" in said:
        step = "Allow the address, user and database in pg_hba.conf and reload the server's settings."
    elif "superuser or replication role" in said or "start WAL sender" in said:
        step = f'As a superuser: ALTER ROLE "{dsn.user}" REPLICATION;'
    return LoginRefused(f"{dsn} refused the user {dsn.user!r}: {said}.", next_step=step)


def _no_database(dsn: Dsn) -> SourceNotFound:
    return SourceNotFound(f"{dsn} has no database {dsn.database!r}.", next_step="Name a database that exists.")


def _unreachable(said: str, dsn: Dsn) -> SourceUnreachable:
    return SourceUnreachable(
        f"{dsn} cannot be reached: {said.rstrip('.?')}.", next_step="Check that the server runs and answers."
    )
