"""A range of keys that a person names: what it is for the database. Pure but for what it is given to ask.

A person writes keys as she likes (``+5``, the label of an enum, a date without its time); cuts have the texts of the
source. What the server cannot read is refused before anybody plans with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from headwater.sources.errors import InvalidRange
from headwater.sources.key_conditions import ComparedColumn, condition
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceTable


class NamedColumn(ComparedColumn, Protocol):
    """A column of a key, for people and in a statement."""

    @property
    def name(self) -> str: ...

    @property
    def type_text(self) -> str: ...


_Column = TypeVar("_Column", bound=NamedColumn)


def printed_range(
    table: SourceTable,
    part: KeyRange,
    key: Sequence[_Column],
    text: Callable[[_Column, str], str | None],
    ask: Callable[[str], Sequence[object]],
) -> KeyRange:
    """*part* of *table*, its values as cuts have them.

    :param text: the text of a cut for a value; ``None``: it is none.
    :param ask: the rows that the server gives for a statement.
    :raises InvalidRange: a value is none of its column's type, or the range ends before it begins.
    """
    start, end = (None if cut is None else _printed(table, cut, key, text) for cut in (part.start, part.end))
    if start is not None and end is not None:
        count = min(len(start.values), len(end.values))  # a cut without a column's value lies before or after them all
        begins = ", ".join(
            f"{column.literal(value)} AS {column.sql}" for value, column in zip(start.values[:count], key, strict=False)
        )
        is_before = condition(KeyRange(end=Cut(end.values[:count], after=True)), key)
        if not ask(f"SELECT 1 AS found FROM (SELECT {begins}) AS begins WHERE {is_before}"):
            raise InvalidRange(
                f"The range of keys of {table.full_name} ends before it begins.",
                next_step="Name the smaller key first.",
            )
    return KeyRange(start, end)


def _printed(table: SourceTable, cut: Cut, key: Sequence[_Column], text: Callable[[_Column, str], str | None]) -> Cut:
    if len(cut.values) > len(key):
        raise InvalidRange(
            f"The key of {table.full_name} has {len(key)} columns; received {len(cut.values)} values.",
            next_step=f"Give a value for each of {', '.join(column.name for column in key)}, in this order.",
        )
    values = []
    for value, column in zip(cut.values, key, strict=False):
        found = text(column, value)
        if found is None:
            raise InvalidRange(
                f"Key column {column.name!r} of {table.full_name} is of type {column.type_text}; a value is not.",
                next_step=f"Write it as the server reads {column.type_text}.",
            )
        values.append(found)
    return Cut(tuple(values), cut.after)
