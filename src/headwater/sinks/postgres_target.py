"""PostgresTarget: a session with the Postgres of a sink: our own tables, the shape of its tables, tokens and reading.

==================  =============================================================================================
``<own>.tokens``    by query, table and backfill: what the table has; the row with no backfill is that of changes
``<own>.fields``    by table and column: the field id that the column was made for
``<own>.s…``        staged rows, in unlogged tables
==================  =============================================================================================

Tables are made and changed in the transaction of the batch that needs it. How rows are merged:
:mod:`headwater.sinks.postgres_merge`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import errors as pg

from headwater import failpoints
from headwater.sinks.batch import Batch, Held
from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.json_rows import from_json
from headwater.sinks.postgres_merge import PostgresMerge, name_of, plain, quoted
from headwater.sinks.postgres_session import sink_error
from headwater.sinks.postgres_text import CSV_ROWS, csv_of, holds
from headwater.sinks.sink import Committed, Mode, Token
from headwater.sinks.sql_staged import SqlPart
from headwater.sinks.sql_table import (
    POSTGRES_NAME_BYTES,
    ExistingColumn,
    OnDrop,
    OnRename,
    SqlColumn,
    SqlTable,
    steps,
)
from headwater.sinks.sql_target import AFTER_PREPARE, BEFORE_PREPARE, row_reason
from headwater.sinks.types import array_of
from headwater.sinks.versions import IS_CURRENT
from headwater.sources.postgres.connection import Connection, Dsn
from headwater.sources.postgres.convert import convert_column
from headwater.sources.postgres.csv import read_texts
from headwater.sources.table import SourceColumn
from headwater.sources.target_names import is_cut
from headwater.versioned.fitting import cast

_CREATED_MEANWHILE: Final = (pg.UniqueViolation, pg.DuplicateSchema, pg.DuplicateTable)
"""What the server says of a schema or table that another session created at the same time."""
_READ_BYTES: Final = 8 << 20
_LOCK: Final = 0x6865_6164
_COLUMNS: Final = """
SELECT a.attname::text, pg_catalog.format_type(a.atttypid, a.atttypmod)
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = pg_catalog.to_regclass(%(place)s) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
# By the names of the table: an index keeps the former names of columns that are renamed.
_UNIQUE: Final = """
SELECT array_agg(a.attname::text)
FROM pg_catalog.pg_index i, pg_catalog.pg_attribute a
WHERE i.indrelid = pg_catalog.to_regclass(%(place)s) AND i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL
  AND i.indimmediate AND i.indisvalid AND a.attrelid = i.indrelid
  AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
GROUP BY i.indexrelid
"""
_KEYS: Final = """
SELECT i.indexrelid::pg_catalog.regclass::text, c.conname::text, array_agg(a.attname::text)
FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey::int2[])
LEFT JOIN pg_catalog.pg_constraint c ON c.conindid = i.indexrelid AND c.conrelid = i.indrelid
WHERE i.indrelid = pg_catalog.to_regclass(%(place)s) AND """


class PostgresTarget(PostgresMerge):
    """A session. One thread."""

    def __init__(self, connection: Connection, dsn: Dsn, own: str, on_rename: OnRename, on_drop: OnDrop) -> None:
        super().__init__(connection, own)
        self._dsn = dsn
        self._policies = (on_rename, on_drop)
        self._shaped: dict[tuple[str, str], SqlTable] = {}
        self._is_prepared = False

    def is_alive(self) -> bool:
        try:
            self._connection.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def close(self) -> None:
        self._connection.close()

    def prepare(self) -> None:
        if self._is_prepared:
            return
        own = quoted(self._own)
        if self._one("SELECT pg_catalog.to_regclass(%(name)s)", name=plain(f"{own}.fields")) is None:
            failpoints.hit(BEFORE_PREPARE)
            with self._connection.transaction():
                self._run("SELECT pg_catalog.pg_advisory_xact_lock(%(lock)s)", lock=_LOCK)
                self._create_schema(self._own)
                self._run(
                    f"CREATE TABLE IF NOT EXISTS {own}.tokens (query text, target text, backfill text, "
                    "epoch bigint NOT NULL DEFAULT 0, plan bigint NOT NULL DEFAULT 0, "
                    "attempt bigint NOT NULL DEFAULT 0, is_upsert boolean NOT NULL DEFAULT false, "
                    "generation bigint NOT NULL DEFAULT 0, PRIMARY KEY (query, target, backfill))"
                )
                self._run(
                    f"CREATE TABLE IF NOT EXISTS {own}.fields "
                    "(target text, name text, field_id integer NOT NULL, PRIMARY KEY (target, name))"
                )
            failpoints.hit(AFTER_PREPARE)
        self._is_prepared = True

    def committed(self, table: SqlTable, query: str, backfill: str) -> Committed:
        if not self._is_prepared:
            if self._one("SELECT pg_catalog.to_regclass(%(name)s)", name=plain(f"{quoted(self._own)}.fields")) is None:
                return Committed()
            self._is_prepared = True
        return self._held(table, query, backfill).committed

    def held(self, table: SqlTable, token: Token) -> Held:
        return self._held(table, token.query, token.backfill)

    def lock(self, table: SqlTable, token: Token) -> Held:
        self._run(
            f"INSERT INTO {self._tokens} (query, target, backfill) VALUES (%(query)s, %(target)s, '') "
            "ON CONFLICT DO NOTHING",
            query=token.query,
            target=table.name,
        )
        # The row of the changes is the lock of all. What another transaction wrote beside it while this one waited is
        # seen by the next statement, not by the one that waited.
        self._run(
            f"SELECT FROM {self._tokens} WHERE query = %(query)s AND target = %(target)s AND backfill = '' FOR UPDATE",
            query=token.query,
            target=table.name,
        )
        return self._held(table, token.query, token.backfill)

    def _held(self, table: SqlTable, query: str, backfill: str) -> Held:
        rows = self._all(
            "SELECT backfill, epoch, plan, attempt, is_upsert, generation, "
            f"pg_catalog.to_regclass(%(place)s) IS NOT NULL FROM {self._tokens} "
            "WHERE query = %(query)s AND target = %(target)s AND backfill IN ('', %(backfill)s)",
            place=plain(name_of(table.place)),
            query=query,
            target=table.name,
            backfill=backfill,
        )
        of_changes = next((row for row in rows if row[0] == ""), ("", 0, 0, 0, False, 0, False))
        of_history = next((row for row in rows if row[0] == backfill), ("", 0, 0, 0, False, 0, False))
        if not of_changes[-1]:  # somebody removed the table: it has nothing, whatever the tokens say
            self._shaped.pop(table.place, None)
            return Held(generation=of_changes[5])
        return Held(Committed(of_changes[1], of_history[2], of_history[3]), of_history[4], of_changes[5])

    def record(self, table: SqlTable, token: Token, batch: Batch, *, is_upsert: bool) -> None:
        if batch.has_changes:
            self._run(
                f"UPDATE {self._tokens} SET epoch = %(epoch)s "
                "WHERE query = %(query)s AND target = %(target)s AND backfill = ''",
                epoch=token.epoch,
                query=token.query,
                target=table.name,
            )
        if batch.history:
            self._run(
                f"INSERT INTO {self._tokens} (query, target, backfill, plan, attempt, is_upsert) "
                "VALUES (%(query)s, %(target)s, %(backfill)s, %(plan)s, %(attempt)s, %(is_upsert)s) "
                "ON CONFLICT (query, target, backfill) DO UPDATE SET plan = EXCLUDED.plan, "
                "attempt = EXCLUDED.attempt, is_upsert = EXCLUDED.is_upsert",
                query=token.query,
                target=table.name,
                backfill=token.backfill,
                plan=token.plan,
                attempt=token.attempt,
                is_upsert=is_upsert,
            )

    def fence(self, table: SqlTable, query: str, generation: int) -> None:
        self._run(
            f"INSERT INTO {self._tokens} (query, target, backfill, generation) "
            "VALUES (%(query)s, %(target)s, '', %(generation)s) "
            "ON CONFLICT (query, target, backfill) DO UPDATE SET generation = EXCLUDED.generation",
            query=query,
            target=table.name,
            generation=generation,
        )

    def transaction(self) -> AbstractContextManager[Any]:
        return self._connection.transaction()

    def relations(self) -> list[str]:
        rows = self._all(
            "SELECT c.relname::text FROM pg_catalog.pg_class c, pg_catalog.pg_namespace n WHERE n.oid = c.relnamespace "
            "AND n.nspname = %(own)s AND c.relkind = 'r'",
            own=self._own,
        )
        return [name for (name,) in rows]

    def drop(self, relations: Sequence[str]) -> None:
        for name in relations:
            self._run(f"DROP TABLE IF EXISTS {name_of((self._own, name))}")

    def stage(self, table: SqlTable, relation: str, schema: pa.Schema, rows: Iterator[pa.Table]) -> tuple[int, int]:
        place = name_of((self._own, relation))
        with self._connection.transaction():
            self._run(f"CREATE UNLOGGED TABLE {place} ({_columns(table.staged(schema))}) WITH (autovacuum_enabled=off)")
            return self._copy(place, rows, "FORMAT csv, FREEZE")

    def proof(self, relation: str) -> tuple[int, int]:
        # Rows as text, because not every type can be hashed. A crash of the server empties unlogged tables.
        found = self._all(
            "SELECT count(*), coalesce(sum(pg_catalog.hashtextextended(r::text, 0)), 0) "
            f"FROM {name_of((self._own, relation))} r"
        )
        return int(found[0][0]), int(found[0][1])

    def _copy(self, place: str, tables: Iterator[pa.Table], options: str) -> tuple[int, int]:
        count = size = 0
        with (
            self._connection.cursor() as cursor,
            cursor.copy(plain(f"COPY {place} FROM STDIN ({options})").encode()) as copy,
        ):
            for rows in tables:
                for start in range(0, rows.num_rows, CSV_ROWS):
                    data = csv_of(rows.slice(start, CSV_ROWS))
                    copy.write(memoryview(data))
                    size += len(data)
                count += rows.num_rows
        return count, size

    def temporary(self, table: SqlTable, rows: pa.Table) -> str:
        place = f"pg_temp.{quoted(self._next_name())}"
        self._run(f"CREATE TEMPORARY TABLE {place} ({_columns(table.staged(rows.schema))}) ON COMMIT DROP")
        self._copy(place, iter([rows]), "FORMAT csv")
        return place

    def shape(
        self, table: SqlTable, empty: Callable[[], None] | None = None, check: Callable[[], None] | None = None
    ) -> None:
        if self._shaped.get(table.place) == table:
            return
        _check_names(table)
        place = name_of(table.place)
        found = self._all(_COLUMNS, place=plain(place))
        if not found:
            try:
                with self._connection.transaction():
                    self._make(table, place)
            except _CREATED_MEANWHILE:
                found = self._all(_COLUMNS, place=plain(place))
                if not found:
                    raise
        if found:
            self._change(table, place, found, empty)
        self._shaped[table.place] = table

    def _create_schema(self, name: str) -> None:
        """IF NOT EXISTS sees no schema that another session is creating: the server waits for its end, then fails."""
        with contextlib.suppress(*_CREATED_MEANWHILE), self._connection.transaction():
            self._run(f"CREATE SCHEMA IF NOT EXISTS {quoted(name)}")

    def _make(self, table: SqlTable, place: str) -> None:
        self._create_schema(table.place[0])
        self._run(f"CREATE TABLE {place} ({_columns(table.columns)})")
        if any(map(is_cut, table.place)):
            text = table.source.full_name.replace("'", "''").replace("%", "%%")
            self._run(f"COMMENT ON TABLE {place} IS '{text}'")
        self._index(table, place)
        target = {"target": table.name}
        self._run(f"UPDATE {self._tokens} SET epoch = 0 WHERE target = %(target)s AND epoch <> 0", **target)
        self._run(f"DELETE FROM {self._tokens} WHERE target = %(target)s AND backfill <> ''", **target)
        self._run(f"DELETE FROM {self._fields} WHERE target = %(target)s", **target)
        self._note(table)

    def _index(self, table: SqlTable, place: str) -> None:
        """Its key, in a table that has none."""
        keys = ", ".join(quoted(name) for name in table.key)
        if table.mode is Mode.MIRROR and not table.is_whole:
            self._run(f"ALTER TABLE {place} ADD PRIMARY KEY ({keys})")
        elif table.mode is Mode.HISTORY and not table.is_whole:
            self._run(f"CREATE UNIQUE INDEX ON {place} ({keys}) WHERE {quoted(IS_CURRENT)}")
        elif table.mode is not Mode.CHANGES:
            narrow = [column.name for column in table.columns if column.name in table.key and _is_narrow(column)][:8]
            if narrow:
                self._run(f"CREATE INDEX ON {place} ({', '.join(quoted(name) for name in narrow)})")

    def _index_anew(self, table: SqlTable, place: str) -> None:
        """Its key, in a table that may have had another one; no row is there, or no version is current."""
        is_ours = "i.indisprimary" if table.mode is Mode.MIRROR else "i.indisunique AND i.indpred IS NOT NULL"
        found = self._all(_KEYS + is_ours + " GROUP BY i.indexrelid, c.conname", place=plain(place))
        if [set(table.key)] == [set(names) for *_, names in found] and not table.is_whole:
            return
        for index, constraint, names in found:
            if constraint is None:
                self._run(f"DROP INDEX {index}")
                continue
            self._run(f"ALTER TABLE {place} DROP CONSTRAINT {quoted(constraint)}")
            nullable = ", ".join(f"ALTER COLUMN {quoted(name)} DROP NOT NULL" for name in names)
            self._run(f"ALTER TABLE {place} {nullable}")
        if found or not table.is_whole:
            self._index(table, place)

    def _change(
        self, table: SqlTable, place: str, found: Sequence[tuple[Any, ...]], empty: Callable[[], None] | None
    ) -> None:
        fields = dict(
            self._all(f"SELECT name, field_id FROM {self._fields} WHERE target = %(target)s", target=table.name)
        )
        existing = [ExistingColumn(name, kind, fields.get(name)) for name, kind in found]
        todo = steps(table, existing, holds, *self._policies, emptied=empty is not None)
        if empty is not None:
            empty()
        for name in todo.removed:
            self._run(f"ALTER TABLE {place} DROP COLUMN {quoted(name)}")
        for old, new in todo.renamed:
            self._run(f"ALTER TABLE {place} RENAME COLUMN {quoted(old)} TO {quoted(new)}")
        for column in todo.added:
            self._run(f"ALTER TABLE {place} ADD COLUMN {_columns([column])}")
        for column in todo.widened:
            using = "" if empty is None or table.mode is not Mode.MIRROR else f" USING NULL::{column.type}"
            self._run(f"ALTER TABLE {place} ALTER COLUMN {quoted(column.name)} TYPE {column.type}{using}")
        if todo.filled:
            sets = ", ".join(f"{quoted(new)} = {quoted(old)}" for new, old in todo.filled)
            self._run(f"UPDATE {place} SET {sets}")
        for name in todo.dropped:
            self._run(f"ALTER TABLE {place} DROP COLUMN {quoted(name)}")
        if empty is not None and fields:
            self._index_anew(table, place)
        if table.mode is Mode.MIRROR and not table.is_whole:
            uniques = [set(names) for (names,) in self._all(_UNIQUE, place=plain(place))]
            if set(table.key) not in uniques:
                keys = ", ".join(quoted(name) for name in table.key)
                raise SinkSchemaError(
                    table.source.full_name,
                    f"{table.name} has no unique index on its key.",
                    next_step=plain(f"CREATE UNIQUE INDEX ON {place} ({keys});"),
                )
        if not todo.are_none or not fields or empty is not None:
            renamed = {new for _, new in todo.renamed}
            gone = {*todo.dropped, *todo.removed} - renamed
            stay = [one.name for one in existing if one.name not in gone]
            self._run(
                f"DELETE FROM {self._fields} WHERE target = %(target)s AND NOT name = ANY(%(names)s)",
                target=table.name,
                names=[name for name in stay if empty is None or name in table.names],
            )
            again = fields.keys() if empty is not None else set()
            self._note(table, {column.name for column in todo.added} | renamed | again)

    def _note(self, table: SqlTable, names: set[str] | None = None) -> None:
        """Remember the field ids of columns that we made."""
        for column in table.columns:
            if column.field_id is not None and (names is None or column.name in names):
                self._run(
                    f"INSERT INTO {self._fields} VALUES (%(target)s, %(name)s, %(id)s) ON CONFLICT (target, name) "
                    "DO UPDATE SET field_id = EXCLUDED.field_id",
                    target=table.name,
                    name=column.name,
                    id=column.field_id,
                )

    def read(self, table: SqlTable, columns: Sequence[str], *, current: bool = False) -> Iterator[pa.Table]:
        place = name_of(table.place)
        there = {name for name, _ in self._all(_COLUMNS, place=plain(place))}
        if not there:
            return
        wanted = ", ".join(quoted(name) if name in there else "NULL" for name in columns)
        where = f" WHERE {quoted(IS_CURRENT)}" if current else ""
        # a column of its own in front: a row of one column that is null would be an empty line
        query = plain(f"COPY (SELECT 1, {wanted} FROM {place}{where}) TO STDOUT (FORMAT csv)")
        held: list[bytes] = []
        size = 0
        with self._connection.cursor() as cursor, cursor.copy(query.encode()) as copy:
            for line in copy:
                held.append(bytes(line))
                size += len(line)
                if size >= _READ_BYTES:
                    yield _typed(table, columns, b"".join(held))
                    held, size = [], 0
        if held:
            yield _typed(table, columns, b"".join(held))

    def refusal(self, table: SqlTable, rows: pa.Table) -> str | None:
        part = SqlPart(rows.num_rows, rows.nbytes, rows.schema)
        known = dict(self._shaped)
        try:
            with self._connection.transaction(force_rollback=True):
                self._run("SET CONSTRAINTS ALL IMMEDIATE")
                self.shape(table)
                source = self.rows_source(table, rows, part)
                if table.mode is Mode.MIRROR:
                    self.merge(table, source)
                else:
                    self.append(table, source)
        except psycopg.Error as error:
            reason = row_reason(sink_error(error, self._dsn, table.source.full_name, self._own))
            if reason is None:
                raise
            return reason
        finally:
            self._shaped = known
        return None


def _columns(columns: Sequence[SqlColumn]) -> str:
    return ", ".join(f"{quoted(column.name)} {column.type}" for column in columns)


def _is_narrow(column: SqlColumn) -> bool:
    return not column.type.endswith("[]") and column.type not in ("text", "bytea", "json", "jsonb")


def _check_names(table: SqlTable) -> None:
    for name in (*table.place, *table.names):
        if len(name.encode()) > POSTGRES_NAME_BYTES or "\0" in name:
            raise SinkSchemaError(
                table.source.full_name,
                f"the name {name!r} is longer than the {POSTGRES_NAME_BYTES} bytes that Postgres keeps.",
                next_step="Rename the column, or leave it out of the capture.",
            )


def _typed(table: SqlTable, columns: Sequence[str], data: bytes) -> pa.Table:
    """Lines of csv as the sink's types."""
    texts = read_texts(table.source.full_name, data, len(columns) + 1).combine_chunks()
    made = []
    for place, name in enumerate(columns):
        field = next((one.field for one in table.columns if one.name == name), None) or table.own.field(name)
        made.append(_values(table, field, texts.column(place + 1)))
    return pa.table(made, list(columns))


def _values(table: SqlTable, field: pa.Field, texts: Any) -> Any:
    array = array_of(texts)
    kind = next((one.type for one in table.source.columns if one.name == field.name), field.type)
    column = next((one for one in table.columns if one.name == field.name), None)
    if column is not None and column.type == "jsonb" and not pa.types.is_string(field.type):
        return from_json(array, field.type)
    is_written = pa.types.is_string(field.type) and column is not None and column.type != "text"
    wanted = kind if is_written else field.type
    return cast(convert_column(table.source, SourceColumn(field.name, wanted, "", 0), array), field.type)
