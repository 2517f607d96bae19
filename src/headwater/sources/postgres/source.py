"""PostgresSource: one database of a Postgres server, as the capture needs it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from headwater.errors import TransientError
from headwater.sources.errors import ForeignOffset, SourceBusy, SourceMisconfigured, SourceNotFound, UnsupportedTable
from headwater.sources.events import Finding, Registered
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.catalog import read_tables, read_tables_by_oid
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.changes import PostgresChangeStream, RawStream
from headwater.sources.postgres.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.postgres.copy_stream import CopyStream
from headwater.sources.postgres.heartbeat import Heartbeat
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.offset import POSITION_TYPE, PostgresOffset
from headwater.sources.postgres.publication import (
    Publication,
    ensure_publication,
    read_publication,
    require_disjoint,
)
from headwater.sources.postgres.relations import Relations, defaults_of
from headwater.sources.postgres.slot import (
    ServerIdentity,
    Slot,
    create_slot,
    read_slot,
    replace_slot,
    server_position,
)
from headwater.sources.postgres.spill import SpillStore
from headwater.sources.postgres.stream import ReplicationStream
from headwater.sources.postgres.toast import Shards, no_shards
from headwater.sources.postgres.types import has_special_values, source_column
from headwater.sources.special_values import with_policy
from headwater.sources.table import SourceTable, SpecialValues

WRITERS_SECONDS: Final = 2.0
"""How long a table that is added waits for the transactions that write to it."""

_SPILLS: Final = 8
_OWNED: Final = ("system_id", "database", "slot")
"""What tells of an identity whose slot it is: a promoted standby has the copy of ours."""

_REGISTERED: Final = """
SELECT w.oid::bigint AS table, r.oid::bigint AS entry, p.oid::bigint AS publication
FROM unnest(%s::oid[]) w (oid)
LEFT JOIN pg_catalog.pg_publication p ON p.pubname = %s
LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = w.oid
"""
# Attaching a table changes all its columns; one that was made as a partition has columns as old as itself.
# What is attached may come with rows that the log does not tell.
_LEAVES: Final = """
SELECT w.oid::bigint AS table, c.oid::bigint AS leaf, n.nspname AS namespace, c.relname AS name,
       pg_catalog.pg_relation_filenode(c.oid)::bigint AS file,
       c.xmin::text::bigint AS xid,
       NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_attribute s USING (attrelid)
                   WHERE a.attrelid = c.oid AND a.attnum > 0 AND s.attname = 'tableoid' AND s.attnum < 0
                     AND a.xmin::text = s.xmin::text AND a.cmin::text = s.cmin::text) AS attached
FROM unnest(%s::oid[]) w (oid)
CROSS JOIN LATERAL pg_catalog.pg_partition_tree(w.oid) t
JOIN pg_catalog.pg_class c ON c.oid = t.relid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE t.isleaf AND c.oid <> w.oid
"""
# Who may have written to a table, or to a partition of it, in a transaction that is still open.
_WRITERS: Final = """
SELECT DISTINCT l.virtualtransaction AS transaction, l.pid
FROM pg_catalog.pg_locks l
WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
  AND l.relation = ANY(%s::oid[])
  AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
"""
_OIDS: Final = """
SELECT c.oid::bigint AS oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN ROWS FROM (unnest(%s::text[]), unnest(%s::text[])) w (namespace, name)
  ON n.nspname = w.namespace AND c.relname = w.name
"""
_LOG_END: Final = """
SELECT (CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
             ELSE pg_catalog.pg_current_wal_flush_lsn() END - '0/0'::pg_catalog.pg_lsn)::bigint AS lsn
"""


class PostgresSource:
    """A database, its publication and its slot. Nothing is connected before it is needed.

    :param special_values: policies by ``schema.table.column`` or ``schema.table``.
    :param poll: read the slot by SQL instead of the replication protocol.
    :param heartbeat_seconds: the least time between two heartbeats, however often it is told to look after the source.
    :param through: what raw messages go through before they are decoded.
    :param streaming: large transactions come in blocks before their commit.
    :param may_be_empty: its publication is made although there is no table for it yet.
    :param shards: the tables that have the rows of one, on a node of a cluster.
    :param may_be_behind: others tell of the same tables, and may have told of wider columns before.
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
        heartbeat_seconds: float = 0.0,
        through: Callable[[RawStream], RawStream] = lambda stream: stream,
        streaming: bool = True,
        may_be_empty: bool = False,
        shards: Shards = no_shards,
        may_be_behind: bool = False,
    ) -> None:
        self._dsn = Dsn(dsn)
        self._through = through
        self._streaming = streaming
        self._may_be_empty = may_be_empty
        self._shards = shards
        self._may_be_behind = may_be_behind
        self._spill = spill
        self._policy = schema_policy
        self._special = dict(special_values or {})
        self._slot = slot
        self._publication = publication
        self._poll = poll
        self._heartbeat = Heartbeat(self._dsn, interval=heartbeat_seconds)
        self._session: Connection | None = None
        self._stream: PostgresChangeStream | None = None
        self._seen: dict[Finding, int] = {}

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
            with_policy(
                self._special,
                str(table.name),
                column.name,
                partial(
                    source_column,
                    column.name,
                    column.type,
                    column.typmod,
                    column.type_text,
                    column.number,
                    nullable=not column.not_null,
                ),
                has_special_values,
            )
            for column in captured
        )
        return SourceTable(
            table.name.namespace, table.name.name, columns, table.key_columns(captured), source_id=table.oid
        )

    def begin(self, tables: Sequence[SourceTable], *, resumed: bool) -> tuple[CdcOffset, Mapping[str, Any]]:
        """The publication, then the slot; see :class:`~headwater.sources.source.Source`."""
        if not resumed:
            self.claim([])
        return self._prepare(tables, create_slot)

    def claim(self, prepared: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """See :class:`~headwater.sources.source.Source`: the slot is ours at a server where we made one of its name."""
        with self._sql() as session:
            here = self._identity(session)
            known = [[source.get(part) for part in _OWNED] for source in prepared]
            if read_slot(session, self._slot) is not None and [here[part] for part in _OWNED] not in known:
                raise SourceMisconfigured(
                    f"The replication slot {self._slot!r} is there already, and this store does not know it.",
                    next_step="Give the store that it belongs to, or another name for the slot (slot); "
                    f"if it belongs to nobody: SELECT pg_drop_replication_slot('{self._slot}');",
                )
        return here

    def renew(self, tables: Sequence[SourceTable]) -> tuple[CdcOffset, Mapping[str, Any]]:
        """See :class:`~headwater.sources.source.Source`."""
        return self._prepare(tables, replace_slot)

    def _prepare(
        self, tables: Sequence[SourceTable], make: Callable[[Connection, str], Slot]
    ) -> tuple[CdcOffset, Mapping[str, Any]]:
        with self._sql() as session:
            self._ensure_publication(session, self._in_catalog(session, tables))
            slot = make(session, self._slot)
            identity = self._identity(session)
        assert slot.confirmed is not None
        return PostgresOffset.at(slot.confirmed), identity

    def _ensure_publication(self, session: Connection, tables: Sequence[CatalogTable]) -> None:
        ensure_publication(session, self._publication, tables, may_be_empty=self._may_be_empty)

    def publish(self, tables: Sequence[SourceTable]) -> None:
        """Have the tables in the publication, which is made where it is not there."""
        with self._sql() as session:
            self._ensure_publication(session, self._in_catalog(session, tables))

    def _identity(self, session: Connection) -> dict[str, Any]:
        return server_position(session).identity.to_json() | {"slot": self._slot}

    def include(self, tables: Sequence[SourceTable]) -> CdcOffset:
        """See :class:`~headwater.sources.source.Source`.

        The server sends what is written after the table came into the publication, so a transaction that had written to
        it before would come in part. Those are waited for.
        """
        with self._sql() as session:
            new = self._in_catalog(session, tables)
            publication = read_publication(session, self._publication)
            sent = [] if publication is None else list(publication.tables)
            require_disjoint([*read_tables_by_oid(session, sent).values(), *new])
            self._ensure_publication(session, new)
            oids = [oid for table in new for oid in (table.oid, *(leaf.oid for leaf in table.leaves))]
            self._await_writers(session, [*oids, *self._oids_of_shards(session, tables)])
            return PostgresOffset.at(ask(session, _LOG_END)[0].lsn)

    def _oids_of_shards(self, session: Connection, tables: Sequence[SourceTable]) -> list[int]:
        names = [name for table in tables for name in self._shards(table)]
        named = [[name.namespace for name in names], [name.name for name in names]]
        return [row.oid for row in ask(session, _OIDS, named)] if names else []

    def has_reached(self, position: CdcOffset) -> bool:
        """See :class:`~headwater.sources.source.Source`."""
        assert isinstance(position, PostgresOffset)
        return self._stream is not None and self._stream.position >= position.lsn

    def _await_writers(self, session: Connection, oids: Sequence[int]) -> None:
        end = time.monotonic() + WRITERS_SECONDS
        writers = {row.transaction: row.pid for row in ask(session, _WRITERS, [oids])}
        while writers:
            if time.monotonic() >= end:
                pids = ", ".join(str(pid) for pid in writers.values() if pid is not None) or "of prepared transactions"
                raise SourceBusy(
                    f"Transactions that have written to the table are still open (server processes {pids}).",
                    next_step="Try again when they have ended, or end them with pg_terminate_backend(pid).",
                )
            time.sleep(0.02)
            still = {row.transaction for row in ask(session, _WRITERS, [oids])}
            writers = {transaction: pid for transaction, pid in writers.items() if transaction in still}

    def _in_catalog(self, session: Connection, tables: Sequence[SourceTable]) -> list[CatalogTable]:
        return read_tables(session, [TableName(table.namespace, table.name) for table in tables])

    def defaults(self, tables: Sequence[SourceTable]) -> dict[str, pa.RecordBatch]:
        """By table, one row: for each column that has one, the value that rows from before the column have there."""
        with self._sql() as session:
            found = read_tables_by_oid(session, [table.source_id for table in tables if table.source_id is not None])
        return {table.full_name: defaults_of(table, found.get(table.source_id or 0)) for table in tables}

    # -- the stream ------------------------------------------------------------------------------------------------

    def open(
        self, tables: Sequence[SourceTable], start: CdcOffset, identity: Mapping[str, Any]
    ) -> PostgresChangeStream:
        """See :class:`~headwater.sources.source.Source`."""
        if not isinstance(start, PostgresOffset):
            raise ForeignOffset(
                f"The store holds a position of {start.kind}, and this is a Postgres database.",
                next_step="Give the address of the source that was captured, or another --store.",
            )
        known = ServerIdentity.from_json(identity)
        raw = self._raw_stream(start.lsn, known)
        moved = None if raw.identity == known else {**identity, **raw.identity.to_json()}
        stream = self._through(raw)
        try:
            relations = Relations(self._sql, self._special, self._shards)
            self._seen = {}
            self._stream = PostgresChangeStream(
                stream,
                relations,
                self._spill_store(),
                tables,
                start,
                self._policy,
                self.held_bytes,
                moved,
                self._may_be_behind,
            )
            return self._stream
        except BaseException:
            stream.close()
            raise

    def _spill_store(self) -> SpillStore:
        """In a directory of its own: a capture that was fenced may hang, and hold the one before."""
        for number in range(_SPILLS - 1):
            try:
                return SpillStore(self._spill / str(number))
            except SourceBusy:
                continue
        return SpillStore(self._spill / str(_SPILLS - 1))

    def _raw_stream(self, start: int, known: ServerIdentity) -> CopyStream:
        if self._poll:
            from headwater.sources.postgres.peek import PeekStream

            return PeekStream.open(self._dsn, self._slot, [self._publication], start, known=known)
        return ReplicationStream.open(
            self._dsn, self._slot, [self._publication], start, known=known, streaming=self._streaming
        )

    def held_bytes(self) -> int | None:
        """How much of its log the server keeps for us; ``None`` while it cannot be asked."""
        try:
            with self._sql() as session:
                slot = read_slot(session, self._slot)
        except TransientError:
            return None
        return None if slot is None else slot.held_bytes

    # -- looking after it ------------------------------------------------------------------------------------------

    def register(self, tables: Sequence[SourceTable]) -> dict[str, str]:
        """See :class:`~headwater.sources.source.Source`: the table's entry in the publication, and its partitions."""
        oids = [table.source_id for table in tables]
        with self._sql() as session:
            entries = {row.table: row for row in ask(session, _REGISTERED, [oids, self._publication])}
            leaves: dict[int, dict[str, Any]] = {}
            for row in ask(session, _LEAVES, [oids]):
                name = str(TableName(row.namespace, row.name))
                leaves.setdefault(row.table, {})[str(row.leaf)] = [name, row.file, row.attached, row.xid]
        return {
            table.full_name: json.dumps(
                {
                    "publication": entries[table.source_id].publication,
                    "entry": entries[table.source_id].entry,
                    "leaves": leaves.get(table.source_id or 0, {}),
                },
                sort_keys=True,
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
            if tables and publication is None:
                raise SourceNotFound(
                    f"The publication {self._publication!r} was dropped: changes since then may be missing.",
                    next_step="Run: headwater resnapshot",
                )
            now = self.register([entry.table for entry in tables])
            seen_at = ask(session, _LOG_END)[0].lsn
        found: dict[Finding, int] = {}
        for entry in tables:
            finding = self._compared(entry, present.get(entry.table.source_id or 0), publication, now)
            if finding is not None:
                found[finding] = self._seen.get(finding, seen_at)
        self._seen = found
        position = 0 if self._stream is None else self._stream.position
        return [finding for finding, place in found.items() if place <= position]

    def _compared(
        self, entry: Registered, catalog: CatalogTable | None, publication: Publication | None, now: Mapping[str, str]
    ) -> Finding | None:
        """What is to be told about a table."""
        table = entry.table
        resnapshot = f"Run: headwater resnapshot {table.full_name}"
        before, registration = json.loads(entry.registration), json.loads(now[table.full_name])
        reason = self._lost(table, catalog, publication)
        if reason is None and (before["publication"], before["entry"]) != (
            registration["publication"],
            registration["entry"],
        ):
            reason = (
                f"The table was taken out of the publication {self._publication!r} and put back; changes between may be"
                " missing."
            )
        if reason is not None:
            return Finding(table, f"{reason} {resnapshot}", stops=True)
        if before == registration:
            return None
        told = self._moved(table.source_id or 0, before["leaves"], registration["leaves"])
        reason = f"Postgres does not log this: {'; '.join(told)}. {resnapshot}" if told else ""
        return Finding(table, reason, stops=False, registration=now[table.full_name])

    def _lost(self, table: SourceTable, catalog: CatalogTable | None, publication: Publication | None) -> str | None:
        """Why the log has not all changes of a table any more."""
        if catalog is None:
            return "The table was dropped at the source."
        if (catalog.name.namespace, catalog.name.name) != (table.namespace, table.name):
            return f"The table is called {catalog.name} at the source by now."
        try:
            catalog.require_capturable()
            catalog.require_identity()
        except UnsupportedTable as error:
            return f"{error.reason[0].upper()}{error.reason[1:]} {error.next_step or ''}".rstrip()
        problems = [] if publication is None else publication.problems([catalog])
        return f"{problems[0][0]} Run: {problems[0][1]}" if problems else None

    def _moved(self, root: int, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
        """What happened to partitions that the log does not tell."""
        told = [f"partition {old[leaf][0]} was detached or dropped with its rows" for leaf in old.keys() - new.keys()]
        for leaf in new.keys() - old.keys():
            if new[leaf][2]:
                told.append(f"partition {new[leaf][0]} was attached, perhaps with rows")
        for leaf in old.keys() & new.keys():
            name, file, _, xid = new[leaf]
            with_root = self._stream is not None and self._stream.has_truncated(root, xid)
            if old[leaf][1] != file and not with_root:
                told.append(f"partition {name} was truncated or rewritten")
        return sorted(told)

    def close(self) -> None:
        """End the connections."""
        self._heartbeat.close()
        if self._session is not None:
            self._session.close()
            self._session = None
