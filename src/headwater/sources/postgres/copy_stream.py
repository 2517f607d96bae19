"""What both ways to read a slot have in common: messages in batches, and an end that leaves no gap.

A stream that raised is of no more use: messages may have been dropped with the error, so going on would be a gap. What
came before an error of the server is still handed out, and the error with the next call.
"""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, Self

import psycopg
from psycopg import pq
from psycopg.errors import ObjectNotInPrerequisiteState, error_from_result

from headwater.sources.errors import SourceClosed, SourceError, SourceNotFound
from headwater.sources.postgres.connection import Connection, Dsn, translated
from headwater.sources.postgres.slot import ServerIdentity


class CopyStream(ABC):
    """Raw messages of one slot, read from a ``COPY`` of the server without blocking.

    :ivar identity: the server that they come from.
    """

    def __init__(
        self,
        session: Connection,
        dsn: Dsn,
        slot: str,
        identity: ServerIdentity,
        start_lsn: int,
        clock: Callable[[], float],
    ) -> None:
        self.identity = identity
        self._session = session
        self._connection = session.pgconn
        self._dsn = dsn
        self._slot = slot
        self._clock = clock
        self._poll = select.poll()
        self._poll.register(self._connection.socket, select.POLLIN)
        # libpq may leave a part of a TLS record behind, of which the socket tells nothing
        self._attempts = 2 if self._connection.ssl_in_use else 1
        self._batch: list[bytes] = []
        self._valid: int | None = None
        self._warning: SourceError | None = None
        self._error: SourceError | None = None
        self._ended = False
        self._connection.notice_handler = self._notice

        self._acknowledged = self._sent = start_lsn
        self._received = self._server_wal_end = start_lsn
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Of the socket, for who waits for several streams."""
        return int(self._connection.socket)

    @property
    def server_wal_end(self) -> int:
        """How far the server has read its log for us: all that committed before it was handed out by ``read``."""
        return self._server_wal_end

    @property
    def received_lsn(self) -> int:
        """The position of the newest of all that came."""
        return max(self._received, self._server_wal_end)

    @property
    def bytes_received(self) -> int:
        return self._bytes

    def read(self, max_messages: int, max_bytes: int, timeout: float) -> list[bytes]:
        """The next messages: all that is there up to the limits; waits for the first one up to *timeout* seconds.

        *max_bytes* is passed by one message at most. An empty list means that nothing came.

        :raises SourceUnreachable: the connection is gone, or the server is silent.
        :raises SourceNotFound: a publication is gone. :raises SourceError: the server's own words.
        """
        if self._error is not None:
            self._fail(self._error)
        if self._ended:
            raise SourceClosed("The stream has ended.", next_step="Open it again.")
        batch = self._batch = []
        try:
            self._fill(batch, max_messages, max_bytes, timeout)
        except SourceError as error:
            self._error = error
        except psycopg.Error as error:
            self._error = translated(error, self._dsn)
        except BaseException:
            self._ended = True
            raise
        if self._warning is not None:
            del batch[self._valid :]
            self._error = self._warning
        if batch:
            self._received = max(self._received, int.from_bytes(batch[-1][1:9], "big"))
        elif self._error is not None:
            self._fail(self._error)
        return batch

    @abstractmethod
    def acknowledge(self, lsn: int) -> None:
        """All that committed before *lsn* is durable here: the server may forget it. It never goes back."""

    @abstractmethod
    def send_status(self) -> None:
        """Tell the server that we are here, if it is time to; cheap enough for every turn of a busy loop."""

    @abstractmethod
    def close(self) -> None:
        """End the stream; what was acknowledged is told before. Closing twice is fine."""

    @abstractmethod
    def _fill(self, batch: list[bytes], max_messages: int, max_bytes: int, timeout: float) -> None:
        """Add what comes to *batch*."""

    def _notice(self, result: pq.abc.PGresult) -> None:
        """From 18 on a publication that is gone is only warned of, and its changes are left out from there."""
        error = error_from_result(result)
        if error.sqlstate == ObjectNotInPrerequisiteState.sqlstate and self._warning is None:
            self._valid = len(self._batch)
            self._warning = self._no_publication(error)

    def _no_publication(self, error: psycopg.Error) -> SourceNotFound:
        return SourceNotFound(
            f"The slot {self._slot!r} came to a change for which there was no publication:"
            f" {error.diag.message_primary}.",
            next_step="A publication that was dropped leaves a gap even if it is made anew. Run: headwater resnapshot",
        )

    def _fail(self, error: SourceError) -> NoReturn:
        self._end()
        raise error

    def _end(self) -> None:
        self._ended = True
        self._connection.notice_handler = None
        self._session.close()
