"""MySqlSink: each table of a query as a table of a MySQL or MariaDB server.

As in Postgres (:mod:`headwater.sinks.postgres`) one batch of one table is one transaction, which also writes the
tokens, into a database of ours on the same server. Tasks load rows into tables of that database, by ``LOAD DATA LOCAL``
where the server allows it. Tables are made and changed before the transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final

from headwater.sinks.errors import SinkInputError
from headwater.sinks.sink import Mode
from headwater.sinks.sql_sink import SqlSink
from headwater.sinks.sql_table import MYSQL_NAME_CHARACTERS, OnDrop, OnRename, SqlTable, is_whole, table_name
from headwater.sinks.sql_target import SqlDriver, Target, needs_library, target_pool
from headwater.sources.table import SourceTable
from headwater.sources.target_names import fit_identifier
from headwater.system.pool import Pool

OWN_DATABASE: Final = "headwater"

SESSIONS: Final = target_pool()
"""Of this process."""


@dataclass(frozen=True)
class MySqlSink(SqlSink):
    """Tables on the server *dsn*. It can be pickled.

    :param dsn: ``mysql://user:password@host:3306/database``; never shown.
    :param database: of the tables; ``None``: that of *dsn*, and if it has none one with the name of each schema.
    :param table: how tables are called; ``{schema}`` and ``{table}`` are the names at the source.
    :param own_database: of our own tables: tokens and staged rows.
    :param on_rename: what a column becomes that is renamed at the source. :param on_drop: … that is dropped there.
    :raises SinkInputError: a *table* that does not name the table.
    """

    sessions: ClassVar[Pool[Target]] = SESSIONS

    dsn: str = field(repr=False)
    mode: Mode = Mode.MIRROR
    database: str | None = None
    table: str = "{table}"
    own_database: str = OWN_DATABASE
    on_rename: OnRename = "copy"
    on_drop: OnDrop = "keep"

    @property
    def _own(self) -> str:
        return self.own_database

    @property
    def _driver(self) -> SqlDriver:
        with needs_library("pymysql", "MySQL", "mysql"):
            from pymysql.err import MySQLError

            from headwater.sinks import mysql_session as session
            from headwater.sinks.mysql_target import MySqlTarget
        return SqlDriver("mysql", MySQLError, session.address, session.connect, MySqlTarget, session.sink_error)

    def _table(self, table: SourceTable) -> SqlTable:
        from headwater.sinks.mysql_text import key_length, sql_type

        has_index = self.mode is not Mode.CHANGES and not is_whole(table)
        type_of = partial(sql_type, key=table.key_columns, length=key_length(table)) if has_index else sql_type
        return SqlTable.of(table, self._place(table), self.mode, type_of, self.on_drop)

    def target(self, table: SourceTable) -> str:
        """The name of *table* there, in lower case where the server ignores case."""
        from headwater.sinks.mysql_target import MySqlTarget

        name = super().target(table)
        with self._target(table) as target:
            assert isinstance(target, MySqlTarget)
            return name.lower() if target.ignores_case() else name

    def _place(self, table: SourceTable) -> tuple[str, str]:
        database = self.database or self._driver.address(self.dsn).database or table.namespace
        if not database:
            raise SinkInputError(
                f"{table.full_name} has no schema whose name its database could have.",
                next_step="Name one by the option database, or in dsn.",
            )
        names = (database, table_name(self.table, table))
        schema, name = (fit_identifier(one, MYSQL_NAME_CHARACTERS, len) for one in names)
        return schema, name
