"""Result: the rows of one prepared statement, taken from the socket in large blocks.

The library logs in and sends the statement; its way of taking rows makes objects of every value, so from the first row
on the packets are taken here. A result that was not read to its end leaves the session unusable: close it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pymysql.err import OperationalError, raise_mysql_exception

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mysql.connection import Connection
from headwater.sources.mysql.row_format import ROWS_LAST, ROWS_LONG, ROWS_MORE, RowFormat
from headwater.sources.table import SourceColumn, SourceTable

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
