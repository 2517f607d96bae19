"""Ranges of keys as SQL: what the rows between two cuts fulfil, and what a range that a person names is. Pure.

A comparison of several columns is written out: one server compares no rows, another uses no index for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from headwater.sources.errors import InvalidRange, SnapshotExpired
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceTable


class ComparedColumn(Protocol):
    """A column of a key, as a statement has it."""

    @property
    def sql(self) -> str:
        """Its name."""
        ...

    def literal(self, text: str) -> str:
        """The value whose text is *text*. :raises SnapshotExpired: it is none of its type."""
        ...


def condition(part: KeyRange, key: Sequence[ComparedColumn]) -> str:
    """What the rows of *part* fulfil; empty where all do."""
    made = []
    if part.start is not None:
        made.append(_compared(part.start, True, key))
    if part.end is not None:
        made.append(_compared(part.end, False, key))
    return " AND ".join(made)


def where(part: KeyRange, key: Sequence[ComparedColumn]) -> str:
    """:func:`condition` with its word."""
    made = condition(part, key)
    return f" WHERE {made}" if made else ""


def _compared(cut: Cut, above: bool, key: Sequence[ComparedColumn]) -> str:
    """``key >= cut`` (*above*) or ``key < cut``; with a cut after its values ``>`` and ``<=``.

    The first part is for the index.
    """
    columns = key[: len(cut.values)]
    values = [column.literal(value) for value, column in zip(cut.values, columns, strict=True)]
    names = [column.sql for column in columns]
    operator = (">" if cut.after else ">=") if above else ("<=" if cut.after else "<")
    if len(columns) == 1:
        return f"{names[0]} {operator} {values[0]}"
    strict = operator[0]
    cases = []
    for place in range(len(columns)):
        equal = [f"{names[before]} = {values[before]}" for before in range(place)]
        last = place == len(columns) - 1
        cases.append(" AND ".join([*equal, f"{names[place]} {operator if last else strict} {values[place]}"]))
    return f"({names[0]} {strict}= {values[0]} AND ({' OR '.join(f'({case})' for case in cases)}))"


def no_value(column: str) -> SnapshotExpired:
    """A cut has a text that its column cannot have."""
    return SnapshotExpired(
        f"A cut has a text for key column {column!r} that is no value of its type: the type was changed.",
        next_step="Take a new snapshot.",
    )


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
    """*part* of *table* as a person named it, its values as cuts have them.

    A person writes keys as she likes (``+5``, the label of an enum, a date without its time); cuts have the texts of
    the source. What the server cannot read is rejected before anything is planned with it.

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
