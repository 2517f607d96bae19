"""Events that name transactions: MySQL's GTIDs, plain and with tags, and MariaDB's."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from headwater.sources.mysql.binlog.cursor import Cursor, protocol_error, text_of
from headwater.sources.mysql.binlog.events import (
    EventHeader,
    EventType,
    Gtid,
    MariaDbGtid,
    MariaDbGtidList,
    PreviousGtids,
)

_LOGICAL_TIMES: Final = 2
_MORE_TIMES: Final = 1 << 55
_STANDALONE, _GROUP_COMMIT, _TRANSACTIONAL, _DDL, _PREPARED_XA, _COMPLETED_XA = 1, 2, 4, 32, 64, 128


def parse_gtid(header: EventHeader, read: Cursor) -> Gtid:
    """:raises SourceProtocolError: it is malformed."""
    read.skip(1)
    uuid, number = UUID(bytes=read.take(16)), read.number(8)
    last_committed = sequence_number = 0
    commit_time = original_time = size = None
    if read.left >= 17 and read.number(1) == _LOGICAL_TIMES:
        last_committed, sequence_number = read.number(8), read.number(8)
        if read.left >= 7:
            commit_time = original_time = read.number(7)
            if commit_time & _MORE_TIMES:
                commit_time, original_time = commit_time ^ _MORE_TIMES, read.number(7)
            if read.left:
                size = read.packed()
    is_anonymous = header.type_code == EventType.ANONYMOUS_GTID
    return Gtid(
        header, uuid, "", number, is_anonymous, last_committed, sequence_number, commit_time, original_time, size
    )


def parse_tagged_gtid(header: EventHeader, read: Cursor) -> Gtid:
    """A list of numbered fields; those that are not known may be left out by older readers.

    :raises SourceProtocolError: it is malformed, or has a field that must be known.
    """
    read.variable()
    size, last_needed = read.variable(), read.variable()
    if size > read.left + 32 or last_needed > 11:
        raise protocol_error("a GTID has fields that are not known.")
    uuid, tag, number = bytes(16), "", 0
    last_committed = sequence_number = 0
    commit_time: int | None = None
    original_time: int | None = None
    transaction_size: int | None = None
    while read.left:
        field = read.variable()
        if field == 1:
            uuid = bytes(read.variable() & 0xFF for _ in range(16))
        elif field == 2:
            number = _signed(read.variable())
        elif field == 3:
            tag = text_of(read.take(read.variable()))
        elif field == 4:
            last_committed = _signed(read.variable())
        elif field == 5:
            sequence_number = _signed(read.variable())
        elif field == 6:
            commit_time = read.variable()
        elif field == 7:
            original_time = read.variable()
        elif field == 8:
            transaction_size = read.variable()
        elif field in (0, 9, 10, 11):
            read.variable()
        else:
            break  # fields of later servers come last
    original_time = commit_time if original_time is None else original_time
    return Gtid(
        header,
        UUID(bytes=uuid),
        tag,
        number,
        False,
        last_committed,
        sequence_number,
        commit_time,
        original_time,
        transaction_size,
    )


def _signed(value: int) -> int:
    return value >> 1 ^ -(value & 1)


def parse_previous_gtids(header: EventHeader, read: Cursor) -> PreviousGtids:
    """:raises SourceProtocolError: it is malformed."""
    first = read.number(8)
    has_tags = first >> 56 == 1
    count = first >> 8 & 0xFFFF_FFFF_FFFF if has_tags else first
    if count * 24 > read.left:
        raise protocol_error("a set of GTIDs is cut off.")
    intervals: dict[tuple[UUID, str], tuple[tuple[int, int], ...]] = {}
    for _ in range(count):
        uuid = UUID(bytes=read.take(16))
        tag = text_of(read.take(read.variable())) if has_tags else ""
        ranges = read.number(8)
        if ranges * 16 > read.left:
            raise protocol_error("a set of GTIDs is cut off.")
        intervals[uuid, tag] = tuple((read.number(8), read.number(8)) for _ in range(ranges))
    return PreviousGtids(header, intervals)


def parse_mariadb_gtid(header: EventHeader, read: Cursor) -> MariaDbGtid:
    """:raises SourceProtocolError: it is malformed."""
    number, domain, flags = read.number(8), read.number(4), read.number(1)
    return MariaDbGtid(
        header,
        domain,
        header.server_id,
        number,
        read.number(8) if flags & _GROUP_COMMIT else None,
        is_standalone=bool(flags & _STANDALONE),
        is_transactional=bool(flags & _TRANSACTIONAL),
        is_ddl=bool(flags & _DDL),
        is_xa_prepare=bool(flags & _PREPARED_XA),
        is_xa_complete=bool(flags & _COMPLETED_XA),
    )


def parse_mariadb_gtid_list(header: EventHeader, read: Cursor) -> MariaDbGtidList:
    """:raises SourceProtocolError: it is malformed."""
    count = read.number(4) & 0x0FFF_FFFF
    if count * 16 > read.left:
        raise protocol_error("a list of GTIDs is cut off.")
    return MariaDbGtidList(header, tuple((read.number(4), read.number(4), read.number(8)) for _ in range(count)))
