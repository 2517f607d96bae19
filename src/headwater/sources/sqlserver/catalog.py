"""Reads tables from the catalog: columns, types, keys in the order of their index.

The key of a table is its primary key, or else the first unique index, by name, whose columns are never null and which
has no filter. A column is known by its ``column_id``, which no other column of the table ever has again, a table by its
``object_id``. Computed columns are left out: change data capture tells null for them, stored or not.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from headwater.sources.errors import SourceNotFound, UnsupportedTable
from headwater.sources.special_values import with_policy
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.names import TableName, literal
from headwater.sources.sqlserver.types import SqlType, Ticks, has_special_values, source_column
from headwater.sources.table import SourceTable, SpecialValues

_NAMES: Final = """
SELECT s.name AS namespace, t.name AS name FROM sys.tables AS t JOIN sys.schemas AS s ON s.schema_id = t.schema_id
WHERE t.is_ms_shipped = 0 AND s.name <> N'cdc' ORDER BY s.name, t.name
"""
_COLUMNS: Final = """
SELECT s.name AS namespace, t.name AS name, t.object_id AS id, t.is_tracked_by_cdc AS tracked,
       t.is_memory_optimized AS in_memory, c.column_id AS column_id, c.name AS column_name,
       COALESCE(b.name, y.name) AS type_name, c.max_length AS max_length, c.precision AS digits, c.scale AS scale,
       c.is_nullable AS nullable, c.is_computed AS computed, c.collation_name AS collation_name,
       d.definition AS default_definition
FROM sys.tables AS t JOIN sys.schemas AS s ON s.schema_id = t.schema_id
JOIN sys.columns AS c ON c.object_id = t.object_id JOIN sys.types AS y ON y.user_type_id = c.user_type_id
LEFT JOIN sys.types AS b ON b.user_type_id = y.system_type_id
LEFT JOIN sys.default_constraints AS d ON d.object_id = c.default_object_id
WHERE {where} ORDER BY s.name, t.name, c.column_id
"""
_KEYS: Final = """
SELECT s.name AS namespace, t.name AS name, i.name AS index_name, i.is_primary_key AS is_primary,
       c.name AS column_name, c.is_nullable AS nullable, c.is_computed AS computed
FROM sys.tables AS t JOIN sys.schemas AS s ON s.schema_id = t.schema_id
JOIN sys.indexes AS i ON i.object_id = t.object_id AND i.is_unique = 1 AND i.has_filter = 0 AND i.is_disabled = 0
JOIN sys.index_columns AS k ON k.object_id = i.object_id AND k.index_id = i.index_id AND k.key_ordinal > 0
JOIN sys.columns AS c ON c.object_id = k.object_id AND c.column_id = k.column_id
WHERE {where} ORDER BY s.name, t.name, i.name, k.key_ordinal
"""
_ROWS: Final = """
SELECT SUM(p.row_count) AS table_rows, SUM(p.used_page_count) * 8192 AS size
FROM sys.dm_db_partition_stats AS p WHERE p.object_id = {id} AND p.index_id IN (0, 1)
"""


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A column of a table.

    :ivar number: its ``column_id``. :ivar default: the expression behind it, as the server writes it.
    """

    number: int
    name: str
    type: SqlType
    nullable: bool
    computed: bool
    collation: str | None
    default: str | None


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table.

    :ivar tracked: change data capture is on for it.
    :ivar key: the columns that name a row, in the order of their index.
    """

    name: TableName
    id: int
    tracked: bool
    in_memory: bool
    columns: tuple[CatalogColumn, ...]
    key: tuple[str, ...]
    key_index: str

    def column(self, name: str) -> CatalogColumn | None:
        return next((column for column in self.columns if column.name == name), None)

    def require_capturable(self) -> None:
        """:raises UnsupportedTable: it has no key, or its changes cannot be captured at all."""
        if self.in_memory:
            raise UnsupportedTable(
                str(self.name),
                "it is memory-optimized, and change data capture does not follow such tables.",
                next_step="Replace it with a table on disk.",
            )
        if not self.key:
            raise UnsupportedTable(
                str(self.name),
                "it has no primary key, and no unique index whose columns are never null.",
                next_step=f"Add one: ALTER TABLE {self.name.sql} ADD PRIMARY KEY (…);",
            )

    def described(
        self, special_values: Mapping[str, SpecialValues] | None = None, ticks: Ticks = Ticks.REFUSE
    ) -> SourceTable:
        """The table as it is captured.

        :param special_values: policies by ``schema.table.column`` or ``schema.table``.
        :raises UnsupportedTable: it cannot be captured.
        """
        self.require_capturable()
        columns = tuple(
            with_policy(
                special_values or {},
                str(self.name),
                column.name,
                partial(source_column, column.name, column.type, column.number, nullable=column.nullable, ticks=ticks),
                has_special_values,
            )
            for column in self.columns
            if not column.computed
        )
        return SourceTable(self.name.namespace, self.name.name, columns, self.key, self.id)


def all_table_names(session: Session) -> list[TableName]:
    """The tables of the database that are not the server's own."""
    return [TableName(row["namespace"], row["name"]) for row in session.ask(_NAMES)]


def read_table(session: Session, name: TableName) -> CatalogTable:
    """One table; see :func:`read_tables`."""
    return read_tables(session, [name])[0]


def read_tables(session: Session, names: Sequence[TableName]) -> list[CatalogTable]:
    """The tables of these names, in their order, as the catalog has them now.

    :raises SourceNotFound: there is none of a name.
    """
    found = present_tables(session, names)
    made = []
    for name in names:
        table = found.get(name)
        if table is None:  # databases mostly take names in any case
            same = [one for one in found.values() if str(one.name).lower() == str(name).lower()]
            if len(same) != 1:
                raise _not_found(session, name)
            table = same[0]
        made.append(table)
    return made


def present_tables(session: Session, names: Sequence[TableName]) -> dict[TableName, CatalogTable]:
    """Those of *names* that are there."""
    if not names:
        return {}
    where = " OR ".join(
        f"(s.name = {literal(name.namespace)} AND t.name = {literal(name.name)})" for name in dict.fromkeys(names)
    )
    columns = _grouped(session.ask(_COLUMNS.format(where=where)))
    keys = _grouped(session.ask(_KEYS.format(where=where)))
    made = {}
    for name, rows in columns.items():
        index, key = _key(keys.get(name, []))
        made[name] = CatalogTable(
            name,
            int(rows[0]["id"]),
            bool(rows[0]["tracked"]),
            bool(rows[0]["in_memory"]),
            tuple(_column(row) for row in rows),
            key,
            index,
        )
    return made


def size_of(session: Session, table: CatalogTable) -> tuple[int, int]:
    """About how many rows and bytes a table has."""
    (row,) = session.ask(_ROWS.format(id=table.id))
    return int(row["table_rows"] or 0), int(row["size"] or 0)


def _grouped(rows: Iterable[Mapping[str, Any]]) -> dict[TableName, list[Mapping[str, Any]]]:
    made: dict[TableName, list[Mapping[str, Any]]] = {}
    for row in rows:
        made.setdefault(TableName(row["namespace"], row["name"]), []).append(row)
    return made


def _column(row: Mapping[str, Any]) -> CatalogColumn:
    kind = SqlType.of_catalog(row["type_name"], int(row["max_length"]), int(row["digits"]), int(row["scale"]))
    return CatalogColumn(
        int(row["column_id"]),
        row["column_name"],
        kind,
        bool(row["nullable"]),
        bool(row["computed"]),
        row["collation_name"],
        row["default_definition"],
    )


def _key(rows: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """The name and the columns of the index that names rows."""
    indexes: dict[tuple[bool, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        indexes.setdefault((not row["is_primary"], row["index_name"]), []).append(row)
    usable = [key for key, parts in indexes.items() if not any(part["nullable"] or part["computed"] for part in parts)]
    if not usable:
        return "", ()
    chosen = min(usable)
    return chosen[1], tuple(part["column_name"] for part in indexes[chosen])


def _not_found(session: Session, name: TableName) -> SourceNotFound:
    there = all_table_names(session)
    near = [one for one in there if one.name.lower() == name.name.lower()] or [
        one
        for text in difflib.get_close_matches(name.name, [one.name for one in there], 1)
        for one in there
        if one.name == text
    ]
    step = f"Did you mean {near[0]}?" if near else "Name a table that exists, as schema.table."
    return SourceNotFound(f"The database has no table {name}.", next_step=step)
