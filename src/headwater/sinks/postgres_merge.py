"""PostgresMerge: how staged rows come into tables of Postgres: the statements of one batch.

A source is a relation, or, for the few rows that came inside, a query over arrays: making a temporary table for them
would take longer than merging them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa

from headwater.sinks.fold import DELETED
from headwater.sinks.postgres_text import literal_of
from headwater.sinks.sink import Mode
from headwater.sinks.sql_staged import SqlPart, unpacked
from headwater.sinks.sql_table import SqlTable
from headwater.sinks.sql_target import Target
from headwater.sinks.versions import CLOSES, IS_CURRENT, VALID_FROM, VALID_TO
from headwater.sources.postgres.connection import Connection
from headwater.sources.table import UNAVAILABLE_COLUMN

ARRAY_BYTES: Final = 4 << 20
"""More rows than that go through a temporary table."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NO_EQUALITY: Final = ("json", "json[]")


def quoted(name: str) -> str:
    """A name for a statement of psycopg, in which a percent sign is doubled."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def name_of(place: tuple[str, str]) -> str:
    return ".".join(quoted(one) for one in place)


def plain(statement: str) -> str:
    """A statement, or a name, for where psycopg looks for no parameters."""
    return statement.replace("%%", "%")


@dataclass(frozen=True, slots=True)
class Source:
    """Staged rows. :ivar sql: what stands after FROM. :ivar values: its parameters. :ivar names: its columns."""

    sql: str
    part: SqlPart
    names: tuple[str, ...]
    values: dict[str, str] = field(default_factory=dict)


class PostgresMerge(Target):
    """The part of a session that merges."""

    def __init__(self, connection: Connection, own: str) -> None:
        self._connection = connection
        self._own = own
        self._tokens = f"{quoted(own)}.tokens"
        self._fields = f"{quoted(own)}.fields"
        self._number = 0

    @abstractmethod
    def temporary(self, table: SqlTable, rows: pa.Table) -> str:
        """A temporary table with *rows*, until the transaction ends."""

    def source(self, table: SqlTable, part: SqlPart) -> Source:
        if part.relation is None:
            return self.rows_source(table, unpacked(part), part)
        return Source(name_of((self._own, part.relation)), part, tuple(part.schema.names))

    def rows_source(self, table: SqlTable, rows: pa.Table, part: SqlPart) -> Source:
        names = tuple(rows.schema.names)
        if rows.nbytes > ARRAY_BYTES:
            return Source(self.temporary(table, rows), part, names)
        prefix = self._next_name()
        values = {f"{prefix}_{place}": literal_of(column) for place, column in enumerate(rows.columns)}
        arrays = ", ".join(f"%({name})s::text[]" for name in values)
        own = [quoted(name) for name in names]
        typed = ", ".join(
            f"u.{name}::{column.type} AS {name}" for name, column in zip(own, table.staged(rows.schema), strict=True)
        )
        return Source(f"(SELECT {typed} FROM unnest({arrays}) AS u ({', '.join(own)}))", part, names, values)

    def append(self, table: SqlTable, source: Source) -> None:
        names = _list(name for name in source.names if name in table.names)
        self._with(source, f"INSERT INTO {name_of(table.place)} ({names}) SELECT {names} FROM {source.sql} s")

    def merge(self, table: SqlTable, source: Source) -> None:
        if table.is_whole:
            self._replace(table, source)
            return
        place, part = name_of(table.place), source.part
        names = [name for name in source.names if name in table.names]
        others = [name for name in names if name not in table.key]
        if part.deletes:
            where = f"s.{quoted(DELETED)} AND {_same(table)}"
            self._with(source, f"DELETE FROM {place} t USING {source.sql} s WHERE {where}")
        if not part.adds:
            return
        is_there = [f"NOT {quoted(DELETED)}"] if part.deletes else []
        known = quoted(UNAVAILABLE_COLUMN)
        if part.unavailable:
            sets = ", ".join(f"{quoted(name)} = {_kept(name, part)}" for name in others)
            where = " AND ".join([*is_there, f"s.{known} IS NOT NULL", _same(table)])
            self._with(source, f"UPDATE {place} t SET {sets} FROM {source.sql} s WHERE {where}")
            where = " AND ".join([*is_there, f"{known} IS NOT NULL"])
            self._insert(table, source, names, where, "ON CONFLICT DO NOTHING")
            is_there.append(f"{known} IS NULL")
        conflict = ""
        if part.relation is None or self._overlaps(table, source):
            sets = ", ".join(f"{quoted(name)} = EXCLUDED.{quoted(name)}" for name in others)
            conflict = f"ON CONFLICT ({_list(table.key)}) DO {f'UPDATE SET {sets}' if others else 'NOTHING'}"
        self._insert(table, source, names, " AND ".join(is_there), conflict)

    def _overlaps(self, table: SqlTable, source: Source) -> bool:
        """Whether the table has a key of *source*: to look first is cheaper than to be ready for it in each row."""
        found = self._one(
            f"SELECT EXISTS (SELECT 1 FROM {name_of(table.place)} t JOIN {source.sql} s ON {_same(table)})",
            **source.values,
        )
        return bool(found)

    def _insert(self, table: SqlTable, source: Source, names: Sequence[str], where: str, conflict: str) -> None:
        condition = f" WHERE {where}" if where else ""
        rows = f"SELECT {_list(names)} FROM {source.sql} s{condition}"
        self._with(source, f"INSERT INTO {name_of(table.place)} ({_list(names)}) {rows} {conflict}")

    def _replace(self, table: SqlTable, source: Source) -> None:
        """Rows that have no other key than themselves."""
        place = name_of(table.place)
        self._with(source, f"DELETE FROM {place} t USING {source.sql} s WHERE {_same(table)}")
        if source.part.null_keys:
            mine, theirs = (f"ROW({', '.join(f'{one}.{quoted(name)}' for name in table.key)})::text" for one in "ts")
            some = " OR ".join(f"s.{quoted(name)} IS NULL" for name in table.key)
            self._with(source, f"DELETE FROM {place} t USING {source.sql} s WHERE ({some}) AND {mine} = {theirs}")
        if source.part.adds:
            names = [name for name in source.names if name in table.names]
            self._insert(table, source, names, f"NOT {quoted(DELETED)}" if source.part.deletes else "", "")

    def set_columns(self, table: SqlTable, source: Source, columns: Sequence[str]) -> None:
        sets = ", ".join(f"{quoted(name)} = s.{quoted(name)}" for name in columns if name not in table.key)
        if sets:
            self._with(source, f"UPDATE {name_of(table.place)} t SET {sets} FROM {source.sql} s WHERE {_same(table)}")

    def remove(self, table: SqlTable, keys: Source | None, kept: Sequence[Source], at_us: int) -> None:
        conditions = [f"NOT EXISTS (SELECT 1 FROM {one.sql} s WHERE {_same(table)})" for one in kept]
        values: dict[str, Any] = {name: value for one in kept for name, value in one.values.items()}
        place, using = name_of(table.place), ""
        if keys is not None:
            using = f"{keys.sql} k"
            conditions.append(_same(table, "k"))
            values |= keys.values
        if table.mode is Mode.MIRROR:
            statement = f"DELETE FROM {place} t {using and f'USING {using}'}"
        else:
            statement = f"UPDATE {place} t SET {_ends('%(at)s')} {using and f'FROM {using}'}"
            conditions.append(f"t.{quoted(IS_CURRENT)}")
            values["at"] = _moment(at_us)
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        self._run(statement + where, **values)

    def add_versions(self, table: SqlTable, source: Source) -> None:
        place, begins = name_of(table.place), quoted(VALID_FROM)
        current = f"t.{quoted(IS_CURRENT)} AND {_same(table, whole_nulls=True)}"
        if source.part.unavailable or self._is_late(table, source, current):
            source = self._completed(table, source, current)
        closes = f"s.{quoted(CLOSES)} AND {current}"
        self._with(source, f"UPDATE {place} t SET {_ends(f's.{begins}')} FROM {source.sql} s WHERE {closes}")
        self._insert(table, source, table.names, f"NOT {quoted(DELETED)}", "")

    def _is_late(self, table: SqlTable, source: Source, current: str) -> bool:
        """Whether a row would begin before the version that it ends."""
        rows = f"{name_of(table.place)} t, {source.sql} s"
        late = f"t.{quoted(VALID_FROM)} > s.{quoted(VALID_FROM)}"
        return bool(self._one(f"SELECT EXISTS (SELECT 1 FROM {rows} WHERE {current} AND {late})", **source.values))

    def _completed(self, table: SqlTable, source: Source, current: str) -> Source:
        """*source* with the values that only the current versions tell; none begins before the one that it ends."""
        made = f"pg_temp.{quoted(self._next_name())}"
        self._with(source, f"CREATE TEMPORARY TABLE {made} ON COMMIT DROP AS SELECT * FROM {source.sql} s")
        sets = [f"{quoted(name)} = {_kept(name, source.part)}" for name in source.part.unavailable]
        begins, ends = quoted(VALID_FROM), quoted(VALID_TO)
        sets += [f"{begins} = GREATEST(s.{begins}, t.{begins})"]
        sets += [f"{ends} = CASE WHEN s.{ends} IS NULL THEN NULL ELSE GREATEST(s.{ends}, t.{begins}) END"]
        self._run(f"UPDATE {made} s SET {', '.join(sets)} FROM {name_of(table.place)} t WHERE {current}")
        return replace(source, sql=made, values={})

    def merge_versions(self, table: SqlTable, source: Source, *, only_existing: bool = False) -> None:
        place = name_of(table.place)
        current = f"t.{quoted(IS_CURRENT)} AND {_same(table, whole_nulls=True)}"
        if only_existing or self._is_late(table, source, current):
            source = self._completed(table, source, current)
        if only_existing:
            self._run(f"DELETE FROM {source.sql} s WHERE NOT EXISTS (SELECT 1 FROM {place} t WHERE {current})")
        others = [column for column in table.columns if column.name in table.own.names and column.name not in table.key]
        differ = " OR ".join(
            f"{_plain(column.type, 't', column.name)} IS DISTINCT FROM {_plain(column.type, 's', column.name)}"
            for column in others
        )
        if differ:
            ends = _ends(f"s.{quoted(VALID_FROM)}")
            self._with(source, f"UPDATE {place} t SET {ends} FROM {source.sql} s WHERE {current} AND ({differ})")
        self._insert(table, source, table.names, f"NOT EXISTS (SELECT 1 FROM {place} t WHERE {current})", "")

    def end_versions(self, table: SqlTable, at_us: int) -> None:
        statement = f"UPDATE {name_of(table.place)} t SET {_ends('%(at)s')} WHERE t.{quoted(IS_CURRENT)}"
        self._run(statement, at=_moment(at_us))

    def clear(self, table: SqlTable) -> None:
        self._run(f"DELETE FROM {name_of(table.place)}")

    def has_rows(self, table: SqlTable) -> bool:
        return bool(self._one(f"SELECT EXISTS (SELECT 1 FROM {name_of(table.place)})"))

    def _next_name(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def _with(self, source: Source, statement: str) -> None:
        self._run(statement, **source.values)

    def _run(self, statement: str, **values: Any) -> None:
        self._connection.execute(statement.encode(), values)

    def _all(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement.encode(), values).fetchall()

    def _one(self, statement: str, **values: Any) -> Any:
        rows = self._all(statement, **values)
        return rows[0][0] if rows else None


def _list(names: Any) -> str:
    return ", ".join(quoted(name) for name in names)


def _plain(kind: str, alias: str, name: str) -> str:
    """A column in a form that has an equality."""
    return f"{alias}.{quoted(name)}" + ("::text" if kind in _NO_EQUALITY else "")


def _same(table: SqlTable, alias: str = "s", *, whole_nulls: bool = False) -> str:
    """That a row of the table and one of a source have the same key."""
    how = "IS NOT DISTINCT FROM" if whole_nulls and table.is_whole else "="
    kinds = {column.name: column.type for column in table.columns}
    pairs = ((_plain(kinds[name], "t", name), _plain(kinds[name], alias, name)) for name in table.key)
    return " AND ".join(f"{mine} {how} {theirs}" for mine, theirs in pairs)


def _kept(name: str, part: SqlPart) -> str:
    """The value of a staged row, or that of the table where the source did not tell it."""
    if name not in part.unavailable:
        return f"s.{quoted(name)}"
    text = name.replace("'", "''").replace("%", "%%")
    lacks = f"pg_catalog.strpos(',' || s.{quoted(UNAVAILABLE_COLUMN)} || ',', ',{text},') > 0"
    return f"CASE WHEN {lacks} THEN t.{quoted(name)} ELSE s.{quoted(name)} END"


def _ends(at: str) -> str:
    """What a version becomes that ends *at* this moment."""
    begins = f"t.{quoted(VALID_FROM)}"
    return f"{quoted(VALID_TO)} = GREATEST({begins}, {at}), {quoted(IS_CURRENT)} = false"


def _moment(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)
