"""Watches a session for a server that says nothing, although the network takes our bytes.

As :mod:`headwater.sources.postgres.watched` does: when nothing has come for half of the timeout, a second connection
asks what the server's thread of the session does. If it works, the session goes on waiting; else it ends as broken.
"""

from __future__ import annotations

import io
import select
from collections.abc import Callable
from typing import Any, Final

import pymysql

_WAITS_FOR_US: Final = ("sending to client", "writing to net", "reading from net")


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
