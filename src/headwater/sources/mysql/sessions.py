"""Sessions that are used again: who reads many parts one after the other does not log in for each.

A login costs more than a small read, most of all with TLS. A session comes back when nothing is open in it any more,
and one that was not used for a while is closed. Each process has its own.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from headwater.errors import TransientError
from headwater.sources.mysql.connection import Connection, Dsn, ask, connect, server_errors

IDLE_SECONDS: Final = 20.0
_MOST_IDLE: Final = 4

_idle: dict[tuple[int, str], list[tuple[float, Connection]]] = {}
_lock = threading.Lock()


def borrow(dsn: Dsn) -> Connection:
    """A session without a transaction, in autocommit; a new one where none is idle.

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    """
    while (session := _taken(dsn)) is not None:
        try:
            with server_errors(dsn):
                ask(session, "ROLLBACK")
            return session
        except TransientError:
            session._force_close()
    return connect(dsn)


def give_back(dsn: Dsn, session: Connection) -> None:
    """Nothing is open in it but perhaps a transaction, whose end is all that is left to do."""
    if not session.open:
        return
    try:
        with server_errors(dsn):
            ask(session, "ROLLBACK")
    except TransientError:
        session._force_close()
        return
    with _lock:
        kept = _idle.setdefault(_key(dsn), [])
        if len(kept) < _MOST_IDLE:
            kept.append((time.monotonic(), session))
            return
    session.close()


def _taken(dsn: Dsn) -> Connection | None:
    """One that was idle for a short time only; older ones are closed."""
    with _lock:
        kept = _idle.get(_key(dsn), [])
        while kept:
            since, session = kept.pop()
            if session.open and time.monotonic() - since < IDLE_SECONDS:
                return session
            session._force_close()
    return None


def _key(dsn: Dsn) -> tuple[int, str]:
    return os.getpid(), repr(sorted(dsn.parameters().items(), key=lambda item: item[0]))
