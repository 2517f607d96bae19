"""Heartbeats: small records in the server's log, so that the slot goes on where nothing of ours is written.

A slot releases the log up to what its reader acknowledged. In a database that rests beside others that write, a record
of our own now and then gives the reader something to acknowledge, and shows how far behind it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from headwater.sources.errors import SourceError
from headwater.sources.postgres.connection import Connection, Dsn, connect, server_errors

HEARTBEAT_PREFIX: Final = "headwater"
HEARTBEAT_INTERVAL: Final = 60.0

# the message alone would wait unflushed for somebody's commit, and is not sent before
_BEAT: Final = """
SELECT pg_catalog.pg_logical_emit_message(false, %s, ''), pg_catalog.pg_current_xact_id()
"""


class Heartbeat:
    """Writes heartbeats to one database. A failure is kept to be shown, and ends nothing.

    :ivar last_error: why the last attempt failed; ``None`` if it did not.
    """

    def __init__(
        self, dsn: Dsn, *, interval: float = HEARTBEAT_INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.last_error: SourceError | None = None
        self._dsn = dsn
        self._interval = interval
        self._clock = clock
        self._due = clock()
        self._session: Connection | None = None

    def beat(self) -> bool:
        """Write a heartbeat if one is due; whether one was written. Never raises for what the server does."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + self._interval
        try:
            if self._session is None:
                self._session = connect(self._dsn)
            with server_errors(self._dsn):
                self._session.execute(_BEAT, [HEARTBEAT_PREFIX])
        except SourceError as error:
            self.last_error = error
            self.close()
            return False
        self.last_error = None
        return True

    def close(self) -> None:
        """End the connection; the next heartbeat opens one again."""
        if self._session is not None:
            self._session.close()
            self._session = None
