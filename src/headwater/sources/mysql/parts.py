"""MySqlParts: the rows of parts of a table, read in a transaction of its own along the index of the key.

The transaction is consistent and takes no lock but the one that every read takes: columns cannot be changed while it is
open. What it shows lies at or before :attr:`MySqlParts.high`; the rows of each part come in key order, so that after a
break the read can go on behind the last one (:attr:`MySqlParts.progress`) in another transaction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

import pyarrow as pa
import pymysql
from pymysql.err import OperationalError, raise_mysql_exception

from headwater.sources.errors import SourceNotFound, SourceProtocolError
from headwater.sources.key_conditions import where
from headwater.sources.mysql.catalog import CatalogTable, read_table
from headwater.sources.mysql.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.mysql.key_columns import cut_after, key_list, read_key
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.places import place_after
from headwater.sources.mysql.row_format import ROWS_LAST, ROWS_LONG, ROWS_MORE, RowFormat
from headwater.sources.mysql.server import Server
from headwater.sources.mysql.splitting import from_sql
from headwater.sources.mysql.types import source_type
from headwater.sources.position_snapshots import table_changed
from headwater.sources.splits import KeyRange, PartsProgress
from headwater.sources.table import SourceColumn, SourceTable
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


BLOCK_BYTES: Final = 4 << 20
_HELD_BYTES: Final = 1 << 20
_PREPARE: Final = 0x16
_EXECUTE: Final = 0x17
_CLOSE: Final = 0x19
_MOST_PACKET: Final = 0xFFFFFF
_EOF: Final = 0xFE
_ERROR: Final = 0xFF


class Result:
    """Rows of *columns* of *table* that *statement* gives; one column of the result for each, in their order.

    The library logs in and sends the statement; its way of taking rows makes objects of every value, so from the first
    row on the packets are taken here, in large blocks. A result that was not read to its end leaves the session
    unusable: close it.

    :raises pymysql.err.Error: the server refused it, or the connection broke; so all methods.
    """

    def __init__(
        self, session: Connection, statement: str, table: SourceTable, columns: Sequence[SourceColumn]
    ) -> None:
        self._session: Any = session
        self._id = self._prepare(statement)
        session._execute_command(_EXECUTE, struct.pack("<IBI", self._id, 0, 1))
        sent = self._descriptions(self._packet_count())
        self.format = RowFormat(table, columns, sent)
        # what the library has taken from the socket by now; then nothing is between the socket and us
        self._held: bytes = self._session._rfile.read1(_HELD_BYTES)
        self._socket: Any = self._session._rfile.raw

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, about :data:`BLOCK_BYTES` of the protocol at a time; then the statement is given back."""
        block = bytearray(max(BLOCK_BYTES, len(self._held)))
        walk = self.format.decoder.walk
        block[: len(self._held)] = self._held
        filled, walked = len(self._held), 0
        while True:
            walked, stopped = walk(block, walked, filled)
            if stopped == ROWS_MORE and filled < len(block):
                filled += self._receive(memoryview(block)[filled:])
                continue
            if walked:
                batch = self.format.batch(block, walked)
                if batch is not None:
                    yield batch
                block[: filled - walked] = block[walked:filled]
                filled, walked = filled - walked, 0
            elif stopped == ROWS_MORE:  # one row is larger than the block
                block.extend(bytes(len(block)))
            if stopped == ROWS_LAST:
                self._end(bytes(block[:filled]))
                return
            if stopped == ROWS_LONG:
                filled, row = self._long(bytes(block[:filled]), block)
                yield row

    def _receive(self, into: memoryview) -> int:
        taken: int = self._socket.readinto(into)
        if not taken:
            raise OperationalError(2013, "the server ended the connection in the middle of a result")
        return taken

    def _long(self, held: bytes, block: bytearray) -> tuple[int, pa.RecordBatch]:
        """The row of several packets that begins with *held*; what follows it in *held* goes to *block*: how much."""
        taken = 0
        row = bytearray()

        def more(count: int) -> bytes:
            nonlocal taken
            have = held[taken : taken + count]
            taken += len(have)
            rest = bytearray(count - len(have))
            received = 0
            while received < len(rest):
                received += self._receive(memoryview(rest)[received:])
            return have + rest

        while True:
            length = int.from_bytes(more(4)[:3], "little")
            row += more(length)
            if length < _MOST_PACKET:
                break
        rest = held[taken:]
        block[: len(rest)] = rest
        made = self.format.batch(row, -1)
        assert made is not None
        return len(rest), made

    def _end(self, packet: bytes) -> None:
        """What follows the last row, a whole packet: the end, or an error."""
        payload = packet[4:]
        if payload[0] == _ERROR:
            raise_mysql_exception(payload)
        if payload[0] != _EOF:
            raise SourceProtocolError("A result ended with a packet that is neither a row nor its end.")
        # nothing answers to this one
        self._session._execute_command(_CLOSE, struct.pack("<I", self._id))

    # -- the statement -----------------------------------------------------------------------------------------------

    def _prepare(self, statement: str) -> int:
        self._session._execute_command(_PREPARE, statement)
        packet = self._session._read_packet()
        _, number, columns, parameters = struct.unpack_from("<BIHH", packet.get_all_data())
        if parameters:
            self._descriptions(parameters)
        if columns:
            self._descriptions(columns)
        found: int = number
        return found

    def _packet_count(self) -> int:
        count: int = self._session._read_packet().read_length_encoded_integer()
        return count

    def _descriptions(self, count: int) -> list[tuple[int, int]]:
        """Type and flags of each column."""
        from pymysql.protocol import FieldDescriptorPacket

        found = []
        for _ in range(count):
            described = self._session._read_packet(FieldDescriptorPacket)
            found.append((described.type_code, described.flags))
        if not self._session._read_packet().is_eof_packet():
            raise SourceProtocolError("The description of a result has no end.")
        return found


_LOCK_SECONDS: Final = 20


class MySqlParts:
    """One read of *columns* of the rows of *parts*.

    :ivar high: the rows show nothing that committed after this place.
    :ivar progress: how far the rows were given.
    :raises SnapshotExpired: the table is not what it was. :raises SourceUnreachable: no answer.
    """

    def __init__(
        self,
        dsn: Dsn,
        table: SourceTable,
        parts: Sequence[KeyRange],
        columns: Sequence[SourceColumn],
    ) -> None:
        self._dsn, self._table, self._parts, self._columns = dsn, table, tuple(parts), tuple(columns)
        self.progress = PartsProgress(parts)
        self._is_read = False
        self._session: Connection | None = borrow(dsn)
        try:
            with server_errors(dsn):
                server = self._begin()
                self._catalog = self._checked()
                # after the table was opened: the statements that made it what it is are before this place
                self.high = place_after(self.session, server)
                self._key = read_key(self._catalog, table)
        except SourceNotFound:
            self.close()
            raise table_changed(table, "was dropped or renamed") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transaction. Closing twice is fine."""
        session, self._session = self._session, None
        if session is None:
            return
        if self._is_read:
            give_back(self._dsn, session)
        elif session.open:
            session._force_close()  # rows are on their way that nobody takes

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, part by part, each in key order.

        :raises SourceUnreachable: the connection broke. :raises SpecialValue: see :class:`.row_format.RowFormat`.
        """
        try:
            with server_errors(self._dsn):
                for part in self._parts:
                    yield from self._rows(part)
                    self.progress.end_part()
                self._is_read = True
        except SourceNotFound:
            raise table_changed(self._table, "was dropped, or lost a column") from None

    def _rows(self, part: KeyRange) -> Iterator[pa.RecordBatch]:
        wanted = [*self._columns, *self._missing_key()]
        statement = (
            f"SELECT {RowFormat.selected(wanted)} FROM {from_sql(self._catalog)}"
            f"{where(part, self._key)} ORDER BY {key_list(self._key)}"
        )
        result = Result(self.session, statement, self._table, wanted)
        for batch in result.batches():
            last = batch.slice(batch.num_rows - 1)
            yield batch.select(range(len(self._columns)))
            self.progress.reach(cut_after(self._key, [last.column(key.name)[0].as_py() for key in self._key]))

    @property
    def session(self) -> Connection:
        """The open one."""
        assert self._session is not None
        return self._session

    def _missing_key(self) -> list[SourceColumn]:
        names = {column.name for column in self._columns}
        return [self._table.column(key.name) for key in self._key if key.name not in names]

    def _begin(self) -> Server:
        ask(self.session, f"SET SESSION lock_wait_timeout = {_LOCK_SECONDS}")
        ask(self.session, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        server = Server.ask(self.session)
        ask(self.session, "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        return server

    def _checked(self) -> CatalogTable:
        """What the catalog says, which stays so once a row was read. :raises SnapshotExpired: another table."""
        table = self._table
        name = TableName(table.namespace, table.name)
        ask(self.session, f"SELECT 1 FROM {name.sql} LIMIT 0")
        catalog = read_table(self.session, name)
        for column in self._columns:
            found = catalog.column(column.name)
            if column.dropped:
                continue
            if found is None:
                raise table_changed(table, f"has no column {column.name!r} any more")
            if source_type(found.type_text) != column.source_type:
                raise table_changed(table, f"has another type of column {column.name!r}")
        return catalog
