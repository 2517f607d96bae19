"""Sessions with the MySQL or MariaDB of a sink: the address, connecting, and errors of the server in our own words.

A server can answer any query with a request for any file of the client's machine. :class:`MySqlConnection` serves one
request only: for the rows of the ``LOAD DATA LOCAL`` that it has just sent, from memory. It never opens a file.
"""

from __future__ import annotations

import re
from typing import Any, Final

import pymysql
from pymysql.constants import CLIENT, COMMAND
from pymysql.converters import conversions

from headwater.databases.address import InvalidAddress
from headwater.databases.mysql import MySqlAddress, is_tls_refusal, watch
from headwater.databases.timeouts import TIMEOUT_SECONDS, connect_seconds
from headwater.errors import HeadwaterError
from headwater.sinks.errors import (
    SinkBusy,
    SinkError,
    SinkInputError,
    SinkLoginRefused,
    SinkRowError,
    SinkUnreachable,
    SinkUnwritable,
    StagedLost,
)

STREAM: Final = "headwater"
"""How statements name the rows that they load."""
_CHUNK: Final = 1 << 18


class FileRequested(pymysql.err.OperationalError):  # type: ignore[misc]
    """The server asked for a file of this machine that nothing here offered. The connection is closed."""


class MySqlConnection(pymysql.Connection):  # type: ignore[misc]
    """A connection. :param client_flag: capabilities besides ``LOCAL_FILES``; the others are those of the library."""

    def __init__(self, *, client_flag: int = 0, **options: Any) -> None:
        # the library itself must not serve requests: it would open whatever file the server names
        super().__init__(client_flag=client_flag | CLIENT.LOCAL_FILES, local_infile=False, **options)

    def load(self, statement: str, data: bytes) -> None:
        """Run a ``LOAD DATA LOCAL INFILE`` of :data:`STREAM`, whose content is *data*.

        :raises FileRequested: the server asked for something else. :raises pymysql.err.MySQLError: it refused.
        """
        self._execute_command(COMMAND.COM_QUERY, statement)
        if self._read_packet().get_all_data() != b"\xfb" + STREAM.encode():
            raise self._refused()
        for start in range(0, len(data), _CHUNK):
            self.write_packet(data[start : start + _CHUNK])
        self.write_packet(b"")
        if not self._read_packet().is_ok_packet():
            raise self._refused()

    def _read_query_result(self, unbuffered: bool = False) -> Any:
        try:
            return super()._read_query_result(unbuffered=unbuffered)
        except RuntimeError as error:
            if "LOAD_LOCAL" not in str(error):
                raise
            raise self._refused() from None

    def _refused(self) -> FileRequested:
        self._force_close()
        return FileRequested("the server asked for a file of this machine")


IDLE_SECONDS: Final = 60
_WRITE_SECONDS: Final = 600
"""How long the server may take no bytes; it may wait for locks meanwhile."""

_SETTINGS: Final = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', "
    f"innodb_lock_wait_timeout = {IDLE_SECONDS}, foreign_key_checks = 1",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
)
_ROW_REASONS: Final = {
    1048: "a value is null where the column takes none",
    1062: "another row has the same value in a unique index",
    1118: "the row is too large",
    1216: "a foreign key does not allow it",
    1217: "a foreign key does not allow it",
    1264: "a value is out of the range of its column",
    1265: "a value does not fit its column",
    1292: "a value is none of its column's type",
    1364: "a column that is not delivered has no default",
    1366: "a value is none of its column's type",
    1367: "a value is none of its column's type",
    1406: "a value is too long for its column",
    1411: "a value is none of its column's type",
    1451: "a foreign key does not allow it",
    1452: "a foreign key does not allow it",
    1644: "a trigger of the table refuses it",
    3819: "a check constraint is violated",
    4025: "a check constraint is violated",
}
_NO_LOGIN: Final = frozenset((1045, 1130, 1698, 1820, 1862, 3118))
_DENIED: Final = frozenset((1044, 1049, 1142, 1143, 1227, 1410))
_BUSY: Final = frozenset((1205, 1213, 1040, 1203, 1007, 1050, 1054, 1146, 1412))
_COLUMN: Final = re.compile(r"[Cc]olumn ['`](.+?)['`](?: at row| cannot| has|$)")
_CONSTRAINT: Final = re.compile(r"(?:CONSTRAINT|[Cc]heck constraint) [`'](.+?)[`']")


def address(dsn: str) -> MySqlAddress:
    """:raises SinkInputError: it cannot be read; the text is not repeated."""
    try:
        return MySqlAddress(dsn)
    except InvalidAddress as error:
        raise SinkInputError(error.message, next_step=error.next_step) from None


def connect(place: MySqlAddress) -> MySqlConnection:
    """A session; a server that falls silent ends it. :raises pymysql.err.MySQLError: it cannot be reached."""
    connection = _login(place)
    watch(connection, TIMEOUT_SECONDS, lambda: _login(place))
    try:
        with connection.cursor() as cursor:
            for statement in _SETTINGS:
                cursor.execute(statement)
    except BaseException:
        connection.close()
        raise
    return connection


def _login(place: MySqlAddress) -> MySqlConnection:
    return MySqlConnection(
        **place.parameters(),
        charset="utf8mb4",
        autocommit=True,
        read_timeout=connect_seconds(TIMEOUT_SECONDS),
        write_timeout=_WRITE_SECONDS,
        client_flag=CLIENT.FOUND_ROWS,
        # what is read comes as text, which Arrow converts
        conv={kind: encoder for kind, encoder in conversions.items() if not isinstance(kind, int)},
    )


def sink_error(error: pymysql.err.MySQLError, place: MySqlAddress, table: str, own: str) -> HeadwaterError:
    """Our error for one of the library. :param table: the full name of the table at the source."""
    if isinstance(error, FileRequested):
        return SinkUnwritable(
            f"{place} asked for a file of this machine, which was not sent: no honest server does that.",
            next_step="Check that dsn is the address of your server. With the option ssl_ca no other server can answer"
            " in its place.",
        )
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    said = place.hide(" ".join(str(error.args[1] if len(error.args) > 1 else error).split()))
    if code in _ROW_REASONS:
        constraint = _CONSTRAINT.search(said)
        reason = f"{_ROW_REASONS[code]}{f' (constraint {constraint[1]})' if constraint else ''}"
        column = _COLUMN.search(said)
        name = column[1].rpartition("`")[2] if column else None
        return SinkRowError(table, reason, column=name)
    if code == 1146 and f"'{own}.s" in said:
        return StagedLost(f"What was staged for {table} is gone from {place}.", next_step="It is staged anew.")
    if code in _NO_LOGIN:
        return SinkLoginRefused(
            f"{place} refused the user {place.user!r}: {said}.", next_step="Check the user name and its password."
        )
    if code in _DENIED:
        return SinkUnwritable(
            f"{place} refused the user {place.user!r}: {said}.",
            next_step="Grant CREATE, ALTER, DROP, INDEX, INSERT, UPDATE, DELETE, SELECT and "
            f"CREATE TEMPORARY TABLES on the databases of the tables and on {own}.",
        )
    if code in _BUSY:
        return SinkBusy(f"{place} did not take {table or 'it'} now (error {code}).", next_step="Try again.")
    if 2000 <= code < 3000 and is_tls_refusal(said):
        return SinkUnwritable(
            f"{place} was refused before the login: {said}.",
            next_step="Check that ssl_ca has the authority of the server's certificate, which names this host; or "
            "choose another ssl_mode.",
        )
    if (
        code in (0, 1053, 1077, 1079, 1927, 4031)
        or 2000 <= code < 3000
        or isinstance(error, pymysql.err.InterfaceError)
    ):
        return SinkUnreachable(
            f"{place} cannot be reached (error {code}).", next_step="Check that the server runs and answers."
        )
    return SinkError(
        f"{place} refused a statement for {table or 'our own tables'} (error {code}).",
        next_step="Look the error up; the server's log may have the statement.",
    )
