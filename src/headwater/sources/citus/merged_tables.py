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
from headwater.sources.citus.members import Member, Members, distributed, here, present_tables
from headwater.sources.citus.merge import Piece
from headwater.sources.citus.numbers import CommitNumbers, node_commits
from headwater.sources.citus.offset import POSITION_DTYPE, POSITION_TYPE, CitusOffset, positions_of
from headwater.sources.errors import RereadNeeded
from headwater.sources.events import Boundary, Changes, Event, Registered, SchemaChanged, Stopped, Truncated
from headwater.sources.evolution import SchemaPolicy, follow, is_wider
from headwater.sources.offset import position_rows
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.table import (
    COMMIT_TIMESTAMP_COLUMN,
    POSITION_COLUMN,
    UNAVAILABLE_COLUMN,
    SourceColumn,
    SourceTable,
)

_UNKNOWN = 1_000_000
"""Numbers of columns that a node has no more begin beneath minus this."""


class MergedTable:
    """One table out of what its nodes call it. Pure.

    A statement that changes columns reaches the nodes one after the other, so that for a while their rows have
    different columns. The merged table only goes forward:

    ===========================================  =====================================================================
    a node has                                   the merged table
    ===========================================  =====================================================================
    a column that it has not                     gets it, under the number that the coordinator gives that name
    not a column that the coordinator has        keeps it: the node is behind; its rows have what the column came with
    neither has the coordinator                  drops it
    another name for a column                    takes it, unless its own is the coordinator's name already
    a wider type                                 takes it; values of a narrower one are made wider
    a column that no other node has a name for   cannot go on: the table is read again
    ===========================================  =====================================================================

    Columns of a node are told apart by the node's own numbers, which need not be the coordinator's. A column that a
    node tells by a name that no node has any more is found by its place, where all numbers up to that of columns that
    were told are in use at that moment: then none of them was ever dropped, and the place is the number.

    :param table: as its log has it, with the coordinator's numbers.
    :ivar table: as it is now.
    """

    def __init__(self, table: SourceTable) -> None:
        self.table = table
        self._ids: dict[int, dict[int, int]] = {}
        self._defaults: dict[int, pa.Scalar] = {}
        self._places: dict[tuple[int, SourceTable], list[int | None]] = {}

    def on_node(
        self, group: int, present: SourceTable, coordinator: SourceTable, defaults: pa.RecordBatch | None = None
    ) -> SourceTable:
        """The table with the numbers that node *group* gives its columns.

        :param present: the table as that node has it now. :param coordinator: as the coordinator has it now.
        :param defaults: what the coordinator has in rows from before a column, for nodes that have not come to it.
        """
        for column in coordinator.columns:
            if defaults is not None and column.name in defaults.schema.names:
                self._defaults.setdefault(column.field_id, defaults.column(column.name)[0])
        names = {column.field_id: column.name for column in coordinator.columns}
        numbers = {column.name: column.field_id for column in present.columns}
        ids: dict[int, int] = {}
        columns = []
        for column in self.table.columns:
            found = numbers.get(names.get(column.field_id, column.name), numbers.get(column.name))
            if found is None or found in ids or column.dropped:
                found = -_UNKNOWN - column.field_id
            ids[found] = column.field_id
            columns.append(replace(column, field_id=found))
        self._ids[group] = ids
        return SourceTable(
            self.table.namespace, self.table.name, tuple(columns), self.table.key_columns, present.source_id
        )

    def follow(
        self, group: int, change: SchemaChanged, coordinator: SourceTable, present: SourceTable | None = None
    ) -> SchemaChanged | None:
        """What becomes of the table when node *group* tells *change*; ``None``: nothing that it does not know.

        :param present: the table as that node has it now, by its numbers; ``None``: it has it no longer.
        :raises RereadNeeded: it cannot go on.
        """
        theirs = self._numbered(group, change.after, coordinator, present)
        kept = {column.field_id for column in coordinator.columns}
        columns: list[SourceColumn] = []
        for column in self.table.columns:
            found = theirs.pop(column.field_id, None)
            if column.dropped and column.field_id not in kept:
                continue
            if found is not None:
                columns.append(self._later(column, found, coordinator))
            elif column.field_id in kept:
                columns.append(column)
        columns += theirs.values()
        names = {column.field_id: column.name for column in columns}
        key = [names.get(self.table.column(name).field_id) for name in self.table.key_columns]
        if None in key:
            raise RereadNeeded(self.table.full_name, "its key changed.")
        now = SourceTable(
            self.table.namespace,
            self.table.name,
            tuple(columns),
            tuple(name for name in key if name is not None),
            self.table.source_id,
        )
        return self.become(now, change.defaults)

    def become(self, now: SourceTable, defaults: pa.RecordBatch | None) -> SchemaChanged | None:
        """The table has the columns of *now*, by the coordinator's numbers; ``None``: it had them before.

        :raises RereadNeeded: its log cannot follow.
        """
        _, told = follow(self.table, now, SchemaPolicy.EVOLVE, defaults)
        if told is None:
            return None
        if told.defaults is not None:
            for column in told.after.columns:
                if column.name in told.defaults.schema.names:
                    self._defaults[column.field_id] = told.defaults.column(column.name)[0]
        self.table = told.after
        self._places.clear()
        return told

    def _numbered(
        self, group: int, theirs: SourceTable, coordinator: SourceTable, present: SourceTable | None
    ) -> dict[int, SourceColumn]:
        """The columns of a node by the coordinator's numbers."""
        ids = self._ids[group]
        known = {column.name: column.field_id for column in self.table.columns if not column.dropped}
        known |= {column.name: column.field_id for column in coordinator.columns}
        numbered: dict[int, SourceColumn] = {}
        for column in theirs.columns:
            if column.dropped:
                continue
            if -_UNKNOWN < column.field_id < 0:  # a place, which may be another column's in what is told next
                number = known.get(column.name, self._by_place(group, theirs, present, -column.field_id))
            else:
                number = ids.get(column.field_id, known.get(column.name))
            if number is None or number in numbered:
                what = f"a node has rows with a column {column.name!r} that the coordinator has under no such name."
                raise RereadNeeded(self.table.full_name, what)
            ids[column.field_id] = number
            numbered[number] = replace(column, field_id=number)
        return numbered

    def _by_place(self, group: int, theirs: SourceTable, present: SourceTable | None, place: int) -> int | None:
        """The number of a column whose name nobody has; *place*: among those that the node tells, from one."""
        told = sum(not column.dropped for column in theirs.columns)
        used = {column.field_id for column in present.columns if not column.dropped} if present is not None else set()
        return self._ids[group].get(place) if used.issuperset(range(1, told + 1)) else None

    def _later(self, mine: SourceColumn, theirs: SourceColumn, coordinator: SourceTable) -> SourceColumn:
        """What a column is that a node has as *theirs*."""
        final = {column.field_id: column.name for column in coordinator.columns}.get(mine.field_id)
        name = mine.name if mine.name == final else theirs.name
        narrower = mine.type != theirs.type and is_wider(theirs.type, mine.type)
        return replace(mine if narrower else theirs, name=name, dropped=False)

    def project(self, group: int, theirs: SourceTable, columns: Sequence[pa.Array], rows: int) -> list[pa.Array]:
        """The columns of the merged table, out of those that a node tells."""
        made = []
        for column, place in zip(self.table.columns, self._placed(group, theirs), strict=True):
            if place is not None and not column.dropped:
                found = columns[place]
                made.append(found if found.type == column.type else found.cast(column.type))
            elif column.field_id in self._defaults and not column.dropped:
                made.append(pa.repeat(self._defaults[column.field_id].cast(column.type), rows))
            else:
                made.append(pa.nulls(rows, column.type))
        return made

    def _placed(self, group: int, theirs: SourceTable) -> list[int | None]:
        known = self._places.get((group, theirs))
        if known is None:
            ids: Mapping[int, int] = self._ids[group]
            places = {ids.get(c.field_id): place for place, c in enumerate(theirs.columns) if not c.dropped}
            known = self._places[group, theirs] = [places.get(c.field_id) for c in self.table.columns]
        return known


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
