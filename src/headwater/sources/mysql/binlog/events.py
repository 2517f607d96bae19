"""Events of the binlog as values; :class:`~headwater.sources.mysql.binlog.decoder.EventDecoder` makes them.

An *event packet* is one event as the server sends it, without the ``0x00`` that a network packet has before it, and as
a binlog file holds it. Times are seconds since 1970 UTC in a header, microseconds elsewhere.

Row events are not decoded here: they say which table and hold the bytes;
:mod:`~headwater.sources.mysql.binlog.rows` makes columns of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final
from uuid import UUID

from headwater.sources.mysql.binlog.table_map import TableMap

HEADER_SIZE: Final = 19
MAGIC: Final = b"\xfebin"
"""What a binlog file begins with."""

FLAG_ARTIFICIAL: Final = 0x20
"""The server made the event for us: it is not in the file, and its position is none."""
FLAG_THREAD_SPECIFIC: Final = 0x04
"""The statement depends on its session: it may use temporary tables."""
FLAG_IGNORABLE: Final = 0x80
"""A reader that does not know the type of the event can skip it."""


class EventType(IntEnum):
    """Numbers of the types that are known here."""

    START_V3 = 1
    QUERY = 2
    STOP = 3
    ROTATE = 4
    INTVAR = 5
    SLAVE = 7
    APPEND_BLOCK = 9
    DELETE_FILE = 11
    RAND = 13
    USER_VAR = 14
    FORMAT_DESCRIPTION = 15
    XID = 16
    BEGIN_LOAD_QUERY = 17
    EXECUTE_LOAD_QUERY = 18
    TABLE_MAP = 19
    WRITE_ROWS_V1 = 23
    UPDATE_ROWS_V1 = 24
    DELETE_ROWS_V1 = 25
    INCIDENT = 26
    HEARTBEAT = 27
    IGNORABLE = 28
    ROWS_QUERY = 29
    WRITE_ROWS_V2 = 30
    UPDATE_ROWS_V2 = 31
    DELETE_ROWS_V2 = 32
    GTID = 33
    ANONYMOUS_GTID = 34
    PREVIOUS_GTIDS = 35
    TRANSACTION_CONTEXT = 36
    VIEW_CHANGE = 37
    XA_PREPARE = 38
    PARTIAL_UPDATE_ROWS = 39
    TRANSACTION_PAYLOAD = 40
    HEARTBEAT_V2 = 41
    GTID_TAGGED = 42
    MARIADB_ANNOTATE_ROWS = 160
    MARIADB_BINLOG_CHECKPOINT = 161
    MARIADB_GTID = 162
    MARIADB_GTID_LIST = 163
    MARIADB_START_ENCRYPTION = 164
    MARIADB_QUERY_COMPRESSED = 165
    MARIADB_WRITE_ROWS_COMPRESSED_V1 = 166
    MARIADB_UPDATE_ROWS_COMPRESSED_V1 = 167
    MARIADB_DELETE_ROWS_COMPRESSED_V1 = 168
    MARIADB_WRITE_ROWS_COMPRESSED = 169
    MARIADB_UPDATE_ROWS_COMPRESSED = 170
    MARIADB_DELETE_ROWS_COMPRESSED = 171


class RowsKind(IntEnum):
    """What a row event did."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3


@dataclass(frozen=True, slots=True)
class EventHeader:
    """What every event begins with.

    :ivar timestamp: seconds since 1970 UTC, when the statement began; 0 in events that the server made for us.
    :ivar type_code: an :class:`EventType`, or a number that is not known here.
    :ivar size: of the whole event with its checksum.
    :ivar log_pos: where the event ends in its file, modulo 2**32 (a file may be larger than 4 GiB); 0 in events that
        the server made for us, and in those of a compressed transaction.
    """

    timestamp: int
    type_code: int
    server_id: int
    size: int
    log_pos: int
    flags: int

    @property
    def is_artificial(self) -> bool:
        return bool(self.flags & FLAG_ARTIFICIAL)


@dataclass(frozen=True, slots=True)
class FormatDescription:
    """The first event of a file: how the others are laid out.

    :ivar created: seconds since 1970 UTC at which the server started, or 0: transactions that are half way then are
        rolled back where it is not 0.
    :ivar has_checksums: events end with a CRC32.
    :ivar post_header_sizes: by type number minus one.
    """

    header: EventHeader
    server_version: str
    created: int
    has_checksums: bool
    post_header_sizes: bytes

    @property
    def is_mariadb(self) -> bool:
        return "mariadb" in self.server_version.lower()


@dataclass(frozen=True, slots=True)
class Rotate:
    """The log goes on in file *name* at *position*. An artificial one says where the stream begins."""

    header: EventHeader
    name: str
    position: int


@dataclass(frozen=True, slots=True)
class Gtid:
    """A transaction of MySQL begins (types GTID, ANONYMOUS_GTID, GTID_TAGGED).

    :ivar uuid: of the source server; all zero where anonymous.
    :ivar tag: of a tagged GTID, else empty.
    :ivar number: 0 where anonymous.
    :ivar is_anonymous: the server has ``gtid_mode=OFF``: there is no name to resume by.
    :ivar commit_time: microseconds, of the commit at this server; ``None`` before MySQL 8.0.
    :ivar original_commit_time: microseconds, of the commit at the server where it was first.
    :ivar transaction_size: bytes of all events of it, this one included; ``None`` before MySQL 8.0.
    """

    header: EventHeader
    uuid: UUID
    tag: str
    number: int
    is_anonymous: bool
    last_committed: int
    sequence_number: int
    commit_time: int | None
    original_commit_time: int | None
    transaction_size: int | None

    @property
    def text(self) -> str:
        """As the server writes it: ``uuid:number`` or ``uuid:tag:number``."""
        return f"{self.uuid}:{self.tag}:{self.number}" if self.tag else f"{self.uuid}:{self.number}"


@dataclass(frozen=True, slots=True)
class PreviousGtids:
    """What was executed before this file began.

    :ivar intervals: half-open ranges of numbers by (uuid, tag).
    """

    header: EventHeader
    intervals: dict[tuple[UUID, str], tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class MariaDbGtid:
    """A transaction or a single statement of MariaDB begins.

    :ivar is_standalone: one event follows (a DDL statement), and no commit after it.
    :ivar is_ddl: the statement is DDL.
    :ivar is_xa_prepare: the transaction ends with an XA PREPARE.
    :ivar is_xa_complete: XA COMMIT or XA ROLLBACK of a prepared one.
    """

    header: EventHeader
    domain: int
    server_id: int
    number: int
    commit_id: int | None
    is_standalone: bool
    is_transactional: bool
    is_ddl: bool
    is_xa_prepare: bool
    is_xa_complete: bool

    @property
    def text(self) -> str:
        """``domain-server-number``."""
        return f"{self.domain}-{self.server_id}-{self.number}"


@dataclass(frozen=True, slots=True)
class MariaDbGtidList:
    """The last GTID of each (domain, server) before this file, or, artificial, where the server begins to send.

    :ivar gtids: (domain, server, number).
    """

    header: EventHeader
    gtids: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Query:
    """A statement: ``BEGIN``, ``COMMIT`` of a table without transactions, DDL, savepoints, XA, ``LOAD DATA``.

    :ivar database: the default database of the statement; may be empty.
    :ivar error_code: of the statement, which was written nonetheless.
    :ivar client_collation: number of the collation in which :attr:`sql` was written; ``None`` where it is not told.
    :ivar xid: of an atomic DDL (MySQL 8.0).
    :ivar databases: of all tables that the statement used, those of triggers, views and functions included; ``None``
        where the server does not say (MariaDB, and MySQL for tables that foreign keys reference).
    """

    header: EventHeader
    database: str
    sql: str
    error_code: int
    client_collation: int | None
    sql_mode: int | None
    xid: int | None
    databases: tuple[str, ...] | None = None

    @property
    def uses_temporary(self) -> bool:
        """Whether the statement may use temporary tables."""
        return bool(self.header.flags & FLAG_THREAD_SPECIFIC)

    @property
    def is_begin(self) -> bool:
        return self.sql == "BEGIN"


@dataclass(frozen=True, slots=True)
class Xid:
    """The transaction committed."""

    header: EventHeader
    xid: int


@dataclass(frozen=True, slots=True)
class XaPrepare:
    """The transaction is prepared (or committed in one phase); its commit comes as a query later."""

    header: EventHeader
    is_one_phase: bool


@dataclass(frozen=True, slots=True)
class TableMapEvent:
    """Row events of *table.table_id* that follow are of this table.

    The same object comes again while the server's bytes are the same, so ``is`` is enough to see that nothing changed.
    """

    header: EventHeader
    table: TableMap


@dataclass(frozen=True, slots=True)
class RowsEvent:
    """Rows of one table, not decoded.

    :ivar table: as the table map before it said.
    :ivar present: one bit per column, lowest first: which columns the rows have (before images of an update).
    :ivar present_after: the same for after images of an update; else ``None``.
    :ivar is_statement_end: table maps are no longer valid after it.
    :ivar data: bytes that hold the rows from *start* to *end*.
    """

    header: EventHeader
    table: TableMap
    kind: RowsKind
    present: bytes
    present_after: bytes | None
    is_statement_end: bool
    data: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TransactionPayload:
    """A transaction whose events were compressed (``binlog_transaction_compression``), decompressed.

    :ivar packets: event packets without checksums; feed each to :meth:`EventDecoder.feed_inner`.
    """

    header: EventHeader
    packets: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The server is there and has nothing new.

    :ivar name: the file that it is at.
    :ivar position: where it is in it.
    """

    header: EventHeader
    name: str
    position: int


@dataclass(frozen=True, slots=True)
class RowsQuery:
    """The text of the statement that made the rows that follow."""

    header: EventHeader
    sql: str


@dataclass(frozen=True, slots=True)
class Incident:
    """The server lost events: what follows cannot be trusted.

    :ivar number: 1: lost events.
    """

    header: EventHeader
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """An event of a type that is not known here and not marked as ignorable: it may hold changes."""

    header: EventHeader


@dataclass(frozen=True, slots=True)
class Other:
    """An event that says nothing about rows or positions."""

    header: EventHeader


Event = (
    FormatDescription
    | Rotate
    | Gtid
    | PreviousGtids
    | MariaDbGtid
    | MariaDbGtidList
    | Query
    | Xid
    | XaPrepare
    | TableMapEvent
    | RowsEvent
    | TransactionPayload
    | Heartbeat
    | RowsQuery
    | Incident
    | Unknown
    | Other
)
