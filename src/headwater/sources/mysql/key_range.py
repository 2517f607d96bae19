"""A range of keys that a person names: what it is for the server.

A person writes keys as she likes (``+5``, the label of an enum, a date without its time); cuts are kept as
:mod:`.key_columns` tells. What the server cannot read is refused before anybody plans with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.sources.errors import InvalidRange
from headwater.sources.mysql.catalog import read_table
from headwater.sources.mysql.connection import Connection, ask
from headwater.sources.mysql.key_columns import FLOATS, INTEGERS, NUMBERED, KeyColumn, condition, read_key
from headwater.sources.mysql.names import TableName, quoted
from headwater.sources.mysql.types import ADDRESSES, BINARIES
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceTable


def printed_range(session: Connection, table: SourceTable, part: KeyRange) -> KeyRange:
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


def _printed(session: Connection, table: SourceTable, cut: Cut, key: Sequence[KeyColumn]) -> Cut:
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


def _text(session: Connection, column: KeyColumn, value: str) -> str | None:
    """The text of a cut; ``None``: it is no value."""
    try:
        if column.kind in INTEGERS or column.kind in ("bit", "year"):
            return str(int(value))
        if column.kind in NUMBERED:
            number = int(value) if value.isdigit() else column.number(value)
            return str(number) if number else None
        if column.kind in ("decimal", "numeric") or column.kind in FLOATS:
            float(value)
            return value.strip().lstrip("+")
        if column.kind in BINARIES:
            return bytes.fromhex(value.removeprefix("0x")).hex().upper()
    except ValueError:
        return None
    if column.charset is not None:
        return value
    kind = column.kind if column.kind in ADDRESSES or column.kind == "date" else "DATETIME(6)"
    found = ask(
        session, f"SELECT CAST(CAST(%s AS {'TIME(6)' if column.kind == 'time' else kind}) AS CHAR) AS v", [value]
    )
    told = found[0]["v"]
    return None if told is None else str(told)


def _is_ascending(session: Connection, start: Cut, end: Cut, key: Sequence[KeyColumn]) -> bool:
    """As far as both have values: a cut without a column's value lies before or after all of them."""
    count = min(len(start.values), len(end.values))
    begins = ", ".join(
        f"{column.literal(value)} AS {quoted(column.name)}"
        for value, column in zip(start.values[:count], key, strict=False)
    )
    is_before = condition(KeyRange(end=Cut(end.values[:count], after=True)), key)
    return ask(session, f"SELECT {is_before} AS found FROM (SELECT {begins}) AS begins")[0]["found"] in (1, "1")
