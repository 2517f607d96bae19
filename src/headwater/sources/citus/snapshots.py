"""CitusSnapshots: reads parts of the tables of a cluster, each shard on its node, inside the snapshot of that node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from headwater.sources.citus.cluster import COORDINATOR, Cluster
from headwater.sources.citus.errors import name_table
from headwater.sources.citus.export import CitusSnapshot
from headwater.sources.citus.shards import Names, PlacedTable, ShardPlace, placed_tables
from headwater.sources.errors import RefusedValue
from headwater.sources.postgres.key_order import PostgresKeyOrder
from headwater.sources.postgres.snapshots import PostgresSnapshots
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable


class CitusSnapshots:
    """The snapshots of one cluster; see :class:`~headwater.sources.snapshots.SnapshotSource`.

    :param dsn: ``citus://user@coordinator:5432/database``.
    :param lock_seconds: how long a snapshot waits for a locked table while it plans; ``None``: until it is free.
    :raises InvalidDsn: it cannot be read.
    """

    def __init__(self, dsn: str, lock_seconds: float | None = None) -> None:
        self._cluster = Cluster(dsn)
        self._lock_seconds = lock_seconds

    def __repr__(self) -> str:
        return f"CitusSnapshots({str(self._cluster)!r})"

    def export(self) -> CitusSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: a node does not answer."""
        return CitusSnapshot(self._cluster, self._lock_seconds)

    def order(self, table: SourceTable) -> PostgresKeyOrder:
        """The order of its keys, which is the same on all nodes. :raises UnsupportedTable: they have none."""
        return self._on(COORDINATOR, self._cluster.own_address).order(table)

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as the source prints them. :raises InvalidRange: it has no such."""
        return self._on(COORDINATOR, self._cluster.own_address).key_range(table, part)

    def _on(self, group: int, address: str) -> PostgresSnapshots:
        return PostgresSnapshots(self._cluster.conninfo_of(address, group), self._lock_seconds)

    def read(
        self,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *part* inside *snapshot*; see :class:`~headwater.sources.snapshots.SnapshotSource`."""
        if snapshot is None:
            exported = self.export()
            try:
                yield from self.read(table, kind, part, exported.name, columns=columns)
            finally:
                exported.close()
            return
        names = Names.parse(snapshot)
        wanted = table.columns if columns is None else tuple(table.column(name) for name in columns)
        schema = pa.schema([column.field for column in wanted])
        placed = placed_tables(self._cluster, table, snapshot)
        for one, within in _parts(placed, kind, part):
            address, name = names.nodes[one.group]
            try:
                for batch in self._on(one.group, address).read(one.table, kind, within, name, columns=columns):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
            except RefusedValue as error:
                name_table(error, one.table.full_name, table.full_name)
                raise


def _parts(placed: Sequence[PlacedTable], kind: SplitKind, part: KeyRange) -> Iterator[tuple[PlacedTable, KeyRange]]:
    """Where *part* is read, and what of it there."""
    if kind is SplitKind.KEY or len(placed) == 1:
        for one in placed:
            yield one, part
        return
    start, end = ShardPlace.of(part.start), ShardPlace.of(part.end)
    last = len(placed) if part.end is None else end.shard + (end.block is not None)
    for place in range(start.shard, last):
        begins = start.block if place == start.shard else None
        ends = end.block if part.end is not None and place == end.shard else None
        yield placed[place], KeyRange(begins, ends)
