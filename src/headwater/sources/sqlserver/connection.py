"""Sessions at SQL Server: the address without its password, statements, errors in our own words.

Statements carry their values as literals: they are ours, and a plain batch needs no parameters of the library. Every
session has the settings of :data:`SETTINGS`, so that the text of a value is the same whatever the defaults are.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Final, Self

import pyarrow as pa
import pytds
from pytds import tds_base

from headwater.databases.address import one_of
from headwater.sources.dsn import SourceAddress, reread
from headwater.sources.errors import (
    AccessDenied,
    LoginRefused,
    SnapshotExpired,
    SourceBusy,
    SourceError,
    SourceMisconfigured,
    SourceNotFound,
    SourceProtocolError,
    SourceUnreachable,
)
from headwater.sources.sqlserver.answer import HalfPair, columns_of_answer, tell_half_pairs
from headwater.sources.sqlserver.types import Ticks

SETTINGS: Final = (
    "SET NOCOUNT ON; SET ANSI_NULLS ON; SET ANSI_PADDING ON; SET QUOTED_IDENTIFIER ON; SET CONCAT_NULL_YIELDS_NULL ON;"
    " SET ARITHABORT ON; SET LANGUAGE us_english; SET DATEFORMAT ymd; SET TEXTSIZE -1; SET DEADLOCK_PRIORITY LOW;"
    " SET TRANSACTION ISOLATION LEVEL READ COMMITTED;"
)
RESNAPSHOT: Final = "Run: headwater resnapshot"
SILENCE: Final = 120.0
"""Seconds that the server may take for an answer."""

_DENIED: Final = frozenset((229, 230, 262, 297, 300, 916, 18452, 18456, 18470, 18486, 18487, 18488, 22904, 22981))
_NO_LOGIN: Final = frozenset((18452, 18456, 18470, 18486, 18487, 18488))
_NOT_FOUND: Final = frozenset((207, 208, 1088, 4701, 4902))
_BUSY: Final = frozenset(
    (1204, 1205, 1222, 3958, 3960, 3966, 3967, 10928, 10929, 17809, 17892, 40501, 41301, 41302, 41305, 41325)
)
_GONE: Final = frozenset(
    (
        596,
        921,
        922,
        976,
        978,
        983,
        988,
        6005,
        10053,
        10054,
        17142,
        17187,
        17197,
        40143,
        40166,
        40197,
        40540,
        40613,
        42108,
    )
)
_CHANGED: Final = frozenset((3961, 3964))
"""A table was altered under an open snapshot."""
_NOT_ENABLED: Final = frozenset((22901, 22910, 22985))
_NO_SNAPSHOT: Final = 3952


class Dsn(SourceAddress):
    """``sqlserver://user:password@host:1433/database?option=value``, also with ``mssql://``."""

    KIND = "SQL Server"
    SCHEMES = ("sqlserver", "mssql")
    PORT = 1433
    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "cafile": str,
        "connect_timeout": float,
        "ticks": Ticks,
        "time_zone": str,
        "validate_host": one_of("yes", "no"),
    }
    NEXT_STEP = (
        "Write sqlserver://user@host:1433/database, with %-escapes; options are cafile (the server's certificates:"
        " encrypts), validate_host (yes or no), connect_timeout, ticks (refuse, truncate, ns) and time_zone (of the"
        " server)."
    )

    def __init__(self, text: str, timeout_seconds: float = SILENCE) -> None:
        super().__init__(text, timeout_seconds)

    def _read(self, text: str) -> None:
        super()._read(text)
        if not self.database:
            raise ValueError
        self.ticks: Ticks = self.options.get("ticks", Ticks.REFUSE)
        self.time_zone: str | None = self.options.get("time_zone")

    def open(self) -> Any:
        """A connection of the library, in autocommit.

        The socket is ours: the library takes its whole time limit to tell that nobody listens.
        """
        timeout = self.options.get("connect_timeout", min(15.0, self.timeout_seconds))
        return pytds.connect(
            sock=socket.create_connection((self.host, self.port), timeout),
            dsn=self.host,
            port=self.port,
            database=self.database,
            user=self.user,
            password=self._password,
            login_timeout=timeout,
            timeout=self.timeout_seconds,
            appname="headwater",
            autocommit=True,
            blocksize=32_767 if "cafile" not in self.options else 16_383,
            disable_connect_retry=True,
            cafile=self.options.get("cafile"),
            validate_host=self.options.get("validate_host", "yes") == "yes",
        )


class Session:
    """One connection, in autocommit. One thread.

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    """

    def __init__(self, dsn: Dsn) -> None:
        self.dsn = dsn = reread(dsn)
        self._connection: Any = None
        with server_errors(dsn):
            self._connection = dsn.open()
        try:
            self.run(SETTINGS)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def run(self, statement: str) -> None:
        """Statements without an answer."""
        with self._asked(statement) as cursor:
            while cursor.nextset():
                pass

    def ask(self, statement: str) -> list[dict[str, Any]]:
        """The rows of one statement by the names of their columns. :raises HalfPair: see :mod:`.answer`."""
        with self._asked(statement) as cursor:
            if cursor.description is None:
                return []
            tell_half_pairs(cursor)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def columns(self, statement: str, rows: int, forgiven: Collection[int] = ()) -> Iterator[list[pa.Array]]:
        """The columns of the rows of one statement, at most so many at a time; see :mod:`.answer`."""
        try:
            with self._asked(statement) as cursor:
                yield from columns_of_answer(cursor, rows, forgiven)
        except BaseException:  # also who takes no more of them: rows are on their way
            self.close()
            raise

    @contextlib.contextmanager
    def _asked(self, statement: str) -> Iterator[Any]:
        if self._connection is None:
            raise unreachable("the connection was closed", self.dsn)
        try:
            with server_errors(self.dsn), self._connection.cursor() as cursor:
                cursor.execute(statement)
                yield cursor
        except (SourceUnreachable, HalfPair):
            self.close()
            raise

    def close(self) -> None:
        """Closing twice is fine."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # whatever the library says of a connection that broke
                connection.close()


@contextlib.contextmanager
def server_errors(dsn: Dsn) -> Iterator[None]:
    """Errors of the library and the server leave the block as errors of our tree, without the password."""
    try:
        yield
    except tds_base.Error as error:
        raise translated(error, dsn) from None
    except UnicodeDecodeError:  # whose text shows what came
        raise SourceProtocolError(f"A text of {dsn} is no Unicode.") from None
    except OSError as error:
        if isinstance(error.__cause__, tds_base.Error):  # the library tried again until its time was up
            raise translated(error.__cause__, dsn) from None
        raise unreachable(type(error).__name__, dsn) from None


def translated(error: tds_base.Error, dsn: Dsn) -> SourceError:
    """The error of our tree for one of the library: by the server's number.

    The server's text is repeated only where it names objects and never values.
    """
    code = int(getattr(error, "number", 0) or getattr(error, "msg_no", 0) or 0)
    said = dsn.hide(" ".join(str(error.args[0] if error.args else error).split())).rstrip(".")
    if code == 4060:
        return SourceNotFound(f"{dsn} has no such database.", next_step="Name a database that exists.")
    if code in _DENIED:
        text = f"{dsn} refused the user {dsn.user!r}: {said}."
        if code in _NO_LOGIN:
            return LoginRefused(text, next_step="Check the user name and its password.")
        return AccessDenied(text, next_step=f"Run: headwater doctor {dsn}")
    if code in _NOT_FOUND:
        return SourceNotFound(f"{dsn} does not have it: {said}.", next_step=f"Run: headwater doctor {dsn}")
    if code in _NOT_ENABLED:
        return SourceMisconfigured(
            f"{dsn} has no change data capture (error {code}).", next_step="Run: EXEC sys.sp_cdc_enable_db;"
        )
    if code in _CHANGED:
        return SnapshotExpired("A table was altered since the snapshot was taken.", next_step="Take a new snapshot.")
    if code == _NO_SNAPSHOT:
        return SourceMisconfigured(
            f"{dsn} does not allow snapshot isolation any more.",
            next_step=f"Run: ALTER DATABASE [{dsn.database}] SET ALLOW_SNAPSHOT_ISOLATION ON;",
        )
    if code in _BUSY:
        return SourceBusy(f"{dsn} has no room now (error {code}).", next_step="Try again, or end what is in the way.")
    if "encryption" in said.lower() or "openssl" in said.lower():
        return SourceMisconfigured(
            f"{dsn} asks for an encrypted connection, or cannot have one: {said}.",
            next_step="Write ?cafile=/path/to/certificates.pem in the address, and: pip install pyOpenSSL",
        )
    if code in _GONE or not code:
        return unreachable(said, dsn)
    return SourceError(
        f"{dsn} refused a statement (error {code}).",
        next_step="Look whether the types of the table's columns were changed; the server's log has the statement.",
    )


def unreachable(said: str, dsn: Dsn) -> SourceUnreachable:
    return SourceUnreachable(
        f"{dsn} cannot be reached: {said or 'the connection broke'}.",
        next_step="Check that the server runs and answers.",
    )
