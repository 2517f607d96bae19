"""CitusSnapshots: reads parts of the tables of a cluster, each shard on its node, inside the snapshot of that node."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from headwater.sources.citus.cluster import COORDINATOR, Cluster, Node, name_table
from headwater.sources.citus.offset import CitusMark
from headwater.sources.citus.shards import Names, PlacedTable, ShardPlace, placed_tables, sizes
from headwater.sources.errors import RefusedValue, SourceBusy
from headwater.sources.postgres.export import PostgresSnapshot
from headwater.sources.postgres.key_order import PostgresKeyOrder
from headwater.sources.postgres.snapshots import PostgresSnapshots
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

TRIES: Final = 20
_PAUSE: Final = 0.1


class CitusSnapshot:
    """A snapshot of every node of a cluster, taken while no shard moved. One thread.

    The snapshots of two nodes are not of one moment. Each has a mark of its own, and a row is on one node: what a
    snapshot of its node has not comes from the log of that node.

    A table with many shards is split by them, each read on its node: a cut of the kind ``HEAP`` is the place of a shard
    in the order of nodes and shards, and where it lies inside that shard, the number of a block. Splits by key are
    those of the largest shard, as the keys of the others are spread in the same way; a range of keys is read in every
    shard.

    :raises SourceUnreachable: a node does not answer. :raises SourceBusy: shards moved whenever it was tried.
    """

    def __init__(self, cluster: Cluster, lock_seconds: float | None = None) -> None:
        self._cluster = cluster
        self._nodes: dict[int, PostgresSnapshot] = {}
        try:
            nodes, inactive, last_group = self._export_at_rest(lock_seconds)
        except BaseException:
            self.close()
            raise
        finally:
            cluster.close()  # nobody closes the way to a source
        marks = {group: snapshot.mark for group, snapshot in self._nodes.items()}
        self._mark = CitusMark(tuple(sorted(marks.items())), inactive, time.time_ns() // 1000, last_group)
        addresses = {node.group: node.address for node in nodes}
        named = {group: (addresses[group], snapshot.name) for group, snapshot in self._nodes.items()}
        self._name = str(Names(named))

    def _export_at_rest(self, lock_seconds: float | None) -> tuple[tuple[Node, ...], tuple[int, ...], int]:
        """Snapshots of all nodes; these, the groups that are not in use, and the last that was given."""
        for _ in range(TRIES):
            last_group = self._cluster.last_group()
            if last_group is None:
                time.sleep(_PAUSE)
                continue
            nodes, inactive = self._cluster.nodes()
            before = self._cluster.placements()
            self._export(nodes, lock_seconds)
            if self._cluster.placements() == before and self._cluster.nodes() == (nodes, inactive):
                return nodes, inactive, last_group
            self.close()
        raise SourceBusy("Nodes or shards of the cluster move without a pause.", next_step="Try again when they rest.")

    def _export(self, nodes: tuple[Node, ...], lock_seconds: float | None) -> None:
        for node in nodes:
            dsn = self._cluster.dsn_of(node.address, node.group)
            self._nodes[node.group] = PostgresSnapshot(dsn, lock_seconds)

    @property
    def name(self) -> str:
        """The snapshots of all nodes, and where they are."""
        return self._name

    @property
    def mark(self) -> CitusMark:
        """What it contains."""
        return self._mark

    def is_open(self) -> bool:
        """Whether all nodes still keep it."""
        return all(snapshot.is_open() for snapshot in self._nodes.values())

    def table(self, table: SourceTable) -> SourceTable:
        """*table* with the columns that it has on the coordinator. :raises SourceNotFound: it has no such table."""
        return self._nodes[COORDINATOR].table(table)

    def has_key(self, table: SourceTable) -> bool:
        """Whether it has a key that names each row."""
        return self._nodes[COORDINATOR].has_key(table)

    def _placed(self, table: SourceTable) -> tuple[PlacedTable, ...]:
        return placed_tables(self._cluster, table, self._name)

    def files(self, table: SourceTable) -> str:
        """Names its nodes, its shards and their files there: those of two nodes may be called the same."""
        return " ".join(
            f"{one.group}/{one.shard}/{file}"
            for one in self._placed(table)
            for file in self._nodes[one.group].files(one.table).split()
        )

    def plan(self, table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        """Splits of about *split_rows* rows; by shards unless *kind* says by key.

        :raises UnsupportedTable: it cannot be split in that way.
        """
        placed = self._placed(table)
        if len(placed) == 1:
            return self._nodes[placed[0].group].plan(placed[0].table, split_rows=split_rows, kind=kind)
        measured = sizes(self._cluster, placed, self._name)
        rows, size = sum(one for one, _ in measured), sum(one for _, one in measured)
        if kind is not SplitKind.KEY:
            cuts = [None, *(Cut((str(place),)) for place in range(1, len(placed))), None]
            splits = tuple(
                Split(place, KeyRange(cuts[place], cuts[place + 1]), measured[place][0]) for place in range(len(placed))
            )
            return SplitPlan(SplitKind.HEAP, splits, rows, size, f"{len(placed)} shards, each read on its node")
        largest = placed[self._largest(placed)]
        of_one = self._nodes[largest.group].plan(
            largest.table, split_rows=max(1, split_rows // len(placed)), kind=SplitKind.KEY
        )
        return SplitPlan(
            SplitKind.KEY,
            _covering(of_one, rows),
            rows,
            size,
            f"by key, as its largest shard of {len(placed)}: {of_one.why}",
        )

    def _largest(self, placed: tuple[PlacedTable, ...]) -> int:
        measured = sizes(self._cluster, placed, self._name)
        return max(range(len(placed)), key=lambda place: measured[place])

    def page_end(self, table: SourceTable, kind: SplitKind, part: KeyRange, rows: int) -> Cut | None:
        """The cut after about the first *rows* rows of *part*; of the heap: after their blocks in its first shard."""
        placed = self._placed(table)
        if len(placed) == 1:
            return self._nodes[placed[0].group].page_end(placed[0].table, kind, part, rows)
        if kind is SplitKind.HEAP:
            place, block = ShardPlace.of(part.start)
            first = placed[place]
            end = self._nodes[first.group].page_end(first.table, kind, KeyRange(block, None), rows)
            return None if end is None else Cut((str(place), *end.values))
        largest = placed[self._largest(placed)]
        return self._nodes[largest.group].page_end(largest.table, kind, part, max(1, rows // len(placed)))

    def close(self) -> None:
        """Let it go. Closing twice is fine."""
        for snapshot in self._nodes.values():
            snapshot.close()
        self._nodes.clear()


def _covering(plan: SplitPlan, rows: int) -> tuple[Split, ...]:
    """The splits of one shard for all of them: where that one has no row the others may have some."""
    ranges = [split.range for split in plan.splits if not split.empty]
    if not ranges:
        return (Split(0, KeyRange(), rows),)
    ranges[0] = KeyRange(None, ranges[0].end)
    ranges[-1] = KeyRange(ranges[-1].start, None)
    each = max(1, rows // len(ranges))
    return tuple(Split(place, part, each) for place, part in enumerate(ranges))


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
