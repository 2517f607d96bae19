"""MySQL and MariaDB: their address, with TLS as it asks for it, and a watch over sessions.

``ssl_mode`` has the words of MySQL's own clients. A mode that is given is kept: a server without TLS, or one whose
certificate does not pass, is refused before the password is sent.

:func:`watch` ends a session of a server that says nothing, although the network takes our bytes: when nothing has
arrived for half of the timeout, a second connection asks what the server's thread of the session does. If it works, the
session goes on waiting; else it ends as broken.
"""

from __future__ import annotations

import io
import select
import ssl
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import pymysql

from headwater.databases.address import Address
from headwater.databases.timeouts import connect_seconds

MODES: Final = ("DISABLED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY")
_WAITS_FOR_US: Final = ("sending to client", "writing to net", "reading from net")


def _mode(text: str) -> str:
    if text.upper() not in MODES:
        raise ValueError
    return text.upper()


class MySqlAddress(Address):
    """``mysql://user:password@host:3306/database?option=value``, also with ``mariadb://``."""

    KIND = "MySQL or MariaDB"
    SCHEMES = ("mysql", "mariadb")
    PORT = 3306
    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
        "connect_timeout": int,
        "ssl_ca": str,
        "ssl_mode": _mode,
        "ssl-mode": _mode,
        "unix_socket": str,
    }
    NEXT_STEP = (
        "Write mysql://user@host:3306/database, with %-escapes; options are connect_timeout, ssl_ca, ssl_mode"
        f" ({', '.join(MODES)}) and unix_socket."
    )

    def parameters(self) -> dict[str, Any]:
        """For the library, with the password: for connecting alone, never for a message.

        :raises InvalidAddress: the file of certificates cannot be read.
        """
        parameters = {"host": self.host, "port": self.port, "user": self.user, "password": self._password}
        if "unix_socket" in self.options:
            parameters["unix_socket"] = self.options["unix_socket"]
        timeout = self.options.get("connect_timeout", connect_seconds(self.timeout_seconds))
        return parameters | self._tls() | {"connect_timeout": timeout}

    def _tls(self) -> dict[str, Any]:
        """Nothing where the URL does not ask: the library encrypts if the server can, unverified."""
        authority = self.options.get("ssl_ca")
        default = "VERIFY_IDENTITY" if authority else ""
        mode = self.options.get("ssl_mode") or self.options.get("ssl-mode") or default
        if not mode:
            return {}
        if mode == "DISABLED":
            return {"ssl_disabled": True}
        if mode == "REQUIRED":
            return {"ssl": {"verify_mode": "none"}}
        try:
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise self.INVALID(
                f"The certificates in {authority} cannot be read: {error.strerror or type(error).__name__}.",
                next_step="Set ssl_ca to a file of PEM certificates.",
            ) from None
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # certificates that the servers generate do not pass it
        context.check_hostname = mode == "VERIFY_IDENTITY"
        return {"ssl": context}


def is_tls_refusal(said: str) -> bool:
    """Whether we refused the server: it has no TLS, or its certificate does not pass."""
    return "certificate" in said.lower() or "SSL is required" in said


def watch(session: Any, timeout: float, connect: Callable[[], Any]) -> None:
    """End a read of *session* when the server is silent, within *timeout* seconds.

    :param connect: opens the second connection; its reads end after a while by themselves.
    """
    session._read_timeout = timeout / 2
    session._rfile = io.BufferedReader(_WatchedSocket(session, connect))


class _WatchedSocket(io.RawIOBase):
    def __init__(self, session: Any, connect: Callable[[], Any]) -> None:
        self._session = session
        self._connect = connect

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                count: int = self._session._sock.recv_into(buffer)
                return count
            except TimeoutError:
                if not self._is_working() and not self._has_input():
                    raise

    def _has_input(self) -> bool:
        """Whether the answer came while we asked."""
        waiting = select.poll()
        waiting.register(self._session._sock, select.POLLIN)
        return bool(waiting.poll(0))

    def _is_working(self) -> bool:
        try:
            other = self._connect()
            try:
                with other.cursor() as cursor:
                    cursor.execute("SELECT CONNECTION_ID()")
                    if int(cursor.fetchone()[0]) != other.thread_id():
                        return True  # a proxy has thread numbers that say nothing
                    cursor.execute("SHOW PROCESSLIST")
                    names = [column[0].lower() for column in cursor.description]
                    threads = [dict(zip(names, map(_text, row), strict=True)) for row in cursor.fetchall()]
            finally:
                other._force_close()
        except (pymysql.err.MySQLError, OSError):
            return False
        own = next((thread for thread in threads if int(thread["id"]) == self._session.thread_id()), None)
        return own is not None and own["command"].lower() != "sleep" and own["state"].lower() not in _WAITS_FOR_US


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
