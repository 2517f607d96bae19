"""PostgresSink: each table of a query as a table of a Postgres database.

``MIRROR`` has the rows as they are now, one per key. ``CHANGES`` has every change, appended. ``HISTORY`` has every
version of every row. One batch of one table is one transaction, which also writes the tokens, into a schema of ours in
the same database. Tasks COPY rows into unlogged tables of that schema; a few rows travel inside their answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from headwater.sinks.sink import Mode
from headwater.sinks.sql_sink import SqlSink
from headwater.sinks.sql_table import POSTGRES_NAME_BYTES, OnDrop, OnRename, SqlTable, table_name
from headwater.sinks.sql_target import SqlDriver, Target, needs_library, target_pool
from headwater.sources.table import SourceTable
from headwater.sources.target_names import fit_identifier
from headwater.system.pool import Pool

OWN_SCHEMA: Final = "headwater"

SESSIONS: Final = target_pool()
"""Of this process."""


@dataclass(frozen=True)
class PostgresSink(SqlSink):
    """Tables in the database *dsn*. It can be pickled.

    :param dsn: ``postgresql://user:password@host/database``; never shown.
    :param schema: of the tables; ``None``: each is in a schema with the name of its own at the source.
    :param table: how tables are called; ``{schema}`` and ``{table}`` are the names at the source.
    :param own_schema: of our own tables: tokens and staged rows.
    :param on_rename: what a column becomes that is renamed at the source. :param on_drop: … that is dropped there.
    :raises SinkInputError: a *table* that does not name the table.
    """

    sessions: ClassVar[Pool[Target]] = SESSIONS

    dsn: str = field(repr=False)
    mode: Mode = Mode.MIRROR
    schema: str | None = None
    table: str = "{table}"
    own_schema: str = OWN_SCHEMA
    on_rename: OnRename = "copy"
    on_drop: OnDrop = "keep"

    @property
    def _own(self) -> str:
        return self.own_schema

    @property
    def _driver(self) -> SqlDriver:
        with needs_library("psycopg", "Postgres", "postgres"):
            from psycopg import Error

            from headwater.sinks import postgres_session as session
            from headwater.sinks.postgres_target import PostgresTarget
        return SqlDriver("postgres", Error, session.address, session.connect, PostgresTarget, session.sink_error)

    def _place(self, table: SourceTable) -> tuple[str, str]:
        names = (self.schema or table.namespace or "public", table_name(self.table, table))
        schema, name = (fit_identifier(one, POSTGRES_NAME_BYTES, lambda text: len(text.encode())) for one in names)
        return schema, name

    def _table(self, table: SourceTable) -> SqlTable:
        from headwater.sinks.postgres_text import sql_type

        return SqlTable.of(table, self._place(table), self.mode, sql_type, self.on_drop)
