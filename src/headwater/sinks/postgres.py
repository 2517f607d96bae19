"""PostgresSink: each table of a query as a table of a Postgres database.

``MIRROR`` has the rows as they are now, one per key. ``CHANGES`` has every change, appended. ``HISTORY`` has every
version of every row. One batch of one table is one transaction, which also writes the tokens, into a schema of ours in
the same database. Tasks COPY rows into unlogged tables of that schema; a few rows travel inside their answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headwater.sinks.errors import SinkDriverMissing
from headwater.sinks.sessions import Sessions
from headwater.sinks.sink import Mode
from headwater.sinks.sql_sink import SqlSink
from headwater.sinks.sql_table import OnDrop, OnRename, SqlTable, check_table_name, table_name
from headwater.sources.table import SourceTable

if TYPE_CHECKING:
    from headwater.sinks.postgres_target import PostgresTarget

OWN_SCHEMA: Final = "headwater"

SESSIONS: Final[Sessions[Any]] = Sessions()
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

    dsn: str = field(repr=False)
    mode: Mode = Mode.MIRROR
    schema: str | None = None
    table: str = "{table}"
    own_schema: str = OWN_SCHEMA
    on_rename: OnRename = "copy"
    on_drop: OnDrop = "keep"

    def __post_init__(self) -> None:
        check_table_name(self.table)

    @property
    def name(self) -> str:
        return f"postgres:{_library().address(self.dsn)}"

    @contextmanager
    def _target(self, table: SourceTable | None = None) -> Iterator[PostgresTarget]:
        session = _library()
        import psycopg

        from headwater.sinks.postgres_target import PostgresTarget

        dsn = session.address(self.dsn)
        place = (self.dsn, self.own_schema, self.on_rename, self.on_drop)

        def connect() -> PostgresTarget:
            return PostgresTarget(session.connect(dsn), dsn, self.own_schema, self.on_rename, self.on_drop)

        try:
            with SESSIONS.borrowed(place, connect) as target:
                yield target
        except psycopg.Error as error:
            raise session.told(error, dsn, "" if table is None else table.full_name, self.own_schema) from None

    def _table(self, table: SourceTable) -> SqlTable:
        from headwater.sinks.postgres_text import sql_type

        place = (self.schema or table.namespace or "public", table_name(self.table, table))
        return SqlTable.of(table, place, self.mode, sql_type, self.on_drop)


def _library() -> Any:
    try:
        from headwater.sinks import postgres_session
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise SinkDriverMissing(
            "The library for Postgres is not installed.", next_step="Run: pip install 'headwater[postgres]'"
        ) from None
    return postgres_session
