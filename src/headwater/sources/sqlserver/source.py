"""SqlServerSource: a database of SQL Server, as the capture needs it.

Nothing is made at the server: change data capture is switched on by those who own the database, for each table, and its
jobs read the log and keep the changes by age. What is kept here is which database it is.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from headwater.databases.timeouts import TIMEOUT_SECONDS
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
from headwater.sources.events import ChangeStream, Checked, Finding, Registered, Stopped
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.offset import CdcOffset
from headwater.sources.sqlserver.catalog import CatalogTable, present_tables, read_tables
from headwater.sources.sqlserver.changes import SqlServerChangeStream
from headwater.sources.sqlserver.connection import RESNAPSHOT, Dsn, Session
from headwater.sources.sqlserver.followed import FollowedTables, described, disable_table, enable_table
from headwater.sources.sqlserver.instances import CaptureInstance, read_instances
from headwater.sources.sqlserver.names import TableName
from headwater.sources.sqlserver.offset import POSITION_TYPE, SqlServerOffset
from headwater.sources.sqlserver.server import Server, captured_end, log_end, recovery_fork
from headwater.sources.sqlserver.types import SqlType, keeps_values
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues

_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
_TEXT: Final = re.compile(r"N?'((?:[^']|'')*)'")


def defaults_of(table: CatalogTable | None, added: Sequence[SourceColumn]) -> pa.RecordBatch | None:
    """One row: what older rows have in those of *added* that have a default, null where it is not known.

    A column that may not be null comes with a default, which the server gives to the rows that are there without
    telling them. What they have is known where it is a constant. It is not where the expression has another value in
    each row, and where the column may be null, as nothing tells whether it came ``WITH VALUES``: such a column is named
    without a value, and who keeps the rows reads it once more. ``None`` where none of *added* has a default.
    """
    found: dict[SourceColumn, pa.Array] = {}
    for column in added:
        now = None if table is None else next((one for one in table.columns if one.number == column.field_id), None)
        if now is None or now.default is None:
            continue
        value = None if now.nullable else constant(now.default, column.type)
        found[column] = pa.nulls(1, column.type) if value is None else value
    if not found:
        return None
    return pa.RecordBatch.from_arrays(list(found.values()), schema=pa.schema([column.field for column in found]))


def constant(definition: str, kind: pa.DataType) -> pa.Array | None:
    """The value of a default as the catalog writes it, such as ``((0))`` or ``(N'new')``; ``None``: no constant."""
    text = definition.strip()
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    quoted = _TEXT.fullmatch(text)
    if quoted is not None:
        text = quoted[1].replace("''", "'")
    elif not _NUMBER.fullmatch(text):
        return None
    try:
        if pa.types.is_boolean(kind):
            return pa.array([float(text) != 0])
        return pa.array([text]).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
        return None


class SqlServerSource:
    """A database. Nothing is connected before it is needed.

    :param special_values: policies by ``schema.table.column``.
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
        self._session: Session | None = None
        self._stream: SqlServerChangeStream | None = None
        self._seen: dict[tuple[str, str], SqlServerOffset] = {}
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
        """See :class:`~headwater.sources.source.Source`: its columns, its capture instance, and what that lacks."""
        with self._sql() as session:
            found = _found(session, tables)
        return {name: _Noted.of(catalog, there).text for name, (catalog, there) in found.items()}

    def check(self, tables: Sequence[Registered]) -> Checked:
        """See :class:`~headwater.sources.source.Source`.

        What a person repairs with a second statement, such as another capture instance, is told by the second check
        that finds it.
        """
        began = time.time()
        with self._sql() as session:
            found = _found(session, [entry.table for entry in tables])
            seen_at = SqlServerOffset(captured_end(session))
        seen: dict[tuple[str, str], SqlServerOffset] = {}
        findings = []
        for entry in tables:
            table, (catalog, there) = entry.table, found[entry.table.full_name]
            before = _noted(entry.registration)
            try:
                _require_same(table, before, catalog, there)
            except SchemaStopped as error:
                stopped = Stopped.by(table, error)
                key = table.full_name, stopped.reason
                seen[key] = self._seen.get(key, seen_at)
                if self.has_reached(seen[key]) and (stopped.reread or key in self._seen):
                    findings.append(Finding(table, stopped.reason, stops=True, reread=stopped.reread))
                continue
            if catalog is None:
                continue  # the stream stops it: it has no capture instance
            followed = None if self._followed is None else self._followed.instance_of(table)
            now = replace(_Noted.of(catalog, there), instance=followed or before.instance)
            if now != before:
                findings.append(Finding(table, _lacking(table, before, now, there), stops=False, registration=now.text))
        self._seen = seen
        return Checked(findings, began if sum(one.stops for one in findings) == len(seen) else None)

    def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            self._session.close()


@dataclass(frozen=True, slots=True)
class _Noted:
    """What is kept of a table.

    :ivar uncaptured: names of the columns that are in none of its capture instances.
    :ivar instance: ``change_id`` of its instance; earlier releases did not note it.
    :ivar columns: type and collation by ``column_id``; ``None`` where an earlier release noted the table.
    """

    uncaptured: tuple[str, ...]
    instance: int | None = None
    columns: Mapping[int, tuple[str, str | None]] | None = None

    @classmethod
    def of(cls, catalog: CatalogTable | None, instances: Sequence[CaptureInstance]) -> _Noted:
        """A table as it is now, followed through the newest of *instances*."""
        own = [] if catalog is None else [column for column in catalog.columns if not column.computed]
        captured = {column.number for instance in instances for column in instance.columns}
        left = [column.name for column in own if instances and column.number not in captured]
        columns = {column.number: (str(column.type), column.collation) for column in own}
        return cls(tuple(left), instances[-1].change_id if instances else None, columns)

    @property
    def text(self) -> str:
        instance = {} if self.instance is None else {"instance": self.instance}
        columns = {} if self.columns is None else {"columns": self.columns}
        return json.dumps({"uncaptured": list(self.uncaptured)} | instance | columns)


def _noted(registration: str) -> _Noted:
    fields = json.loads(registration)
    columns = fields.get("columns")
    known = None if columns is None else {int(number): (one[0], one[1]) for number, one in columns.items()}
    return _Noted(tuple(fields["uncaptured"]), fields.get("instance"), known)


def _found(
    session: Session, tables: Sequence[SourceTable]
) -> dict[str, tuple[CatalogTable | None, list[CaptureInstance]]]:
    """By name: the table that has the name now, and its capture instances; those of the known table where none has."""
    present = present_tables(session, [TableName(table.namespace, table.name) for table in tables])
    by_name = {table.full_name: present.get(TableName(table.namespace, table.name)) for table in tables}
    ids = {table.full_name: table.source_id or 0 for table in tables}
    ids |= {name: catalog.id for name, catalog in by_name.items() if catalog is not None}
    instances = read_instances(session, list(ids.values()))
    return {name: (catalog, instances.get(ids[name], [])) for name, catalog in by_name.items()}


def _require_same(
    table: SourceTable, before: _Noted, catalog: CatalogTable | None, instances: Sequence[CaptureInstance]
) -> None:
    """:raises RereadNeeded: stored values may be others. :raises SchemaStopped: the instance has other columns."""
    name = table.full_name
    if catalog is None:
        if instances:
            step = f"Rename it back, or add the table of the new name; then run: headwater resnapshot {name}"
            raise SchemaStopped(name, "the table was renamed at the source.", next_step=step)
        return
    if catalog.id != table.source_id:
        raise RereadNeeded(name, "another table has its name now.")
    own = [column for column in catalog.columns if not column.computed]
    for captured in instances[-1].columns if instances else ():
        for column in own:
            if (column.number == captured.number) != (column.name == captured.name):
                what = f"the name {captured.name!r} means another column than in the capture instance."
                step = f"{_another_instance(table, [column.name], instances)} Then run: headwater resnapshot {name}"
                raise SchemaStopped(name, what, next_step=f"Run: {step}")
    for column in own:
        now = str(column.type), column.collation
        old = (before.columns or {}).get(column.number, now)
        if old != now and (old[1] != now[1] or not keeps_values(SqlType.parse(old[0]), column.type)):
            raise RereadNeeded(name, f"column {column.name!r} changed from {old[0]} to {now[0]}, or its collation.")


def _lacking(table: SourceTable, before: _Noted, now: _Noted, instances: Sequence[CaptureInstance]) -> str:
    """That columns came which nothing captures; empty where that was told before."""
    if not now.uncaptured or now.uncaptured == before.uncaptured:
        return ""
    return (
        f"No capture instance has the columns {', '.join(now.uncaptured)}. Make another one soon: rows that change"
        f" until then lack them. Run: {_another_instance(table, now.uncaptured, instances)}"
    )


def _another_instance(table: SourceTable, names: Sequence[str], instances: Sequence[CaptureInstance]) -> str:
    """The statements that make an instance with the columns *names*: a table has at most two."""
    step = enable_table(table, "_".join(names)[:40])
    return f"{disable_table(table, instances[0].name)} {step}" if len(instances) > 1 else step
