"""Columns that change on one node before the others: the merged table only goes forward, and no value is lost."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from headwater.sources.citus.merged_tables import MergedTable
from headwater.sources.errors import SchemaStopped
from headwater.sources.events import SchemaChanged
from headwater.sources.evolution import SchemaPolicy, as_narrow, follow
from headwater.sources.table import SourceColumn, SourceTable


def table(*columns: tuple[str, int, pa.DataType], oid: int = 7) -> SourceTable:
    made = tuple(SourceColumn(name, kind, str(kind), number) for name, number, kind in columns)
    return SourceTable("public", "t", made, ("id",), oid)


INT, LONG, TEXT = pa.int32(), pa.int64(), pa.string()
BEFORE = table(("id", 1, LONG), ("v", 3, INT))
ON_NODE = table(("id", 1, LONG), ("v", 2, INT), oid=40)  # made there without the column that was dropped before


def changed(before: SourceTable, after: SourceTable, defaults: pa.RecordBatch | None = None) -> SchemaChanged:
    """What a node tells of a change."""
    _, told = follow(before, after, SchemaPolicy.EVOLVE, defaults)
    assert told is not None
    return told


def merged() -> tuple[MergedTable, SourceTable]:
    made = MergedTable(BEFORE)
    known = made.on_node(1, ON_NODE, BEFORE)
    assert made.on_node(2, ON_NODE, BEFORE) == known
    return made, known


def test_nodes_may_number_columns_in_their_own_way() -> None:
    made, known = merged()
    assert [column.field_id for column in known.columns] == [1, 2]
    assert known.source_id == 40
    found = made.project(1, known, [pa.array([1], LONG), pa.array([5], INT)], 1)
    assert [column.to_pylist() for column in found] == [[1], [5]]


def test_rows_of_a_node_that_is_behind_have_what_a_column_came_with_also_after_a_restart() -> None:
    coordinator = table(("id", 1, LONG), ("v", 3, INT), ("w", 4, TEXT))
    there = table(("id", 1, LONG), ("v", 2, INT), ("w", 3, TEXT), oid=40)
    made = MergedTable(coordinator)  # as the log has it, after another node told the column
    known = made.on_node(2, there, coordinator, pa.RecordBatch.from_pydict({"w": ["new"]}))
    change = changed(known, ON_NODE)
    assert made.follow(2, change, coordinator) is None
    rows = [pa.array([1], LONG), pa.array([5], INT), pa.nulls(1, TEXT)]
    assert [column.to_pylist() for column in made.project(2, change.after, rows, 1)] == [[1], [5], ["new"]]


def test_a_column_that_comes_to_one_node_first_is_there_for_all_with_what_it_came_with() -> None:
    made, known = merged()
    coordinator = table(("id", 1, LONG), ("v", 3, INT), ("w", 4, TEXT))
    there = table(("id", 1, LONG), ("v", 2, INT), ("w", 3, TEXT), oid=40)
    defaults = pa.RecordBatch.from_pydict({"w": ["new"]})
    told = made.follow(1, changed(known, there, defaults), coordinator)
    assert told is not None
    assert told.added == ("w",)
    assert [column.field_id for column in told.after.columns] == [1, 3, 4]
    behind = made.project(2, known, [pa.array([1], LONG), pa.array([5], INT)], 1)
    assert [column.to_pylist() for column in behind] == [[1], [5], ["new"]]
    assert made.follow(2, changed(known, there, defaults), coordinator) is None
    now = made.project(2, there, [pa.array([1], LONG), pa.array([5], INT), pa.array(["x"])], 1)
    assert [column.to_pylist() for column in now] == [[1], [5], ["x"]]


def test_a_rename_keeps_the_values_of_nodes_that_have_the_old_name() -> None:
    made, known = merged()
    coordinator = table(("id", 1, LONG), ("u", 3, INT))
    renamed = table(("id", 1, LONG), ("u", 2, INT), oid=40)
    told = made.follow(1, changed(known, renamed), coordinator)
    assert told is not None
    assert told.renamed == (("v", "u"),)
    behind = made.project(2, known, [pa.array([1], LONG), pa.array([5], INT)], 1)
    assert behind[1].to_pylist() == [5]
    assert made.follow(2, changed(known, renamed), coordinator) is None


def test_a_name_in_between_does_not_come_back() -> None:
    made, known = merged()
    coordinator = table(("id", 1, LONG), ("x", 3, INT))
    first, last = (table(("id", 1, LONG), (name, 2, INT), oid=40) for name in ("u", "x"))
    for before, after in ((known, first), (first, last)):
        made.follow(1, changed(before, after), coordinator)
    assert made.table.columns[1].name == "x"
    assert made.follow(2, changed(known, first), coordinator) is None
    assert made.table.columns[1].name == "x"


def test_a_column_is_dropped_once_the_coordinator_has_it_no_more() -> None:
    made, known = merged()
    gone = table(("id", 1, LONG), oid=40)
    assert made.follow(1, changed(known, gone), BEFORE) is None  # the node is behind, or ahead: nobody knows yet
    told = made.follow(1, changed(known, gone), table(("id", 1, LONG)))
    assert told is not None
    assert told.dropped == ("v",)
    late = made.project(2, known, [pa.array([1], LONG), pa.array([5], INT)], 1)
    assert late[1].to_pylist() == [None]


def test_a_wider_type_is_taken_and_narrow_values_are_made_wide() -> None:
    made, known = merged()
    wide = table(("id", 1, LONG), ("v", 2, LONG), oid=40)
    told = made.follow(1, changed(known, wide), table(("id", 1, LONG), ("v", 3, LONG)))
    assert told is not None
    assert told.retyped == ("v",)
    behind = made.project(2, known, [pa.array([1], LONG), pa.array([5], INT)], 1)
    assert behind[1].type == LONG
    assert made.follow(2, changed(known, wide), table(("id", 1, LONG), ("v", 3, LONG))) is None


def test_a_column_that_nobody_has_a_name_for_stops_the_table() -> None:
    made, known = merged()
    strange = table(("id", 1, LONG), ("v", 2, INT), ("w", 9, TEXT), oid=40)
    with pytest.raises(SchemaStopped) as stopped:
        made.follow(1, changed(known, strange), BEFORE)
    assert stopped.value.next_step == "Run: headwater resnapshot public.t"


def test_after_a_restart_columns_are_found_by_what_the_coordinator_calls_them_now() -> None:
    """The log has the old name still; the coordinator and the node have the new one."""
    made = MergedTable(BEFORE)
    coordinator = table(("id", 1, LONG), ("u", 3, INT))
    present = table(("id", 1, LONG), ("u", 2, INT), oid=40)
    known = made.on_node(1, present, coordinator)
    assert [(column.name, column.field_id) for column in known.columns] == [("id", 1), ("v", 2)]
    told = made.follow(1, changed(known, present), coordinator)
    assert told is not None
    assert told.renamed == (("v", "u"),)


def test_a_column_that_a_node_has_not_yet_gets_a_number_of_its_own() -> None:
    grown = MergedTable(table(("id", 1, LONG), ("v", 3, INT), ("w", 4, TEXT)))
    known = grown.on_node(1, ON_NODE, grown.table)
    assert known.columns[2].field_id < 0
    behind = replace(known, columns=known.columns[:2])
    found = grown.project(1, behind, [pa.array([1], LONG), pa.array([5], INT)], 1)
    assert [column.to_pylist() for column in found] == [[1], [5], [None]]


def told_by_a_node(known: SourceTable, *columns: tuple[str, pa.DataType], present: SourceTable) -> SourceTable:
    """What a Relation message is read as: names that the node has no more get numbers by their places."""
    numbers = {column.name: column.field_id for column in (*known.columns, *present.columns) if not column.dropped}
    named = [(name, numbers.get(name, -place), kind) for place, (name, kind) in enumerate(columns, 1)]
    return table(*named, oid=40)


def test_a_rename_that_another_node_told_before_a_restart_keeps_the_values_of_one_that_is_behind() -> None:
    renamed = table(("id", 1, LONG), ("u", 3, INT), ("w", 4, TEXT))
    there = table(("id", 1, LONG), ("u", 2, INT), ("w", 3, TEXT), oid=40)
    made = MergedTable(renamed)  # as the log has it by now
    known = made.on_node(2, there, renamed)
    old = told_by_a_node(known, ("id", LONG), ("v", INT), ("w", TEXT), present=there)
    change = changed(known, old)
    assert made.follow(2, change, renamed, there) is None
    rows = [pa.array([1], LONG), pa.nulls(1, INT), pa.array(["x"]), pa.array([5], INT)]
    assert [column.name for column in change.after.columns if not column.dropped] == ["id", "w", "v"]
    assert [column.to_pylist() for column in made.project(2, change.after, rows, 1)] == [[1], [5], ["x"]]
    now = changed(change.after, there)  # and the node comes to it
    assert made.follow(2, now, renamed, there) is None
    later = {"id": pa.array([1], LONG), "u": pa.array([6], INT), "w": pa.array(["y"])}
    rows = [later.get(column.name, pa.nulls(1, INT)) for column in now.after.columns]
    assert [column.to_pylist() for column in made.project(2, now.after, rows, 1)] == [[1], [6], ["y"]]


def test_a_column_that_was_dropped_for_another_before_a_restart_is_not_taken_for_a_rename() -> None:
    replaced = table(("id", 1, LONG), ("u", 4, INT))
    there = table(("id", 1, LONG), ("u", 3, INT), oid=40)  # its second column was dropped
    made = MergedTable(replaced)
    known = made.on_node(2, there, replaced)
    old = told_by_a_node(known, ("id", LONG), ("v", INT), present=there)
    with pytest.raises(SchemaStopped):
        made.follow(2, changed(known, old), replaced, there)


def test_a_column_that_was_dropped_since_the_start_is_not_taken_for_a_rename() -> None:
    before = table(("id", 1, LONG), ("b", 2, INT), ("c", 3, INT))
    there = table(("id", 1, LONG), ("b", 2, INT), ("c", 3, INT), oid=40)
    made = MergedTable(before)
    known = made.on_node(2, there, before)
    now = table(("id", 1, LONG), ("c2", 3, INT), oid=40)  # b was dropped, c renamed twice
    old = told_by_a_node(known, ("id", LONG), ("c1", INT), present=now)
    with pytest.raises(SchemaStopped):
        made.follow(2, changed(known, old), table(("id", 1, LONG), ("c2", 3, INT)), now)


def test_a_place_is_looked_at_anew_in_what_is_told_next() -> None:
    there = table(("id", 1, LONG), ("c2", 2, INT), ("d2", 3, INT), oid=40)
    renamed = table(("id", 1, LONG), ("c2", 2, INT), ("d2", 3, INT))
    made = MergedTable(renamed)
    known = made.on_node(2, there, renamed)
    first = changed(known, told_by_a_node(known, ("id", LONG), ("c1", INT), ("d2", INT), present=there))
    made.follow(2, first, renamed, there)
    gone = table(("id", 1, LONG), ("d2", 3, INT), oid=40)  # c2 was dropped meanwhile
    told = told_by_a_node(known, ("id", LONG), ("d1", INT), present=gone)
    with pytest.raises(SchemaStopped):
        made.follow(2, changed(first.after, told), table(("id", 1, LONG), ("d2", 3, INT)), gone)


def test_a_type_that_another_node_made_wider_before_a_restart_is_told_narrow_by_one_that_is_behind() -> None:
    wide, narrow = table(("id", 1, LONG), ("v", 3, LONG)), table(("id", 1, LONG), ("v", 2, INT), oid=40)
    made = MergedTable(wide)
    known = made.on_node(2, table(("id", 1, LONG), ("v", 2, LONG), oid=40), wide)
    with pytest.raises(SchemaStopped):
        follow(known, narrow, SchemaPolicy.EVOLVE)
    behind = as_narrow(known, narrow)
    projection, told = follow(behind, narrow, SchemaPolicy.EVOLVE)
    assert told is None
    found = made.project(2, projection.table, [pa.array([1], LONG), pa.array([5], INT)], 1)
    assert (found[1].type, found[1].to_pylist()) == (LONG, [5])
    texts = table(("id", 1, LONG), ("v", 2, TEXT), oid=40)
    assert as_narrow(texts, narrow) == narrow
    assert as_narrow(texts, table(("id", 1, LONG), ("v", 2, pa.float64()), oid=40)) == texts
