"""A range of keys that a person names: what it is for the database.

A person writes keys as she likes (``+5``, a date without its time); cuts are kept as :mod:`.key_columns` tells. What
the server cannot read is refused before anybody plans with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.sources.errors import InvalidRange
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.sqlserver.catalog import read_table
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.key_columns import KeyColumn, condition, read_key
from headwater.sources.sqlserver.names import TableName, literal, quoted
from headwater.sources.sqlserver.types import BINARIES, TEXTS
from headwater.sources.table import SourceTable


def printed_range(session: Session, table: SourceTable, part: KeyRange) -> KeyRange:
    """*part* of *table*, its values as cuts have them.

    :raises InvalidRange: a value is none of its column's type, or the range ends before it begins.
    """
    key = read_key(read_table(session, TableName(table.namespace, table.name)), table)
    start, end = (None if cut is None else _printed(session, table, cut, key) for cut in (part.start, part.end))
    if start is not None and end is not None and not _is_ascending(session, start, end, key):
        raise InvalidRange(
            f"The range of keys of {table.full_name} ends before it begins.", next_step="Name the smaller key first."
        )
    return KeyRange(start, end)


def _printed(session: Session, table: SourceTable, cut: Cut, key: Sequence[KeyColumn]) -> Cut:
    if len(cut.values) > len(key):
        raise InvalidRange(
            f"The key of {table.full_name} has {len(key)} columns; received {len(cut.values)} values.",
            next_step=f"Give a value for each of {', '.join(column.name for column in key)}, in this order.",
        )
    values = []
    for value, column in zip(cut.values, key, strict=False):
        found = _text(session, column, value)
        if found is None:
            raise InvalidRange(
                f"Key column {column.name!r} of {table.full_name} is of type {column.type_text}; a value is not.",
                next_step=f"Write it as the server reads {column.type_text}.",
            )
        values.append(found)
    return Cut(tuple(values), cut.after)


def _text(session: Session, column: KeyColumn, value: str) -> str | None:
    """The text of a cut; ``None``: it is no value."""
    if column.kind.name in TEXTS:
        return value
    if column.kind.name in BINARIES:
        try:
            return bytes.fromhex(value.removeprefix("0x")).hex().upper()
        except ValueError:
            return None
    tried = f"TRY_CONVERT({column.type_text}, {literal(value)})"
    told = session.ask(f"SELECT {column.text_of(tried)} AS v")[0]["v"]
    return None if told is None else str(told)


def _is_ascending(session: Session, start: Cut, end: Cut, key: Sequence[KeyColumn]) -> bool:
    """As far as both have values: a cut without a column's value lies before or after all of them."""
    count = min(len(start.values), len(end.values))
    begins = ", ".join(
        f"{column.literal(value)} AS {quoted(column.name)}"
        for value, column in zip(start.values[:count], key, strict=False)
    )
    is_before = condition(KeyRange(end=Cut(end.values[:count], after=True)), key)
    return bool(session.ask(f"SELECT 1 AS found FROM (SELECT {begins}) AS [begins] WHERE {is_before}"))
