"""Sessions that are used again: who reads many parts one after the other does not log in for each.

A session comes back when nothing is open in it any more but perhaps a transaction, and one that was not used for a
while is closed. Each process has its own.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from headwater.errors import TransientError
from headwater.sources.sqlserver.connection import Dsn, Session

IDLE_SECONDS: Final = 20.0
_MOST_IDLE: Final = 4
_END: Final = (
    "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCK_TIMEOUT -1;"
)

_idle: dict[tuple[int, str], list[tuple[float, Session]]] = {}
_lock = threading.Lock()


def borrow(dsn: Dsn) -> Session:
    """A session without a transaction; a new one where none is idle.

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    """
    while (session := _taken(dsn)) is not None:
        try:
            session.run(_END)
            return session
        except TransientError:
            session.close()
    return Session(dsn)


def give_back(session: Session) -> None:
    """Nothing is open in it but perhaps a transaction, whose end is all that is left to do."""
    if not session.is_open:
        return
    try:
        session.run(_END)
    except TransientError:
        session.close()
        return
    with _lock:
        kept = _idle.setdefault((os.getpid(), session.dsn.origin), [])
        if len(kept) < _MOST_IDLE:
            kept.append((time.monotonic(), session))
            return
    session.close()


def _taken(dsn: Dsn) -> Session | None:
    """One that was idle for a short time only; older ones are closed."""
    with _lock:
        kept = _idle.get((os.getpid(), dsn.origin), [])
        while kept:
            since, session = kept.pop()
            if session.is_open and time.monotonic() - since < IDLE_SECONDS:
                return session
            session.close()
    return None
