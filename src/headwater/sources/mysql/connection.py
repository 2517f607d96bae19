"""Connections to MySQL and MariaDB: the address without its password, the session settings, errors in our own words.

Every session has the settings of :data:`SESSION`, so that the text of a value is the same whatever the defaults of the
server or the user are. Rows of SQL come as texts or bytes, as the server prints them.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import pymysql
from pymysql.converters import conversions

from headwater.databases.address import one_of
from headwater.databases.mysql import MySqlAddress, is_tls_refusal, watch
from headwater.databases.timeouts import connect_seconds
from headwater.sources.dsn import SourceAddress, reread
from headwater.sources.errors import (
    AccessDenied,
    DriverMissing,
    LoginRefused,
    SourceBusy,
    SourceError,
    SourceMisconfigured,
    SourceNotFound,
    SourceUnreachable,
)

Connection: TypeAlias = "pymysql.Connection[Any]"

SESSION: Final[Mapping[str, str]] = {
    "time_zone": "'+00:00'",
    "sql_mode": "'NO_ENGINE_SUBSTITUTION'",  # zero dates can be read, quotes and bars mean what they mean everywhere
    "net_read_timeout": "600",
    "net_write_timeout": "600",
    "wait_timeout": "28800",
    "group_concat_max_len": "1048576",
}
_MYSQL: Final[Mapping[str, str]] = {"max_execution_time": "0"}
_MARIADB: Final[Mapping[str, str]] = {"max_statement_time": "0", "idle_transaction_timeout": "0"}

_KEEPALIVES: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A server that is gone without a word is noticed, also where a statement may take its time."""

_OLDEST: Final = {"MySQL": (8, 0, 1), "MariaDB": (10, 5, 0)}
"""Older servers do not log the names of columns."""

_NO_LOGIN: Final = frozenset((1045, 1130, 1698, 1820, 1862, 3118))
_DENIED: Final = frozenset((1044, 1142, 1143, 1227, 1370)) | _NO_LOGIN
_BUSY: Final = frozenset((1040, 1203, 1205, 1213, 1226, 1412, 3024, 1969))
_NOT_FOUND: Final = frozenset((1146, 1109, 1051, 1054))
_GONE: Final = frozenset(
    (1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1317, 3169, 4031, 1927, 1129, 1927)
)
_CLIENT: Final = range(2000, 3000)


class Dsn(SourceAddress, MySqlAddress):
    """Where a server is that is read from. ``tinyint1``: what its columns of type ``tinyint(1)`` hold."""

    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        **MySqlAddress.OPTIONS,
        "tinyint1": one_of("integer", "boolean"),
    }
    NEXT_STEP = f"{MySqlAddress.NEXT_STEP.removesuffix('.')}; of a source also tinyint1 (integer or boolean)."

    @property
    def tinyint1_is_boolean(self) -> bool:
        """Whether columns of type ``tinyint(1)`` hold true and false."""
        return bool(self.options.get("tinyint1") == "boolean")


@dataclass(frozen=True, slots=True)
class Version:
    """Which server it is. :ivar family: ``MySQL`` or ``MariaDB``."""

    family: str
    number: tuple[int, int, int]

    @classmethod
    def parse(cls, text: str) -> Version:
        """:param text: what ``version()`` gives."""
        text = text.removeprefix("5.5.5-") if "mariadb" in text.lower() else text
        digits = [*text.partition("-")[0].split("."), "0", "0"][:3]
        major, minor, patch = (int("".join(letter for letter in part if letter.isdigit()) or 0) for part in digits)
        return cls("MariaDB" if "mariadb" in text.lower() else "MySQL", (major, minor, patch))

    @property
    def is_mariadb(self) -> bool:
        return self.family == "MariaDB"

    def __str__(self) -> str:
        return f"{self.family} {'.'.join(str(part) for part in self.number)}"


def version_of(session: Connection) -> Version:
    """As the server told when it was connected to."""
    return Version.parse(session.get_server_info())


def connect(dsn: Dsn) -> Connection:
    """A session for SQL, in autocommit and without a current database. A server that falls silent ends it.

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused. :raises SourceMisconfigured: too old.
    """
    dsn = reread(dsn)
    with server_errors(dsn):
        session = _login(dsn)
        try:
            watch(session, dsn.timeout_seconds, lambda: _login(dsn))
            _keep_alive(session._sock)
            version = version_of(session)
            if version.number < _OLDEST[version.family]:
                oldest = ".".join(str(part) for part in _OLDEST[version.family])
                raise SourceMisconfigured(
                    f"{dsn} is {version}, which is too old: it does not log the names of columns.",
                    next_step=f"Capture from {version.family} {oldest} or later.",
                )
            _set(session, {**SESSION, **(_MARIADB if version.is_mariadb else _MYSQL)})
        except BaseException:
            session.close()
            raise
    return session


def _login(dsn: Dsn) -> Connection:
    """A session whose reads end when the server is silent."""
    return pymysql.connect(
        **dsn.parameters(),
        charset="utf8mb4",
        autocommit=True,
        read_timeout=connect_seconds(dsn.timeout_seconds),
        write_timeout=dsn.timeout_seconds,
        # what is read comes as text, or as bytes where it is none
        conv={kind: encoder for kind, encoder in conversions.items() if not isinstance(kind, int)},
        program_name="headwater",
    )


def _keep_alive(connected: socket.socket) -> None:
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVES.items():
            if hasattr(socket, name):  # not on every system
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _set(session: Connection, settings: Mapping[str, str]) -> None:
    with session.cursor() as cursor:
        for name, value in settings.items():
            cursor.execute(f"SET SESSION {name} = {value}")


def ask(session: Connection, query: str, parameters: Sequence[object] = ()) -> list[dict[str, Any]]:
    """The rows of a query of ours by the names of their columns, in lower case."""
    with session.cursor() as cursor:
        cursor.execute(query, parameters or None)
        names = [column[0].lower() for column in cursor.description or ()]
        return [dict(zip(names, (_text(value) for value in row), strict=True)) for row in cursor.fetchall()]


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


@contextlib.contextmanager
def server_errors(dsn: Dsn) -> Iterator[None]:
    """Errors of the library and the server leave the block as errors of our tree, without the password."""
    try:
        yield
    except pymysql.err.Error as error:
        raise translated(error, dsn) from None
    except OSError as error:
        raise _unreachable(f"{type(error).__name__} {error.strerror or ''}".strip(), dsn) from None
    except RuntimeError as error:  # the library's: it lacks what the login of MySQL needs, or refused to send a file
        if "LOAD_LOCAL" in str(error):
            raise SourceMisconfigured(
                f"{dsn} asked for a file of this machine, which was not sent: no honest server does that.",
                next_step="Check that this is the address of your server. With the option ssl_ca no other server can"
                " answer in its place.",
            ) from None
        if "cryptography" not in str(error):
            raise
        raise DriverMissing(
            "The login of MySQL needs the package cryptography, which is not installed.",
            next_step="Run: pip install 'headwater[mysql]'",
        ) from None


def translated(error: pymysql.err.Error, dsn: Dsn) -> SourceError:
    """The error of our tree for one of the library: by the server's number."""
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    said = dsn.hide(" ".join(str(error.args[1] if len(error.args) > 1 else error).split())).rstrip(".")
    if code == 1049:
        return SourceNotFound(f"{dsn} has no such database: {said}.", next_step="Name a database that exists.")
    if code in _DENIED:
        text = f"{dsn} refused the user {dsn.user!r}: {said}."
        if code in _NO_LOGIN:
            return LoginRefused(text, next_step="Check the user name and its password.")
        return AccessDenied(text, next_step=f"Run: headwater doctor {dsn}")
    if code in _NOT_FOUND:
        return SourceNotFound(f"{dsn} does not have it: {said}.")
    if code in _BUSY:
        return SourceBusy(f"{dsn} has no room now: {said}.", next_step="Try again, or end the sessions in the way.")
    if code in _CLIENT and is_tls_refusal(said):
        return SourceMisconfigured(
            f"{dsn} was refused before the login: {said}.",
            next_step="Check that ssl_ca has the authority of the server's certificate, which names this host; or "
            "choose another ssl_mode.",
        )
    if code in _GONE or code in _CLIENT or isinstance(error, pymysql.err.InterfaceError) or not code:
        return _unreachable(said, dsn)
    return SourceError(
        f"{dsn} refused a statement (error {code}).",
        next_step="Look whether the types of the table's columns were changed; the server's log has the statement.",
    )


def _unreachable(said: str, dsn: Dsn) -> SourceUnreachable:
    return SourceUnreachable(
        f"{dsn} cannot be reached: {said or 'the connection broke'}.",
        next_step="Check that the server runs and answers.",
    )
