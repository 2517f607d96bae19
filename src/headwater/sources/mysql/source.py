"""MySqlSource: a MySQL or MariaDB server, as the capture needs it.

Nothing is made at the server: it logs all tables, for everybody, and keeps its log by age. What is kept here is who it
is, and a number under which we read its log: a capture that takes over from one that hangs ends its stream.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.errors import TransientError
from headwater.sources.errors import (
    ForeignOffset,
    LogPurged,
    RereadNeeded,
    SourceBusy,
    SourceMisconfigured,
    UnsupportedTable,
)
from headwater.sources.events import ChangeStream, Checked, Finding, Registered, Stopped
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.mysql.catalog import CatalogTable, present_tables, read_tables, table_ids
from headwater.sources.mysql.changes import MySqlChangeStream
from headwater.sources.mysql.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.mysql.definitions import Definitions
from headwater.sources.mysql.doctor import setting_problems
from headwater.sources.mysql.gtid import MySqlGtids
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.offset import POSITION_TYPE, MySqlOffset, base_of
from headwater.sources.mysql.server import (
    Server,
    binlog_files,
    executed,
    log_position,
    prepared_transactions,
    purged,
)
from headwater.sources.mysql.stream import RESNAPSHOT, BinlogStream
from headwater.sources.mysql.table_shape import TableShape
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable, SpecialValues

_BEHIND_SECONDS: Final = 5.0
_DECIDED_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.1
_LOCK_SECONDS: Final = 2
"""A table that is locked, as by a long ``ALTER TABLE``, must not hold up the session for longer."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The catalog at a position of the log.

    :ivar time: when it was read. :ivar statements: how many had been read that name each table.
    """

    time: float
    position: MySqlOffset
    present: Mapping[str, tuple[CatalogTable, TableShape]]
    statements: Mapping[str, int]


class MySqlSource:
    """A server. Nothing is connected before it is needed.

    :param special_values: policies by ``database.table.column`` or ``database.table``.
    :param timeout_seconds: a server that is silent for this long counts as unreachable.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema_policy: SchemaPolicy = SchemaPolicy.EVOLVE,
        special_values: Mapping[str, SpecialValues] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._dsn = Dsn(dsn, timeout_seconds)
        self._policy = schema_policy
        self._special = dict(special_values or {})
        self._session: Connection | None = None
        self._stream: MySqlChangeStream | None = None
        self._behind: tuple[float, int | None] = (0.0, None)
        self._look: _Look | None = None
        self._seen: set[Finding] = set()
        self._shapes: dict[str, TableShape] = {}
        self._rolled_back: set[int] = set()
        self._server: Server | None = None
        self._unlogged: tuple[MySqlOffset, MySqlOffset] | None = None

    @property
    def name(self) -> str:
        return str(self._dsn)

    @property
    def position_type(self) -> pa.DataType:
        return POSITION_TYPE

    @contextmanager
    def _sql(self) -> Iterator[Connection]:
        """The session for SQL; one that broke is opened again with the next call."""
        if self._session is None or not self._session.open:
            self._session = connect(self._dsn)
            with server_errors(self._dsn):
                ask(self._session, f"SET SESSION lock_wait_timeout = {_LOCK_SECONDS}")
        try:
            with server_errors(self._dsn):
                yield self._session
        except TransientError:
            self._end_session()
            raise

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.open:
            session._force_close()

    # -- tables ----------------------------------------------------------------------------------------------------

    def tables(self, names: Sequence[str]) -> list[SourceTable]:
        """See :class:`~headwater.sources.source.Source`."""
        if not names:
            return []
        wanted = [TableName.parse(name, self._dsn.database) for name in names]
        with self._sql() as session:
            found = read_tables(session, wanted)
        return [self._described(table) for table in found]

    def _described(self, table: CatalogTable) -> SourceTable:
        return table.described(self._special, tinyint1_is_boolean=self._dsn.tinyint1_is_boolean)

    def begin(self, tables: Sequence[SourceTable], *, resumed: bool) -> tuple[CdcOffset, Mapping[str, Any]]:
        """See :class:`~headwater.sources.source.Source`: where the log ends now."""
        with self._sql() as session:
            server = Server.ask(session)
            for problem in setting_problems(server):
                raise SourceMisconfigured(f"{self._dsn}: {problem.text}", next_step=f"Run: {problem.fix}")
            position = log_position(session, server)
            self._require_decided(session)
            self._require_unchanged(session, tables)
        self._rolled_back.clear()
        return position, server.identity() | {"replica": random.randrange(1 << 31, 1 << 32)}

    def claim(self, prepared: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """See :class:`~headwater.sources.source.Source`: nothing at the server is anybody's own."""
        with self._sql() as session:
            return Server.ask(session).identity()

    def renew(self, tables: Sequence[SourceTable]) -> tuple[CdcOffset, Mapping[str, Any]]:
        """See :class:`~headwater.sources.source.Source`."""
        return self.begin(tables, resumed=True)

    def include(self, tables: Sequence[SourceTable]) -> CdcOffset:
        """See :class:`~headwater.sources.source.Source`: transactions are logged whole, when they commit."""
        with self._sql() as session:
            position = log_position(session, Server.ask(session))
            self._require_decided(session)
            self._require_unchanged(session, tables)
        if self._stream is not None:
            for table in tables:
                self._stream.begin_at(table, position)
        return position

    def _require_decided(self, session: Connection) -> None:
        """Wait for transactions whose rows may be in the log before the position that was just asked for.

        Once they are decided every snapshot shows what became of them.

        :raises SourceBusy: one is prepared, and nobody decides it.
        """
        left = prepared_transactions(session)
        end = time.monotonic() + _DECIDED_SECONDS
        while left:
            if time.monotonic() > end:
                raise SourceBusy(
                    f"{self._dsn} has {len(left)} prepared XA transactions that nobody commits or rolls back; their"
                    " rows would be missed.",
                    next_step="Look for them with XA RECOVER; and XA COMMIT or XA ROLLBACK each.",
                )
            time.sleep(_LOOK_SECONDS)
            left &= prepared_transactions(session)

    def _require_unchanged(self, session: Connection, tables: Sequence[SourceTable]) -> None:
        """:raises SourceBusy: a table is not as it was described before the position was asked for."""
        names = [TableName(table.namespace, table.name) for table in tables]
        now = present_tables(session, names)
        for name, table in zip(names, tables, strict=True):
            if name not in now or self._described(now[name]) != table:
                raise SourceBusy(f"Table {name} is being altered.", next_step="Try again.")

    def has_reached(self, position: CdcOffset) -> bool:
        """See :class:`~headwater.sources.source.Source`."""
        assert isinstance(position, MySqlOffset)
        return self._stream is not None and self._stream.has_reached(position)

    # -- the stream ------------------------------------------------------------------------------------------------

    def open(self, tables: Sequence[SourceTable], start: CdcOffset, identity: Mapping[str, Any]) -> ChangeStream:
        """See :class:`~headwater.sources.source.Source`."""
        if not isinstance(start, MySqlOffset):
            raise ForeignOffset(
                f"The store holds a position of {start.kind}, and this is a MySQL or MariaDB server.",
                next_step="Give the address of the source that was captured, or another --store.",
            )
        self._look, self._seen, self._unlogged = None, set(), None
        stream = BinlogStream.open(self._dsn, start, identity)
        self._server = stream.server
        definitions = Definitions(self._sql, self._special, tinyint1_is_boolean=self._dsn.tinyint1_is_boolean)
        self._rolled_back = {place for place in self._rolled_back if place >= start.place}
        self._stream = MySqlChangeStream(
            stream,
            definitions,
            tables,
            start,
            self._policy,
            self._behind_bytes,
            rolled_back=self._rolled_back,
            shapes=self._shapes,
        )
        return self._stream

    def _behind_bytes(self, position: MySqlOffset) -> int | None:
        """How much of the server's log lies after *position*; asked for now and then."""
        asked, behind = self._behind
        if time.monotonic() - asked < _BEHIND_SECONDS:
            return behind
        try:
            with self._sql() as session:
                files = binlog_files(session)
            left = [size for name, size in files.items() if _number(name) > _number(position.filename)]
            behind = sum(left) + max(0, files.get(position.filename, 0) - position.position)
        except TransientError:
            behind = None
        self._behind = time.monotonic(), behind
        return behind

    # -- looking after it ------------------------------------------------------------------------------------------

    def register(self, tables: Sequence[SourceTable]) -> Mapping[str, str]:
        """See :class:`~headwater.sources.source.Source`: a server logs all tables; what counts is their shape."""
        with self._sql() as session:
            now = self._shapes_now(session, Server.ask(session), tables)
        self._shapes.update({name: shape for name, (_, shape) in now.items()})
        shapes = {table.full_name: now.get(table.full_name) for table in tables}
        return {name: "{}" if found is None else found[1].to_json() for name, found in shapes.items()}

    def resume(self, tables: Sequence[Registered]) -> None:
        """See :class:`~headwater.sources.source.Registering`."""
        shapes = {entry.table.full_name: TableShape.parse(entry.registration) for entry in tables}
        self._shapes = {name: shape for name, shape in shapes.items() if shape is not None}

    def check(self, tables: Sequence[Registered]) -> Checked:
        """See :class:`~headwater.sources.source.Source`. How tables change is in the log; what is not in it is found
        by comparing their shapes with the catalog at a position that the stream has passed.

        :raises LogPurged: see :meth:`_require_logged`.
        """
        self._require_logged()
        look, self._look = self._look or self._look_at(tables), None
        if not self.has_reached(look.position):
            self._look = look
            return Checked([], None)
        # Of a table that a statement has changed meanwhile, the next look is as good.
        entries = [
            entry for entry in tables if self._statements(entry.table) == look.statements.get(entry.table.full_name)
        ]
        findings = [self._compared(entry, look) for entry in entries]
        found = [finding for finding in findings if finding is not None]
        before, self._seen = self._seen, {finding for finding in found if finding.stops}
        # A server may show what a statement did before the statement is in its log: what stays is what counts.
        ready = [finding for finding in found if not finding.stops or finding in before]
        return Checked(ready, look.time if len(entries) == len(tables) and len(ready) == len(found) else None)

    def _statements(self, table: SourceTable) -> int:
        return 0 if self._stream is None else self._stream.statements(table.full_name)

    def _look_at(self, tables: Sequence[Registered]) -> _Look:
        statements = {entry.table.full_name: self._statements(entry.table) for entry in tables}
        began = time.time()
        with self._sql() as session:
            server = Server.ask(session)
            present = self._shapes_now(session, server, [entry.table for entry in tables])
            return _Look(began, log_position(session, server), present, statements)

    def _shapes_now(
        self, session: Connection, server: Server, tables: Sequence[SourceTable]
    ) -> dict[str, tuple[CatalogTable, TableShape]]:
        names = {TableName(table.namespace, table.name): table.full_name for table in tables}
        found = present_tables(session, list(names))
        ids = table_ids(session, found)
        return {
            names[name]: (table, TableShape.of_catalog(table, server.server, ids.get(name, "")))
            for name, table in found.items()
        }

    def _compared(self, entry: Registered, look: _Look) -> Finding | None:
        """What differs between the catalog and the shape of a table, both at the position of *look*."""
        table, name = entry.table, entry.table.full_name
        if name not in look.present:
            reason = f"The table does not exist at the source. Create it again, then run: headwater resnapshot {name}"
            return Finding(table, reason, stops=True)
        catalog, now = look.present[name]
        try:
            catalog.require_capturable()
        except UnsupportedTable as error:
            return Finding(table, Stopped.by(table, error).reason, stops=True)
        shape = self._shapes.get(name)
        change = None if shape is None else shape.change_to(now)
        if catalog.key != table.key_columns:
            change = "its key changed."
        if change is not None:
            stopped = Stopped.by(table, RereadNeeded(name, change))
            return Finding(table, stopped.reason, stops=True, reread=True)
        self._shapes[name] = now
        return None if shape == now else Finding(table, "", stops=False, registration=now.to_json())

    def _require_logged(self) -> None:
        """:raises LogPurged: transactions count as executed that the log will never tell: ``gtid_purged`` was set."""
        stream, server = self._stream, self._server
        if stream is None or server is None or server.version.is_mariadb or not server.numbers_transactions:
            return
        if self._unlogged is None:
            with self._sql() as session:
                gone, done = purged(session, server), executed(session, server)
            if isinstance(gone, MySqlGtids) and isinstance(done, MySqlGtids):
                found = MySqlOffset("", 0, done.minus(gone)), MySqlOffset("", 0, gone)
                self._unlogged = None if stream.has_reached(found[1]) else found
        elif stream.has_reached(self._unlogged[0]):
            gap, self._unlogged = self._unlogged[1], None
            if not stream.has_reached(gap):
                raise LogPurged(
                    f"{self._dsn} counts transactions as executed that are not in its log: gtid_purged was set, after"
                    " a restore perhaps. Their changes are not told.",
                    next_step=RESNAPSHOT,
                )

    def close(self) -> None:
        """End the connections."""
        self._end_session()


def _number(filename: str) -> int:
    number = filename[len(base_of(filename)) + 1 :]
    return int(number) if number.isdigit() else 0
