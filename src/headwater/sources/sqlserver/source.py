"""SqlServerSource: a database of SQL Server, as the capture needs it.

Nothing is made at the server: change data capture is switched on by those who own the database, for each table, and its
jobs read the log and keep the changes by age. What is kept here is which database it is.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from headwater.errors import TransientError
from headwater.sources.errors import (
    ForeignOffset,
    RereadNeeded,
    SchemaStopped,
    ServerReplaced,
    SourceBusy,
    SourceWentBack,
    UnsupportedTable,
)
from headwater.sources.events import ChangeStream, Finding, Registered
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.offset import CdcOffset
from headwater.sources.sqlserver.catalog import CatalogTable, present_tables, read_tables
from headwater.sources.sqlserver.changes import SqlServerChangeStream
from headwater.sources.sqlserver.connection import RESNAPSHOT, Dsn, Session
from headwater.sources.sqlserver.defaults import defaults_of
from headwater.sources.sqlserver.followed import FollowedTables, described, disable_table, enable_table
from headwater.sources.sqlserver.instances import CaptureInstance, read_instances
from headwater.sources.sqlserver.names import TableName
from headwater.sources.sqlserver.offset import POSITION_TYPE, SqlServerOffset
from headwater.sources.sqlserver.server import Server, captured_end, log_end, recovery_fork
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues

_CHECK_SECONDS: Final = 30.0


class SqlServerSource:
    """A database. Nothing is connected before it is needed.

    :param special_values: policies by ``schema.table.column``.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema_policy: SchemaPolicy = SchemaPolicy.EVOLVE,
        special_values: Mapping[str, SpecialValues] | None = None,
    ) -> None:
        self._dsn = Dsn(dsn)
        self._policy = schema_policy
        self._special = dict(special_values or {})
        self._session: Session | None = None
        self._stream: SqlServerChangeStream | None = None
        self._checked = -math.inf
        self._since: dict[str, SqlServerOffset] = {}
        self._followed: FollowedTables | None = None
        self._instances: dict[tuple[str, str], int] = {}

    @property
    def name(self) -> str:
        return str(self._dsn)

    @property
    def position_type(self) -> pa.DataType:
        return POSITION_TYPE

    @contextmanager
    def _sql(self) -> Iterator[Session]:
        """The session for questions; one that broke is opened again with the next call."""
        if self._session is None or not self._session.is_open:
            self._session = Session(self._dsn)
        try:
            yield self._session
        except TransientError:
            self._session.close()
            raise

    # -- tables ----------------------------------------------------------------------------------------------------

    def tables(self, names: Sequence[str]) -> list[SourceTable]:
        """See :class:`~headwater.sources.source.Source`: with the columns that the newest capture instance has."""
        if not names:
            return []
        wanted = [TableName.parse(name) for name in names]
        with self._sql() as session:
            Server.ask(session).require_cdc(session)
            found = read_tables(session, wanted)
            instances = read_instances(session, [table.id for table in found])
        return [self._described(table, instances.get(table.id, [])) for table in found]

    def _described(self, table: CatalogTable, instances: Sequence[CaptureInstance]) -> SourceTable:
        """:raises UnsupportedTable: it has no key, or no capture instance with it."""
        made = table.described(self._special, self._dsn.ticks)
        if not instances:
            raise UnsupportedTable(
                str(table.name),
                "change data capture is off for it.",
                next_step=f"Run: {enable_table(table.name)}",
            )
        try:
            return described(made, instances[-1], self._special, self._dsn.ticks, is_only=len(instances) == 1)
        except SchemaStopped as error:
            raise UnsupportedTable(str(table.name), error.change, next_step=error.next_step) from None

    def begin(self, tables: Sequence[SourceTable], *, resumed: bool) -> tuple[CdcOffset, Mapping[str, Any]]:
        """See :class:`~headwater.sources.source.Source`: as far as changes are shown now."""
        with self._sql() as session:
            server = Server.ask(session)
            server.require_cdc(session)
            position = SqlServerOffset(captured_end(session))
            self._require_unchanged(session, tables)
            identity = server.identity(session)
        return position, identity

    def claim(self, prepared: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """See :class:`~headwater.sources.source.Source`: nothing at the server is anybody's own."""
        with self._sql() as session:
            return Server.ask(session).identity(session)

    def renew(self, tables: Sequence[SourceTable]) -> tuple[CdcOffset, Mapping[str, Any]]:
        """See :class:`~headwater.sources.source.Source`."""
        return self.begin(tables, resumed=True)

    def include(self, tables: Sequence[SourceTable]) -> CdcOffset:
        """See :class:`~headwater.sources.source.Source`: a capture instance has all that commits after it was made."""
        with self._sql() as session:
            position = SqlServerOffset(captured_end(session))
            self._require_unchanged(session, tables)
        for table in tables:
            if self._stream is not None:
                self._stream.begin_at(table, position)
        return position

    def _require_unchanged(self, session: Session, tables: Sequence[SourceTable]) -> None:
        """:raises SourceBusy: a table is not as it was described before the position was asked for."""
        names = [TableName(table.namespace, table.name) for table in tables]
        now = present_tables(session, names)
        instances = read_instances(session, [table.id for table in now.values()])
        for name, table in zip(names, tables, strict=True):
            found = now.get(name)
            if found is None or self._described(found, instances.get(found.id, [])) != table:
                raise SourceBusy(f"Table {name} is being altered.", next_step="Try again.")

    def has_reached(self, position: CdcOffset) -> bool:
        """See :class:`~headwater.sources.source.Source`."""
        assert isinstance(position, SqlServerOffset)
        return self._stream is not None and self._stream.has_reached(position)

    # -- the stream ------------------------------------------------------------------------------------------------

    def begin_from(self, since: Mapping[str, CdcOffset]) -> None:
        """See :class:`~headwater.sources.source.AlwaysLogging`: a capture instance may be newer than the position."""
        self._since = {name: place for name, place in since.items() if isinstance(place, SqlServerOffset)}

    def resume(self, tables: Sequence[Registered]) -> None:
        """See :class:`~headwater.sources.source.Registering`: an instance that was made anew lacks what was between."""
        noted = {(one.table.namespace, one.table.name): _noted(one.registration).instance for one in tables}
        self._instances = {key: instance for key, instance in noted.items() if instance is not None}

    def open(self, tables: Sequence[SourceTable], start: CdcOffset, identity: Mapping[str, Any]) -> ChangeStream:
        """See :class:`~headwater.sources.source.Source`."""
        if not isinstance(start, SqlServerOffset):
            raise ForeignOffset(
                f"The store holds a position of {start.kind}, and this is SQL Server.",
                next_step="Give the address of the source that was captured, or another --store.",
            )
        with self._sql() as session:
            server = Server.ask(session)
            server.require_cdc(session)
            if server.broker != identity.get("broker", server.broker):
                raise ServerReplaced(
                    f"{self._dsn} is another database than the one that was captured.",
                    next_step=f"Give the address of the captured one. To begin anew with this one: {RESNAPSHOT}",
                )
            fork, was = recovery_fork(session), identity.get("fork")
            if fork is not None and was is not None and fork != was:
                raise SourceWentBack(
                    f"{self._dsn} was restored, or failed over with a loss, since it was captured.",
                    next_step=RESNAPSHOT,
                )
            if captured_end(session) < start.commit_lsn and log_end(session) < start.commit_lsn:
                raise SourceWentBack(
                    f"The log of {self._dsn} ends before our position {start.commit_lsn.hex}: it was restored.",
                    next_step=RESNAPSHOT,
                )
        begins = {
            (table.namespace, table.name): self._since[table.full_name].commit_lsn.following
            for table in tables
            if table.full_name in self._since
        }
        self._followed = FollowedTables(
            tables, self._policy, self._special, self._dsn.ticks, self._defaults, self._lost, begins, self._instances
        )
        self._stream = SqlServerChangeStream(self._dsn, self._followed, start)
        return self._stream

    def _defaults(self, table: SourceTable, added: Sequence[SourceColumn]) -> pa.RecordBatch | None:
        name = TableName(table.namespace, table.name)
        with self._sql() as session:
            return defaults_of(present_tables(session, [name]).get(name), added)

    def _lost(self, table: SourceTable, what: str) -> SchemaStopped:
        """The error of a table that no capture instance tells any more, with what helps as the database is now."""
        name, full = TableName(table.namespace, table.name), table.full_name
        with self._sql() as session:
            found = present_tables(session, [name]).get(name)
            is_captured = found is not None and bool(read_instances(session, [found.id]).get(found.id))
        if found is None:
            step = f"Create it again, then run: {enable_table(table)} Then run: headwater resnapshot {full}"
            return SchemaStopped(full, "the table was dropped at the source.", next_step=step)
        if found.id != table.source_id:
            what = "it was dropped and created again."
        if is_captured:
            return RereadNeeded(full, what)
        step = f"Run: {enable_table(table)} Then run: headwater resnapshot {full}"
        return SchemaStopped(full, what, next_step=step)

    # -- looking after it ------------------------------------------------------------------------------------------

    def register(self, tables: Sequence[SourceTable]) -> Mapping[str, str]:
        """See :class:`~headwater.sources.source.Source`: its capture instance, and which columns none has."""
        found = self._uncaptured(tables)
        made = {}
        for table in tables:
            names, instances = found[table.full_name]
            made[table.full_name] = _Noted(tuple(names), instances[-1].change_id if instances else None).text
        return made

    def check(self, tables: Sequence[Registered]) -> list[Finding]:
        """See :class:`~headwater.sources.source.Source`: tells of columns that came and that nothing captures."""
        if time.monotonic() - self._checked < _CHECK_SECONDS:
            return []
        self._checked = time.monotonic()
        missing = self._uncaptured([entry.table for entry in tables])
        found = []
        for entry in tables:
            names, instances = missing[entry.table.full_name]
            before = _noted(entry.registration)
            followed = None if self._followed is None else self._followed.instance_of(entry.table)
            now = _Noted(tuple(names), followed or before.instance)
            if now == before:
                continue
            reason = ""
            if names and now.uncaptured != before.uncaptured:
                step = enable_table(entry.table, "_".join(names)[:40])
                if len(instances) > 1:  # there may be two
                    step = f"{disable_table(entry.table, instances[0].name)} {step}"
                reason = (
                    f"No capture instance has the columns {', '.join(names)}. Make another one soon: rows that change"
                    f" until then lack them. Run: {step}"
                )
            found.append(Finding(entry.table, reason, stops=False, registration=now.text))
        return found

    def _uncaptured(self, tables: Sequence[SourceTable]) -> dict[str, tuple[list[str], list[CaptureInstance]]]:
        """The columns of each table that are in none of its capture instances, and these; none where it has no such."""
        names = {TableName(table.namespace, table.name): table.full_name for table in tables}
        with self._sql() as session:
            present = present_tables(session, list(names))
            instances = read_instances(session, [table.id for table in present.values()])
        found: dict[str, tuple[list[str], list[CaptureInstance]]] = {full: ([], []) for full in names.values()}
        for name, table in present.items():
            there = instances.get(table.id, [])
            captured = {column.number for instance in there for column in instance.columns}
            if there and name in names:
                left = [one.name for one in table.columns if not one.computed and one.number not in captured]
                found[names[name]] = left, there
        return found

    def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            self._session.close()


@dataclass(frozen=True, slots=True)
class _Noted:
    """What is kept of a table. :ivar instance: ``change_id`` of its instance; earlier releases did not note it."""

    uncaptured: tuple[str, ...]
    instance: int | None = None

    @property
    def text(self) -> str:
        instance = {} if self.instance is None else {"instance": self.instance}
        return json.dumps({"uncaptured": list(self.uncaptured)} | instance)


def _noted(registration: str) -> _Noted:
    fields = json.loads(registration)
    return _Noted(tuple(fields["uncaptured"]), fields.get("instance"))
