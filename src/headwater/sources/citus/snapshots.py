"""CitusSnapshots: reads parts of the tables of a cluster, each shard on its node, inside the snapshot of that node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from headwater.sources.citus.cluster import COORDINATOR, Cluster
from headwater.sources.citus.export import CitusSnapshot
from headwater.sources.citus.shards import Names, placed_tables
from headwater.sources.postgres.key_order import PostgresKeyOrder
from headwater.sources.postgres.snapshots import PostgresSnapshots
from headwater.sources.splits import Cut, KeyRange, SplitKind
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
        by_shard = kind is SplitKind.HEAP and len(placed) > 1
        for one in placed[_place(part.start, 0) : _place(part.end, len(placed))] if by_shard else placed:
            where, within = (SplitKind.KEY, KeyRange()) if by_shard else (kind, part)
            address, name = names.nodes[one.group]
            for batch in self._on(one.group, address).read(one.table, where, within, name, columns=columns):
                yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _place(cut: Cut | None, otherwise: int) -> int:
    return otherwise if cut is None else int(cut.values[0])
