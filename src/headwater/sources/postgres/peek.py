"""Raw messages of a slot by plain SQL, for where the replication protocol cannot be had: poolers, some services.

``pg_logical_slot_peek_binary_changes`` decodes from the slot's confirmed position on and gives whole transactions; only
``pg_replication_slot_advance`` moves the slot. What was handed out and is not acknowledged comes again with the next
peek and is left out here by its place in the commit order, in which transactions, and messages outside of them, come.
A table is described once per peek, perhaps in a transaction that is left out: such descriptions are handed out with the
next message, where they are news.

=========  ====================================================  ==================================
state      what ``read`` does                                    goes to
=========  ====================================================  ==================================
resting    waits until it is time to look, moves the slot        peeking, or resting: nothing is new
peeking    hands out what the server sends                       resting, when all of it was sent
=========  ====================================================  ==================================

A peek is one transaction with its own settings, so a pooler may change the server's session between any two of them.
The messages are those of the stream, with the first protocol version: a transaction comes after its commit, whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Self

import psycopg
from psycopg import pq
from psycopg.errors import ObjectInUse, UndefinedObject, error_from_result

from headwater.sources.errors import SlotBusy, SourceError, SourceProtocolError
from headwater.sources.postgres.connection import (
    SESSION,
    Connection,
    Dsn,
    connect,
    server_errors,
    translated,
)
from headwater.sources.postgres.names import literal, quoted
from headwater.sources.postgres.offset import Lsn
from headwater.sources.postgres.slot import ServerIdentity, check_slot, read_slot, server_position
from headwater.sources.postgres.stream import CopyStream

PEEK_CHANGES: Final = 100_000
PEEK_INTERVAL: Final = 0.25

_BEGIN, _MESSAGE, _RELATION = b"BMR"
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_HEADER_SIZE: Final = 19
_TRAILER: Final = b"\xff\xff"
_TWO_FIELDS: Final = b"\0\2\0\0\0\x08"  # the LSN and the message
_NO_TIME: Final = bytes(8)

_SETTINGS: Final = ", ".join(
    f"pg_catalog.set_config('{name}', '{value}', true)"
    for name, value in {**SESSION, "client_min_messages": "warning"}.items()
)
_LOOK: Final = f"""
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_flush_lsn() END - '0/0'::pg_catalog.pg_lsn, {_SETTINGS}
"""


class PeekStream(CopyStream):
    """The messages of one slot from a position on. :meth:`open` makes it.

    :param changes: a peek ends with the transaction that reaches this number; more are fewer decodings of the same log.
    :param interval: seconds between two looks while nothing is new.
    """

    def __init__(
        self,
        session: Connection,
        dsn: Dsn,
        slot: str,
        identity: ServerIdentity,
        start_lsn: int,
        options: str,
        *,
        changes: int = PEEK_CHANGES,
        interval: float = PEEK_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(session, dsn, slot, identity, start_lsn, clock)
        self._options = options
        self._changes = self._limit = changes
        self._interval = interval
        self._sleep = sleep
        self._look_at = self._heard_at = clock()
        self._next_place = start_lsn
        self._peeking = False
        self._copying = False
        self._until = start_lsn
        self._rows = 0
        self._new = False
        self._left_out = False
        self._described: dict[bytes, bytes] = {}
        self._handed_out: dict[bytes, bytes] = {}

    @classmethod
    def open(
        cls,
        dsn: Dsn,
        slot: str,
        publications: Sequence[str],
        start_lsn: int,
        *,
        known: ServerIdentity | None = None,
        messages: bool = True,
        changes: int = PEEK_CHANGES,
        interval: float = PEEK_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Self:
        """Read from *start_lsn* on: transactions that commit there or later come, whole.

        :param known: the server that *start_lsn* is a position of: the slot is first checked for a gap.
        :param messages: texts of ``pg_logical_emit_message`` come, too.
        :raises SourceUnreachable: :raises AccessDenied: :raises SourceNotFound: the server cannot be used.
        :raises SlotLost: :raises SlotInvalidated: :raises SlotMoved: :raises SlotBusy: nor can the slot.
        :raises ServerReplaced: :raises SourceWentBack: it is not the server of *start_lsn*.
        """
        session = connect(dsn)
        try:
            with server_errors(dsn):
                server = server_position(session)
                if known is not None:
                    check_slot(read_slot(session, slot), slot, start_lsn, known, server)
            names = literal(",".join(map(quoted, publications)))
            options = f"'proto_version', '1', 'publication_names', {names}"
            options += ", 'messages', 'true'" if messages else ""
            return cls(
                session,
                dsn,
                slot,
                server.identity,
                start_lsn,
                options,
                changes=changes,
                interval=interval,
                clock=clock,
                sleep=sleep,
            )
        except BaseException:
            session.close()
            raise

    def acknowledge(self, lsn: int) -> None:
        """All that committed before *lsn* is durable here; the slot is moved before the next peek."""
        self._acknowledged = max(self._acknowledged, lsn)

    def send_status(self) -> None:
        """Nothing: a server that is asked by SQL waits for no status."""

    def close(self) -> None:
        try:
            if not (self._ended or self._peeking or self._error):
                self._advance()
        except (SourceError, psycopg.Error):
            pass  # what was not told comes again and is left out
        finally:
            self._end()

    def _fill(self, batch: list[bytes], max_messages: int, max_bytes: int, timeout: float) -> None:
        deadline = self._clock() + timeout
        while True:
            if not self._peeking:
                now = self._clock()
                if now < self._look_at:
                    self._sleep(max(0.0, min(self._look_at, deadline) - now))
                if self._clock() < self._look_at or not self._look():
                    if self._clock() >= deadline:
                        return
                    continue
            self._take(batch, max_messages, max_bytes)
            if batch:
                return
            if self._peeking:
                now = self._clock()
                if self._poll.poll(max(0, round((deadline - now) * 1000))):
                    self._heard_at = self._clock()
                    continue
                now = self._clock()
                self._session.check_answers(now - self._heard_at)
                if now >= deadline:
                    return
            elif self._clock() >= deadline:
                return

    def _look(self) -> bool:
        """Begin a peek if the log went on; whether one began."""
        self._advance()
        self._session.execute("BEGIN")
        row = self._session.execute(_LOOK.encode()).fetchone()
        assert row is not None
        wal_end = int(row[0])
        if wal_end <= self._server_wal_end:
            self._session.execute("ROLLBACK")
            self._look_at = self._clock() + self._interval
            return False
        self._connection.send_query(
            f"COPY (SELECT lsn, data FROM pg_catalog.pg_logical_slot_peek_binary_changes({literal(self._slot)},"
            f" '{Lsn(wal_end)}', {self._limit}, {self._options})) TO STDOUT (FORMAT binary)".encode()
        )
        self._connection.flush()
        self._peeking, self._copying, self._heard_at = True, False, self._clock()
        self._until, self._rows, self._new, self._left_out = wal_end, 0, False, False
        return True

    def _take(self, batch: list[bytes], max_messages: int, max_bytes: int) -> None:
        """Take what the server has sent, and the end of the peek if it is there."""
        connection = self._connection
        untried = self._attempts
        if not self._copying:
            for _ in range(untried):
                connection.consume_input()
            if connection.is_busy():
                return
            result = connection.get_result()
            if result is None or result.status != pq.ExecStatus.COPY_OUT:
                raise self._refused(result)
            self._copying = True
        get, append, size = connection.get_copy_data, batch.append, 0
        while True:
            length, data = get(1)
            if length > 0:
                untried = self._attempts
                message = self._message(bytes(data))
                if message is not None:
                    if self._described:
                        batch += self._news()
                    append(message)
                    size += len(message)
                    if len(batch) >= max_messages or size >= max_bytes:
                        break
            elif length < 0:
                self._end_peek()
                break
            elif untried:
                connection.consume_input()
                untried -= 1
            else:
                break
        self._bytes += size

    def _message(self, row: bytes) -> bytes | None:
        """The raw message of a row; ``None`` for one that was handed out before, and for no row."""
        if not self._rows and row.startswith(_SIGNATURE):
            row = row[_HEADER_SIZE:]
            if not row:
                return None
        if row == _TRAILER:
            return None
        if row[:6] != _TWO_FIELDS or len(row) < 19:
            raise SourceProtocolError("A row of changes is not of the form that was asked for.")
        self._rows += 1
        kind = row[18]
        if kind == _MESSAGE and not row[19] & 1:
            left_out = self._is_old(row[20:28])
        else:
            if kind == _BEGIN:
                self._left_out = self._is_old(row[19:27])
            left_out = self._left_out
        position = row[6:14]
        message = b"w" + position + position + _NO_TIME + row[18:]
        if kind == _RELATION:
            described = self._described if left_out else self._handed_out
            described[row[19:23]] = message
        return None if left_out else message

    def _news(self) -> list[bytes]:
        """What transactions that were left out said of tables, where it is not what was handed out last."""
        told, self._described = self._described, {}
        news = {oid: one for oid, one in told.items() if one[25:] != self._handed_out.get(oid, b"")[25:]}
        self._handed_out |= news
        return list(news.values())

    def _is_old(self, place: bytes) -> bool:
        position = int.from_bytes(place, "big")
        if position < self._next_place:
            return True
        self._next_place = position + 1
        self._new = True
        return False

    def _end_peek(self) -> None:
        while (result := self._connection.get_result()) is not None:
            if result.status != pq.ExecStatus.COMMAND_OK:
                raise self._refused(result)
        self._session.execute("COMMIT")
        self._peeking = False
        if self._rows < self._limit:
            self._server_wal_end = self._until
            self._limit = self._changes
        elif not self._new:
            # all of it was handed out before and is not acknowledged yet: look further
            self._limit *= 2

    def _advance(self) -> None:
        """Move the slot to what was acknowledged."""
        if self._acknowledged > self._sent:
            try:
                self._session.execute(
                    "SELECT pg_catalog.pg_replication_slot_advance(%s, %s)", [self._slot, str(Lsn(self._acknowledged))]
                )
            except (ObjectInUse, UndefinedObject) as error:
                raise self._explained(error) from error
            self._sent = self._acknowledged
            self._limit = self._changes

    def _refused(self, result: pq.abc.PGresult | None) -> SourceError:
        if result is None:
            return SourceProtocolError("The server answered nothing to a query.")
        error = error_from_result(result)
        while self._connection.get_result() is not None:
            pass
        if self._connection.status != pq.ConnStatus.OK:
            return translated(error, self._dsn)
        self._session.execute("ROLLBACK")
        return self._explained(error)

    def _explained(self, error: psycopg.Error) -> SourceError:
        """The server's refusal, by what became of the slot."""
        slot = read_slot(self._session, self._slot)
        confirmed = 0 if slot is None or slot.confirmed is None else slot.confirmed
        try:
            check_slot(slot, self._slot, confirmed, self.identity, server_position(self._session))
        except SourceError as reason:
            return reason
        if isinstance(error, ObjectInUse):
            return SlotBusy(self._slot)
        if isinstance(error, UndefinedObject):
            return self._no_publication(error)
        return translated(error, self._dsn)
