"""How the columns of a table at a sink follow those of its source. Pure.

**Mapping** (:class:`ColumnMapping`): the columns of the source under the names that the sink has for them.

================  ==================================================================================================
policy            what a column becomes at the sink
================  ==================================================================================================
on_drop keep      it stays, null from then on
on_drop drop      it is removed; the table is rewritten
on_rename copy    a new column with the old values; the old one is as one that was dropped
on_rename keep    it keeps the name that it has there
================  ==================================================================================================

**Evolution**: a column that the sink lacks is added at the end. A column that the source does not have any longer
stays, and is null from then on, or is removed, and the table is rewritten. A column that was renamed, which its field
id shows, is a new one: a mirror has the old values there, too, and is rewritten for it. A type may become wider: the
table is rewritten. A name may become that of another column: values are matched by the field id. Any other change of a
type is refused in a mirror, but for one that is emptied; where earlier rows stay, their column becomes
``<name>_before``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, count
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.sink import Mode
from headwater.sinks.types import sink_type
from headwater.sources.table import FIELD_ID, UNAVAILABLE_COLUMN, SourceTable


@dataclass(frozen=True, slots=True)
class Evolution:
    """What becomes of a table's columns.

    :ivar schema: its columns afterwards. :ivar added: those that are new.
    :ivar renamed: of columns that had another name that name; ``None``: what had their name was another column.
    :ivar dropped: names that go.
    :ivar must_rewrite: the files that the table has are not as they must be.
    """

    schema: pa.Schema
    added: tuple[pa.Field, ...]
    renamed: Mapping[str, str | None]
    must_rewrite: bool
    dropped: tuple[str, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether a batch without rows has to be committed for them."""
        return self.must_rewrite


def evolve(
    table: str,
    existing: pa.Schema,
    wanted: pa.Schema,
    mode: Mode,
    *,
    copies: bool = False,
    drops: bool = False,
    emptied: bool = False,
) -> Evolution:
    """How *existing* takes the rows of *wanted*.

    :param mode: values of columns that were renamed are copied, but for those of changes. :param copies: … those, too.
    :param drops: columns that the source had go.
    :param emptied: no row of before counts any more, nor do the field ids of then.
    :raises SinkSchemaError: it cannot.
    """
    fields: list[pa.Field] = []
    before: list[pa.Field] = []
    sources: dict[str, str | None] = {}
    must_rewrite, by_name = False, emptied or mode is Mode.CHANGES
    for column in existing:
        place = wanted.get_field_index(column.name)
        new = column if place < 0 else wanted.field(place)
        is_other = not by_name and _is_other(column, new)
        is_ours = FIELD_ID in (column.metadata or {})
        is_narrower = is_ours and mode is not Mode.MIRROR and not holds(new.type, column.type)
        if emptied and mode is Mode.MIRROR and is_ours:
            must_rewrite |= new.type != column.type or _is_other(column, new)
            fields.append(new if place >= 0 else column.remove_metadata())
        elif not is_other and not is_narrower and holds(column.type, new.type):
            fields.append(column)
        elif not is_other and holds(new.type, column.type):
            fields.append(new)
            must_rewrite = True
        elif is_other or mode is not Mode.MIRROR:
            fields.append(new)
            sources[new.name] = None
            must_rewrite = True
            if mode is not Mode.MIRROR and (not is_other or _place(wanted, column) is None):
                kept = pa.field(free_name(column.name, {*existing.names, *wanted.names}), column.type)
                before.append(kept)
                sources[kept.name] = column.name
        else:
            raise SinkSchemaError(
                table,
                f"column {column.name!r} is {column.type} there and became {new.type}.",
                next_step="The table must be emptied there and read again.",
            )
    known = {name.lower() for name in existing.names}
    added = tuple(field for field in wanted if field.name not in existing.names)
    clash = next((field.name for field in added if field.name.lower() in known), None)
    if clash is not None:
        raise SinkSchemaError(
            table,
            f"column {clash!r} differs from one that is there in upper and lower case only.",
            next_step="Deliver it to another directory.",
        )
    if not emptied and (mode is not Mode.CHANGES or copies or drops):
        sources |= _renamed(existing, wanted, {field.name for field in added} | sources.keys(), by_name=by_name)
    gone = [one for one in existing if one.name not in wanted.names and FIELD_ID in (one.metadata or {})]
    dropped = tuple(one.name for one in gone) if drops else ()
    schema = pa.schema([field for field in (*fields, *before, *added) if field.name not in dropped])
    must_rewrite |= bool(sources) or bool(dropped)
    return Evolution(schema, (*before, *added), sources, must_rewrite, dropped)


def _renamed(existing: pa.Schema, wanted: pa.Schema, names: Iterable[str], *, by_name: bool) -> dict[str, str]:
    """Of the columns *names* of *wanted* those that *existing* has under another name."""
    there = {
        _field_id(field): field
        for field in existing
        if field.name not in wanted.names or (not by_name and _is_other(field, wanted.field(field.name)))
    }
    pairs = [(wanted.field(name), there.get(_field_id(wanted.field(name)))) for name in names if name in wanted.names]
    return {field.name: old.name for field, old in pairs if old is not None and holds(field.type, old.type)}


def _is_other(field: pa.Field, new: pa.Field) -> bool:
    """Whether the name of *field* is that of another column now."""
    return all(FIELD_ID in (one.metadata or {}) for one in (field, new)) and _field_id(field) != _field_id(new)


def _place(wanted: pa.Schema, field: pa.Field) -> int | None:
    """Where the column of *field* is among those of *wanted*, whatever its name is there."""
    return next((place for place, one in enumerate(wanted) if _field_id(one) == _field_id(field)), None)


def free_name(name: str, taken: set[str]) -> str:
    """A name for a column from before whose own name is that of another one now."""
    lower = {one.lower() for one in taken}
    names = chain([f"{name}_before"], (f"{name}_before_{number}" for number in count(2)))
    return next(one for one in names if one.lower() not in lower)


def _field_id(field: pa.Field) -> bytes:
    return bytes((field.metadata or {}).get(FIELD_ID, field.name.encode() + b" has none"))


def holds(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether every value of *other* is one of *kind*."""
    if kind == other:
        return True
    if pt.is_signed_integer(kind) and pt.is_signed_integer(other):
        return bool(kind.bit_width >= other.bit_width)
    if pt.is_decimal(kind) and pt.is_decimal(other):
        return bool(kind.scale >= other.scale and kind.precision - kind.scale >= other.precision - other.scale)
    if pt.is_decimal(kind) and pt.is_signed_integer(other):
        return bool(kind.precision - kind.scale >= {8: 3, 16: 5, 32: 10, 64: 19}[other.bit_width])
    if pt.is_float64(kind):
        return bool(pt.is_float32(other) or (pt.is_signed_integer(other) and other.bit_width <= 32))
    if pt.is_list(kind) and pt.is_list(other):
        return holds(kind.value_type, other.value_type)
    if pt.is_struct(kind) and pt.is_struct(other):
        return kind.names == other.names and all(
            holds(mine.type, theirs.type) for mine, theirs in zip(kind, other, strict=True)
        )
    return bool(
        pt.is_map(kind)
        and pt.is_map(other)
        and holds(kind.key_type, other.key_type)
        and holds(kind.item_type, other.item_type)
    )


class DropPolicy(Enum):
    """What becomes of a column that the source dropped."""

    KEEP = "keep"
    DROP = "drop"


class RenamePolicy(Enum):
    """What becomes of a column that the source gave another name."""

    COPY = "copy"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """How rows of a source's table become rows of the sink's.

    :ivar table: as the sink has it. :ivar names: of columns that have another name there, by that of the source.
    """

    table: SourceTable
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, table: SourceTable, existing: pa.Schema | None, on_drop: DropPolicy, on_rename: RenamePolicy) -> Self:
        """:param existing: the columns that the sink has; nothing where it has no table."""
        columns = table.columns
        if on_drop is DropPolicy.DROP:
            columns = tuple(one for one in columns if not one.dropped or one.name in table.key_columns)
        names: dict[str, str] = {}
        if on_rename is RenamePolicy.KEEP and existing is not None:
            names = _kept(table, existing)
            columns = tuple(replace(one, name=names.get(one.name, one.name)) for one in columns)
        if columns == table.columns:
            return cls(table)
        keys = tuple(names.get(name, name) for name in table.key_columns)
        return cls(replace(table, columns=columns, key_columns=keys), names)

    def batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the source, of a log or of history, under the names of the sink."""
        if not self.names:
            return batch
        fields = [one.with_name(self.names.get(one.name, one.name)) for one in batch.schema]
        arrays = [
            self._unavailable(column) if one.name == UNAVAILABLE_COLUMN else column
            for one, column in zip(fields, batch.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def _unavailable(self, texts: Any) -> Any:
        for name, there in self.names.items():
            wrapped = pc.binary_join_element_wise("", texts, "", ",")
            named = pc.replace_substring(wrapped, f",{name},", f",{there},", max_replacements=1)
            texts = pc.utf8_slice_codeunits(named, 1, -1)
        return texts


def _kept(table: SourceTable, existing: pa.Schema) -> dict[str, str]:
    """The columns of *table* that *existing* has under another name."""
    names = {one.name for one in table.columns}
    there = {
        bytes((one.metadata or {})[FIELD_ID]): one
        for one in existing
        if FIELD_ID in (one.metadata or {}) and one.name not in names
    }
    found: dict[str, str] = {}
    for one in table.columns:
        other = there.get(str(one.field_id).encode())
        kind = sink_type(one.type)
        if other is None or one.name in existing.names or kind is None:
            continue
        if holds(other.type, kind) or holds(kind, other.type):
            found[one.name] = other.name
    return found
