"""Filters that run in the database: comparisons of whole numbers with the first column of the key. Pure.

They narrow the ranges that are read, so the statement of each task asks for fewer rows and whole splits fall away.
Spark applies every filter once more: what is read may be more than was asked for, never less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.types as pt

from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceTable
from headwater.spark.data_source_api import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """From *low* up to *high*, both included; ``None``: no bound."""

    low: int | None = None
    high: int | None = None

    def within(self, low: int | None, high: int | None) -> Bounds:
        """The part of it from *low* up to *high*."""
        lows = [bound for bound in (self.low, low) if bound is not None]
        highs = [bound for bound in (self.high, high) if bound is not None]
        return Bounds(max(lows, default=None), min(highs, default=None))


def bounds_for(table: SourceTable, filters: Sequence[Filter]) -> Bounds:
    """What *filters* say about the first key column of *table*, where that is a whole number."""
    column = table.column(table.key_columns[0])
    if not pt.is_integer(column.type):
        return Bounds()
    found, limit = bounds_of(filters, column.name), 1 << (column.type.bit_width - 1)
    low, high = (
        bound if bound is not None and -limit <= bound < limit else None for bound in (found.low, found.high)
    )  # the database would refuse to compare with others
    return Bounds(low, high)


def bounds_of(filters: Sequence[Filter], column: str) -> Bounds:
    """What *filters* say about *column*; those that say something else are passed over."""
    made = Bounds()
    for one in filters:
        if getattr(one, "attribute", None) != (column,):
            continue
        if isinstance(one, In):
            if one.value and all(type(value) is int for value in one.value):
                made = made.within(min(one.value), max(one.value))
            continue
        value = getattr(one, "value", None)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if isinstance(one, EqualTo):
            made = made.within(value, value)
        elif isinstance(one, GreaterThan):
            made = made.within(value + 1, None)
        elif isinstance(one, GreaterThanOrEqual):
            made = made.within(value, None)
        elif isinstance(one, LessThan):
            made = made.within(None, value - 1)
        elif isinstance(one, LessThanOrEqual):
            made = made.within(None, value)
    return made


def narrowed(part: KeyRange, bounds: Bounds) -> KeyRange | None:
    """*part* within *bounds* of the first key column; ``None`` when nothing is left of it."""
    low, high = bounds.low, bounds.high
    try:
        start = None if part.start is None else int(part.start.values[0])
        end = None if part.end is None else int(part.end.values[0])
    except ValueError:  # a key of another type than its column
        return part
    if (
        (low is not None and high is not None and low > high)
        or (high is not None and start is not None and start > high)
        or (low is not None and end is not None and end < low)
    ):
        return None
    first, last = part.start, part.end
    if low is not None and (start is None or start < low):
        first = Cut((str(low),))
    if high is not None and (end is None or end > high):
        last = Cut((str(high),), after=True)
    return KeyRange(first, last)
