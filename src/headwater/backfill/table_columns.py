"""The columns of a table as its log has them, against those of a snapshot, told apart by their field ids. Pure."""

from __future__ import annotations

from dataclasses import replace

from headwater.sources.table import SourceTable


def has_columns(there: SourceTable, table: SourceTable, *, exactly: bool) -> bool:
    """Whether *there*, in a snapshot, are the columns of *table*; with *exactly*: and no others."""
    found = {column.field_id: (column.name, column.type) for column in there.columns if not column.dropped}
    wanted = {column.field_id: (column.name, column.type) for column in table.columns if not column.dropped}
    return found == wanted if exactly else wanted.items() <= found.items()


def is_renamed(there: SourceTable, table: SourceTable) -> bool:
    """Whether a column of *table* has another name *there*, in a snapshot."""
    names = {column.field_id: column.name for column in there.columns if not column.dropped}
    return any(names.get(column.field_id, column.name) != column.name for column in table.columns if not column.dropped)


def readable_columns(table: SourceTable, there: SourceTable, *, by_number: bool) -> SourceTable:
    """*table* as it can be read *there*, in a snapshot: what that has no longer counts as dropped.

    :param by_number: readers find a column whatever its name is by now.
    """
    names = {column.field_id: column.name for column in there.columns if not column.dropped}
    columns = tuple(
        column
        if (column.field_id in names if by_number else names.get(column.field_id) == column.name)
        else replace(column, dropped=True)
        for column in table.columns
    )
    return replace(table, columns=columns)
