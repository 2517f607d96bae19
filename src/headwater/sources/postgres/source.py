"""PostgresSource: one database of a Postgres server, as the capture needs it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from headwater.sources.errors import ForeignOffset
from headwater.sources.events import ChangeStream, Finding, Registered
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.catalog import read_tables, read_tables_by_oid
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.changes import PostgresChangeStream, RawStream
from headwater.sources.postgres.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.postgres.heartbeat import Heartbeat
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.offset import POSITION_TYPE, PostgresOffset
from headwater.sources.postgres.publication import Publication, check_publication, ensure_publication, read_publication
from headwater.sources.postgres.relations import Relations
from headwater.sources.postgres.slot import ServerIdentity, create_slot, read_slot, server_position
from headwater.sources.postgres.spill import SpillStore
from headwater.sources.postgres.stream import ReplicationStream
from headwater.sources.postgres.types import source_column
from headwater.sources.table import SourceTable, SpecialValues

_REGISTERED: Final = """
SELECT r.prrelid::bigint AS table, r.oid::bigint AS entry
FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = %s AND r.prrelid = ANY(%s::oid[])
"""
# A partition made in place and one that was attached later: the latter came with rows that the log does not tell.
_LEAVES: Final = """
SELECT w.oid::bigint AS table, c.oid::bigint AS leaf, n.nspname AS namespace, c.relname AS name,
       pg_catalog.pg_relation_filenode(c.oid)::bigint AS file,
       (SELECT a.xmin::text FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'tableoid')
       IS DISTINCT FROM (SELECT i.xmin::text FROM pg_catalog.pg_inherits i WHERE i.inhrelid = c.oid) AS attached
FROM unnest(%s::oid[]) w (oid)
CROSS JOIN LATERAL pg_catalog.pg_partition_tree(w.oid) t
JOIN pg_catalog.pg_class c ON c.oid = t.relid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE t.isleaf AND c.oid <> w.oid
"""


class PostgresSource:
    """A database, its publication and its slot. Nothing is connected before it is needed.

    :param special_values: policies by ``schema.table.column``.
    :param poll: read the slot by SQL instead of the replication protocol.
    """

    def __init__(
        self,
        dsn: str,
        *,
        spill: Path,
        schema_policy: SchemaPolicy = SchemaPolicy.EVOLVE,
        special_values: Mapping[str, SpecialValues] | None = None,
        slot: str = "headwater",
        publication: str = "headwater",
        poll: bool = False,
        heartbeat_seconds: float = 10.0,
    ) -> None:
        self._dsn = Dsn(dsn)
        self._spill = spill
        self._policy = schema_policy
        self._special = dict(special_values or {})
        self._slot = slot
        self._publication = publication
        self._poll = poll
        self._heartbeat = Heartbeat(self._dsn, interval=heartbeat_seconds)
        self._session: Connection | None = None

    @property
    def name(self) -> str:
        return str(self._dsn)

    @property
    def position_type(self) -> pa.DataType:
        return POSITION_TYPE

    @contextmanager
    def _sql(self) -> Iterator[Connection]:
        """The session for SQL; one that broke is opened again with the next call."""
        if self._session is None or self._session.closed:
            self._session = connect(self._dsn)
        with server_errors(self._dsn):
            yield self._session

    # -- tables ----------------------------------------------------------------------------------------------------

    def tables(self, names: Sequence[str]) -> list[SourceTable]:
        """See :class:`~headwater.sources.source.Source`."""
        if not names:
            return []
        with self._sql() as session:
            found = read_tables(session, [TableName.parse(name) for name in names])
            publication = read_publication(session, self._publication)
            stored = session.info.server_version >= 180000 if publication is None else publication.stored_generated
        return [self._described(table, publication, stored_generated=stored) for table in found]

    def _described(
        self, table: CatalogTable, publication: Publication | None, *, stored_generated: bool
    ) -> SourceTable:
        table.require_capturable()
        sent = None if publication is None else publication.tables.get(table.oid)
        captured = table.captured_columns(None if sent is None else sent.columns, stored_generated=stored_generated)
        columns = tuple(
            source_column(
                column.name,
                column.type,
                column.typmod,
                column.type_text,
                column.number,
                nullable=not column.not_null,
                special_values=self._special.get(f"{table.name}.{column.name}", SpecialValues.ERROR),
            )
            for column in captured
        )
        return SourceTable(
            table.name.namespace, table.name.name, columns, table.key_columns(captured), source_id=table.oid
        )

    def begin(self, tables: Sequence[SourceTable]) -> tuple[CdcOffset, Mapping[str, Any]]:
        """The publication, then the slot; see :class:`~headwater.sources.source.Source`."""
        with self._sql() as session:
            ensure_publication(session, self._publication, self._in_catalog(session, tables))
            slot = create_slot(session, self._slot)
            identity = server_position(session).identity
        assert slot.confirmed is not None
        return PostgresOffset.at(slot.confirmed), identity.to_json()

    def include(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.source.Source`."""
        with self._sql() as session:
            ensure_publication(session, self._publication, self._in_catalog(session, [table]))

    def _in_catalog(self, session: Connection, tables: Sequence[SourceTable]) -> list[CatalogTable]:
        return read_tables(session, [TableName(table.namespace, table.name) for table in tables])

    # -- the stream ------------------------------------------------------------------------------------------------

    def open(self, tables: Sequence[SourceTable], start: CdcOffset, identity: Mapping[str, Any]) -> ChangeStream:
        """See :class:`~headwater.sources.source.Source`."""
        if not isinstance(start, PostgresOffset):
            raise ForeignOffset(
                f"The store holds a position of {start.kind}, and this is a Postgres database.",
                next_step="Give the address of the source that was captured, or another --store.",
            )
        known = ServerIdentity.from_json(identity)
        with self._sql() as session:
            present = read_tables_by_oid(session, [table.source_id for table in tables if table.source_id is not None])
            if present:
                check_publication(session, self._publication, [])
        stream = self._raw_stream(start.lsn, known)
        try:
            relations = Relations(self._sql, self._special)
            spill = SpillStore(self._spill)
            return PostgresChangeStream(stream, relations, spill, tables, start, self._policy, self.held_bytes)
        except BaseException:
            stream.close()
            raise

    def _raw_stream(self, start: int, known: ServerIdentity) -> RawStream:
        if self._poll:
            from headwater.sources.postgres.peek import PeekStream

            return PeekStream.open(self._dsn, self._slot, [self._publication], start, known=known)
        return ReplicationStream.open(self._dsn, self._slot, [self._publication], start, known=known)

    def held_bytes(self) -> int | None:
        """How much of its log the server keeps for us."""
        with self._sql() as session:
            slot = read_slot(session, self._slot)
        return None if slot is None else slot.held_bytes

    # -- looking after it ------------------------------------------------------------------------------------------

    def register(self, tables: Sequence[SourceTable]) -> dict[str, str]:
        """See :class:`~headwater.sources.source.Source`: the table's entry in the publication, and its partitions."""
        oids = [table.source_id for table in tables]
        with self._sql() as session:
            entries = {row.table: row.entry for row in ask(session, _REGISTERED, [self._publication, oids])}
            leaves: dict[int, dict[str, Any]] = {}
            for row in ask(session, _LEAVES, [oids]):
                name = str(TableName(row.namespace, row.name))
                leaves.setdefault(row.table, {})[str(row.leaf)] = [name, row.file, row.attached]
        return {
            table.full_name: json.dumps(
                {"entry": entries.get(table.source_id), "leaves": leaves.get(table.source_id or 0, {})}, sort_keys=True
            )
            for table in tables
        }

    def check(self, tables: Sequence[Registered]) -> list[Finding]:
        """See :class:`~headwater.sources.source.Source`."""
        self._heartbeat.beat()
        with self._sql() as session:
            oids = [entry.table.source_id for entry in tables if entry.table.source_id is not None]
            present = read_tables_by_oid(session, oids)
            publication = read_publication(session, self._publication)
        now = self.register([entry.table for entry in tables])
        found: list[Finding] = []
        for entry in tables:
            table, resnapshot = entry.table, f"Run: headwater resnapshot {entry.table.full_name}"
            if table.source_id not in present:
                found.append(Finding(table, f"The table was dropped at the source. {resnapshot}", stops=True))
            elif publication is None or table.source_id not in publication.tables:
                reason = f"The table was taken out of the publication {self._publication!r}."
                found.append(Finding(table, f"{reason} {resnapshot}", stops=True))
            else:
                found += _compared(table, entry.registration, now[table.full_name], resnapshot)
        return found

    def close(self) -> None:
        """End the connections."""
        self._heartbeat.close()
        if self._session is not None:
            self._session.close()
            self._session = None


def _compared(table: SourceTable, before: str, now: str, resnapshot: str) -> list[Finding]:
    """What happened to a table in its publication and to its partitions that the log does not tell."""
    if before == now:
        return []
    old, new = json.loads(before), json.loads(now)
    if old["entry"] != new["entry"] and old["entry"] is not None:
        reason = "The table was taken out of the publication and put back; changes between may be missing."
        return [Finding(table, f"{reason} {resnapshot}", stops=True)]
    told = []
    for leaf in old["leaves"].keys() - new["leaves"].keys():
        told.append(f"partition {old['leaves'][leaf][0]} was detached or dropped with its rows")
    for leaf in new["leaves"].keys() - old["leaves"].keys():
        if new["leaves"][leaf][2]:
            told.append(f"partition {new['leaves'][leaf][0]} was attached, perhaps with rows")
    for leaf in old["leaves"].keys() & new["leaves"].keys():
        if old["leaves"][leaf][1] != new["leaves"][leaf][1]:
            told.append(f"partition {new['leaves'][leaf][0]} was truncated or rewritten")
    reason = f"Postgres does not log this: {'; '.join(sorted(told))}. {resnapshot}" if told else ""
    return [Finding(table, reason, stops=False, registration=now)]
