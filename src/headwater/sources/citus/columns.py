"""MergedTable: one table out of what its nodes call it. Pure.

A statement that changes columns reaches the nodes one after the other, so that for a while their rows have different
columns. The merged table only goes forward:

===========================================  ========================================================================
a node has                                   the merged table
===========================================  ========================================================================
a column that it has not                     gets it, under the number that the coordinator gives that name
not a column that the coordinator has        keeps it: the node is behind; its rows have what the column came with
neither has the coordinator                  drops it
another name for a column                    takes it, unless its own is the coordinator's name already
a wider type                                 takes it; values of a narrower one are made wider
a column that nobody else has a name for     cannot go on: the table is read again
===========================================  ========================================================================

Columns of a node are told apart by the node's own numbers, which need not be the coordinator's. A column that a node
tells by a name that nobody has any more is found by its place, where all numbers up to that of columns that were told
are in use at that moment: then none of them was ever dropped, and the place is the number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from headwater.sources.errors import RereadNeeded
from headwater.sources.events import SchemaChanged
from headwater.sources.evolution import SchemaPolicy, follow, is_wider
from headwater.sources.table import SourceColumn, SourceTable

_UNKNOWN = 1_000_000
"""Numbers of columns that a node has no more begin beneath minus this."""


class MergedTable:
    """One table.

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
