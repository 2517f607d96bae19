"""Shards of a table as the snapshots of a cluster show them: tables of their own, each on one node.

Which shards there are is read in the coordinator's snapshot, and what their columns are called and numbered in those of
their nodes. That stays the same as long as the snapshot is, so it is asked for once per process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from headwater.sources.citus.cluster import COORDINATOR, Cluster, Shard, TableKind, kind_of, shards_of
from headwater.sources.errors import SnapshotExpired
from headwater.sources.postgres.connection import Dsn, ask, server_errors
from headwater.sources.postgres.snapshot import SnapshotSession
from headwater.sources.splits import Cut
from headwater.sources.table import SourceTable

_COLUMNS: Final = """
SELECT n.nspname::text AS namespace, c.relname::text AS name, a.attname::text AS column, a.attnum::int AS number
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE n.nspname = ANY (%s) AND c.relname = ANY (%s)
"""
_SIZES: Final = """
SELECT n.nspname::text AS namespace, c.relname::text AS name, GREATEST(c.reltuples, 0)::bigint AS rows,
       pg_catalog.pg_relation_size(c.oid)::bigint AS size
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = ANY (%s) AND c.relname = ANY (%s)
"""
_ROW_BYTES: Final = 100
"""Of a row of a shard that was never analyzed."""


@dataclass(frozen=True, slots=True)
class PlacedTable:
    """A table that is read on one node: a shard, or a table that only the coordinator has.

    :ivar table: with the name and the numbers of columns that it has there.
    :ivar shard: its number; ``None`` where it is no shard.
    """

    group: int
    address: str
    table: SourceTable
    shard: int | None = None


class ShardPlace(NamedTuple):
    """A cut of the kind ``HEAP``: the place of a shard in the order of nodes and shards, and a cut inside it."""

    shard: int
    block: Cut | None

    @classmethod
    def of(cls, cut: Cut | None) -> ShardPlace:
        """``None`` is the beginning."""
        if cut is None:
            return cls(0, None)
        return cls(int(cut.values[0]), Cut(cut.values[1:]) if len(cut.values) > 1 else None)


@dataclass(frozen=True, slots=True)
class Names:
    """The snapshots of the nodes by group: address and name. Its text is the name of the snapshot of the cluster."""

    nodes: Mapping[int, tuple[str, str]]

    def __str__(self) -> str:
        told = {str(group): list(pair) for group, pair in self.nodes.items()}
        return json.dumps(told, sort_keys=True, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Names:
        return cls({int(group): (pair[0], pair[1]) for group, pair in json.loads(text).items()})


@lru_cache(maxsize=256)
def placed_tables(cluster: Cluster, table: SourceTable, snapshot: str) -> tuple[PlacedTable, ...]:
    """Where the rows of *table* are, each once, in the order of nodes and shards.

    :raises SnapshotExpired: the snapshot is gone, or a shard has not the columns of the table.
    """
    names = Names.parse(snapshot)
    address, name = names.nodes[COORDINATOR]
    with _Session(cluster.dsn_of(address, COORDINATOR), name) as session:
        kind = kind_of(session.connection, table.source_id or 0)
        shards = [] if kind is TableKind.LOCAL else shards_of(session.connection, table.source_id or 0)
    if kind is TableKind.LOCAL:
        return (PlacedTable(COORDINATOR, address, table),)
    if kind is TableKind.REFERENCE:
        shards = [shard for shard in shards if shard.group == COORDINATOR]
    if not shards:
        raise _expired(table, "has no shards")
    made: list[PlacedTable] = []
    for group in sorted({shard.group for shard in shards}):
        if group not in names.nodes:
            raise _expired(table, "has shards on a node that is not in use")
        there = [shard for shard in shards if shard.group == group]
        address, name = names.nodes[group]
        with _Session(cluster.dsn_of(address, group), name) as session:
            numbers = session.columns(there)
        for shard in there:
            made.append(PlacedTable(group, address, _shard_table(table, shard, numbers), shard.number))
    return tuple(made)


def sizes(cluster: Cluster, placed: Sequence[PlacedTable], snapshot: str) -> list[tuple[int, int]]:
    """About how many rows and bytes each has."""
    names = Names.parse(snapshot)
    found: dict[tuple[int, str, str], tuple[int, int]] = {}
    for group in {one.group for one in placed}:
        address, name = names.nodes[group]
        with _Session(cluster.dsn_of(address, group), name) as session:
            there = [one.table for one in placed if one.group == group]
            for row in session.ask(_SIZES, there):
                rows = row.rows or row.size // _ROW_BYTES
                found[group, row.namespace, row.name] = rows, row.size
    return [found.get((one.group, one.table.namespace, one.table.name), (0, 0)) for one in placed]


def _shard_table(table: SourceTable, shard: Shard, numbers: Mapping[tuple[str, str], Mapping[str, int]]) -> SourceTable:
    known = numbers.get((shard.table.namespace, shard.table.name), {})
    columns = []
    for column in table.columns:
        if column.dropped:
            columns.append(column)
            continue
        if column.name not in known:
            raise _expired(table, f"has a shard without the column {column.name!r}")
        columns.append(replace(column, field_id=known[column.name]))
    return SourceTable(shard.table.namespace, shard.table.name, tuple(columns), table.key_columns, None)


class _Session(SnapshotSession):
    """A session that asks the catalog of one node inside its snapshot."""

    def __init__(self, dsn: Dsn, snapshot: str) -> None:
        super().__init__(dsn, snapshot)
        self.connection = self._session

    def ask(self, query: str, tables: Sequence[SourceTable]) -> list[Any]:
        named = [[table.namespace for table in tables], [table.name for table in tables]]
        with server_errors(self._dsn):
            return ask(self._session, query, named)

    def columns(self, shards: Sequence[Shard]) -> dict[tuple[str, str], dict[str, int]]:
        """The numbers of columns by their names, by the name of the shard's table."""
        found: dict[tuple[str, str], dict[str, int]] = {}
        named = [[shard.table.namespace for shard in shards], [shard.table.name for shard in shards]]
        with server_errors(self._dsn):
            rows = ask(self._session, _COLUMNS, named)
        for row in rows:
            found.setdefault((row.namespace, row.name), {})[row.column] = row.number
        return found


def _expired(table: SourceTable, what: str) -> SnapshotExpired:
    return SnapshotExpired(
        f"Table {table.full_name} {what} in the snapshot of the cluster.", next_step="Take a new snapshot."
    )
