"""Sessions that are used again: a query that reads many parts, one after the other, does not log in for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import pymysql

from headwater.sources.mysql.connection import Connection, Dsn, ask, connect, server_errors
from headwater.system.pool import Pool

IDLE_SECONDS: Final = 20.0

T = TypeVar("T")


def _reset(session: Connection) -> bool:
    with suppress(pymysql.err.Error, OSError):
        ask(session, "ROLLBACK")
        return True
    return False


def _close(session: Connection) -> None:
    with suppress(pymysql.err.Error, OSError):
        session.close()


_POOL: Final = Pool(_reset, _close, idle_seconds=IDLE_SECONDS)


def _address(dsn: Dsn) -> str:
    return repr(sorted(dsn.parameters().items(), key=lambda item: item[0]))


def borrow(dsn: Dsn) -> Connection:
    """A session without a transaction, in autocommit; a new one where none is idle.

    :raises SourceUnreachable: no answer. :raises AccessDenied: refused.
    """
    return _POOL.borrow(_address(dsn), lambda: connect(dsn))


def give_back(dsn: Dsn, session: Connection) -> None:
    """Nothing is open in it but perhaps a transaction, which is rolled back."""
    _POOL.give_back(_address(dsn), session)


def with_session(dsn: Dsn, question: Callable[[Connection], T]) -> T:
    """The answer over a session, which is opened again when it breaks."""

    def asked(session: Connection) -> T:
        with server_errors(dsn):
            return question(session)

    return _POOL.ask(_address(dsn), lambda: connect(dsn), asked)
