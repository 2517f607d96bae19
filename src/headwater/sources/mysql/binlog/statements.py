"""Statements in the binlog: what a query event says beside its text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mysql.binlog.compression import inflate
from headwater.sources.mysql.binlog.cursor import Cursor, text_of
from headwater.sources.mysql.binlog.events import EventHeader, Query
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
