"""SqlTable: what a table of a query is in a database, and how its columns follow those of the source. Pure.

======================  =============================================================================================
a column at the source  at the sink
======================  =============================================================================================
added                   added at the end, null in older rows
wider type              the column gets it
renamed                 ``copy``: a new column with the old values, the old one stays; ``rename``: renamed
dropped                 ``keep``: stays, null in new rows; ``drop``: dropped, if we made it
any other type          refused
======================  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import pyarrow as pa

from headwater.sinks.change_rows import CHANGE_TYPE, COMMIT_VERSION, changes_schema
from headwater.sinks.errors import SinkInputError, SinkSchemaError
from headwater.sinks.fold import DELETED
from headwater.sinks.sink import Mode
from headwater.sinks.table_schema import free_name
from headwater.sinks.types import sink_schema
from headwater.sinks.versions import ADDED_NAMES, CLOSES, versions_schema
from headwater.sources.table import FIELD_ID, SOURCE_TYPE, SPECIAL_VALUES, SourceTable, SpecialValues

OnRename = Literal["copy", "rename"]
OnDrop = Literal["keep", "drop"]
TypeOf = Callable[[pa.Field, pa.DataType | None], str]
"""The type in SQL of a field of a sink, given the source's type where it has one."""

_TAKEN: Final = {
    Mode.MIRROR: frozenset((DELETED,)),
    Mode.CHANGES: frozenset((CHANGE_TYPE, COMMIT_VERSION)),
    Mode.HISTORY: ADDED_NAMES | {DELETED, CLOSES},
}
POSTGRES_NAME_BYTES: Final = 63
MYSQL_NAME_CHARACTERS: Final = 64

_PASSING: Final = "_headwater_"


@dataclass(frozen=True, slots=True)
class SqlColumn:
    """A column as it is to be.

    :ivar type: in SQL. :ivar field: in the types of :mod:`headwater.sinks.types`. :ivar field_id: the source's.
    """

    name: str
    type: str
    field: pa.Field
    field_id: int | None = None


@dataclass(frozen=True, slots=True)
class SqlTable:
    """A table as it is to be.

    :ivar place: schema (database) and name. :ivar columns: all of them, those that the mode adds last.
    :ivar own: the source's columns. :ivar is_whole: the key is the whole row, and may be null: there is no primary key.
    """

    source: SourceTable
    place: tuple[str, str]
    columns: tuple[SqlColumn, ...]
    own: pa.Schema
    mode: Mode
    is_whole: bool
    type_of: TypeOf = field(repr=False, compare=False)

    @classmethod
    def of(cls, table: SourceTable, place: tuple[str, str], mode: Mode, type_of: TypeOf, on_drop: OnDrop) -> SqlTable:
        """:raises SinkSchemaError: it cannot be there."""
        gone = {one.name for one in table.columns if one.dropped and on_drop == "drop"}.difference(table.key_columns)
        own = pa.schema([one for one in sink_schema(table) if one.name not in gone])
        clash = next((name for name in own.names if name in _TAKEN[mode]), None)
        if clash is not None:
            raise SinkSchemaError(
                table.full_name,
                f"its column {clash!r} is one that this mode adds.",
                next_step="Rename the column, or leave it out of the capture.",
            )
        shape = {Mode.MIRROR: pa.schema, Mode.CHANGES: changes_schema, Mode.HISTORY: versions_schema}[mode](own)
        columns = columns_of(shape, table, type_of)
        return cls(table, place, columns, own, mode, is_whole(table), type_of)

    @property
    def name(self) -> str:
        """``schema.table`` for people and for the tokens."""
        return place_name(self.place)

    @property
    def key(self) -> tuple[str, ...]:
        return self.source.key_columns

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def column(self, name: str) -> SqlColumn:
        return next(column for column in self.columns if column.name == name)

    def staged(self, schema: pa.Schema) -> tuple[SqlColumn, ...]:
        """The columns of a relation with rows of *schema*."""
        return columns_of(schema, self.source, self.type_of)


def named_type(field: pa.Field) -> str:
    """What the type of a column is called at the source; nothing where it is text for its special values."""
    metadata = field.metadata or {}
    is_text = metadata.get(SPECIAL_VALUES, b"").decode() == SpecialValues.TEXT.value
    return "" if is_text else metadata.get(SOURCE_TYPE, b"").decode()


def is_whole(table: SourceTable) -> bool:
    """Whether the key is all there is: such rows have no key at the source, and may have nulls in it."""
    return set(table.key_columns) >= {one.name for one in table.columns if not one.dropped}


def columns_of(schema: pa.Schema, table: SourceTable, type_of: TypeOf) -> tuple[SqlColumn, ...]:
    """*schema*, of rows of *table*, as columns."""
    kinds = {column.name: column.type for column in table.columns}
    made = []
    for one in schema:
        number = (one.metadata or {}).get(FIELD_ID)
        kind = type_of(one, kinds.get(one.name))
        made.append(SqlColumn(one.name, kind, one, None if number is None else int(number)))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class ExistingColumn:
    """A column that is there. :ivar field_id: that it was made for, if we made it."""

    name: str
    type: str
    field_id: int | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """What becomes of the columns of a table that is there.

    :ivar removed: names that go before anything else. :ivar renamed: old and new names, one step after the other.
    :ivar filled: new columns, and the old ones whose values they take.
    :ivar widened: columns that get another type; in a table without rows any other.
    """

    added: tuple[SqlColumn, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    filled: tuple[tuple[str, str], ...] = ()
    widened: tuple[SqlColumn, ...] = ()
    dropped: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def are_none(self) -> bool:
        return not (self.added or self.renamed or self.widened or self.dropped or self.removed)


def steps(
    wanted: SqlTable,
    existing: Sequence[ExistingColumn],
    holds: Callable[[str, str], bool],
    on_rename: OnRename,
    on_drop: OnDrop,
    *,
    emptied: bool = False,
) -> Steps:
    """How *existing* becomes *wanted*.

    :param holds: whether every value of the second type is one of the first.
    :param emptied: no row of before counts any more, nor do the field ids of then.
    :raises SinkSchemaError: it cannot.
    """
    removed: tuple[str, ...] = ()
    renamed: list[tuple[str, str]] = []
    if not emptied and wanted.mode is not Mode.CHANGES:
        removed, moved = _moved(wanted, existing)
        renamed = _in_turn(moved, existing)
        existing = [replace(one, name=moved.get(one.name, one.name)) for one in existing if one.name not in removed]
    known = {column.name: column for column in existing}
    gone = {
        column.field_id: column
        for column in existing
        if column.field_id is not None and column.name not in wanted.names and not emptied
    }
    added, filled, widened = [], [], []
    for column in wanted.columns:
        there = known.get(column.name)
        is_known = there is not None and (there.field_id is not None or column.field_id is None)
        old = None if is_known or column.field_id is None else gone.get(column.field_id)
        is_key = wanted.mode is not Mode.CHANGES and column.name in wanted.key  # its index goes with it
        if old is not None and there is None and (on_rename == "rename" or is_key):
            there = gone.pop(column.field_id)  # type: ignore[arg-type]
            renamed.append((old.name, column.name))
        elif old is not None and wanted.mode is not Mode.CHANGES and holds(column.type, old.type):
            filled.append((column.name, old.name))
        if there is None:
            _check_case(wanted, column, known)
            added.append(column)
        elif emptied and wanted.mode is Mode.MIRROR and there.field_id is not None:
            widened += [] if there.type == column.type else [column]
        elif holds(column.type, there.type):
            widened += [] if holds(there.type, column.type) else [column]
        elif holds(there.type, column.type) and (wanted.mode is Mode.MIRROR or there.field_id is None):
            continue
        elif wanted.mode is not Mode.MIRROR:
            renamed.append((column.name, free_name(column.name, {*known, *wanted.names})))
            added.append(column)
        else:
            raise SinkSchemaError(
                wanted.source.full_name,
                f"column {column.name!r} is {there.type} in {wanted.name} and became {column.type}.",
                next_step="The table must be emptied there and read again.",
            )
    kept = {column.field_id for column in wanted.columns}
    dropped = [column.name for column in gone.values() if column.field_id not in kept] if on_drop == "drop" else []
    return Steps(*(tuple(found) for found in (added, renamed, filled, widened, dropped, removed)))  # type: ignore[arg-type]


def _moved(wanted: SqlTable, existing: Sequence[ExistingColumn]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The columns whose name is that of another one now: those that go, and the new names of the others."""
    there = {column.field_id: column for column in existing if column.field_id is not None}
    named = {column.field_id: column.name for column in wanted.columns if column.field_id is not None}
    by_name = {column.name: column for column in existing}
    removed: list[str] = []
    moved: dict[str, str] = {}
    for column in wanted.columns:
        old = by_name.get(column.name)
        if old is None or None in (old.field_id, column.field_id) or old.field_id == column.field_id:
            continue
        if old.field_id in named:
            moved[old.name] = named[old.field_id]
        elif wanted.mode is Mode.MIRROR:
            removed.append(old.name)
        else:
            moved[old.name] = free_name(old.name, {*by_name, *wanted.names})
        if column.field_id in there:
            moved[there[column.field_id].name] = column.name
    left = ((one.name, passing_id(one.name)) for one in existing)
    return tuple(removed), moved | {name: named[number] for name, number in left if number in named}


def _in_turn(moved: Mapping[str, str], existing: Sequence[ExistingColumn]) -> list[tuple[str, str]]:
    """Renames that may exchange names, one after the other, by names that tell the field ids."""
    passing = {one.name: f"{_PASSING}{one.field_id}" for one in existing if one.name in moved}
    first = [(old, name) for old, name in passing.items() if old != name]
    return [*first, *((passing[old], new) for old, new in moved.items())]


def passing_id(name: str) -> int | None:
    """The field id of a column that was on its way from one name to another when its process ended."""
    number = name.removeprefix(_PASSING)
    return int(number) if name != number and number.isdigit() else None


def _check_case(wanted: SqlTable, column: SqlColumn, known: dict[str, ExistingColumn]) -> None:
    if column.name.lower() in {name.lower() for name in known}:
        raise SinkSchemaError(
            wanted.source.full_name,
            f"column {column.name!r} differs from one in {wanted.name} in upper and lower case only.",
            next_step="Deliver it to another table.",
        )


def check_table_name(pattern: str) -> None:
    """:raises SinkInputError: not every table would have a name of its own."""
    try:
        first, second = (pattern.format(schema="a", table=name) for name in "bc")
    except (KeyError, IndexError, ValueError):
        first = second = ""
    if first == second:
        raise SinkInputError(
            f"Received table = {pattern!r}; it must have {{table}} in it, and may have {{schema}}.",
            next_step='For example table = "{schema}_{table}".',
        )


def table_name(pattern: str, table: SourceTable) -> str:
    """What *table* is called."""
    return pattern.format(schema=table.namespace, table=table.name)


def place_name(place: tuple[str, str]) -> str:
    """``schema.table``; a schema with a dot is quoted, or its table could be taken for that of another schema."""
    schema, table = place
    if "." in schema or '"' in schema:
        schema = '"' + schema.replace('"', '""') + '"'
    return f"{schema}.{table}"
