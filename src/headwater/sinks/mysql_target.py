"""MySqlTarget: a session with the MySQL or MariaDB of a sink: our own tables, the shape of its tables, tokens, reading.

``<own>.tokens``, ``<own>.fields`` and ``<own>.s…`` are what they are in Postgres
(:mod:`headwater.sinks.postgres_target`). A table is made and changed before the transaction, because that would end it;
each step can be done again: a column is noted as ours once it has its values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import ClassVar, Final

import pyarrow as pa
import pyarrow.types as pt
import pymysql
from pymysql.cursors import SSCursor

from headwater import failpoints
from headwater.databases.mysql import MySqlAddress
from headwater.sinks.batch import Batch, Held
from headwater.sinks.errors import SinkBusy, SinkSchemaError
from headwater.sinks.mysql_merge import MySqlMerge, listed, name_of, quoted
from headwater.sinks.mysql_session import IDLE_SECONDS, STREAM, MySqlConnection, sink_error
from headwater.sinks.mysql_text import holds, lines_of, normal, tuples_of, values_of
from headwater.sinks.sink import Committed, Mode, Token
from headwater.sinks.sql_staged import SqlPart
from headwater.sinks.sql_table import (
    MYSQL_NAME_CHARACTERS,
    ExistingColumn,
    OnDrop,
    OnRename,
    SqlColumn,
    SqlTable,
    passing_id,
    steps,
)
from headwater.sinks.sql_target import AFTER_PREPARE, BEFORE_PREPARE, row_reason
from headwater.sinks.versions import IS_CURRENT
from headwater.sources.target_names import is_cut

BEFORE_SHAPE = failpoints.register("sink.mysql.before_shape")
BETWEEN_SHAPE = failpoints.register("sink.mysql.between_shape")
AFTER_SHAPE = failpoints.register("sink.mysql.after_shape")

_LINES: Final = 100_000
_TUPLES: Final = 1_000
_READ_ROWS: Final = 20_000
_LOCK_SECONDS: Final = 60


class MySqlTarget(MySqlMerge):
    """A session. One thread."""

    shapes_apart: ClassVar[bool] = True

    def __init__(
        self, connection: MySqlConnection, address: MySqlAddress, own: str, on_rename: OnRename, on_drop: OnDrop
    ) -> None:
        super().__init__(connection, own)
        self._address = address
        self._policies = (on_rename, on_drop)
        self._tokens, self._fields = (name_of((own, name)) for name in ("tokens", "fields"))
        self._shaped: dict[tuple[str, str], SqlTable] = {}
        self._temporary: list[str] = []
        self._number = 0
        self._is_prepared = False
        self._is_maria = "MariaDB" in str(self._one("SELECT VERSION()"))
        if self._is_maria:
            self._run(f"SET SESSION idle_transaction_timeout = {IDLE_SECONDS}")
        # texts that differ in case or in blanks at their end are two
        collation = "utf8mb4_nopad_bin" if self._is_maria else "utf8mb4_0900_bin"
        self._options = f"ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE {collation}"
        self._has_files = self._one("SELECT @@local_infile") == "1"

    def ignores_case(self) -> bool:
        """Whether names of tables that differ in case only are one."""
        return str(self._one("SELECT @@lower_case_table_names")) != "0"

    def is_alive(self) -> bool:
        try:
            self._connection.ping(reconnect=False)
        except pymysql.err.MySQLError:
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(pymysql.err.MySQLError):
            self._connection.close()

    def prepare(self) -> None:
        if self._is_prepared:
            return
        if not self._exists((self._own, "fields")):
            failpoints.hit(BEFORE_PREPARE)
            self._run(f"CREATE DATABASE IF NOT EXISTS {quoted(self._own)}")
            texts = "query varchar(255), target varchar(255), backfill varchar(255)"
            numbers = ", ".join(f"{name} bigint NOT NULL DEFAULT 0" for name in ("epoch", "plan", "attempt"))
            self._run(
                f"CREATE TABLE IF NOT EXISTS {self._tokens} ({texts}, {numbers}, is_upsert tinyint NOT NULL DEFAULT 0, "
                f"generation bigint NOT NULL DEFAULT 0, PRIMARY KEY (query, target, backfill)) {self._options}"
            )
            self._run(
                f"CREATE TABLE IF NOT EXISTS {self._fields} (target varchar(255), name varchar(255), "
                f"field_id int NOT NULL, PRIMARY KEY (target, name)) {self._options}"
            )
            failpoints.hit(AFTER_PREPARE)
        self._run(f"USE {quoted(self._own)}")  # aliases in a DELETE of several tables need one, whichever it is
        self._is_prepared = True

    def _exists(self, place: tuple[str, str]) -> bool:
        schema, name = (self._text(one) for one in place)
        found = self._one(
            f"SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = {schema} AND TABLE_NAME = {name}"
        )
        return found is not None

    def committed(self, table: SqlTable, query: str, backfill: str) -> Committed:
        if not self._is_prepared and not self._exists((self._own, "fields")):
            return Committed()
        return self._held(table, query, backfill, "").committed

    def held(self, table: SqlTable, token: Token) -> Held:
        return self._held(table, token.query, token.backfill, "")

    def lock(self, table: SqlTable, token: Token) -> Held:
        query, target = self._text(token.query), self._text(table.name)
        mine = f"query = {query} AND target = {target} AND backfill = ''"
        # to insert first would share the lock with others that do, and none of them would get it for itself
        if self._one(f"SELECT 1 FROM {self._tokens} WHERE {mine} FOR UPDATE") is None:
            self._run(f"INSERT IGNORE INTO {self._tokens} SET query = {query}, target = {target}, backfill = ''")
        return self._held(table, token.query, token.backfill, "FOR UPDATE")

    def _held(self, table: SqlTable, query: str, backfill: str, lock: str) -> Held:
        rows = self._all(
            f"SELECT backfill, epoch, plan, attempt, is_upsert, generation FROM {self._tokens} "
            f"WHERE query = {self._text(query)} AND target = {self._text(table.name)} "
            f"AND backfill IN ('', {self._text(backfill)}) {lock}"
        )
        found = {row[0]: [int(one) for one in row[1:]] for row in rows}
        of_changes, of_history = (found.get(name, [0] * 5) for name in ("", backfill))
        if not self._exists(table.place):  # somebody removed the table: it has nothing, whatever the tokens say
            self._shaped.pop(table.place, None)
            return Held(generation=of_changes[4])
        return Held(Committed(of_changes[0], of_history[1], of_history[2]), bool(of_history[3]), of_changes[4])

    def record(self, table: SqlTable, token: Token, batch: Batch, *, is_upsert: bool) -> None:
        query, target, backfill = (self._text(one) for one in (token.query, table.name, token.backfill))
        if batch.has_changes:
            self._run(
                f"UPDATE {self._tokens} SET epoch = {token.epoch} "
                f"WHERE query = {query} AND target = {target} AND backfill = ''"
            )
        if batch.history:
            values = {"plan": token.plan, "attempt": token.attempt, "is_upsert": int(is_upsert)}
            sets = ", ".join(f"{name} = {value}" for name, value in values.items())
            self._run(
                f"INSERT INTO {self._tokens} SET query = {query}, target = {target}, backfill = {backfill}, {sets} "
                f"ON DUPLICATE KEY UPDATE {sets}"
            )

    def fence(self, table: SqlTable, query: str, generation: int) -> None:
        self._run(
            f"INSERT INTO {self._tokens} SET query = {self._text(query)}, target = {self._text(table.name)}, "
            f"backfill = '', generation = {generation} ON DUPLICATE KEY UPDATE generation = {generation}"
        )
        with self._changing(table):  # an earlier generation that changes its columns now has done so
            pass

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        except BaseException:
            with contextlib.suppress(pymysql.err.MySQLError):
                self._connection.rollback()
            raise
        self._connection.commit()
        self._allow_rest()
        if self._temporary:
            self._run(f"DROP TEMPORARY TABLE IF EXISTS {', '.join(self._temporary)}")
            self._temporary.clear()

    def _begin(self) -> None:
        """Begin a transaction that the server ends if this process stops: others wait for its locks."""
        if not self._is_maria:  # MySQL has no timeout for transactions alone
            self._end_when_idle()
        self._connection.begin()

    def _allow_rest(self) -> None:
        """After a transaction: the session can be idle for as long as the server allows."""
        if not self._is_maria:
            self._run("SET SESSION wait_timeout = DEFAULT")

    def relations(self) -> list[str]:
        rows = self._all(
            f"SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = {self._text(self._own)}"
        )
        return [name for (name,) in rows]

    def drop(self, relations: Sequence[str]) -> None:
        for name in relations:
            self._run(f"DROP TABLE IF EXISTS {name_of((self._own, name))}")

    def stage(self, table: SqlTable, relation: str, schema: pa.Schema, rows: Iterator[pa.Table]) -> tuple[int, int]:
        place = name_of((self._own, relation))
        columns = table.staged(schema)
        # of the key, not unique: versions have keys more than once
        index = "" if table.is_whole or table.mode is Mode.CHANGES else f", KEY ({listed(table.key)})"
        self._run(f"CREATE TABLE {place} ({_columns(columns)}{index}) {self._options}")
        return self._load(place, columns, rows)

    def proof(self, relation: str) -> tuple[int, int]:
        place = name_of((self._own, relation))
        rows = self._all(f"SELECT count(*) FROM {place}")
        checksum = self._all(f"CHECKSUM TABLE {place}")
        return int(rows[0][0]), int(checksum[0][1] or 0)

    def temporary(self, table: SqlTable, rows: pa.Table) -> str:
        self._number += 1
        place = name_of((self._own, f"t{self._number}"))
        columns = table.staged(rows.schema)
        index = "" if table.is_whole or table.mode is Mode.CHANGES else f", KEY ({listed(table.key)})"
        self._run(f"CREATE TEMPORARY TABLE {place} ({_columns(columns)}{index}) {self._options}")
        self._temporary.append(place)
        self._insert_all(place, columns, rows)
        return place

    def _load(self, place: str, columns: Sequence[SqlColumn], tables: Iterator[pa.Table]) -> tuple[int, int]:
        count = size = 0
        for rows in tables:
            for start in range(0, rows.num_rows, _LINES):
                some = rows.slice(start, _LINES)
                size += self._load_file(place, columns, some) if self._has_files else 0
                if not self._has_files:
                    size += self._insert_all(place, columns, some)
            count += rows.num_rows
        return count, size

    def _load_file(self, place: str, columns: Sequence[SqlColumn], rows: pa.Table) -> int:
        """By LOAD DATA. What a client sends is loaded leniently: a warning is an error here."""
        data = lines_of(rows)
        is_hex = [pt.is_binary(column.field.type) for column in columns]
        names = ", ".join(f"@v{at}" if is_hex[at] else quoted(one.name) for at, one in enumerate(columns))
        sets = ", ".join(f"{quoted(one.name)} = UNHEX(@v{at})" for at, one in enumerate(columns) if is_hex[at])
        self._connection.load(
            f"LOAD DATA LOCAL INFILE '{STREAM}' INTO TABLE {place} CHARACTER SET utf8mb4 "
            f"({names}){f' SET {sets}' if sets else ''}",
            data,
        )
        for _, code, message in self._all("SHOW WARNINGS LIMIT 1"):
            raise pymysql.err.DataError(int(code), message)
        return len(data)

    def _insert_all(self, place: str, columns: Sequence[SqlColumn], rows: pa.Table) -> int:
        head = f"INSERT INTO {place} ({listed(column.name for column in columns)}) VALUES ".encode()
        size = 0
        for start in range(0, rows.num_rows, _TUPLES):
            data = tuples_of(rows.slice(start, _TUPLES))
            self._run(head + data)
            size += len(data)
        return size

    def shape(
        self, table: SqlTable, empty: Callable[[], None] | None = None, check: Callable[[], None] | None = None
    ) -> None:
        if self._shaped.get(table.place) == table:
            return
        _check_names(table)
        failpoints.hit(BEFORE_SHAPE)
        with self._changing(table):
            if check is not None:
                check()
            found = self._found(table)
            if found:
                self._change(table, found, empty)
            else:
                self._make(table)
        failpoints.hit(AFTER_SHAPE)
        self._shaped[table.place] = table

    @contextlib.contextmanager
    def _changing(self, table: SqlTable) -> Iterator[None]:
        """No other session changes the columns of *table*. The server ends this one if its process is frozen.

        :raises SinkBusy: another one does.
        """
        lock = self._text("headwater." + blake2b(table.name.encode(), digest_size=16).hexdigest())
        self._end_when_idle()
        if self._one(f"SELECT GET_LOCK({lock}, {_LOCK_SECONDS})") != "1":
            raise SinkBusy(f"Another process changes {table.name}.", next_step="Try again.")
        try:
            yield
        finally:
            self._run(f"DO RELEASE_LOCK({lock})")
        self._run("SET SESSION wait_timeout = DEFAULT")

    def _end_when_idle(self) -> None:
        """Let the server end this session, and with it its locks, soon after its process was frozen."""
        self._run(f"SET SESSION wait_timeout = {IDLE_SECONDS}")

    def _found(self, table: SqlTable) -> list[ExistingColumn]:
        schema, name = (self._text(one) for one in table.place)
        fields = dict(self._all(f"SELECT name, field_id FROM {self._fields} WHERE target = {self._text(table.name)}"))
        rows = self._all(
            "SELECT COLUMN_NAME, COLUMN_TYPE FROM information_schema.COLUMNS "
            f"WHERE TABLE_SCHEMA = {schema} AND TABLE_NAME = {name} ORDER BY ORDINAL_POSITION"
        )
        return [
            ExistingColumn(name, normal(kind), passing_id(name) if name not in fields else int(fields[name]))
            for name, kind in rows
        ]

    def _make(self, table: SqlTable) -> None:
        """The tokens go first: where the table is not there, they say nothing anyway."""
        target = self._text(table.name)
        self._run(f"UPDATE {self._tokens} SET epoch = 0 WHERE target = {target} AND backfill = ''")
        self._run(f"DELETE FROM {self._tokens} WHERE target = {target} AND backfill <> ''")
        self._run(f"DELETE FROM {self._fields} WHERE target = {target}")
        self._note(table, set(table.names))
        failpoints.hit(BETWEEN_SHAPE)
        self._run(f"CREATE DATABASE IF NOT EXISTS {quoted(table.place[0])}")
        index = ""
        if table.mode is Mode.MIRROR and not table.is_whole:
            index = f", PRIMARY KEY ({listed(table.key)})"
        elif table.mode is Mode.HISTORY and not table.is_whole:
            index = f", KEY ({listed((*table.key, IS_CURRENT))})"
        columns = _columns(table.columns, table.key if index.startswith(", PRIMARY") else ())
        comment = f"COMMENT {self._text(table.source.full_name)}" if any(map(is_cut, table.place)) else ""
        self._run(f"CREATE TABLE {name_of(table.place)} ({columns}{index}) {self._options} {comment}")

    def _change(self, table: SqlTable, existing: Sequence[ExistingColumn], empty: Callable[[], None] | None) -> None:
        place, target = name_of(table.place), self._text(table.name)
        is_ours = any(column.field_id is not None for column in existing)
        todo = steps(table, existing, holds, *self._policies, emptied=empty is not None)
        if empty is not None:
            empty()
            if is_ours and table.mode is Mode.MIRROR:
                self._without_key(table, existing)
        for name in todo.removed:
            self._run(f"ALTER TABLE {place} DROP COLUMN {quoted(name)}")
        for old, new in todo.renamed:  # whatever ends this between two statements: what is noted of a name is true
            self._run(f"DELETE FROM {self._fields} WHERE target = {target} AND name = {self._text(new)}")
            self._run(f"ALTER TABLE {place} RENAME COLUMN {quoted(old)} TO {quoted(new)}")
        for column in todo.added:
            self._run(f"ALTER TABLE {place} ADD COLUMN {_columns([column])}")
        for column in todo.widened:
            required = table.key if table.mode is Mode.MIRROR and not table.is_whole else ()
            self._run(f"ALTER TABLE {place} MODIFY COLUMN {_columns([column], required)}")
        failpoints.hit(BETWEEN_SHAPE)
        if todo.filled:
            sets = ", ".join(f"{quoted(new)} = {quoted(old)}" for new, old in todo.filled)
            self._run(f"UPDATE {place} SET {sets}")
        for name in todo.dropped:
            self._run(f"ALTER TABLE {place} DROP COLUMN {quoted(name)}")
        if table.mode is Mode.MIRROR and not table.is_whole:
            self._check_key(table, can_make=empty is not None and is_ours)
        if empty is not None:
            self._run(f"DELETE FROM {self._fields} WHERE target = {target}")
        self._note(table, set(table.names) if is_ours else {column.name for column in todo.added})

    def _uniques(self, table: SqlTable) -> dict[str, set[str]]:
        """The columns of its unique indexes."""
        schema, name = (self._text(one) for one in table.place)
        rows = self._all(
            "SELECT INDEX_NAME, COLUMN_NAME FROM information_schema.STATISTICS "
            f"WHERE TABLE_SCHEMA = {schema} AND TABLE_NAME = {name} AND NON_UNIQUE = 0 AND SUB_PART IS NULL"
        )
        uniques: dict[str, set[str]] = {}
        for index, column in rows:
            uniques.setdefault(index, set()).add(column)
        return uniques

    def _without_key(self, table: SqlTable, existing: Sequence[ExistingColumn]) -> None:
        """Drop the primary key that it had, if that is another one now."""
        known = self._uniques(table).get("PRIMARY", set())
        if not known or (known == set(table.key) and not table.is_whole):
            return
        nullable = (f"MODIFY COLUMN {quoted(one.name)} {one.type} NULL" for one in existing if one.name in known)
        self._run(f"ALTER TABLE {name_of(table.place)} DROP PRIMARY KEY, {', '.join(nullable)}")

    def _check_key(self, table: SqlTable, *, can_make: bool) -> None:
        if set(table.key) in self._uniques(table).values():
            return
        if can_make:
            keys = [column for column in table.columns if column.name in table.key]
            required = ", ".join(f"MODIFY COLUMN {_columns([column], table.key)}" for column in keys)
            self._run(f"ALTER TABLE {name_of(table.place)} {required}, ADD PRIMARY KEY ({listed(table.key)})")
        else:
            raise SinkSchemaError(
                table.source.full_name,
                f"{table.name} has no unique index on its key.",
                next_step=f"ALTER TABLE {name_of(table.place)} ADD UNIQUE ({listed(table.key)});",
            )

    def _note(self, table: SqlTable, names: set[str]) -> None:
        """Remember the field ids of columns that we made."""
        for column in table.columns:
            if column.field_id is not None and column.name in names:
                self._run(
                    f"INSERT INTO {self._fields} SET target = {self._text(table.name)}, "
                    f"name = {self._text(column.name)}, field_id = {column.field_id} "
                    f"ON DUPLICATE KEY UPDATE field_id = {column.field_id}"
                )

    def read(self, table: SqlTable, columns: Sequence[str], *, current: bool = False) -> Iterator[pa.Table]:
        there = {column.name for column in self._found(table)}
        if not there:
            return
        known = {column.name: column for column in table.columns}
        own = {name: table.own.field(name) if name in table.own.names else known[name].field for name in columns}
        wanted = ", ".join(
            "NULL" if name not in there else f"HEX({quoted(name)})" if pt.is_binary(own[name].type) else quoted(name)
            for name in columns
        )
        where = f" WHERE {quoted(IS_CURRENT)}" if current else ""
        with self._connection.cursor(SSCursor) as cursor:
            cursor.execute(f"SELECT {wanted} FROM {name_of(table.place)}{where}")
            while rows := cursor.fetchmany(_READ_ROWS):
                made = []
                for name, texts in zip(columns, zip(*rows, strict=True), strict=True):
                    source = next((one.type for one in table.source.columns if one.name == name), None)
                    kind = known[name].type if name in known else "longtext"
                    made.append(values_of(list(texts), own[name], source, kind))
                yield pa.table(made, list(columns))

    def refusal(self, table: SqlTable, rows: pa.Table) -> str | None:
        try:
            if self._exists(table.place):
                self.shape(table)
            self._begin()
            try:
                source = self.rows_source(table, rows, SqlPart(rows.num_rows, rows.nbytes, rows.schema))
                if self._exists(table.place):
                    (self.merge if table.mode is Mode.MIRROR else self.append)(table, source)
            finally:
                self._connection.rollback()
                self._allow_rest()
        except pymysql.err.MySQLError as error:
            reason = row_reason(sink_error(error, self._address, table.source.full_name, self._own))
            if reason is None:
                raise
            return reason
        finally:
            if self._temporary:
                self._run(f"DROP TEMPORARY TABLE IF EXISTS {', '.join(self._temporary)}")
                self._temporary.clear()
        return None


def _columns(columns: Sequence[SqlColumn], required: Sequence[str] = ()) -> str:
    return ", ".join(
        f"{quoted(column.name)} {column.type} {'NOT NULL' if column.name in required else 'NULL'}" for column in columns
    )


def _check_names(table: SqlTable) -> None:
    for name in (*table.place, *table.names):
        if len(name) > MYSQL_NAME_CHARACTERS or name != name.rstrip():
            raise SinkSchemaError(
                table.source.full_name,
                f"the name {name!r} is longer than the {MYSQL_NAME_CHARACTERS} characters that it may have there.",
                next_step="Name the tables by the option table, or leave the column out of the capture.",
            )
