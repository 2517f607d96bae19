"""EventDecoder: event packets to events, one after the other.

It knows what earlier events said: the format of the file, and the tables that row events are of. Everything is checked:
the checksum of every event that has one, every length against the end of its event. What is wrong raises
:class:`~headwater.sources.errors.SourceProtocolError`.

The packets of a compressed transaction are fed one by one in turn::

    decoder = EventDecoder()
    event = decoder.feed(packet)
    if isinstance(event, TransactionPayload):
        for inner in event.packets:
            event = decoder.feed_inner(inner)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mysql.binlog import gtid_events
from headwater.sources.mysql.binlog.compression import inflate, payload_packets
from headwater.sources.mysql.binlog.cursor import Cursor, protocol_error, text_of
from headwater.sources.mysql.binlog.events import (
    FLAG_IGNORABLE,
    HEADER_SIZE,
    Event,
    EventHeader,
    EventType,
    FormatDescription,
    Heartbeat,
    Incident,
    Other,
    Query,
    Rotate,
    RowsEvent,
    RowsKind,
    RowsQuery,
    TableMapEvent,
    TransactionPayload,
    Unknown,
    XaPrepare,
    Xid,
)
from headwater.sources.mysql.binlog.json_diff import complete_partial
from headwater.sources.mysql.binlog.table_map import MAX_COLUMNS, TableMap, parse_table_map
from headwater.sources.mysql.charsets import charset_of, decode_text

_SQL_MODE, _CHARSET, _DATABASES, _DDL_XID = 1, 4, 12, 17
_TOO_MANY: Final = 254
"""In place of the number of databases: the server does not say which."""
_LOAD_HEADER: Final = 13
"""Bytes about the file of a ``LOAD DATA``."""
_SIZES: Final = {
    0: 4,
    1: 8,
    3: 4,
    4: 6,
    7: 2,
    8: 2,
    9: 8,
    10: 4,
    13: 3,
    16: 1,
    17: 8,
    18: 2,
    19: 1,
    20: 1,
    128: 3,
    129: 8,
    130: 2,
}
"""Of the values that have a fixed one, by their number."""
_COUNTED: Final = {2: 1, 5: 0, 6: 0}
"""Texts with their length before them, and how many bytes follow them."""


def parse_query(header: EventHeader, read: Cursor) -> Query:
    """:raises SourceProtocolError: it is malformed."""
    return _query(header, read, is_compressed=False)


def parse_compressed_query(header: EventHeader, read: Cursor) -> Query:
    """:raises SourceProtocolError: it is malformed."""
    return _query(header, read, is_compressed=True)


def parse_load_query(header: EventHeader, read: Cursor) -> Query:
    """A ``LOAD DATA`` that was logged as a statement. :raises SourceProtocolError: it is malformed."""
    return _query(header, read, is_compressed=False, more_header=_LOAD_HEADER)


def _query(header: EventHeader, read: Cursor, *, is_compressed: bool, more_header: int = 0) -> Query:
    read.skip(8)
    database_size, error_code, status_size = read.number(1), read.number(2), read.number(2)
    read.skip(more_header)
    told = _status(read.take(status_size))
    database = text_of(read.take(database_size))
    read.skip(1)
    text = inflate(read.rest()) if is_compressed else read.rest()
    charset, mode = told.get(_CHARSET), told.get(_SQL_MODE)
    collation = None if charset is None else int.from_bytes(charset[:2], "little")
    xid, databases = told.get(_DDL_XID), told.get(_DATABASES)
    return Query(
        header,
        database,
        _sql(text, collation),
        error_code,
        collation,
        None if mode is None else int.from_bytes(mode, "little"),
        None if xid is None else int.from_bytes(xid, "little"),
        None if databases is None else tuple(text_of(name) for name in databases.split(b"\0")[:-1]) or None,
    )


@lru_cache(maxsize=256)
def _status(data: bytes) -> Mapping[int, bytes]:
    """The values up to the first whose layout is not known: later servers append theirs. Sessions repeat them."""
    told: dict[int, bytes] = {}
    read = Cursor(data)
    try:
        while read.left:
            field = read.number(1)
            if field in _SIZES:
                told[field] = read.take(_SIZES[field])
            elif field in _COUNTED:
                read.skip(read.number(1) + _COUNTED[field])
            elif field == 11:
                read.counted()
                read.counted()
            elif field == _DATABASES:
                count = read.number(1)
                start = read.place
                for _ in range(count % _TOO_MANY):
                    read.place = read.data.index(0, read.place) + 1
                if count != _TOO_MANY:
                    told[field] = bytes(read.data[start : read.place])
            elif field == 131:
                read.skip(read.number(1) * 4)
            else:
                break
    except (SourceProtocolError, ValueError):
        pass  # the text of the statement is what counts
    return told


def _sql(text: bytes, collation: int | None) -> str:
    charset = "utf8mb4" if collation is None else charset_of(collation)
    if charset in (None, "binary", "utf8mb3", "utf8mb4", "ascii"):
        return text.decode(errors="replace")
    assert charset is not None
    return decode_text(charset, text)


_HEADER: Final = struct.Struct("<IBIIIH")
_FLAGS_AT: Final = 17
_IN_USE: Final = 0x1
_CHECKSUM: Final = 4
_STATEMENT_END: Final = 1
_NO_TABLE: Final = 0xFF_FFFF
"""The table of an event without rows, which only ends a statement."""
_MAX_TABLES: Final = 4096
"""Table maps that are kept for their bytes; a server holds about as many tables open."""
_LATEST_TABLES: Final = 1024

_ROWS: Final = {
    EventType.WRITE_ROWS_V1: (RowsKind.INSERT, 1),
    EventType.UPDATE_ROWS_V1: (RowsKind.UPDATE, 1),
    EventType.DELETE_ROWS_V1: (RowsKind.DELETE, 1),
    EventType.WRITE_ROWS_V2: (RowsKind.INSERT, 2),
    EventType.UPDATE_ROWS_V2: (RowsKind.UPDATE, 2),
    EventType.DELETE_ROWS_V2: (RowsKind.DELETE, 2),
    EventType.PARTIAL_UPDATE_ROWS: (RowsKind.UPDATE, 2),
    EventType.MARIADB_WRITE_ROWS_COMPRESSED_V1: (RowsKind.INSERT, 1),
    EventType.MARIADB_UPDATE_ROWS_COMPRESSED_V1: (RowsKind.UPDATE, 1),
    EventType.MARIADB_DELETE_ROWS_COMPRESSED_V1: (RowsKind.DELETE, 1),
    EventType.MARIADB_WRITE_ROWS_COMPRESSED: (RowsKind.INSERT, 2),
    EventType.MARIADB_UPDATE_ROWS_COMPRESSED: (RowsKind.UPDATE, 2),
    EventType.MARIADB_DELETE_ROWS_COMPRESSED: (RowsKind.DELETE, 2),
}
"""What was done, and the version of the layout."""
_COMPRESSED_ROWS: Final = frozenset(kind for kind in _ROWS if kind >= EventType.MARIADB_WRITE_ROWS_COMPRESSED_V1)


_WITHOUT_CHANGES: Final = frozenset(
    (
        *(EventType.START_V3, EventType.STOP, EventType.SLAVE, EventType.IGNORABLE),
        *(EventType.INTVAR, EventType.RAND, EventType.USER_VAR),
        *(EventType.APPEND_BLOCK, EventType.DELETE_FILE, EventType.BEGIN_LOAD_QUERY),
        *(EventType.TRANSACTION_CONTEXT, EventType.VIEW_CHANGE),
        *(EventType.MARIADB_BINLOG_CHECKPOINT, EventType.MARIADB_START_ENCRYPTION),
    )
)
"""Events that change nothing by themselves: what belongs to a statement comes before the event that runs it."""


class EventDecoder:
    """Makes events of packets."""

    def __init__(self) -> None:
        self._format: FormatDescription | None = None
        self._id_size = 6
        self._tables: dict[int, TableMap] = {}
        self._maps: dict[bytes, TableMap] = {}

    @property
    def format(self) -> FormatDescription | None:
        """Of the file whose events come."""
        return self._format

    def feed(self, packet: bytes) -> Event:
        """The event of one packet.

        :raises SourceProtocolError: it is malformed, its checksum is wrong, or it cannot come here.
        """
        header = self._header(packet)
        if header.type_code == EventType.FORMAT_DESCRIPTION:
            return self._format_description(header, packet)
        end = len(packet)
        is_between_files = header.type_code == EventType.ROTATE and header.is_artificial
        if self._format is not None and not is_between_files:
            has_checksum = self._format.has_checksums
        else:
            # What the server makes before the format of a file is known does not tell whether it has one.
            has_checksum = end >= HEADER_SIZE + _CHECKSUM and _is_intact(packet)
        if has_checksum:
            end -= _CHECKSUM
            if end < HEADER_SIZE or not _is_intact(packet):
                raise protocol_error("the checksum of an event is wrong.")
        return self._event(header, packet, end)

    def feed_inner(self, packet: bytes) -> Event:
        """The event of a packet of a compressed transaction: the same, without a checksum.

        :raises SourceProtocolError: as :meth:`feed`.
        """
        header = self._header(packet)
        if header.type_code in (EventType.FORMAT_DESCRIPTION, EventType.TRANSACTION_PAYLOAD, EventType.ROTATE):
            raise protocol_error(f"a compressed transaction has an event of type {header.type_code} inside.")
        return self._event(header, packet, len(packet))

    def _header(self, packet: bytes) -> EventHeader:
        if len(packet) < HEADER_SIZE:
            raise protocol_error("an event is cut off.")
        timestamp, kind, server_id, size, log_pos, flags = _HEADER.unpack_from(packet)
        if size != len(packet):
            raise protocol_error("an event has another size than it says.")
        return EventHeader(timestamp, kind, server_id, size, log_pos, flags)

    def _event(self, header: EventHeader, packet: bytes, end: int) -> Event:
        kind = header.type_code
        if kind in _ROWS:
            return self._rows(header, packet, end)
        if kind == EventType.TABLE_MAP:
            return TableMapEvent(header, self._table_map(packet, end))
        parse = _PARSERS.get(kind)
        if parse is None:
            is_harmless = kind in _WITHOUT_CHANGES or bool(header.flags & FLAG_IGNORABLE)
            return Other(header) if is_harmless else Unknown(header)
        return parse(header, Cursor(packet, HEADER_SIZE, end))

    # -- the file ------------------------------------------------------------------------------------------------------

    def _format_description(self, header: EventHeader, packet: bytes) -> FormatDescription:
        if len(packet) < HEADER_SIZE + 57 + 1 + _CHECKSUM:
            raise protocol_error("a format description is cut off.")
        # A file that is being written has a flag in its header that was not there when the checksum was made.
        flags = (header.flags & ~_IN_USE).to_bytes(2, "little")
        if not _is_intact(packet[:_FLAGS_AT] + flags + packet[_FLAGS_AT + 2 :]):
            raise protocol_error("the checksum of a format description is wrong.")
        read = Cursor(packet, HEADER_SIZE, len(packet) - _CHECKSUM)
        version = read.number(2)
        server = text_of(read.take(50).rstrip(b"\0"))
        created, header_size = read.number(4), read.number(1)
        if version != 4 or header_size != HEADER_SIZE:
            raise protocol_error(
                f"it has the format {version}; this is for format 4 (MySQL 5.6 and later, MariaDB 10)."
            )
        sizes = read.take(read.left - 1)
        algorithm = read.number(1)
        if algorithm not in (0, 1):
            raise protocol_error("its checksums are of a kind that is not known.")
        if len(sizes) < EventType.DELETE_ROWS_V1:
            raise protocol_error("a format description is cut off.")
        self._format = FormatDescription(header, server, created, algorithm == 1, sizes)
        self._id_size = 4 if sizes[EventType.TABLE_MAP - 1] == 6 else 6
        self._tables.clear()
        self._maps.clear()
        return self._format

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _table_map(self, packet: bytes, end: int) -> TableMap:
        body = packet[HEADER_SIZE:end]
        table = self._maps.get(body)
        if table is None:
            is_mariadb = self._format is not None and self._format.is_mariadb
            table = parse_table_map(Cursor(body), self._id_size, is_mariadb=is_mariadb)
            if len(self._maps) >= _MAX_TABLES:
                self._maps.clear()
                # rows of the tables that were told last may follow still: a statement tells all of its own first
                self._tables = dict(list(self._tables.items())[-_LATEST_TABLES:])
            self._maps[body] = table
        self._tables.pop(table.table_id, None)
        self._tables[table.table_id] = table
        return table

    def _rows(self, header: EventHeader, packet: bytes, end: int) -> RowsEvent | Other:
        code = EventType(header.type_code)
        kind, version = _ROWS[code]
        read = Cursor(packet, HEADER_SIZE, end)
        table_id, flags = read.number(self._id_size), read.number(2)
        if version == 2:
            extra = read.number(2)
            read.skip(extra - 2)
        if table_id == _NO_TABLE:
            return Other(header)
        table = self._tables.get(table_id)
        if table is None:
            raise protocol_error("rows are of a table that was not described before them.")
        width = read.packed()
        if width > MAX_COLUMNS or (width != len(table.columns) and table.unknown_type is None):
            raise protocol_error("rows have another number of columns than their table.")
        size = (width + 7) // 8
        present = read.take(size)
        present_after = read.take(size) if kind is RowsKind.UPDATE else None
        data, start = packet, read.place
        if code in _COMPRESSED_ROWS:
            data, start = inflate(read.rest()), 0
            end = len(data)
        event = RowsEvent(header, table, kind, present, present_after, bool(flags & _STATEMENT_END), data, start, end)
        is_partial = code is EventType.PARTIAL_UPDATE_ROWS and table.unknown_type is None
        return complete_partial(event) if is_partial else event


def _is_intact(packet: bytes) -> bool:
    view = memoryview(packet)
    return zlib.crc32(view[:-_CHECKSUM]) == int.from_bytes(view[-_CHECKSUM:], "little")


# -- small events ------------------------------------------------------------------------------------------------------


def _rotate(header: EventHeader, read: Cursor) -> Rotate:
    position = read.number(8)
    return Rotate(header, text_of(read.rest()), position)


def _xid(header: EventHeader, read: Cursor) -> Xid:
    return Xid(header, read.number(8))


def _xa_prepare(header: EventHeader, read: Cursor) -> XaPrepare:
    return XaPrepare(header, bool(read.number(1)))


def _heartbeat(header: EventHeader, read: Cursor) -> Heartbeat:
    return Heartbeat(header, text_of(read.rest()), header.log_pos)


def _heartbeat_v2(header: EventHeader, read: Cursor) -> Heartbeat:
    name, position = "", header.log_pos
    while read.left:
        field = read.packed()
        if field == 0:
            break
        value = Cursor(read.take(read.packed()))
        if field == 1:
            name = text_of(value.rest())
        elif field == 2:
            position = value.packed()
    return Heartbeat(header, name, position)


def _rows_query(header: EventHeader, read: Cursor) -> RowsQuery:
    read.skip(1)  # a length that does not hold more than 255
    return RowsQuery(header, read.rest().decode(errors="replace"))


def _annotate_rows(header: EventHeader, read: Cursor) -> RowsQuery:
    return RowsQuery(header, read.rest().decode(errors="replace"))


def _incident(header: EventHeader, read: Cursor) -> Incident:
    number = read.number(2)
    return Incident(header, number, read.counted().decode(errors="replace") if read.left else "")


def _payload(header: EventHeader, read: Cursor) -> TransactionPayload:
    return TransactionPayload(header, payload_packets(read))


_PARSERS: Final[dict[int, Callable[[EventHeader, Cursor], Event]]] = {
    EventType.QUERY: parse_query,
    EventType.MARIADB_QUERY_COMPRESSED: parse_compressed_query,
    EventType.EXECUTE_LOAD_QUERY: parse_load_query,
    EventType.ROTATE: _rotate,
    EventType.XID: _xid,
    EventType.XA_PREPARE: _xa_prepare,
    EventType.HEARTBEAT: _heartbeat,
    EventType.HEARTBEAT_V2: _heartbeat_v2,
    EventType.ROWS_QUERY: _rows_query,
    EventType.MARIADB_ANNOTATE_ROWS: _annotate_rows,
    EventType.INCIDENT: _incident,
    EventType.TRANSACTION_PAYLOAD: _payload,
    EventType.GTID: gtid_events.parse_gtid,
    EventType.ANONYMOUS_GTID: gtid_events.parse_gtid,
    EventType.GTID_TAGGED: gtid_events.parse_tagged_gtid,
    EventType.PREVIOUS_GTIDS: gtid_events.parse_previous_gtids,
    EventType.MARIADB_GTID: gtid_events.parse_mariadb_gtid,
    EventType.MARIADB_GTID_LIST: gtid_events.parse_mariadb_gtid_list,
}
