"""MongoSource: a replica set or a sharded cluster, as the capture needs it.

Nothing is made at the server: it logs all collections, for everybody, and keeps its log by size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.sources.errors import (
    ForeignOffset,
    RereadNeeded,
    SourceBusy,
    SourceMisconfigured,
    SourceWentBack,
    UnsupportedTable,
)
from headwater.sources.events import ChangeStream, Checked, Finding, Registered, Stopped
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.mongodb import catalog
from headwater.sources.mongodb.changes import MongoChangeStream
from headwater.sources.mongodb.connection import RESNAPSHOT, Client, Dsn, connect, server_errors
from headwater.sources.mongodb.documents.columns import ALL_COLUMNS
from headwater.sources.mongodb.documents.decoder import told
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import POSITION_TYPE, MongoOffset, token_time
from headwater.sources.mongodb.server import Server, cluster_time, operation_time
from headwater.sources.mongodb.watch import now, require_events
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable, SpecialValues


class MongoSource:
    """A deployment. Nothing is connected before it is needed.

    :param columns: by ``database.collection``: how its columns are found, see :mod:`.catalog`.
    :param special_values: policies by ``database.collection.column`` or ``database.collection``.
    :param timeout_seconds: a server that is silent for this long counts as unreachable.
    """

    def __init__(
        self,
        dsn: str,
        *,
        schema_policy: SchemaPolicy = SchemaPolicy.EVOLVE,
        special_values: Mapping[str, SpecialValues] | None = None,
        columns: Mapping[str, str] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._dsn = Dsn(dsn, timeout_seconds)
        self._policy = schema_policy
        self._special = dict(special_values or {})
        self._columns = {str(self._parsed(name)): text for name, text in (columns or {}).items()}
        self._opened: Client | None = None
        self._stream: MongoChangeStream | None = None
        self._since: dict[str, MongoOffset] = {}
        self._seen: dict[Finding, MongoOffset] = {}

    @property
    def name(self) -> str:
        return str(self._dsn)

    @property
    def position_type(self) -> pa.DataType:
        return POSITION_TYPE

    @property
    def _client(self) -> Client:
        if self._opened is None:
            self._opened = connect(self._dsn, **self._dsn.without_timeout())
        return self._opened

    def _parsed(self, name: str) -> CollectionName:
        return CollectionName.parse(name, self._dsn.database)

    # -- tables ----------------------------------------------------------------------------------------------------

    def tables(self, names: Sequence[str]) -> list[SourceTable]:
        """See :class:`~headwater.sources.source.Source`."""
        with server_errors(self._dsn):
            return [self._described(catalog.find(self._client, self._parsed(name))) for name in names]

    def _described(self, collection: catalog.Collection) -> SourceTable:
        full = str(collection.name)
        policies = {
            column.removeprefix(f"{full}."): policy
            for column, policy in self._special.items()
            if column.startswith(f"{full}.")
        }
        if full in self._special:
            policies[ALL_COLUMNS] = self._special[full]
        return catalog.describe(self._client, collection, self._columns.get(full, self._dsn.columns), policies)

    def begin(self, tables: Sequence[SourceTable], *, resumed: bool) -> tuple[CdcOffset, Mapping[str, Any]]:
        """See :class:`~headwater.sources.source.Source`: now, or after the token that the address names."""
        token = self._dsn.start_token
        return self._begun(tables, MongoOffset.from_token(token) if token else None)

    def _begun(
        self, tables: Sequence[SourceTable], position: MongoOffset | None
    ) -> tuple[CdcOffset, Mapping[str, Any]]:
        with server_errors(self._dsn):
            server = self._server()
            position = position or self._now(tables)
            self._require_same_collections(tables)
        return position, server.identity()

    def _spaces(self, tables: Sequence[SourceTable]) -> list[str]:
        """The databases of *tables*."""
        return sorted({table.namespace for table in tables})

    def _now(self, tables: Sequence[SourceTable]) -> MongoOffset:
        token = now(self._dsn, self._client, self._spaces(tables))
        told, moment = token_time(token), time.time_ns() // 1000
        if told is None:  # of a form that we do not know: its time is all that is left
            return MongoOffset(cluster_time(self._client), moment=moment)
        return MongoOffset(told - 1, token, moment=moment)

    def _server(self) -> Server:
        server = Server.ask(self._client, self._dsn)
        if server.is_sharded and len(self._client.nodes) > 1:
            raise SourceMisconfigured(
                f"{self._dsn} names several routers: a cursor is known to one of them only.",
                next_step="Name one mongos in the address.",
            )
        return server

    def _require_same_collections(self, tables: Sequence[SourceTable]) -> None:
        """:raises SourceBusy: one was dropped and made anew after it was described."""
        present = catalog.present(self._client, [CollectionName(table.namespace, table.name) for table in tables])
        for table in tables:
            found = present.get(CollectionName(table.namespace, table.name))
            if found is None or found.source_id != table.source_id:
                raise SourceBusy(f"Collection {table.full_name} is being made anew.", next_step="Try again.")

    def claim(self, prepared: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """See :class:`~headwater.sources.source.Source`: nothing at the server is anybody's own."""
        with server_errors(self._dsn):
            return self._server().identity()

    def renew(self, tables: Sequence[SourceTable]) -> tuple[CdcOffset, Mapping[str, Any]]:
        """See :class:`~headwater.sources.source.Source`: now, whatever the address says."""
        return self._begun(tables, None)

    def include(self, tables: Sequence[SourceTable]) -> CdcOffset:
        """See :class:`~headwater.sources.source.Source`: all collections are logged, always.

        :raises AccessDenied: they are in another database than those before, and the user may not watch all of them.
        """
        with server_errors(self._dsn):
            position = MongoOffset(operation_time(self._client))
            self._require_same_collections(tables)
        if self._stream is not None:
            spaces = self._stream.spaces_with(tables)
            if spaces != self._stream.spaces:
                now(self._dsn, self._client, spaces)
            for table in tables:
                self._stream.begin_at(table, position)
        return position

    def has_reached(self, position: CdcOffset) -> bool:
        """See :class:`~headwater.sources.source.Source`."""
        assert isinstance(position, MongoOffset)
        return self._stream is not None and self._stream.has_reached(position)

    # -- the stream ------------------------------------------------------------------------------------------------

    def begin_from(self, since: Mapping[str, CdcOffset]) -> None:
        """See :class:`~headwater.sources.source.AlwaysLogging`."""
        self._since = {name: place for name, place in since.items() if isinstance(place, MongoOffset)}

    def open(
        self,
        tables: Sequence[SourceTable],
        start: CdcOffset,
        identity: Mapping[str, Any],
    ) -> ChangeStream:
        """See :class:`~headwater.sources.source.Source`."""
        if not isinstance(start, MongoOffset):
            raise ForeignOffset(
                f"The store holds a position of {start.kind}, and this is MongoDB.",
                next_step="Give the address of the source that was captured, or another --store.",
            )
        self._seen = {}
        with server_errors(self._dsn):
            server = self._server()
            server.require_same(identity, self._dsn)
            end = cluster_time(self._client)
            if end < start.time:
                raise SourceWentBack(
                    f"The log of {self._dsn} ends before our position: it was restored from an older state.",
                    next_step=RESNAPSHOT,
                )
            images = self._has_images(tables)
        require_events(self._dsn, self._client, self._spaces(tables), start)
        after = {
            CollectionName(table.namespace, table.name): place.time
            for table in tables
            if (place := self._since.get(table.full_name)) is not None
        }
        self._stream = MongoChangeStream(
            self._dsn,
            self._client,
            server,
            tables,
            start,
            self._policy,
            after=after,
            images=images,
        )
        return self._stream

    def _has_images(self, tables: Sequence[SourceTable]) -> bool:
        """Whether the server keeps those of one of *tables*."""
        names = [CollectionName(table.namespace, table.name) for table in tables]
        return any(one.has_images for one in catalog.present(self._client, names).values())

    # -- looking after it ------------------------------------------------------------------------------------------

    def register(self, tables: Sequence[SourceTable]) -> Mapping[str, str]:
        """See :class:`~headwater.sources.source.Source`: a server logs all collections, none is registered."""
        return {table.full_name: json.dumps({"database": table.namespace}) for table in tables}

    def check(self, tables: Sequence[Registered]) -> Checked:
        """See :class:`~headwater.sources.source.Source`. What was dropped or renamed is told by the log, in its place.

        Another collection of the same name, of which the log told nothing, is what a restored server has.
        """
        began = time.time()
        names = {CollectionName(entry.table.namespace, entry.table.name): entry.table for entry in tables}
        with server_errors(self._dsn):
            present = catalog.present(self._client, list(names))
            seen_at = MongoOffset(operation_time(self._client))
        seen: dict[Finding, MongoOffset] = {}
        for name, table in names.items():
            try:
                if name in present:
                    present[name].require_capturable()
                    if present[name].source_id != table.source_id:
                        raise RereadNeeded(table.full_name, "another collection has its name now.")
            except (RereadNeeded, UnsupportedTable) as error:
                stopped = Stopped.by(table, error)
                finding = Finding(table, stopped.reason, stops=True, reread=stopped.reread)
                seen[finding] = self._seen.get(finding, seen_at)
        self._seen = seen
        ready = [finding for finding, position in seen.items() if self.has_reached(position)]
        return Checked([*self._conflicts(tables), *ready], began if len(ready) == len(seen) else None)

    def _conflicts(self, tables: Sequence[Registered]) -> list[Finding]:
        """Values that columns did not take, which are null: told once for each kind."""
        if self._stream is None:
            return []
        by_name = {entry.table.full_name: entry.table for entry in tables}
        made = []
        for name, conflicts in self._stream.take_conflicts().items():
            if name in by_name:
                made.append(Finding(by_name[name], f"{told(conflicts)}.", stops=False))
        return made

    def close(self) -> None:
        """End the connections."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
