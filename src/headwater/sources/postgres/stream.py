"""The replication stream: raw messages of a slot, in commit order, by the replication protocol.

A slot is read through the replication protocol here, or in SQL (:mod:`~headwater.sources.postgres.peek`). What both
have in common is :class:`CopyStream`. A stream that raised is of no more use: messages may have been dropped with the
error, so going on would be a gap. What came before an error of the server is still handed out, and the error with the
next call.

Raw messages leave as the server sent them: ``w | start u64 | end u64 | time i64 | pgoutput message``. Keepalives never
leave: they tell :attr:`ReplicationStream.server_wal_end`, and are answered.

The server is told two positions. What was *received* keeps the connection alive and is only shown. What was
*acknowledged* is durable here: the server forgets its log up to there and never sends it again.
"""

from __future__ import annotations

import select
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, Self

import psycopg
from psycopg import generators, pq
from psycopg.errors import ObjectInUse, ObjectNotInPrerequisiteState, UndefinedObject, error_from_result

from headwater.sources.errors import (
    SlotBusy,
    SourceClosed,
    SourceError,
    SourceMisconfigured,
    SourceNotFound,
    SourceProtocolError,
    SourceUnreachable,
)
from headwater.sources.postgres.connection import (
    Connection,
    Dsn,
    connect_replication,
    server_errors,
    translated,
)
from headwater.sources.postgres.names import literal, quoted
from headwater.sources.postgres.offset import Lsn
from headwater.sources.postgres.slot import (
    ServerIdentity,
    ServerPosition,
    Slot,
    check_slot,
    read_slots,
    server_position,
)


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


STATUS_INTERVAL: Final = 10.0
ACKNOWLEDGE_INTERVAL: Final = 1.0
ACKNOWLEDGE_BYTES: Final = 1 << 20
SLOT_RELEASE: Final = 5.0
GATHER_MESSAGES: Final = 500
GATHER_SECONDS: Final = 0.001
_RETRY_STATUS: Final = 0.1

_XLOG_DATA: Final = ord("w")
_KEEPALIVE: Final = ord("k")
_STATUS: Final = struct.Struct("!cQQQqB")
_UNIX_SECONDS_OF_2000: Final = 946_684_800
_OLDEST: Final = 140000


class ReplicationStream(CopyStream):
    """The messages of one slot from a position on. :meth:`open` starts it."""

    def __init__(
        self,
        session: Connection,
        dsn: Dsn,
        slot: str,
        identity: ServerIdentity,
        start_lsn: int,
        *,
        status_interval: float = STATUS_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(session, dsn, slot, identity, start_lsn, clock)
        self._silence = dsn.timeout_seconds
        self._status_interval = status_interval
        self._sent_at = self._heard_at = clock()
        self._status_due = self._sent_at + status_interval
        self._asked_at: float | None = None

    @classmethod
    def open(
        cls,
        dsn: Dsn,
        slot: str,
        publications: Sequence[str],
        start_lsn: int,
        *,
        known: ServerIdentity | None = None,
        streaming: bool = True,
        messages: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Self:
        """Start the stream at *start_lsn*: transactions that commit there or later come, whole.

        A slot that an earlier connection of ours still holds is waited for, for a few seconds.

        :param known: the server that *start_lsn* is a position of: the slot is first checked for a gap.
        :param streaming: large transactions come in blocks before their commit.
        :param messages: texts of ``pg_logical_emit_message`` come, too.
        :raises SourceUnreachable: :raises AccessDenied: :raises SourceNotFound: the server cannot be used.
        :raises SlotLost: :raises SlotInvalidated: :raises SlotMoved: :raises SlotBusy: nor can the slot.
        :raises ServerReplaced: :raises SourceWentBack: it is not the server of *start_lsn*.
        """
        session = connect_replication(dsn)
        try:
            with server_errors(dsn):
                server, interval = _prepare(session, dsn)
                deadline = clock() + SLOT_RELEASE
                while True:
                    try:
                        if known is not None:
                            check_slot(_find(session, slot), slot, start_lsn, known, server)
                        _start(session, server, slot, _options(publications, streaming, messages), start_lsn)
                        break
                    except SlotBusy:
                        if clock() >= deadline:
                            raise
                        sleep(0.05)
            return cls(session, dsn, slot, server.identity, start_lsn, status_interval=interval, clock=clock)
        except BaseException:
            session.close()
            raise

    def acknowledge(self, lsn: int) -> None:
        """All that committed before *lsn* is durable here; the server is told within a second of calls to this stream.

        The position never goes back. After the end of the stream it is kept for the next one.
        """
        if lsn <= self._acknowledged:
            return
        self._acknowledged = lsn
        now = self._clock()
        if lsn - self._sent >= ACKNOWLEDGE_BYTES or now - self._sent_at >= ACKNOWLEDGE_INTERVAL:
            self._send(now)
        else:
            self._status_due = min(self._status_due, self._sent_at + ACKNOWLEDGE_INTERVAL)

    def send_status(self) -> None:
        now = self._clock()
        if now >= self._status_due:
            self._send(now)

    def close(self) -> None:
        if not self._ended and self._error is None and self._acknowledged > self._sent:
            self._send(self._clock())
        self._end()

    def _fill(self, batch: list[bytes], max_messages: int, max_bytes: int, timeout: float) -> None:
        connection = self._connection
        get, append = connection.get_copy_data, batch.append
        attempts = self._attempts
        untried, size, keepalives = attempts, 0, 0
        deadline: float | None = None
        gathered = timeout <= 0
        while True:
            length, data = get(1)
            if length > 0:
                message = bytes(data)
                if message[0] == _XLOG_DATA:
                    append(message)
                    size += length
                    if len(batch) >= max_messages or size >= max_bytes:
                        break
                else:
                    self._control(message)
                    keepalives += 1
                untried = attempts
            elif length < 0:
                raise self._end_of_copy()
            elif untried:
                connection.consume_input()
                untried -= 1
            elif batch and (gathered or len(batch) >= GATHER_MESSAGES):
                break
            elif batch:
                # the server sends message by message: without a pause each would be a batch
                gathered, untried = True, attempts
                time.sleep(GATHER_SECONDS)
            else:
                now = self._clock()
                deadline = now + timeout if deadline is None else deadline
                wait = min(deadline, self._next_duty(now, heard=keepalives > 0)) - now
                keepalives = 0
                if self._poll.poll(max(0, round(wait * 1000))):
                    untried = attempts
                elif self._clock() >= deadline:
                    break
        self._bytes += size
        if batch or keepalives:
            self._heard(self._clock())
        self.send_status()

    def _control(self, message: bytes) -> None:
        if message[0] != _KEEPALIVE or len(message) != 18:
            raise SourceProtocolError("The server sent a replication message of an unknown kind.")
        self._server_wal_end = max(self._server_wal_end, int.from_bytes(message[1:9], "big"))
        if message[17]:
            self._send(self._clock())

    def _heard(self, now: float) -> None:
        self._heard_at = now
        self._asked_at = None

    def _next_duty(self, now: float, *, heard: bool) -> float:
        """Do what is due while nothing comes; when the next thing is.

        :raises SourceUnreachable: the server was asked for an answer and gave none.
        """
        if heard:
            self._heard(now)
        half = self._silence / 2
        if self._asked_at is not None and now - self._asked_at >= half:
            raise SourceUnreachable(
                f"{self._dsn} said nothing for {now - self._heard_at:.0f} s.",
                next_step="Check the server and the network between.",
            )
        if self._asked_at is None and now - self._heard_at >= half:
            self._asked_at = now
            self._send(now, answer=True)
        elif now >= self._status_due:
            self._send(now)
        patience = (self._heard_at if self._asked_at is None else self._asked_at) + half
        return min(self._status_due, patience)

    def _send(self, now: float, *, answer: bool = False) -> None:
        """A failure is told by the next read."""
        if self._ended or self._error is not None:
            return
        since_2000 = int((time.time() - _UNIX_SECONDS_OF_2000) * 1_000_000)
        acknowledged = self._acknowledged
        written = max(acknowledged, self.received_lsn)
        status = _STATUS.pack(b"r", written, acknowledged, acknowledged, since_2000, answer)
        try:
            if self._connection.put_copy_data(status) > 0:
                self._connection.flush()
                self._sent, self._sent_at = acknowledged, now
                self._status_due = now + self._status_interval
            else:
                self._status_due = now + _RETRY_STATUS
        except psycopg.Error as error:
            self._error = translated(error, self._dsn)

    def _end_of_copy(self) -> SourceError:
        result = self._connection.get_result()
        if result is None or result.status != pq.ExecStatus.FATAL_ERROR:
            return SourceUnreachable(f"{self._dsn} ended the stream.", next_step="Check that the server runs.")
        error = error_from_result(result)
        if isinstance(error, UndefinedObject):
            return self._no_publication(error)
        return translated(error, self._dsn)


def _prepare(session: Connection, dsn: Dsn) -> tuple[ServerPosition, float]:
    """The server, and how often it wants to hear from us."""
    if session.info.server_version < _OLDEST:
        raise SourceMisconfigured(f"{dsn} is older than 14.", next_step="Capture from Postgres 14 or later.")
    # from 18 on a missing publication is but a warning
    session.execute("SET client_min_messages = warning")
    row = session.execute(
        "SELECT setting::int FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'"
    ).fetchone()
    timeout = row[0] / 1000 if row is not None else 0
    return server_position(session), min(STATUS_INTERVAL, timeout / 3) if timeout else STATUS_INTERVAL


def _options(publications: Sequence[str], streaming: bool, messages: bool) -> str:
    names = literal(",".join(map(quoted, publications)))
    options = f"proto_version '2', publication_names {names}"
    return options + (", streaming 'on'" if streaming else "") + (", messages 'true'" if messages else "")


def _find(session: Connection, name: str) -> Slot | None:
    # a session of replication takes no parameters
    return next((slot for slot in read_slots(session) if slot.name == name), None)


def _start(session: Connection, server: ServerPosition, slot: str, options: str, start_lsn: int) -> None:
    command = f"START_REPLICATION SLOT {quoted(slot)} LOGICAL {Lsn(start_lsn)} ({options})"
    session.pgconn.send_query(command.encode())
    result = session.wait(generators.execute(session.pgconn))[0]
    if result.status == pq.ExecStatus.COPY_BOTH:
        return
    error = error_from_result(result)
    found = _find(session, slot)
    confirmed = Lsn(0) if found is None or found.confirmed is None else found.confirmed
    check_slot(found, slot, confirmed, server.identity, server)
    raise SlotBusy(slot) if isinstance(error, ObjectInUse) else error
