"""Table maps as tables: what row events tell of columns, and what the captured table knows of them.

A table map tells the table as it was when its rows were written. Columns are told apart by their names; that one was
renamed is told by the statement in the log before (:mod:`~headwater.sources.mysql.ddl`), and is in the captured table
by then. A new column takes a field id that none had before. The catalog, which tells the table as it is now, is asked
for what a table map lacks: the defaults of new columns, and MariaDB's types that are logged as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import pyarrow as pa

from headwater.sources.errors import RereadNeeded, SchemaStopped
from headwater.sources.evolution import Projection
from headwater.sources.mysql.binlog.rows import ColumnPlan, TablePlan
from headwater.sources.mysql.binlog.table_map import BinlogColumn, ColumnType, TableMap
from headwater.sources.mysql.catalog import CatalogColumn, CatalogTable, present_tables
from headwater.sources.mysql.column_clause import ColumnClause
from headwater.sources.mysql.connection import Connection, ask
from headwater.sources.mysql.defaults import constant_default
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.row_statements import RowStatement
from headwater.sources.mysql.types import ADDRESSES, MySqlType, arrow_type, has_special_values, source_column
from headwater.sources.special_values import with_policy
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues

_MOST_NAMES: Final = 64

_KIND: Final = "SELECT table_type AS type FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
_TRIGGERS: Final = """
SELECT 1 AS one FROM information_schema.triggers WHERE event_object_schema = %s AND event_object_table = %s LIMIT 1
"""
_CASCADES: Final = """
SELECT 1 AS one FROM information_schema.referential_constraints
WHERE unique_constraint_schema = %s AND referenced_table_name = %s
  AND (delete_rule NOT IN ('RESTRICT', 'NO ACTION') OR update_rule NOT IN ('RESTRICT', 'NO ACTION')) LIMIT 1
"""
_FUNCTIONS: Final = """
SELECT 1 AS one FROM information_schema.routines
WHERE routine_type = 'FUNCTION' AND LOWER(routine_name) IN ({names}) LIMIT 1
"""
_SEES_TRIGGERS: Final = """
SELECT 1 AS one FROM information_schema.user_privileges WHERE privilege_type = 'TRIGGER' AND grantee = %s
UNION ALL SELECT 1 FROM information_schema.schema_privileges
WHERE privilege_type = 'TRIGGER' AND grantee = %s AND %s LIKE table_schema
UNION ALL SELECT 1 FROM information_schema.table_privileges
WHERE privilege_type = 'TRIGGER' AND grantee = %s AND table_schema = %s AND table_name = %s
"""


def may_write_others(session: Connection, statement: RowStatement, *, uses_temporary: bool) -> bool:
    """Whether *statement* may have written tables that it does not name: by views, triggers, functions, foreign keys.

    The catalog has them as they are now. What the user is not allowed to see may exist: where the answer is not
    certain, it is yes.

    :param uses_temporary: the session that ran it used temporary tables, which no catalog shows.
    """
    tables = statement.tables
    if tables is None or len(tables) > _MOST_NAMES:
        return True
    user = str(ask(session, "SELECT CURRENT_USER() AS name")[0]["name"])
    grantee = "@".join(f"'{part}'" for part in user.rsplit("@", 1))
    if any(_reaches_others(session, table, grantee, uses_temporary=uses_temporary) for table in tables):
        return True
    names = sorted(statement.calls)
    return bool(names) and bool(ask(session, _FUNCTIONS.format(names=", ".join(["%s"] * len(names))), names))


def _reaches_others(session: Connection, table: TableName, grantee: str, *, uses_temporary: bool) -> bool:
    place = (table.namespace, table.name)
    kinds = ask(session, _KIND, place)
    if any("VIEW" in str(row["type"]) for row in kinds):
        return True
    if ask(session, _TRIGGERS, place) or ask(session, _CASCADES, place):
        return True
    if not kinds and uses_temporary:
        return False
    return not ask(session, _SEES_TRIGGERS, (grantee, grantee, table.namespace, grantee, *place))


BINARY: Final = 63
"""The number of the collation of bytes."""

_HIDDEN: Final = ("!hidden!", "DB_ROW_HASH_")
"""How columns are called that servers make for indexes and do not show."""

_NUMBERS: Final = {
    ColumnType.TINY: "tinyint",
    ColumnType.SHORT: "smallint",
    ColumnType.INT24: "mediumint",
    ColumnType.LONG: "int",
    ColumnType.LONGLONG: "bigint",
}
_PLAIN: Final = {
    ColumnType.FLOAT: "float",
    ColumnType.DOUBLE: "double",
    ColumnType.DATE: "date",
    ColumnType.YEAR: "year",
    ColumnType.JSON: "json",
    ColumnType.ENUM: "enum",
    ColumnType.SET: "set",
    ColumnType.GEOMETRY: "geometry",
    ColumnType.VECTOR: "vector",
    ColumnType.TIME: "time",
    ColumnType.DATETIME: "datetime",
    ColumnType.TIMESTAMP: "timestamp",
}
_TIMES: Final = {ColumnType.TIME2: "time", ColumnType.DATETIME2: "datetime", ColumnType.TIMESTAMP2: "timestamp"}
_BLOBS: Final = {1: "tiny", 2: "", 3: "medium", 4: "long"}


def type_text(column: BinlogColumn) -> str:
    """The type of a column as the catalog would write it, as far as a table map tells."""
    is_binary = column.collation == BINARY
    kind = column.type
    if kind in _NUMBERS:
        return f"{_NUMBERS[kind]} unsigned" if column.unsigned else _NUMBERS[kind]
    if kind is ColumnType.NEWDECIMAL:
        return f"decimal({column.size},{column.scale})"
    if kind is ColumnType.BIT:
        return f"bit({column.size})"
    if kind in _TIMES:
        return f"{_TIMES[kind]}({column.size})" if column.size else _TIMES[kind]
    if kind in (ColumnType.VARCHAR, ColumnType.VARCHAR_COMPRESSED):
        return f"varbinary({column.size})" if is_binary else "varchar"
    if kind is ColumnType.STRING:
        return f"binary({column.size})" if is_binary else "char"
    if kind in (ColumnType.BLOB, ColumnType.BLOB_COMPRESSED):
        return _BLOBS[column.size] + ("blob" if is_binary else "text")
    return _PLAIN[kind]


@dataclass(frozen=True, slots=True)
class Definition:
    """A table as a table map describes it.

    :ivar table: its columns in the order of the row events, without those that no user sees.
    :ivar places: where they are in the row events.
    :ivar defaults: one row: for each new column that has one, the value that rows from before the column have there.
    :ivar unknown: new columns of which that is not known.
    """

    table_map: TableMap
    table: SourceTable
    places: tuple[int, ...]
    defaults: pa.RecordBatch
    unknown: frozenset[str] = frozenset()

    def plan(self, projection: Projection) -> TablePlan:
        """How rows are decoded: the columns that *projection* takes, the others are passed over."""
        wanted = {place for place in projection.places if place is not None}
        columns = dict(zip(self.places, enumerate(self.table.columns), strict=True))
        made = []
        for place, told in enumerate(self.table_map.columns):
            number, column = columns.get(place, (-1, None))
            if column is None or number not in wanted:
                made.append(ColumnPlan(told, None, "", name=told.name or ""))
            else:
                made.append(ColumnPlan(told, column.type, column.source_type, column.special_values, column.name))
        return TablePlan(self.table.full_name, tuple(made))


class Definitions:
    """Describes tables.

    :param sql: gives the session for SQL.
    :param special_values: policies by ``database.table.column`` or ``database.table``.
    """

    def __init__(
        self,
        sql: Callable[[], AbstractContextManager[Connection]],
        special_values: Mapping[str, SpecialValues],
        *,
        tinyint1_is_boolean: bool,
    ) -> None:
        self._sql = sql
        self._special = special_values
        self._boolean = tinyint1_is_boolean

    def describe(self, table_map: TableMap, known: SourceTable) -> Definition:
        """The table that *table_map* tells of; *known* is the captured one.

        :raises SchemaStopped: the map tells no names, or the key is another one. :raises UnsupportedTable: no key.
        """
        name = known.full_name
        if table_map.unknown_type is not None:
            raise SchemaStopped(
                name,
                f"one of its columns has a type (number {table_map.unknown_type}) that this version does not know.",
                next_step=f"Upgrade Headwater, or drop the column; then run: headwater resnapshot {name}",
            )
        if not table_map.has_names:
            raise SchemaStopped(
                name,
                "its rows came without the names of their columns (binlog_row_metadata).",
                next_step="Run: SET GLOBAL binlog_row_metadata = FULL; Then run: FLUSH TABLES; Then run: headwater"
                f" resnapshot {name}",
            )
        live = {column.name: column for column in known.columns if not column.dropped}
        places = [place for place, told in enumerate(table_map.columns) if not (told.name or "").startswith(_HIDDEN)]
        news = [told for told in (table_map.columns[place] for place in places) if not self._is_same(told, live)]
        catalog = self.catalog(known) if news else None
        next_id = max(column.field_id for column in known.columns) + 1
        columns = []
        for place in places:
            told = table_map.columns[place]
            assert told.name is not None
            if told not in news:
                columns.append(replace(live[told.name], nullable=told.nullable))
                continue
            before = live.get(told.name)
            columns.append(self._column(told, name, before, next_id, catalog))
            next_id += before is None
        table = SourceTable(known.namespace, known.name, tuple(columns), _key(table_map, known, columns))
        added = [column for column in columns if column.name not in live]
        values = self._defaults(added, catalog)
        unknown = frozenset(column.name for column in added if column not in values)
        return Definition(table_map, table, tuple(places), defaults_of(values), unknown)

    def _is_same(self, told: BinlogColumn, live: Mapping[str, SourceColumn]) -> bool:
        """Whether a captured column has that name and a type of the same values."""
        column = live.get(told.name or "")
        return column is not None and _fits(told, column.source_type)

    def _column(
        self, told: BinlogColumn, table: str, before: SourceColumn | None, field_id: int, catalog: CatalogTable | None
    ) -> SourceColumn:
        assert told.name is not None
        now = None if catalog is None else catalog.column(told.name)
        text = now.type_text if now is not None and _fits(told, now.type_text) else type_text(told)
        make = partial(
            source_column,
            told.name,
            text,
            field_id if before is None else before.field_id,
            nullable=told.nullable,
            tinyint1_is_boolean=self._boolean,
        )
        policy = None if before is None else before.special_values
        return with_policy(self._special, table, told.name, make, has_special_values, policy)

    def of_clause(
        self, clause: ColumnClause, known: SourceTable, before: SourceColumn | None, field_id: int
    ) -> SourceColumn:
        """The column that a statement defines. :param before: as it was, if it is not new."""
        make = partial(
            source_column,
            clause.name,
            clause.type,
            field_id if before is None else before.field_id,
            nullable=clause.nullable,
            tinyint1_is_boolean=self._boolean,
        )
        policy = None if before is None else before.special_values
        return with_policy(self._special, known.full_name, clause.name, make, has_special_values, policy)

    def catalog(self, known: SourceTable) -> CatalogTable | None:
        """The table of that name as it is now."""
        name = TableName(known.namespace, known.name)
        with self._sql() as session:
            return present_tables(session, [name]).get(name)

    def may_write_others(self, statement: RowStatement, *, uses_temporary: bool) -> bool:
        """See :func:`may_write_others`."""
        with self._sql() as session:
            return may_write_others(session, statement, uses_temporary=uses_temporary)

    def _defaults(self, added: list[SourceColumn], catalog: CatalogTable | None) -> dict[SourceColumn, pa.Array]:
        values: dict[SourceColumn, pa.Array] = {}
        for column in added:
            now: CatalogColumn | None = None if catalog is None else catalog.column(column.name)
            value = None if now is None else constant_default(now, column)
            if value is not None:
                values[column] = value
        return values


def defaults_of(values: Mapping[SourceColumn, pa.Array]) -> pa.RecordBatch:
    """One row: what older rows have in new columns, where that is not null."""
    given = {column: value for column, value in values.items() if not value.null_count}
    return pa.RecordBatch.from_arrays(list(given.values()), schema=pa.schema([column.field for column in given]))


def _fits(told: BinlogColumn, source_type: str) -> bool:
    """Whether row events of *told* hold values of *source_type*."""
    kind = MySqlType.parse(source_type)
    if kind.name in ADDRESSES:
        return told.type is ColumnType.STRING and told.size in (4, 16)
    return bool(arrow_type(kind) == arrow_type(MySqlType.parse(type_text(told))))


def _key(table_map: TableMap, known: SourceTable, columns: list[SourceColumn]) -> tuple[str, ...]:
    """The captured key, where the table map does not tell another one. :raises RereadNeeded: it does."""
    names = {column.name for column in columns}
    told = None
    if table_map.primary_key:
        told = {table_map.columns[place].name for place in table_map.primary_key}
    if not names.issuperset(known.key_columns) or (told is not None and told != set(known.key_columns)):
        raise RereadNeeded(known.full_name, "its key changed.")
    return known.key_columns
