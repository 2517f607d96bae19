"""Sessions that are used again: a query that reads many parts, one after the other, does not log in for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from headwater.errors import TransientError
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.system.pool import Pool

IDLE_SECONDS: Final = 20.0
_END: Final = (
    "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCK_TIMEOUT -1;"
)

T = TypeVar("T")


def _reset(session: Session) -> bool:
    with suppress(TransientError):
        if session.is_open:
            session.run(_END)
            return True
    return False


_POOL: Final = Pool(_reset, Session.close, idle_seconds=IDLE_SECONDS)


def borrow(dsn: Dsn) -> Session:
    """A session without a transaction; a new one where none is idle.

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    """
    return _POOL.borrow(dsn.origin, lambda: Session(dsn))


def give_back(session: Session) -> None:
    """Nothing is open in it but perhaps a transaction, which is rolled back."""
    _POOL.give_back(session.dsn.origin, session)


def with_session(dsn: Dsn, question: Callable[[Session], T]) -> T:
    """The answer over a session, which is opened again when it breaks."""
    return _POOL.ask(dsn.origin, lambda: Session(dsn), question)
