"""MySqlMerge: how staged rows come into tables of MySQL and MariaDB: the statements of one batch.

A source is a relation, or a temporary table for rows that came inside. Rows are upserted by an update of those that are
there and an insert of the others: ``ON DUPLICATE KEY UPDATE`` would change another row where a unique index of somebody
else is violated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa

from headwater.sinks.fold import DELETED
from headwater.sinks.mysql_session import MySqlConnection
from headwater.sinks.sink import Mode
from headwater.sinks.sql_staged import SqlPart, unpacked
from headwater.sinks.sql_table import SqlTable
from headwater.sinks.sql_target import Target
from headwater.sinks.versions import CLOSES, IS_CURRENT, VALID_FROM, VALID_TO
from headwater.sources.table import UNAVAILABLE_COLUMN

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def name_of(place: tuple[str, str]) -> str:
    return ".".join(quoted(one) for one in place)


@dataclass(frozen=True, slots=True)
class Source:
    """Staged rows. :ivar sql: their table. :ivar names: its columns."""

    sql: str
    part: SqlPart
    names: tuple[str, ...]


class MySqlMerge(Target):
    """The part of a session that merges."""

    def __init__(self, connection: MySqlConnection, own: str) -> None:
        self._connection = connection
        self._own = own

    @abstractmethod
    def temporary(self, table: SqlTable, rows: pa.Table) -> str:
        """A temporary table with *rows*."""

    def source(self, table: SqlTable, part: SqlPart) -> Source:
        if part.relation is None:
            return self.rows_source(table, unpacked(part), part)
        return Source(name_of((self._own, part.relation)), part, tuple(part.schema.names))

    def rows_source(self, table: SqlTable, rows: pa.Table, part: SqlPart) -> Source:
        return Source(self.temporary(table, rows), part, tuple(rows.schema.names))

    def append(self, table: SqlTable, source: Source) -> None:
        self._insert(table, source, "")

    def merge(self, table: SqlTable, source: Source) -> None:
        place, part = name_of(table.place), source.part
        if table.is_whole:
            self._run(f"DELETE t FROM {place} t JOIN {source.sql} s ON {_same(table)}")
            if part.adds:
                self._insert(table, source, f"WHERE NOT s.{quoted(DELETED)}" if part.deletes else "")
            return
        is_there = f"NOT s.{quoted(DELETED)}" if part.deletes else "1"
        if part.deletes:
            self._run(f"DELETE t FROM {place} t JOIN {source.sql} s ON {_same(table)} WHERE s.{quoted(DELETED)}")
        if not part.adds:
            return
        joined = f"{place} t JOIN {source.sql} s ON {_same(table)}"
        if self._one(f"SELECT 1 FROM {joined} WHERE {is_there} LIMIT 1") is None:
            self._insert(table, source, f"WHERE {is_there}")
            return
        others = [name for name in source.names if name in table.names and name not in table.key]
        if others:
            sets = ", ".join(f"t.{quoted(name)} = {_kept(name, part)}" for name in others)
            self._run(f"UPDATE {joined} SET {sets} WHERE {is_there}")
        first = quoted(table.key[0])
        self._insert(table, source, f"LEFT JOIN {place} t ON {_same(table)} WHERE {is_there} AND t.{first} IS NULL")

    def _insert(self, table: SqlTable, source: Source, rest: str) -> None:
        names = [name for name in source.names if name in table.names]
        mine, theirs = (", ".join(prefix + quoted(name) for name in names) for prefix in ("", "s."))
        self._run(f"INSERT INTO {name_of(table.place)} ({mine}) SELECT {theirs} FROM {source.sql} s {rest}")

    def set_columns(self, table: SqlTable, source: Source, columns: Sequence[str]) -> None:
        sets = ", ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in columns if name not in table.key)
        if sets:
            self._run(f"UPDATE {name_of(table.place)} t JOIN {source.sql} s ON {_same(table)} SET {sets}")

    def remove(self, table: SqlTable, keys: Source | None, kept: Sequence[Source], at_us: int) -> None:
        conditions = [f"NOT EXISTS (SELECT 1 FROM {one.sql} s WHERE {_same(table)})" for one in kept]
        joined = f"{name_of(table.place)} t"
        if keys is not None:
            joined += f" JOIN {keys.sql} k ON {_same(table, 'k')}"
        if table.mode is Mode.MIRROR:
            statement = f"DELETE t FROM {joined}"
        else:
            statement = f"UPDATE {joined} SET {_ends(_moment(at_us))}"
            conditions.append(f"t.{quoted(IS_CURRENT)}")
        self._run(statement + (f" WHERE {' AND '.join(conditions)}" if conditions else ""))

    def add_versions(self, table: SqlTable, source: Source) -> None:
        joined = f"{name_of(table.place)} t JOIN {source.sql} s ON {_same(table)}"
        self._complete(table, source)
        ends = _ends(f"s.{quoted(VALID_FROM)}")
        self._run(f"UPDATE {joined} SET {ends} WHERE s.{quoted(CLOSES)} AND t.{quoted(IS_CURRENT)}")
        self._insert(table, source, f"WHERE NOT s.{quoted(DELETED)}")

    def _complete(self, table: SqlTable, source: Source) -> None:
        """Give the staged rows what only the current versions tell; none begins before the one that it ends."""
        begins, ends = quoted(VALID_FROM), quoted(VALID_TO)
        sets = [f"s.{quoted(name)} = {_kept(name, source.part)}" for name in source.part.unavailable]
        sets += [f"s.{ends} = GREATEST(s.{ends}, t.{begins})", f"s.{begins} = GREATEST(s.{begins}, t.{begins})"]
        late = "1" if source.part.unavailable else f"t.{begins} > s.{begins}"
        self._run(
            f"UPDATE {source.sql} s JOIN {name_of(table.place)} t ON {_same(table)} SET {', '.join(sets)} "
            f"WHERE t.{quoted(IS_CURRENT)} AND {late}"
        )

    def merge_versions(self, table: SqlTable, source: Source, *, only_existing: bool = False) -> None:
        place, current = name_of(table.place), f"t.{quoted(IS_CURRENT)}"
        self._complete(table, source)
        there = f"LEFT JOIN {place} t ON {_same(table)} AND {current}"
        if only_existing:
            self._run(f"DELETE s FROM {source.sql} s {there} WHERE {current} IS NULL")
        others = [name for name in table.own.names if name not in table.key]
        if others:
            differ = " OR ".join(f"NOT (t.{quoted(name)} <=> s.{quoted(name)})" for name in others)
            joined = f"{place} t JOIN {source.sql} s ON {_same(table)}"
            self._run(f"UPDATE {joined} SET {_ends(f's.{quoted(VALID_FROM)}')} WHERE {current} AND ({differ})")
        self._insert(table, source, f"{there} WHERE {current} IS NULL")

    def end_versions(self, table: SqlTable, at_us: int) -> None:
        self._run(f"UPDATE {name_of(table.place)} t SET {_ends(_moment(at_us))} WHERE t.{quoted(IS_CURRENT)}")

    def clear(self, table: SqlTable) -> None:
        self._run(f"DELETE FROM {name_of(table.place)}")

    def has_rows(self, table: SqlTable) -> bool:
        return self._one(f"SELECT 1 FROM {name_of(table.place)} LIMIT 1") is not None

    def _run(self, statement: str | bytes) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)

    def _all(self, statement: str) -> Sequence[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            rows: Sequence[tuple[Any, ...]] = cursor.fetchall()
            return rows

    def _one(self, statement: str) -> Any:
        rows = self._all(statement)
        return rows[0][0] if rows else None

    def _text(self, value: str) -> str:
        text: str = self._connection.escape(value)
        return text


def listed(names: Iterable[str]) -> str:
    return ", ".join(quoted(name) for name in names)


def _same(table: SqlTable, alias: str = "s") -> str:
    """That a row of the table and one of a source have the same key."""
    how = "<=>" if table.is_whole else "="
    return " AND ".join(f"t.{quoted(name)} {how} {alias}.{quoted(name)}" for name in table.key)


def _kept(name: str, part: SqlPart) -> str:
    """The value of a staged row, or that of the table where the source did not tell it."""
    if name not in part.unavailable:
        return f"s.{quoted(name)}"
    text = name.replace("\\", "\\\\").replace("'", "\\'")
    lacks = f"FIND_IN_SET('{text}', COALESCE(s.{quoted(UNAVAILABLE_COLUMN)}, ''))"
    return f"IF({lacks}, t.{quoted(name)}, s.{quoted(name)})"


def _ends(at: str) -> str:
    """What a version becomes that ends *at* this moment."""
    return f"t.{quoted(VALID_TO)} = GREATEST(t.{quoted(VALID_FROM)}, {at}), t.{quoted(IS_CURRENT)} = 0"


def _moment(us: int) -> str:
    return f"TIMESTAMP'{(_EPOCH + timedelta(microseconds=us)).replace(tzinfo=None).isoformat(sep=' ')}'"
