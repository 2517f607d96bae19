"""pgoutput: the messages of Postgres's logical replication (protocol versions 1 and 2), as far as they are not rows.

A *raw message* is the payload of a CopyData message: ``w``, three numbers of 64 bits, then the pgoutput message from
byte :data:`HEADER` on. Rows (insert, update, delete) are many, and the row decoder reads them
(:mod:`~headwater.sources.postgres.decoder`); everything else is few, and is read here into values.

Inside a streamed transaction, messages that belong to it carry its xid after the type byte.
Times are microseconds since 1970 UTC. Everything is checked: bytes that are not exactly one message raise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headwater.sources.errors import SourceProtocolError
from headwater.sources.postgres.offset import Lsn

HEADER: Final = 25
"""Where the pgoutput message begins in a raw message."""
POSTGRES_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970: the zero of the server's times."""

BEGIN, COMMIT, ORIGIN, RELATION, TYPE, TRUNCATE, MESSAGE = (ord(letter) for letter in "BCORYTM")
INSERT, UPDATE, DELETE = (ord(letter) for letter in "IUD")
STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT = (ord(letter) for letter in "SEcA")

_U8, _U32, _I32, _U64 = (struct.Struct(form) for form in ("!B", "!I", "!i", "!Q"))
_RAW: Final = struct.Struct("!cQQq")
_TRUNCATE_CASCADE, _TRUNCATE_RESTART = 1, 2


def protocol_error(reason: str) -> SourceProtocolError:
    """The error of bytes that are not what the protocol says."""
    return SourceProtocolError(
        f"The replication stream is not what the protocol says: {reason}",
        next_step="Start the capture again; if it repeats, report it with the server's version.",
    )


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction begins; its rows follow, then its commit."""

    commit_lsn: Lsn
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The transaction ends."""

    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction came to the server by replication from another."""

    lsn: Lsn
    name: str


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column as rows carry it."""

    name: str
    is_key: bool
    type_oid: int
    typmod: int


@dataclass(frozen=True, slots=True)
class Relation:
    """What rows of *oid* look like from here on.

    :ivar replica_identity: ``d`` key, ``n`` nothing, ``f`` full, ``i`` index.
    :ivar xid: of a streamed transaction.
    """

    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Type:
    """The name of a type that is not built in."""

    oid: int
    namespace: str
    name: str
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables were emptied."""

    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """What ``pg_logical_emit_message`` wrote."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Messages of a transaction that has not committed follow, up to the stop."""

    xid: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The streamed part ends."""


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A streamed transaction committed."""

    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """A streamed transaction was rolled back, or (*subxid* differs) a savepoint of it."""

    xid: int
    subxid: int


ControlMessage = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Truncate
    | Message
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
)


def raw_message(content: bytes, wal_start: int = 0, wal_end: int = 0, send_time: int = 0) -> bytes:
    """A pgoutput message with the header of the replication stream before it, for messages that came another way."""
    return _RAW.pack(b"w", wal_start, wal_end, send_time) + content


def type_of(message: bytes) -> int:
    """The type byte.

    :raises SourceProtocolError: *message* is no raw message.
    """
    check_raw(message)
    return message[HEADER]


def check_raw(message: bytes) -> None:
    """:raises SourceProtocolError: *message* is no raw message."""
    if len(message) <= HEADER or message[0] != 0x77:
        raise protocol_error("a message is cut off, or is no WAL data.")


def parse_control(message: bytes, *, streamed: bool = False) -> ControlMessage:
    """The value of a raw message that is not a row.

    :param streamed: the message came inside a streamed transaction.
    :raises SourceProtocolError: it is malformed, or of a type that is not known here.
    """
    check_raw(message)
    read = _Cursor(message)
    parse = _PARSERS.get(message[HEADER])
    if parse is None:
        raise protocol_error(f"a message of type {message[HEADER]:#04x} cannot come here.")
    carries_xid = streamed and message[HEADER] in _WITH_XID
    try:
        made = parse(read, read.u32() if carries_xid else None)
    except (struct.error, IndexError, ValueError) as error:
        if isinstance(error, SourceProtocolError):
            raise
        raise protocol_error(f"a message of type {chr(message[HEADER])!r} is malformed.") from error
    if read.place != len(message):
        raise protocol_error(f"a message of type {chr(message[HEADER])!r} has the wrong length.")
    return made


class _Cursor:
    """Reads a message from front to back; beyond its end it raises."""

    __slots__ = ("message", "place")

    def __init__(self, message: bytes) -> None:
        self.message, self.place = message, HEADER + 1

    def _number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self.message, self.place)[0]
        self.place += form.size
        return value

    def u8(self) -> int:
        return self._number(_U8)

    def u16(self) -> int:
        return self.u8() << 8 | self.u8()

    def u32(self) -> int:
        return self._number(_U32)

    def i32(self) -> int:
        return self._number(_I32)

    def lsn(self) -> Lsn:
        return Lsn(self._number(_U64))

    def time(self) -> int:
        """Wraps as the server's 64 bits do: a malformed message must not make a number that Arrow cannot hold."""
        return postgres_time(self._number(_U64))

    def text(self) -> str:
        end = self.message.index(b"\0", self.place)
        text = self.message[self.place : end].decode()
        self.place = end + 1
        return text

    def content(self) -> bytes:
        length = self.u32()
        content = self.message[self.place : self.place + length]
        self.place += length
        return content

    @property
    def left(self) -> int:
        return len(self.message) - self.place


def postgres_time(unsigned: int) -> int:
    """Microseconds since 1970 of the 64 bits that the server sent, as a signed number of 64 bits."""
    shifted = (unsigned + POSTGRES_EPOCH_US) & 0xFFFF_FFFF_FFFF_FFFF
    return shifted - (1 << 64) if shifted >> 63 else shifted


def _begin(read: _Cursor, _xid: int | None) -> Begin:
    return Begin(commit_lsn=read.lsn(), commit_time=read.time(), xid=read.u32())


def _commit(read: _Cursor, _xid: int | None) -> Commit:
    read.u8()
    return Commit(commit_lsn=read.lsn(), end_lsn=read.lsn(), commit_time=read.time())


def _origin(read: _Cursor, _xid: int | None) -> Origin:
    return Origin(lsn=read.lsn(), name=read.text())


def _relation(read: _Cursor, xid: int | None) -> Relation:
    oid, namespace, name, identity = read.u32(), read.text(), read.text(), chr(read.u8())
    columns = []
    for _ in range(read.u16()):
        flags, column, type_oid, typmod = read.u8(), read.text(), read.u32(), read.i32()
        columns.append(RelationColumn(column, bool(flags & 1), type_oid, typmod))
    # An empty namespace stands for the system's own.
    return Relation(oid, namespace or "pg_catalog", name, identity, tuple(columns), xid)


def _type(read: _Cursor, xid: int | None) -> Type:
    oid, namespace, name = read.u32(), read.text(), read.text()
    return Type(oid, namespace or "pg_catalog", name, xid)


def _truncate(read: _Cursor, xid: int | None) -> Truncate:
    count, options = read.u32(), read.u8()
    if count * 4 > read.left:
        raise protocol_error("a truncation names more tables than it holds.")
    oids = tuple(read.u32() for _ in range(count))
    return Truncate(oids, bool(options & _TRUNCATE_CASCADE), bool(options & _TRUNCATE_RESTART), xid)


def _message(read: _Cursor, xid: int | None) -> Message:
    flags, lsn, prefix, content = read.u8(), read.lsn(), read.text(), read.content()
    return Message(bool(flags & 1), lsn, prefix, content, xid)


def _stream_start(read: _Cursor, _xid: int | None) -> StreamStart:
    return StreamStart(xid=read.u32(), is_first=bool(read.u8()))


def _stream_stop(_read: _Cursor, _xid: int | None) -> StreamStop:
    return StreamStop()


def _stream_commit(read: _Cursor, _xid: int | None) -> StreamCommit:
    xid = read.u32()
    read.u8()
    return StreamCommit(xid=xid, commit_lsn=read.lsn(), end_lsn=read.lsn(), commit_time=read.time())


def _stream_abort(read: _Cursor, _xid: int | None) -> StreamAbort:
    made = StreamAbort(xid=read.u32(), subxid=read.u32())
    if read.left:  # with parallel streaming the server adds where and when
        read.lsn()
        read.time()
    return made


_PARSERS: Final[dict[int, Callable[[_Cursor, int | None], ControlMessage]]] = {
    BEGIN: _begin,
    COMMIT: _commit,
    ORIGIN: _origin,
    RELATION: _relation,
    TYPE: _type,
    TRUNCATE: _truncate,
    MESSAGE: _message,
    STREAM_START: _stream_start,
    STREAM_STOP: _stream_stop,
    STREAM_COMMIT: _stream_commit,
    STREAM_ABORT: _stream_abort,
}
_WITH_XID: Final = frozenset((RELATION, TYPE, TRUNCATE, MESSAGE))
