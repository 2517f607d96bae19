"""How a captured table follows the changes of its source's columns. Pure.

Columns are told apart by their field id, so a rename is a rename. The captured table only grows: a column that the
source dropped stays, and is null from then on; a column that comes is added at the end. A type may become wider, never
another one: the source rewrites such a table without telling its rows, so only a new snapshot helps. Text is another
type than a number, too: tables at a sink do not change from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import pyarrow as pa

from headwater.sources.errors import RereadNeeded, SchemaStopped
from headwater.sources.events import SchemaChanged
from headwater.sources.table import SourceColumn, SourceTable


class SchemaPolicy(Enum):
    """What happens when a table's columns change."""

    EVOLVE = "evolve"  # the log takes the new columns; nothing that was there is removed
    IGNORE = "ignore"  # the log keeps its columns; new ones are left out, dropped ones are null
    STOP = "stop"  # the capture stops before the change, and nothing is lost


@dataclass(frozen=True, slots=True)
class Projection:
    """How rows as the source tells them become rows of the captured table.

    :ivar table: the captured table.
    :ivar places: for each of its columns, the place in the source's rows; ``None`` where the source has it no longer.
    """

    table: SourceTable
    places: tuple[int | None, ...]

    def apply(self, columns: Sequence[pa.Array], rows: int) -> list[pa.Array]:
        """The columns of the captured table.

        :raises SchemaStopped: a value of a type that became wider does not fit the captured one.
        """
        made = []
        for column, place in zip(self.table.columns, self.places, strict=True):
            if place is None:
                made.append(pa.nulls(rows, column.type))
            elif columns[place].type != column.type:
                made.append(self._narrowed(columns[place], column))
            else:
                made.append(columns[place])
        return made

    def _narrowed(self, values: pa.Array, column: SourceColumn) -> pa.Array:
        try:
            return values.cast(column.type)
        except pa.ArrowInvalid:  # whose text shows the value
            raise SchemaStopped(
                self.table.full_name,
                f"column {column.name!r} holds values that its captured type {column.type} does not.",
                next_step="Set schema_policy to evolve, in pipeline.toml ([source]) or with --schema-policy, and"
                f" restart; then run: headwater resnapshot {self.table.full_name}",
            ) from None


def as_narrow(known: SourceTable, told: SourceTable) -> SourceTable:
    """*known* with the types of *told*, where those are narrower: it is told as it was before it was made wider."""
    types = {column.field_id: column for column in told.columns}

    def narrowed(column: SourceColumn) -> SourceColumn:
        found = types.get(column.field_id, column)
        if found.type == column.type or not is_wider(found.type, column.type):
            return column
        if is_text(column.type) and not pa.types.is_integer(found.type):
            return column  # not every text is the same as the source's
        return replace(column, type=found.type, source_type=found.source_type)

    return replace(known, columns=tuple(narrowed(column) for column in known.columns))


def follow(
    known: SourceTable, now: SourceTable, policy: SchemaPolicy, defaults: pa.RecordBatch | None = None
) -> tuple[Projection, SchemaChanged | None]:
    """What *known*, the captured table, becomes when the source's table is *now*.

    :param defaults: one row: the values that older rows have in columns that are new, where they are not null.
    :raises SchemaStopped: it cannot go on by itself, or the policy says stop.
    """
    grown, change = _grown(known, now, defaults)
    if change is None:
        return _projection(grown, now), None
    if policy is SchemaPolicy.STOP:
        raise SchemaStopped(
            known.full_name,
            told(change),
            next_step="Set schema_policy to evolve or ignore, in pipeline.toml ([source]) or with --schema-policy: the"
            " capture resumes before the change. Then run: headwater run",
        )
    if policy is SchemaPolicy.IGNORE:
        return _projection(known, now), None
    return _projection(grown, now), change


def _grown(
    known: SourceTable, now: SourceTable, defaults: pa.RecordBatch | None
) -> tuple[SourceTable, SchemaChanged | None]:
    if now.source_id != known.source_id:
        raise RereadNeeded(known.full_name, "it was dropped and created again.")
    current = {column.field_id: column for column in now.columns}
    old = {column.field_id for column in known.columns}
    columns: list[SourceColumn] = []
    dropped, renamed, retyped, revived = [], [], [], []
    for column in known.columns:
        found = current.get(column.field_id)
        if found is None:
            if not column.dropped:
                dropped.append(column.name)
            columns.append(replace(column, dropped=True))
            continue
        if found.name != column.name:
            renamed.append((column.name, found.name))
        if found.type != column.type:
            if not is_wider(column.type, found.type) or is_text(found.type) != is_text(column.type):
                what = f"column {found.name!r} changed from {column.source_type} to {found.source_type}."
                raise RereadNeeded(known.full_name, what)
            retyped.append(found.name)
        if column.dropped:
            revived.append(found.name)
        columns.append(found)
    added = [column for column in now.columns if column.field_id not in old]
    names = {column.name for column in (*columns, *added) if not column.dropped}
    columns = [replace(column, name=_free(column, names)) if column.dropped else column for column in columns]
    key = _key_after(known, now)
    grown = SourceTable(known.namespace, known.name, (*columns, *added), key, now.source_id)
    if not (dropped or renamed or retyped or revived or added):
        return grown, None
    return grown, SchemaChanged(
        known,
        grown,
        added=(*revived, *(column.name for column in added)),
        dropped=tuple(dropped),
        renamed=tuple(renamed),
        retyped=tuple(retyped),
        defaults=_of(defaults, added),
    )


def _of(defaults: pa.RecordBatch | None, added: Sequence[SourceColumn]) -> pa.RecordBatch | None:
    if defaults is None:
        return None
    chosen = defaults.select([column.name for column in added if column.name in defaults.schema.names])
    return chosen if chosen.num_columns else None


def _free(column: SourceColumn, taken: set[str]) -> str:
    """The name of a dropped column, changed when a new column has it by now."""
    return f"{column.name}__dropped_{column.field_id}" if column.name in taken else column.name


def _key_after(known: SourceTable, now: SourceTable) -> tuple[str, ...]:
    """:raises RereadNeeded: the key has other columns than before."""
    before = [known.column(name).field_id for name in known.key_columns]
    after = [now.column(name).field_id for name in now.key_columns]
    if before != after or any(
        known.columns[place].type != now.column(name).type
        for place, name in zip(known.key_places, now.key_columns, strict=True)
    ):
        raise RereadNeeded(known.full_name, "its key changed.")
    return now.key_columns


def _projection(table: SourceTable, now: SourceTable) -> Projection:
    places = {column.field_id: place for place, column in enumerate(now.columns)}
    return Projection(table, tuple(places.get(column.field_id) for column in table.columns))


def is_wider(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether every value of *old* has its equal in *new*."""
    if is_text(new):
        return True
    if pa.types.is_integer(old) and pa.types.is_integer(new):
        if pa.types.is_signed_integer(old) == pa.types.is_signed_integer(new):
            return bool(new.bit_width >= old.bit_width)
        return bool(pa.types.is_signed_integer(new) and new.bit_width > old.bit_width)
    if pa.types.is_floating(old) and pa.types.is_floating(new):
        return bool(new.bit_width >= old.bit_width)
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale)
    if pa.types.is_integer(old) and pa.types.is_decimal(new):
        unsigned = pa.types.is_unsigned_integer(old) and old.bit_width == 64
        return bool(new.precision - new.scale >= _DIGITS[old.bit_width] + unsigned)
    return False


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}


def told(change: SchemaChanged) -> str:
    """A change for a person."""
    parts = [
        f"added {', '.join(change.added)}" if change.added else "",
        f"dropped {', '.join(change.dropped)}" if change.dropped else "",
        f"renamed {', '.join(f'{old} to {new}' for old, new in change.renamed)}" if change.renamed else "",
        f"retyped {', '.join(change.retyped)}" if change.retyped else "",
    ]
    return "; ".join(part for part in parts if part) + "."
