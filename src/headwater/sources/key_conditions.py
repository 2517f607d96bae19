"""What the rows between two cuts fulfil, as SQL. Pure.

A comparison of several columns is written out: one server compares no rows, another uses no index for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headwater.sources.errors import SnapshotExpired
from headwater.sources.splits import Cut, KeyRange


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
