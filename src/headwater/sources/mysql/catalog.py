"""Reads tables from ``information_schema``: columns, types, keys in the order of the index, what logs them.

The key of a table is its primary key, or else the first unique index, by name, whose columns are never null. Tables
have no number that the log and the catalog share, so ``source_id`` stays empty: that a table was dropped and made anew
is told by the statements in the log.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pymysql

from headwater.sources.errors import SourceNotFound, UnsupportedTable
from headwater.sources.mysql.column_clause import charset_of
from headwater.sources.mysql.connection import Connection, ask, version_of
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.types import has_special_values, source_column
from headwater.sources.special_values import with_policy
from headwater.sources.table import SourceTable, SpecialValues

_PLAIN: Final = re.compile(r"\w+", re.ASCII)
_NO_ACCESS: Final = (1044, 1109, 1142, 1227)

SYSTEM: Final = ("information_schema", "mysql", "performance_schema", "sys")

_TABLES: Final = """
SELECT t.table_schema AS namespace, t.table_name AS name, t.table_type AS type, t.engine AS engine,
       t.table_collation AS table_collation, t.create_time AS created,
       t.table_rows AS table_rows, COALESCE(t.data_length, 0) + COALESCE(t.index_length, 0) AS size
FROM information_schema.tables t WHERE {where} ORDER BY 1, 2
"""
_COLUMNS: Final = """
SELECT c.table_schema AS namespace, c.table_name AS name, c.column_name AS column_name,
       c.ordinal_position AS number, c.column_type AS column_type, c.is_nullable AS nullable,
       c.column_default AS column_default, c.extra AS extra, c.character_set_name AS charset,
       c.collation_name AS collation, c.generation_expression AS expression, c.privileges AS privileges
FROM information_schema.columns c WHERE {where} ORDER BY 1, 2, c.ordinal_position
"""
_INDEXES: Final = """
SELECT s.table_schema AS namespace, s.table_name AS name, s.index_name AS index_name, s.column_name AS column_name,
       s.nullable AS nullable, s.sub_part AS prefix
FROM information_schema.statistics s WHERE s.non_unique = 0 AND {where} ORDER BY 1, 2, 3, s.seq_in_index
"""

_CASCADES: Final = """
SELECT r.constraint_name AS name FROM information_schema.referential_constraints r
WHERE r.constraint_schema = %s AND r.table_name = %s
  AND (r.delete_rule NOT IN ('RESTRICT', 'NO ACTION') OR r.update_rule NOT IN ('RESTRICT', 'NO ACTION')) ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A column of a table.

    :ivar number: its place in the table, from 1; it changes when columns before it come or go.
    :ivar type_text: the type as the database writes it, for example ``int(10) unsigned``.
    :ivar default: as the catalog tells it; how, is the server's family's own. :ivar extra: what else it says.
    :ivar charset: of a text.
    """

    number: int
    name: str
    type_text: str
    nullable: bool
    default: str | None
    extra: str
    charset: str | None
    collation: str | None
    expression: str = ""

    @property
    def is_generated(self) -> bool:
        """It is computed from the others, stored or not."""
        return "GENERATED" in self.extra.upper().replace("DEFAULT_GENERATED", "")


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table.

    :ivar key: the columns that name a row, in the order of their index; empty where there is none.
    :ivar key_index: the name of that index.
    :ivar rows: about how many, by the server's statistics. :ivar size: bytes on disk.
    :ivar charset: of new columns. :ivar created: when the table was created or rebuilt.
    """

    name: TableName
    kind: str
    engine: str
    columns: tuple[CatalogColumn, ...]
    key: tuple[str, ...]
    key_index: str
    rows: int
    size: int
    charset: str = ""
    created: str = ""

    def column(self, name: str) -> CatalogColumn | None:
        return next((column for column in self.columns if column.name == name), None)

    def require_capturable(self) -> None:
        """:raises UnsupportedTable: it is no table whose changes are logged, or it has no key."""
        if self.kind not in ("BASE TABLE", "SYSTEM VERSIONED"):
            raise UnsupportedTable(
                str(self.name), f"it is a {self.kind.lower()}.", next_step="Replace it with a table."
            )
        if self.kind == "SYSTEM VERSIONED":
            raise UnsupportedTable(
                str(self.name),
                "it is system-versioned, and its log tells old versions beside the rows.",
                next_step=f"Run: ALTER TABLE {self.name.sql} DROP SYSTEM VERSIONING;",
            )
        if not self.key:
            raise UnsupportedTable(
                str(self.name),
                "it has no primary key, and no unique index whose columns are never null.",
                next_step=f"Add one: ALTER TABLE {self.name.sql} ADD PRIMARY KEY (…);",
            )

    def described(
        self,
        special_values: Mapping[str, SpecialValues] | None = None,
        *,
        tinyint1_is_boolean: bool = False,
    ) -> SourceTable:
        """The table as it is captured, its field ids the places of the columns.

        :param special_values: policies by ``database.table.column`` or ``database.table``.
        :raises UnsupportedTable: it cannot be captured.
        """
        self.require_capturable()
        columns = tuple(
            with_policy(
                special_values or {},
                str(self.name),
                column.name,
                partial(
                    source_column,
                    column.name,
                    column.type_text,
                    column.number,
                    nullable=column.nullable,
                    tinyint1_is_boolean=tinyint1_is_boolean,
                ),
                has_special_values,
            )
            for column in self.columns
        )
        return SourceTable(self.name.namespace, self.name.name, columns, self.key)


def cascades(session: Connection, name: TableName) -> list[str]:
    """The foreign keys of a table through which its rows change when those of another do."""
    return [str(row["name"]) for row in ask(session, _CASCADES, [name.namespace, name.name])]


def all_table_names(session: Connection, database: str = "") -> list[TableName]:
    """The tables of *database*, of all that are not the server's own where none is named."""
    where, parameters = "t.table_schema = %s", [database]
    if not database:
        where, parameters = f"t.table_schema NOT IN ({', '.join(['%s'] * len(SYSTEM))})", list(SYSTEM)
    rows = ask(session, _TABLES.format(where=f"{where} AND t.table_type = 'BASE TABLE'"), parameters)
    return [TableName(row["namespace"], row["name"]) for row in rows]


def read_table(session: Connection, name: TableName) -> CatalogTable:
    """One table; see :func:`read_tables`."""
    return read_tables(session, [name])[0]


def read_tables(session: Connection, names: Sequence[TableName]) -> list[CatalogTable]:
    """The tables of these names, in their order, as the catalog has them now.

    :raises SourceNotFound: there is none of a name.
    """
    found = present_tables(session, names)
    for name in names:
        if name not in found:
            raise _not_found(session, name)
    return [found[name] for name in names]


def present_tables(session: Connection, names: Sequence[TableName]) -> dict[TableName, CatalogTable]:
    """Those of *names* that are there."""
    if not names:
        return {}
    pairs = " OR ".join(["({0}.table_schema = %s AND {0}.table_name = %s)"] * len(names))
    parameters = [part for name in names for part in (name.namespace, name.name)]
    tables = ask(session, _TABLES.format(where=pairs.format("t")), parameters)
    columns = _grouped(ask(session, _COLUMNS.format(where=f"({pairs.format('c')})"), parameters))
    indexes = _grouped(ask(session, _INDEXES.format(where=f"({pairs.format('s')})"), parameters))
    made = {}
    for row in tables:
        name = TableName(row["namespace"], row["name"])
        index, key = _key(indexes.get(name, []))
        made[name] = CatalogTable(
            name=name,
            kind=str(row["type"]),
            engine=str(row["engine"] or ""),
            columns=tuple(_column(column) for column in columns.get(name, [])),
            key=key,
            key_index=index,
            rows=int(row["table_rows"] or 0),
            size=int(row["size"] or 0),
            charset=charset_of(str(row["table_collation"] or "").lower()),
            created=str(row["created"] or ""),
        )
    return made


def table_ids(session: Connection, tables: Mapping[TableName, CatalogTable]) -> dict[TableName, str]:
    """What changes when a table is created again or rebuilt: InnoDB's number where it can be read, else a time."""
    ids = {name: f"created:{table.created}" for name, table in tables.items() if table.created}
    plain = {f"{name.namespace}/{name.name}": name for name in tables if _PLAIN.fullmatch(name.namespace + name.name)}
    if not plain:
        return ids
    view = "INNODB_SYS_TABLES" if version_of(session).is_mariadb else "INNODB_TABLES"
    query = f"SELECT t.name AS name, t.table_id AS id FROM information_schema.{view} t WHERE t.name IN "
    try:
        rows = ask(session, f"{query}({', '.join(['%s'] * len(plain))})", list(plain))
    except pymysql.err.Error as error:
        if error.args[0] not in _NO_ACCESS:
            raise
        return ids
    return ids | {plain[row["name"]]: f"innodb:{row['id']}" for row in rows if row["name"] in plain}


def _grouped(rows: Iterable[Mapping[str, Any]]) -> dict[TableName, list[Mapping[str, Any]]]:
    made: dict[TableName, list[Mapping[str, Any]]] = {}
    for row in rows:
        made.setdefault(TableName(row["namespace"], row["name"]), []).append(row)
    return made


def _column(row: Mapping[str, Any]) -> CatalogColumn:
    return CatalogColumn(
        number=int(row["number"]),
        name=row["column_name"],
        type_text=row["column_type"],
        nullable=row["nullable"] == "YES",
        default=row["column_default"],
        extra=row["extra"] or "",
        charset=row["charset"],
        collation=row["collation"],
        expression=row["expression"] or "",
    )


def _key(rows: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """The name and the columns of the index that names rows."""
    indexes: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        indexes.setdefault(row["index_name"], []).append(row)
    usable = {
        name: tuple(part["column_name"] for part in parts)
        for name, parts in indexes.items()
        if all(part["column_name"] and part["nullable"] != "YES" and part["prefix"] is None for part in parts)
    }
    primary = next((name for name in usable if name.upper() == "PRIMARY"), None)
    chosen = primary or min(usable, default="")
    return chosen, usable.get(chosen, ())


def _not_found(session: Connection, name: TableName) -> SourceNotFound:
    there = all_table_names(session)
    step = "Name a table that exists, as database.table."
    same = [one for one in there if one.name.lower() == name.name.lower()]
    same.sort(key=lambda one: one.namespace.lower() != name.namespace.lower())
    near = same or [
        one
        for text in difflib.get_close_matches(name.name, [one.name for one in there], 1)
        for one in there
        if one.name == text
    ]
    if near:
        step = f"Did you mean {near[0]}?"
    return SourceNotFound(f"The server has no table {name}.", next_step=step)
