"""PostgresSource: one database of a Postgres server, as the capture needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.errors import TransientError
from headwater.sources.errors import (
    ForeignOffset,
    RefusedValue,
    RereadNeeded,
    SourceBusy,
    SourceMisconfigured,
    SourceNotFound,
    UnsupportedTable,
)
from headwater.sources.events import Checked, Finding, Registered, Stopped, stop_reason
from headwater.sources.evolution import SchemaPolicy, follow
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.catalog import existing_names, one_view, read_tables, read_tables_by_oid
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.changes import PostgresChangeStream, RawStream
from headwater.sources.postgres.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.postgres.heartbeat import Heartbeat
from headwater.sources.postgres.identity import TableIdentity, read_identities
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.offset import POSITION_TYPE, PostgresOffset
from headwater.sources.postgres.publication import (
    GENERATED_SINCE,
    Publication,
    ensure_publication,
    read_publication,
    require_disjoint,
    sent_columns,
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
from headwater.sources.postgres.stream import CopyStream, ReplicationStream
from headwater.sources.postgres.toast import Shards, no_shards
from headwater.sources.postgres.types import has_special_values, source_column
from headwater.sources.special_values import with_policy
from headwater.sources.table import SourceTable, SpecialValues

WRITERS_SECONDS: Final = 2.0
"""How long a table that is added waits for the transactions that write to it."""

LOCK_TIMEOUT: Final = "2s"
"""A table that is locked, as by a long ``ALTER TABLE``, must not hold up the session for longer."""
_SPILLS: Final = 8
_OWNED: Final = ("system_id", "database", "slot")
"""What tells of an identity whose slot it is: a promoted standby has the copy of ours."""

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
    :param timeout_seconds: a server that is silent for this long counts as unreachable.
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
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._dsn = Dsn(dsn, timeout_seconds)
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
        self._identities: dict[int, TableIdentity] = {}
        self._published: Publication | None = None
        self._seen: dict[tuple[str, str], int] = {}

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
            self._session = connect(self._dsn, lock_timeout=LOCK_TIMEOUT)
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
            version = session.info.server_version
        return [self._described(table, publication, version) for table in found]

    def _described(self, table: CatalogTable, publication: Publication | None, version: int) -> SourceTable:
        table.require_capturable()
        captured = sent_columns(table, publication, version)
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
        with self._sql() as session, one_view(session):
            self._published = read_publication(session, self._publication)
        raw = self._raw_stream(start.lsn, known)
        moved = None if raw.identity == known else {**identity, **raw.identity.to_json()}
        stream = self._through(raw)
        try:
            kept = None if self._may_be_behind else self._identities
            relations = Relations(
                self._sql, self._special, lambda: self._published, kept, self._shards, stream.send_status
            )
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
        """See :class:`~headwater.sources.source.Source`: the identity of each table."""
        with self._sql() as session, one_view(session):
            present = read_tables_by_oid(session, [table.source_id for table in tables if table.source_id is not None])
            self._published = read_publication(session, self._publication)
            found = read_identities(session, self._published, list(present.values()))
        nothing = TableIdentity(None, None, {})
        self._identities |= found
        return {table.full_name: found.get(table.source_id or 0, nothing).to_text() for table in tables}

    def resume(self, tables: Sequence[Registered]) -> None:
        """See :class:`~headwater.sources.source.Registering`."""
        self._identities = {
            entry.table.source_id: TableIdentity.from_text(entry.registration)
            for entry in tables
            if entry.table.source_id is not None
        }

    def check(self, tables: Sequence[Registered]) -> Checked:
        """See :class:`~headwater.sources.source.Source`."""
        self._heartbeat.beat()
        began: float | None = time.time()
        with self._sql() as session:
            oids = [entry.table.source_id for entry in tables if entry.table.source_id is not None]
            lost = [TableName(entry.table.namespace, entry.table.name) for entry in tables]
            with one_view(session):
                present = read_tables_by_oid(session, oids)
                publication = read_publication(session, self._publication)
                now = read_identities(session, publication, list(present.values()))
                self._published = publication
                others = {str(name) for name in existing_names(session, lost)}
            if tables and publication is None:
                raise SourceNotFound(
                    f"The publication {self._publication!r} was dropped: changes since then may be missing.",
                    next_step="Run: headwater resnapshot",
                )
            seen_at = ask(session, _LOG_END)[0].lsn
        seen: dict[tuple[str, str], int] = {}
        ready: list[Finding] = []
        position = 0 if self._stream is None else self._stream.position
        for entry in tables:
            oid = entry.table.source_id or 0
            identity = now.get(oid)
            text = "" if identity is None else identity.to_text()
            key = entry.table.full_name, text
            seen[key] = self._seen.get(key, seen_at)
            catalog = present.get(oid)
            if catalog is None or identity is None:
                finding: Finding = self._gone(entry.table, None, others)
            elif (catalog.name.namespace, catalog.name.name) != (entry.table.namespace, entry.table.name):
                finding = self._gone(entry.table, catalog.name, others)
            else:
                finding = self._compared(entry, catalog, publication, identity)
                if finding == Finding(entry.table, "", stops=False, registration=entry.registration):
                    continue
            if seen[key] > position:
                began = None
                continue
            if finding.registration is not None and identity is not None and self._stream is not None:
                self._identities[oid] = identity
                self._stream.adopt(oid, identity, None if finding.change is None else finding.change.after)
            ready.append(finding)
        self._seen = seen
        return Checked(ready, began)

    def _gone(self, table: SourceTable, renamed: TableName | None, others: Collection[str]) -> Finding:
        """What becomes of a table whose name means another table, or none, by now."""
        name = table.full_name
        if name in others:
            what = "The table was dropped and created again." if renamed is None else "Another table took its name."
            return Finding(table, f"{what} Run: headwater resnapshot {name}", stops=True, reread=True)
        if renamed is None:
            reason = f"The table was dropped at the source. Create it again, then run: headwater resnapshot {name}"
        else:
            reason = (
                f"The table was renamed to {renamed} at the source. Add {renamed} to the captured tables, or rename it"
                f" back and run: headwater resnapshot {name}"
            )
        return Finding(table, reason, stops=True)

    def _compared(
        self, entry: Registered, catalog: CatalogTable, publication: Publication | None, now: TableIdentity
    ) -> Finding:
        """What is to be told about a table that changed."""
        table, before = entry.table, TableIdentity.from_text(entry.registration)
        resnapshot = f"Run: headwater resnapshot {table.full_name}"
        lost = self._lost(table, catalog, publication)
        if lost is not None:
            return Finding(table, lost, stops=True)
        reason = None
        if (before.publication, before.entry) != (now.publication, now.entry):
            reason = (
                f"the table was taken out of the publication {self._publication!r} and put back; changes between may be"
                " missing."
            )
        moved = self._moved(table.source_id or 0, before, now)
        unlogged = f"Postgres does not log this: {'; '.join(moved)}." if moved else None
        change = None
        try:
            reason = (None if self._may_be_behind else unlogged) or reason or before.rewritten(now)
            if reason is not None:
                raise RereadNeeded(table.full_name, reason)
            if self._may_be_behind:  # a node of a cluster: its partitions may be shards, and others name its columns
                note = "" if unlogged is None else f"{unlogged} {resnapshot}"
                return Finding(table, note, stops=False, registration=now.to_text())
            described = self._described(catalog, publication, GENERATED_SINCE)
            _, change = follow(table, described, self._policy, defaults_of(described, catalog))
        except RereadNeeded as error:
            return Finding(table, Stopped.by(table, error).reason, stops=True, reread=True)
        except (UnsupportedTable, RefusedValue) as error:
            return Finding(table, Stopped.by(table, error).reason, stops=True)
        return Finding(table, "", stops=False, registration=now.to_text(), change=change)

    def _lost(self, table: SourceTable, catalog: CatalogTable, publication: Publication | None) -> str | None:
        """Why the log does not have all changes of *table* any more, and what to do."""
        try:
            catalog.require_capturable()
            catalog.require_identity()
        except UnsupportedTable as error:
            return Stopped.by(table, error).reason
        problems = [] if publication is None else publication.problems([catalog])
        return stop_reason(table.full_name, problems[0][0], f"Run: {problems[0][1]}") if problems else None

    def _moved(self, root: int, before: TableIdentity, now: TableIdentity) -> list[str]:
        """What happened to partitions that the log does not tell."""
        told = [
            f"partition {leaf.name} was detached or dropped with its rows"
            for oid, leaf in before.leaves.items()
            if oid not in now.leaves
        ]
        for oid, leaf in now.leaves.items():
            old = before.leaves.get(oid)
            if old is None:
                if leaf.attached:
                    told.append(f"partition {leaf.name} was attached, perhaps with rows")
                continue
            truncated = old.file != leaf.file and (leaf.emptied or leaf.counted != old.counted)
            if truncated and (self._stream is None or not self._stream.has_truncated(root, leaf.xid)):
                told.append(f"partition {leaf.name} was truncated")
        return sorted(told)

    def close(self) -> None:
        """End the connections."""
        self._heartbeat.close()
        if self._session is not None:
            self._session.close()
            self._session = None
