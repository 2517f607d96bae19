"""MySqlChangeStream: the events of the binlog as what the capture is told (:mod:`headwater.sources.events`).

Rows wait until a boundary is told or enough of them came: those of a transaction that ends in a rollback are not told.
Statements in the log are looked at for what rows do not tell. A session that sets ``binlog_format`` logs a statement
instead of the rows that it changed: the tables that it may have written must be read again.

The rows of a prepared XA transaction are in the log before it is decided. They wait for that in memory, and no boundary
is told before: an epoch sealed in between would lose them with the process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from headwater.sources.errors import LogPurged, SourceError, SourceMisconfigured, SourceProtocolError, SourceUnreachable
from headwater.sources.events import Boundary, Event, StreamStatus
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.mysql import ddl
from headwater.sources.mysql.binlog import events as binlog
from headwater.sources.mysql.binlog.decoder import EventDecoder
from headwater.sources.mysql.binlog.events import EventHeader, Gtid, MariaDbGtid, Rotate
from headwater.sources.mysql.definitions import Definitions
from headwater.sources.mysql.followed import FollowedTables
from headwater.sources.mysql.gtid import MariaDbGtids, MySqlGtids, contains
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.offset import MySqlOffset
from headwater.sources.mysql.row_statements import row_statement
from headwater.sources.mysql.stream import RESNAPSHOT, BinlogStream
from headwater.sources.mysql.table_shape import TableShape
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable

MAX_ROWS: Final = 32_768
MAX_BYTES: Final = 16 << 20
MAX_PACKETS: Final = 65_536

_XA: Final = re.compile(r"XA\s+(START|BEGIN|END|COMMIT|ROLLBACK)\s+(.*)", re.IGNORECASE | re.DOTALL)
_ROLLED_BACK: Final = "a transaction was rolled back in part, and the log has the rows that were rolled back."
_INNER: Final = ("SAVEPOINT", "RELEASE SAVEPOINT", "USE ")


@dataclass(slots=True)
class _Prepared:
    """What one XA transaction did to captured tables, in order, until it is decided."""

    steps: list[binlog.RowsEvent | ddl.Unlogged] = field(default_factory=list)


class MySqlChangeStream:
    """The changes of *tables* after *start*.

    :param behind_bytes: asks how much of the server's log lies after a position.
    :param rolled_back: places of transactions that are known to have been; it grows.
    :param shapes: of the tables, by full name; kept as statements come.
    """

    def __init__(
        self,
        stream: BinlogStream,
        definitions: Definitions,
        tables: Iterable[SourceTable],
        start: MySqlOffset,
        policy: SchemaPolicy = SchemaPolicy.EVOLVE,
        behind_bytes: Callable[[MySqlOffset], int | None] = lambda _: None,
        rolled_back: set[int] | None = None,
        shapes: dict[str, TableShape] | None = None,
    ) -> None:
        self._stream = stream
        self._rolled_back = set() if rolled_back is None else rolled_back
        folds_names = stream.server.settings.get("lower_case_table_names", "0") != "0"
        self._tables = FollowedTables(definitions, tables, policy, folds_names=folds_names, shapes=shapes)
        self._behind_bytes = behind_bytes
        self._decoder = EventDecoder()
        self._log = LogPlace(start, stream.server.server)
        self._start = start
        self._told = start
        self._told_idle = False
        self._queue: list[bytes] = []
        self._place = 0
        self._inner: tuple[bytes, ...] = ()
        self._inner_place = 0
        self._seq = 0
        self._standalone = False
        self._xa: str | None = None
        self._prepared: dict[str, _Prepared] = {}
        self._changed: set[tuple[str, str]] = set()
        self._transactions = 0
        self._commit_time_us: int | None = None
        self._is_idle = False
        self._after: dict[tuple[str, str], MySqlOffset] = {}
        self._failure: SourceError | None = None

    # -- tables ----------------------------------------------------------------------------------------------------

    def begin_at(self, table: SourceTable, position: MySqlOffset) -> None:
        """What comes before *position* of a table that is about to be added is not of interest."""
        self._after[table.namespace, table.name] = position

    def add_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`. Call it at a boundary."""
        position = self._after.pop((table.namespace, table.name), None)
        self._tables.add(table, 0 if position is None else position.place)

    def remove_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        self._tables.remove(table)

    def statements(self, table: str) -> int:
        """How many statements were read that name the table of this full name."""
        return self._tables.statements[table]

    def has_reached(self, position: MySqlOffset) -> bool:
        """Whether all that was committed before *position* was told."""
        if self._told.gtids is not None and position.gtids is not None:
            return contains(self._told.gtids, position.gtids)
        return self._told >= position

    # -- polling ---------------------------------------------------------------------------------------------------

    def poll(self, timeout: float, *, linger: float = 0.0, stop_at_boundary: bool) -> list[Event]:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        if self._failure is not None:
            raise self._failure
        events: list[Event] = []
        until = time.monotonic() + linger
        if not self._has_more():
            self._queue, self._place = self._stream.read(MAX_PACKETS, MAX_BYTES, timeout), 0
            if not self._queue:
                self._is_idle, until = True, 0.0
        while self._has_more() or self._read_more(until):
            ended = self._take(events)
            if (ended and stop_at_boundary) or self._is_full:
                break
        if not self._log.in_transaction or self._is_full:
            self._tables.tell_rows(events)
        self._tell_boundary(events)
        return events

    def _has_more(self) -> bool:
        return self._inner_place < len(self._inner) or self._place < len(self._queue)

    @property
    def _is_full(self) -> bool:
        return self._tables.held_rows >= MAX_ROWS or self._tables.held_bytes >= MAX_BYTES

    def _read_more(self, until: float) -> bool:
        """Whether more came in time: rows are the cheaper the more come at once."""
        left = until - time.monotonic()
        if left <= 0:
            return False
        try:
            self._queue, self._place = self._stream.read(MAX_PACKETS, MAX_BYTES, left), 0
        except SourceError as error:
            self._failure = error
            return False
        return bool(self._queue)

    def _take(self, events: list[Event]) -> bool:
        """One event; whether a transaction ended with it."""
        if self._inner_place < len(self._inner):
            event = self._decoder.feed_inner(self._inner[self._inner_place])
            self._inner_place += 1
        else:
            event = self._decoder.feed(self._queue[self._place])
            self._place += 1
            self._log.pass_event(event.header)
        match event:
            case binlog.RowsEvent():
                self._rows(event, events)
            case binlog.TransactionPayload():
                self._inner, self._inner_place = event.packets, 0
            case binlog.Gtid():
                self._begin(event, standalone=True)
            case binlog.MariaDbGtid():
                self._begin(event, standalone=event.is_standalone)
                self._xa = "" if event.is_xa_prepare else None
            case binlog.Query():
                return self._statement(event, events)
            case binlog.Xid():
                return self._end()
            case binlog.XaPrepare():
                return self._prepare(event, events)
            case binlog.Rotate():
                self._log.rotate(event)
            case binlog.Heartbeat():
                self._log.heartbeat(event.name, event.position)
                self._is_idle = True
            case binlog.Incident():
                raise LogPurged("The server lost a part of its log (an incident event).", next_step=RESNAPSHOT)
            case binlog.Unknown():
                raise SourceMisconfigured(
                    f"The log has an event of type {event.header.type_code}, which this version cannot read and which"
                    " may hold changes.",
                    next_step="Upgrade Headwater: the capture resumes before the event, and nothing is lost. To skip"
                    " the event and read all tables again, run: headwater resnapshot",
                )
            case _:
                pass
        return False

    # -- transactions ----------------------------------------------------------------------------------------------

    def _begin(self, event: binlog.Gtid | binlog.MariaDbGtid, *, standalone: bool) -> None:
        self._log.begin(event)
        self._seq = 0
        self._changed.clear()
        self._standalone = standalone
        self._xa = None

    def _end(self) -> bool:
        self._log.end()
        self._transactions += 1
        self._commit_time_us = self._log.commit_time_us
        self._is_idle = False
        return not self._prepared

    @property
    def _is_new(self) -> bool:
        return self._log.place >= self._start.place

    def _rows(self, event: binlog.RowsEvent, events: list[Event]) -> None:
        if not self._is_new or self._log.place in self._rolled_back:
            return
        self._changed.add((event.table.database, event.table.name))
        if self._xa is not None:
            if self._tables.has(event.table.database, event.table.name):
                self._prepared.setdefault(self._xa, _Prepared()).steps.append(event)
            return
        self._seq = self._tables.add_rows(event, self._log.place, self._log.commit_time_us, self._seq, events)

    def _statement(self, event: binlog.Query, events: list[Event]) -> bool:
        """A statement of the log; whether a transaction ended with it."""
        sql = event.sql.strip()
        if event.is_begin:
            self._standalone = False
            return False
        upper = sql[:16].upper()
        if upper.startswith(("COMMIT", "ROLLBACK")) and not upper.startswith("ROLLBACK TO"):
            if upper.startswith("ROLLBACK"):
                self._roll_back()
            return self._end()
        found = _XA.match(sql)
        if found is not None:
            return self._xa_statement(found[1].upper(), "".join(found[2].split()), events)
        if self._is_new and not upper.startswith(_INNER):
            self._effects(event, sql, events)
        return self._end() if self._standalone else False

    def _roll_back(self) -> None:
        """Servers log rows that were rolled back where a transaction also did what cannot be (temporary tables).

        :raises SourceUnreachable: some were told already: what is read again is told without them.
        """
        if not self._tables.void(self._log.place):
            self._rolled_back.add(self._log.place)
            raise SourceUnreachable(
                "A large transaction was rolled back at the end of its rows.", next_step="The capture reads it again."
            )

    def _effects(self, event: binlog.Query, sql: str, events: list[Event]) -> None:
        mode = event.sql_mode or 0
        effects = ddl.effects(sql, event.database, sql_mode=mode)
        statement = None if effects else row_statement(sql, event.database, sql_mode=mode)
        if statement is not None:
            for one in self._tables.unlogged(statement, event.databases, uses_temporary=event.uses_temporary):
                self._unlogged(one, events)
        elif sql[:11].upper() == "ROLLBACK TO":
            for namespace, name in sorted(self._changed):
                self._unlogged(ddl.Unlogged(TableName(namespace, name), _ROLLED_BACK), events)
        else:
            if event.uses_temporary:
                effects = ddl.of_temporary(effects)
            self._tables.apply_all(sql, effects, self._row_position(), events)

    def _unlogged(self, effect: ddl.Unlogged, events: list[Event]) -> None:
        """Rows changed that the log does not have; those of an XA transaction once it is decided."""
        if self._xa is None:
            self._tables.apply(effect, self._row_position(), events)
        elif self._tables.concerns(effect):
            self._prepared.setdefault(self._xa, _Prepared()).steps.append(effect)

    def _row_position(self) -> MySqlOffset:
        position = replace(self._log.before, seq=self._seq)
        self._seq += 1
        return position

    # -- XA --------------------------------------------------------------------------------------------------------

    def _xa_statement(self, verb: str, xid: str, events: list[Event]) -> bool:
        if verb in ("START", "BEGIN"):
            self._standalone, self._xa = False, xid
            return False
        if verb == "END":
            if self._xa == "" and "" in self._prepared:  # MariaDB names it only here
                self._prepared[xid] = self._prepared.pop("")
            self._xa = xid
            return False
        prepared = self._prepared.pop(xid, None)
        if verb == "COMMIT" and prepared is not None:
            self._xa = None
            self._decided(prepared, events)
        return self._end()

    def _prepare(self, event: binlog.XaPrepare, events: list[Event]) -> bool:
        xid, self._xa = self._xa, None
        if event.is_one_phase and xid is not None:
            self._decided(self._prepared.pop(xid, _Prepared()), events)
        return self._end()

    def _decided(self, prepared: _Prepared, events: list[Event]) -> None:
        for step in prepared.steps:
            if isinstance(step, binlog.RowsEvent):
                self._rows(step, events)
            else:
                self._unlogged(step, events)

    # -- boundaries ------------------------------------------------------------------------------------------------

    def _tell_boundary(self, events: list[Event]) -> None:
        """What ended last, unless a transaction is half way or undecided."""
        position = self._log.boundary
        if self._log.in_transaction or self._prepared or position.place < self._start.place:
            return
        if self._transactions:
            events.append(Boundary(position, self._commit_time_us, self._transactions))
            self._told, self._transactions, self._told_idle = position, 0, False
        elif self._is_idle and not self._has_more():
            moment = int(time.time() * 1e6)
            if not self._told_idle or moment - (self._told.moment or 0) >= 1_000_000 or position != self._told:
                self._told, self._told_idle = replace(position, moment=moment), True
                events.append(Boundary(self._told, None, 0))
        self._is_idle = False

    def acknowledge(self, position: CdcOffset) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`: a server keeps its log by age, whoever has read it."""

    def status(self) -> StreamStatus:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        return StreamStatus(self._stream.bytes_received, self._behind_bytes(self._told), None, 0)

    def close(self) -> None:
        """End the stream."""
        self._stream.close()


_WRAP = 1 << 32


class LogPlace:
    """How far a stream has read a server's log from *start* on, the boundary from which it was asked for. Pure.

    A transaction begins with its number (GTID) and ends with its commit; what lies between is at one place of the
    commit order, that of the boundary before it. Positions in a file are counted modulo 2³², and a file can be larger.

    :param server: the server that sends it; it may be another one than that of *start*.
    :ivar place: of the transaction that is being read.
    :ivar commit_time_us: when it was committed.
    :ivar in_transaction: one is half way.
    """

    def __init__(self, start: MySqlOffset, server: str) -> None:
        self._server = server
        self._gtids = start.gtids
        self._filename = start.filename if server == start.server else ""
        self._position = start.position if server == start.server else 0
        self._begun_at = self._position
        self._pending: Gtid | MariaDbGtid | None = None
        self.place = start.place
        self.commit_time_us = 0
        self.in_transaction = False

    @property
    def boundary(self) -> MySqlOffset:
        """The place after the last transaction that ended."""
        return MySqlOffset(self._filename, self._position, self._gtids, self._server)

    @property
    def before(self) -> MySqlOffset:
        """The boundary before the transaction that is being read."""
        return MySqlOffset(self._filename, self._begun_at, self._gtids, self._server)

    def pass_event(self, header: EventHeader) -> None:
        """The event ends where its header says; those that the server made for us are in no file."""
        if header.is_artificial or not header.log_pos:
            return
        position = self._position - self._position % _WRAP + header.log_pos
        self._position = position + _WRAP if position < self._position else position

    def rotate(self, event: Rotate) -> None:
        """The log goes on in another file. :raises SourceUnreachable: a transaction was half way."""
        if self.in_transaction:
            raise SourceUnreachable(
                "The server's log ends within a transaction.", next_step="The capture reads it again."
            )
        self._filename, self._position = event.name, event.position

    def begin(self, event: Gtid | MariaDbGtid) -> None:
        """A transaction begins.

        :raises SourceMisconfigured: it has no number, and those before had. :raises SourceProtocolError: one has not
            ended.
        """
        if self.in_transaction:
            raise SourceProtocolError(
                "The log begins a transaction within another.", next_step="Start the capture again."
            )
        self.in_transaction = True
        self._pending = event
        self.commit_time_us = event.header.timestamp * 1_000_000
        if isinstance(event, Gtid):
            self.commit_time_us = event.commit_time or self.commit_time_us
            if event.is_anonymous and self._gtids is not None:
                raise SourceMisconfigured(
                    "The server wrote a transaction without a number: gtid_mode is not ON any more.",
                    next_step="Set gtid_mode = ON again; then run: headwater resnapshot",
                )
        self._begun_at = self._position - event.header.size
        self.place = self.before.place

    def end(self) -> None:
        """The transaction ended."""
        pending, self._pending, self.in_transaction = self._pending, None, False
        if isinstance(self._gtids, MySqlGtids) and isinstance(pending, Gtid):
            self._gtids = self._gtids.with_transaction(pending.uuid, pending.tag, pending.number)
        elif isinstance(self._gtids, MariaDbGtids) and isinstance(pending, MariaDbGtid):
            self._gtids = self._gtids.with_transaction(pending.domain, pending.server_id, pending.number)

    def heartbeat(self, name: str, position: int) -> None:
        """The server has nothing new, and its log ends here."""
        if not self.in_transaction and name == self._filename and position > self._position:
            self._position = position
