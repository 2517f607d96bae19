"""A range of keys that a person names: what it is for the server.

A person writes keys as she likes (``+5``, an uuid in capitals, ``today``); cuts are kept and compared as the server
prints them. What it cannot read is refused before anybody plans with it: a query that has such a range in its state
could never go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import errors as pg
from psycopg import sql

from headwater.sources.errors import InvalidRange
from headwater.sources.postgres.catalog import read_table
from headwater.sources.postgres.connection import Connection
from headwater.sources.postgres.key_columns import KeyColumn, condition, read_key
from headwater.sources.postgres.names import TableName
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceTable


def printed_range(session: Connection, table: SourceTable, part: KeyRange) -> KeyRange:
    """*part* of *table*, its values as the server prints them.

    :raises InvalidRange: a value is none of its column's type, or the range ends before it begins.
    """
    key = read_key(session, read_table(session, TableName(table.namespace, table.name)), table.key_columns)
    start, end = (None if cut is None else _printed(session, table, cut, key) for cut in (part.start, part.end))
    if start is not None and end is not None and not _is_ascending(session, start, end, key):
        raise InvalidRange(
            f"The range of keys of {table.full_name} ends before it begins.", next_step="Name the smaller key first."
        )
    return KeyRange(start, end)


def _printed(session: Connection, table: SourceTable, cut: Cut, key: Sequence[KeyColumn]) -> Cut:
    if len(cut.values) > len(key):
        raise InvalidRange(
            f"The key of {table.full_name} has {len(key)} columns; received {len(cut.values)} values.",
            next_step=f"Give a value for each of {', '.join(column.name for column in key)}, in this order.",
        )
    values = []
    for value, column in zip(cut.values, key, strict=False):
        query = sql.SQL("SELECT pg_catalog.format('%s', {})").format(_value(value, column))
        try:
            row = session.execute(query).fetchone()
        except pg.DataError:
            raise InvalidRange(
                f"Key column {column.name!r} of {table.full_name} is of type {column.type_sql}; a value is not.",
                next_step=f"Write it as Postgres reads {column.type_sql}.",
            ) from None
        assert row is not None
        values.append(str(row[0]))
    return Cut(tuple(values), cut.after)


def _is_ascending(session: Connection, start: Cut, end: Cut, key: Sequence[KeyColumn]) -> bool:
    """As far as both have values: a cut without a column's value lies before or after all of them."""
    count = min(len(start.values), len(end.values))
    begins = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(_value(value, column), sql.Identifier(column.name))
        for value, column in zip(start.values[:count], key, strict=False)
    )
    is_before = condition(SplitKind.KEY, KeyRange(end=Cut(end.values[:count], after=True)), key)
    assert is_before is not None
    row = session.execute(sql.SQL("SELECT {} FROM (SELECT {}) begins").format(is_before, begins)).fetchone()
    return row == (True,)


def _value(text: str, column: KeyColumn) -> sql.Composed:
    collate = (
        sql.SQL("") if column.collation is None else sql.SQL(" COLLATE {}").format(sql.Identifier(*column.collation))
    )
    return sql.SQL("{}::{}{}").format(sql.Literal(text), sql.SQL(column.type_sql), collate)
