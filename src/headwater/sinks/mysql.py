"""MySqlSink: each table of a query as a table of a MySQL or MariaDB server.

As in Postgres (:mod:`headwater.sinks.postgres`) one batch of one table is one transaction, which also writes the
tokens, into a database of ours on the same server. Tasks load rows into tables of that database, by ``LOAD DATA LOCAL``
where the server allows it. Tables are made and changed before the transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from headwater.sinks.errors import SinkDriverMissing, SinkInputError
from headwater.sinks.sessions import Sessions
from headwater.sinks.sink import Mode
from headwater.sinks.sql_sink import SqlSink
from headwater.sinks.sql_table import OnDrop, OnRename, SqlTable, check_table_name, is_whole, table_name
from headwater.sources.table import SourceTable

if TYPE_CHECKING:
    from headwater.sinks.mysql_target import MySqlTarget

OWN_DATABASE: Final = "headwater"

SESSIONS: Final[Sessions[Any]] = Sessions()
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

    dsn: str = field(repr=False)
    mode: Mode = Mode.MIRROR
    database: str | None = None
    table: str = "{table}"
    own_database: str = OWN_DATABASE
    on_rename: OnRename = "copy"
    on_drop: OnDrop = "keep"

    def __post_init__(self) -> None:
        check_table_name(self.table)

    @property
    def name(self) -> str:
        return f"mysql:{_library().address(self.dsn)}"

    @contextmanager
    def _target(self, table: SourceTable | None = None) -> Iterator[MySqlTarget]:
        session = _library()
        import pymysql

        from headwater.sinks.mysql_target import MySqlTarget

        address = session.address(self.dsn)
        place = (self.dsn, self.own_database, self.on_rename, self.on_drop)

        def connect() -> MySqlTarget:
            return MySqlTarget(session.connect(address), address, self.own_database, self.on_rename, self.on_drop)

        try:
            with SESSIONS.borrowed(place, connect) as target:
                yield target
        except pymysql.err.MySQLError as error:
            name = "" if table is None else table.full_name
            raise session.told(error, address, name, self.own_database) from None

    def _table(self, table: SourceTable) -> SqlTable:
        library = _library()
        from headwater.sinks.mysql_text import key_length, sql_type

        database = self.database or library.address(self.dsn).database or table.namespace
        if not database:
            raise SinkInputError(
                f"{table.full_name} has no schema whose name its database could have.",
                next_step="Name one by the option database, or in dsn.",
            )
        has_index = self.mode is not Mode.CHANGES and not is_whole(table)
        type_of = partial(sql_type, key=table.key_columns, length=key_length(table)) if has_index else sql_type
        return SqlTable.of(table, (database, table_name(self.table, table)), self.mode, type_of, self.on_drop)


def _library() -> Any:
    try:
        from headwater.sinks import mysql_session
    except ModuleNotFoundError as error:
        if error.name != "pymysql":
            raise
        raise SinkDriverMissing(
            "The library for MySQL is not installed.", next_step="Run: pip install 'headwater[mysql]'"
        ) from None
    return mysql_session
