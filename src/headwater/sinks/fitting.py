"""Fitting: the columns of a table as its sink has them, where those of the source went or changed their names. Pure.

================  ==================================================================================================
policy            what a column becomes at the sink
================  ==================================================================================================
on_drop keep      it stays, null from then on
on_drop drop      it goes; the table is written anew
on_rename copy    a new column with the old values; the old one is as one that was dropped
on_rename keep    it keeps the name that it has there
================  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from headwater.sinks.table_schema import holds
from headwater.sinks.types import sink_type
from headwater.sources.table import FIELD_ID, UNAVAILABLE_COLUMN, SourceTable


class DropPolicy(Enum):
    """What becomes of a column that the source dropped."""

    KEEP = "keep"
    DROP = "drop"


class RenamePolicy(Enum):
    """What becomes of a column that the source gave another name."""

    COPY = "copy"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Fitting:
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
