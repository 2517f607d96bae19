"""Partitions: rows in files of their own by the values of some columns, as Delta tables have them. Pure.

``partition_by`` has names of columns, or a part of a date or of a moment, for which a column is added:

====================  =======================  ======================================
written               the column               its values
====================  =======================  ======================================
``country``           ``country``              those of the column; of text '' is null
``year(ordered)``     ``ordered_year``         2024
``month(ordered)``    ``ordered_month``        the text 2024-05
``day(ordered)``      ``ordered_day``          the date 2024-05-31
====================  =======================  ======================================

A moment with a zone counts in UTC; one before year 1 or after 9999 is null in the added column. A file does not have
the columns by which it is parted: the log of the table tells their values, as texts (``null`` is no text).
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.sinks.errors import SinkInputError, SinkSchemaError
from headwater.sinks.keys import KeySet

Values = Mapping[str, str | None]
"""Of one partition: by column its value as a text."""

PartitionBy = tuple[str, ...] | Mapping[str, tuple[str, ...]]
"""The option ``partition_by``: of every table, or by the name of the table."""

_PART = re.compile(r"(?:(year|month|day)\(([^()]+)\)|([^()]+))")
_WALL = pa.timestamp("us")
_FIRST_DAY, _LAST_DAY = dt.date.min, dt.date.max
_TYPES: Final[Mapping[str, pa.DataType]] = {"year": pa.int32(), "month": pa.string(), "day": pa.date32()}


def partition_texts(by: PartitionBy, table: str) -> tuple[str, ...]:
    """What *by* says of the table with this name."""
    return by.get(table, ()) if isinstance(by, Mapping) else by


@dataclass(frozen=True, slots=True)
class PartitionColumn:
    """One column by which rows are parted.

    :ivar column: where its values come from. :ivar unit: ``year``, ``month``, ``day``, or nothing: it is *column*.
    """

    column: str
    unit: str | None = None

    @property
    def name(self) -> str:
        return f"{self.column}_{self.unit}" if self.unit else self.column

    @classmethod
    def parse(cls, text: str) -> Self:
        """:raises SinkInputError: it is not written as above."""
        found = _PART.fullmatch(text.strip())
        if found is None:
            raise SinkInputError(
                f"Received {text!r} in partition_by; valid are a column, year(column), month(column), day(column).",
                next_step="Correct it in the configuration of the sink.",
            )
        return cls(found[2] or found[3], found[1])

    def of(self, rows: pa.Table) -> Any:
        """Its values in *rows*."""
        values = rows.column(self.column)
        if pt.is_string(values.type):
            return pc.if_else(pc.equal(values, ""), None, values)
        if not (pt.is_date(values.type) or pt.is_timestamp(values.type)):
            return values
        days = values.cast(_WALL if pt.is_timestamp(values.type) else pa.date32()).cast(pa.date32())
        is_far = pc.or_(pc.less(days, _FIRST_DAY), pc.greater(days, _LAST_DAY))
        if self.unit is None:
            if pc.any(is_far).as_py():
                raise SinkInputError(
                    f"The column {self.column!r} has a time before year 1 or after 9999, which no partition can have.",
                    next_step=f"Partition by day({self.column}): such rows are in the partition of null then.",
                )
            return values
        days = pc.if_else(is_far, None, days)
        if self.unit == "day":
            return days
        if self.unit == "year":
            return pc.year(days).cast(pa.int32())
        return pc.utf8_slice_codeunits(days.cast(pa.string()), 0, -3)


@dataclass(frozen=True, slots=True)
class Partitioning:
    """The columns by which the rows of a table are parted; none: they are not."""

    columns: tuple[PartitionColumn, ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str], *more: str) -> Self:
        """:param more: names of further columns. :raises SinkInputError: not as above, or one twice."""
        made = [PartitionColumn.parse(text) for text in texts] + [PartitionColumn(name) for name in more]
        names = [one.name for one in made]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise SinkInputError(f"The column {twice!r} is in partition_by twice.", next_step="Leave one of them out.")
        return cls(tuple(made))

    def __bool__(self) -> bool:
        return bool(self.columns)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.columns]

    def added(self, table: str, schema: pa.Schema) -> pa.Schema:
        """*schema* with the columns that are made of others. :raises SinkSchemaError: its columns do not go with it."""
        for one in self.columns:
            place = schema.get_field_index(one.column)
            kind = schema.field(place).type if place >= 0 else None
            if kind is None or not _can_part(kind, one.unit):
                problem = "which it does not have" if kind is None else f"which is {kind}"
                raise SinkSchemaError(
                    table,
                    f"it is partitioned by {one.column!r}, {problem}.",
                    next_step="Say in partition_by by which columns each table is partitioned: docs/sinks.md",
                )
            if one.unit and one.name in schema.names:
                raise SinkSchemaError(
                    table,
                    f"it has a column {one.name!r}, which partition_by would add.",
                    next_step="Partition it by another column.",
                )
        made = [pa.field(one.name, _TYPES[one.unit]) for one in self.columns if one.unit]
        return pa.schema([*schema, *made])

    def stored(self, schema: pa.Schema) -> pa.Schema:
        """The columns of *schema* that files have."""
        names = set(self.names)
        return pa.schema([field for field in schema if field.name not in names])

    def split(self, rows: pa.Table) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
        """*rows* by partition, each with the columns that files have, in their order."""
        stored = rows.select([name for name in rows.schema.names if name not in set(self.names)])
        if not self.columns:
            yield {}, stored
            return
        if not rows.num_rows:
            return
        values = pa.table([one.of(rows) for one in self.columns], self.names)
        keys = KeySet(values, self.names)
        order = np.argsort(keys.ids, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(keys.ids[order]) != 0, True)) + 1
        texts = [value_texts(values.column(name).take(pa.array(order[ends - 1]))) for name in self.names]
        ordered = stored.take(pa.array(order)) if ends.size > 1 else stored
        start = 0
        for place, end in enumerate(ends.tolist()):
            yield (
                {name: told[place] for name, told in zip(self.names, texts, strict=True)},
                ordered.slice(start, end - start),
            )
            start = end


NOT_PARTED: Final = Partitioning()


def with_values(rows: pa.Table, values: Values, schema: pa.Schema) -> pa.Table:
    """*rows* of a file with those columns of its partition that *schema* has."""
    for name, text in values.items():
        place = schema.get_field_index(name)
        if place >= 0:
            field = schema.field(place)
            column = pa.repeat(_value(text, field.type), rows.num_rows)
            there = rows.schema.get_field_index(name)
            rows = rows.append_column(field, column) if there < 0 else rows.set_column(there, field, column)
    return rows


def _can_part(kind: pa.DataType, unit: str | None) -> bool:
    if unit is not None:
        return bool(pt.is_date(kind) or pt.is_timestamp(kind))
    valid = (pt.is_boolean, pt.is_signed_integer, pt.is_string, pt.is_date, pt.is_timestamp, pt.is_decimal)
    return any(is_one(kind) for is_one in valid)


def value_texts(values: Any) -> list[str | None]:
    """Values of a column as the log of a table has them."""
    if pt.is_timestamp(values.type):
        values = values.cast(_WALL)
    found: list[str | None] = values.cast(pa.string()).to_pylist()
    return found


def _value(text: str | None, kind: pa.DataType) -> Any:
    if text is None:
        return pa.scalar(None, kind)
    if pt.is_timestamp(kind):
        return pa.scalar(text).cast(_WALL).cast(pa.int64()).cast(kind)
    return pa.scalar(text).cast(kind)
