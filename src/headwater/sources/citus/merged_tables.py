"""MergedTables: the captured tables out of what the nodes tell of them.

A row gets the columns that its table has over all nodes, and its place in the merged log. What else a node tells of a
table becomes what it means for the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.citus.cluster import COORDINATOR, TableKind
from headwater.sources.citus.columns import MergedTable
from headwater.sources.citus.members import Member, Members, distributed, here, present_tables
from headwater.sources.citus.merge import Piece
from headwater.sources.citus.numbers import CommitNumbers, node_commits
from headwater.sources.citus.offset import POSITION_DTYPE, POSITION_TYPE, CitusOffset, positions_of
from headwater.sources.errors import RereadNeeded
from headwater.sources.events import Boundary, Changes, Event, Registered, SchemaChanged, Stopped, Truncated
from headwater.sources.offset import position_rows
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN, SourceTable


class MergedTables:
    """All that are captured.

    :param kinds: of the tables, by name. :param nodes: those that are followed, by group; others add to it.
    :param number: the greatest that a commit was given.
    """

    def __init__(
        self,
        members: Members,
        tables: Iterable[SourceTable],
        kinds: Mapping[str, TableKind],
        nodes: Mapping[int, Member],
        number: int,
    ) -> None:
        self._members = members
        self._merged = {table.full_name: MergedTable(table) for table in tables}
        self._kinds = dict(kinds)
        self._nodes = nodes
        self._oids: dict[tuple[int, str], int | None] = {}
        self._numbers = CommitNumbers(number)

    @property
    def number(self) -> int:
        """The greatest that a commit was given."""
        return self._numbers.last

    def table(self, name: str) -> SourceTable | None:
        """As it is now; ``None``: it is not captured, or not any more."""
        merged = self._merged.get(name)
        return None if merged is None else merged.table

    def here(self, group: int) -> list[SourceTable]:
        """Those whose changes the node tells."""
        return here(group, self._kinds, [merged.table for merged in self._merged.values()])

    def followed(self, group: int, tables: Sequence[SourceTable] | None = None) -> list[SourceTable]:
        """Those of *tables*, or of all, of which the node may tell something.

        A worker tells no row of a reference table, but that it was truncated, where the statement was sent there.
        """
        some = [merged.table for merged in self._merged.values()] if tables is None else tables
        told = here(group, self._kinds, some)
        if group == COORDINATOR:
            return told
        return [*told, *(table for table in some if self._kinds[table.full_name] is TableKind.REFERENCE)]

    def distributed(self) -> dict[str, int]:
        """The distributed ones, with their oids on the coordinator."""
        tables = distributed(self._kinds, [merged.table for merged in self._merged.values()])
        return {table.full_name: table.source_id for table in tables if table.source_id is not None}

    def on_node(self, group: int, address: str, tables: Sequence[SourceTable]) -> list[SourceTable]:
        """*tables* with the numbers of a node; one that it has no longer keeps its name, for what is told of it."""
        names = [table.full_name for table in tables]
        coordinator = self._members.described(names)
        defaults = self._members.defaults(list(coordinator.values()))
        present = present_tables(self._members.source(group, address), names)
        made = []
        for place, name in enumerate(names):
            merged = self._merged[name]
            there = present.get(name, replace(merged.table, source_id=-2 - place))
            made.append(merged.on_node(group, there, coordinator.get(name, merged.table), defaults.get(name)))
            self._oids[group, name] = there.source_id
        return made

    def add(self, table: SourceTable) -> None:
        """Capture one more, on all nodes."""
        name = table.full_name
        self._merged[name] = MergedTable(table)
        self._kinds[name] = self._members.cluster.kinds().get(table.source_id or 0, TableKind.LOCAL)
        for group, member in self._nodes.items():
            for known in self.on_node(group, member.address, self.followed(group, [table])):
                member.stream.add_table(known)

    def remove(self, table: SourceTable) -> None:
        """Its changes are of no interest any more."""
        self._merged.pop(table.full_name, None)
        for group, member in self._nodes.items():
            if (group, table.full_name) in self._oids:
                member.stream.remove_table(replace(table, source_id=self._oids.pop((group, table.full_name))))

    def stop(self, stopped: Stopped) -> list[Event]:
        self.remove(stopped.table)
        return [stopped]

    def become(self, table: SourceTable) -> SchemaChanged | None:
        """A table has the columns that the coordinator has now: *table*. See :meth:`MergedTable.become`."""
        merged = self._merged.get(table.full_name)
        return None if merged is None else merged.become(table, self._members.defaults([table])[table.full_name])

    # -- what nodes tell -------------------------------------------------------------------------------------------

    def tell(self, taken: Mapping[int, Piece], told: CitusOffset) -> list[Event]:
        """Pieces of nodes, without their boundaries. :param told: where the nodes were before them."""
        numbers = self._numbers.of({group: piece.commits for group, piece in taken.items()})
        rows: dict[str, list[Changes]] = {}
        events: list[Event] = []
        for group, piece in taken.items():
            for event in piece.events:
                assert not isinstance(event, (Boundary, Registered))
                name = (event.before if isinstance(event, SchemaChanged) else event.table).full_name
                merged = self._merged.get(name)
                if merged is None or not self._is_told(group, name, event):
                    continue
                if isinstance(event, Changes):
                    of_rows = numbers[group][np.searchsorted(piece.commits.lsns, node_commits(event))]
                    rows.setdefault(name, []).append(_changes(group, merged, event, of_rows))
                else:
                    events += self._changed(group, merged, event, told)
        for some in rows.values():
            events += some if len(taken) == 1 else [_by_position(some)]
        return events

    def _is_told(self, group: int, name: str, event: Event) -> bool:
        """Of reference tables the coordinator tells all but truncations: a worker knows them for those alone."""
        is_own = group == COORDINATOR or self._kinds[name] is not TableKind.REFERENCE
        return is_own or isinstance(event, Truncated)

    def _changed(
        self, group: int, merged: MergedTable, event: SchemaChanged | Truncated | Stopped, told: CitusOffset
    ) -> list[Event]:
        table = merged.table
        name = table.full_name
        if isinstance(event, SchemaChanged):
            try:
                coordinator = self._members.described([name]).get(name, table)
                present = present_tables(self._nodes[group].source, [name]).get(name)
                change = merged.follow(group, event, coordinator, present)
            except RereadNeeded as error:
                return self.stop(Stopped.by(table, error))
            return [] if change is None else [change]
        if isinstance(event, Stopped):
            return self.stop(replace(event, table=table))
        if self._kinds[name] is TableKind.DISTRIBUTED:
            # told by one node, of all shards: rows that others wrote before and after it cannot be told apart here
            return self.stop(Stopped.by(table, RereadNeeded(name, "it was truncated, node by node.")))
        if self._kinds[name] is TableKind.REFERENCE:
            # told of the table, not of its copy, whose rows may commit in a transaction of their own
            what = "it was truncated, which is not logged in order with its rows."
            return self.stop(Stopped.by(table, RereadNeeded(name, what)))
        assert isinstance(event.position, PostgresOffset)
        return [Truncated(table, told.with_node(group, event.position, self._numbers.last))]


def _changes(group: int, merged: MergedTable, event: Changes, numbers: NDArray[np.uint64]) -> Changes:
    rows = event.rows
    own = [rows.column(place) for place in range(len(event.table.columns))]
    columns = merged.project(group, event.table, own, rows.num_rows)
    positions = positions_of(rows.column(POSITION_COLUMN), group, numbers)
    made = pa.RecordBatch.from_arrays(
        [*columns, positions, rows.column(COMMIT_TIMESTAMP_COLUMN), rows.column(UNAVAILABLE_COLUMN)],
        schema=merged.table.log_schema(POSITION_TYPE),
    )
    return Changes(merged.table, made, event.ops)


def _by_position(told: Sequence[Changes]) -> Changes:
    """Rows of one table from several nodes, as the merged log has them."""
    (rows,) = pa.Table.from_batches([one.rows for one in told]).combine_chunks().to_batches()
    order = pa.array(np.argsort(position_rows(rows.column(POSITION_COLUMN), POSITION_DTYPE)["number"], kind="stable"))
    return Changes(told[0].table, rows.take(order), pa.concat_arrays([one.ops for one in told]).take(order))
