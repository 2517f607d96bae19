"""The doctor: whether a server can be captured, what could stop it later, and the statement that mends each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwater.sources.diagnosis import Diagnosis, Finding, Level, statement_of
from headwater.sources.errors import SourceError, SourceNotFound, UnsupportedTable
from headwater.sources.mysql.catalog import CatalogTable, all_table_names, cascades, read_table, read_tables
from headwater.sources.mysql.connection import Connection, Dsn, connect, server_errors
from headwater.sources.mysql.names import TableName, quoted
from headwater.sources.mysql.server import Server
from headwater.sources.mysql.server_checks import check_server
from headwater.sources.mysql.types import MySqlType


def examine(dsn: Dsn, tables: Sequence[str] = ()) -> Diagnosis:
    """Look at the server and at *tables*; at every table where none is named. Nothing is changed.

    :raises InputError: a text is no table name.
    """
    names = [TableName.parse(text, dsn.database) for text in tables]
    try:
        session = connect(dsn)
    except SourceError as error:
        return Diagnosis(
            str(dsn), None, [Finding("connection", Level.PROBLEM, error.message, statement_of(error.next_step))]
        )
    try:
        with server_errors(dsn):
            findings = [Finding("connection", Level.OK, f"{dsn} answers.")]
            server = Server.ask(session)
            findings += check_server(session, server)
            findings += _tables(session, dsn, server, names)
    finally:
        session.close()
    return Diagnosis(str(dsn), str(server.version), findings)


def _tables(session: Connection, dsn: Dsn, server: Server, names: Sequence[TableName]) -> Iterator[Finding]:
    if not names:
        yield from _summary(read_tables(session, all_table_names(session, dsn.database)))
        return
    for name in names:
        try:
            yield from _table(read_table(session, name))
            if not server.logs_cascades:
                yield from _cascades(session, name)
        except SourceNotFound as error:
            yield Finding("table", Level.PROBLEM, error.message, statement_of(error.next_step), str(name))


def _table(table: CatalogTable) -> Iterator[Finding]:
    name = str(table.name)
    try:
        table.require_capturable()
    except UnsupportedTable as error:
        yield Finding("table", Level.PROBLEM, error.reason, statement_of(error.next_step), name)
        return
    index = "its primary key" if table.key_index.upper() == "PRIMARY" else f"the unique index {table.key_index}"
    yield Finding("table", Level.OK, f"Its rows are named by {index}: {', '.join(table.key)}.", None, name)
    if table.engine.upper() not in ("INNODB", "ROCKSDB", "XTRADB"):
        text = f"The engine {table.engine} has no transactions: a statement that fails half way is logged half."
        yield Finding("engine", Level.NOTE, text, f"ALTER TABLE {table.name.sql} ENGINE = InnoDB;", name)
    booleans = [column.name for column in table.columns if MySqlType.parse(column.type_text).is_tinyint1]
    if booleans:
        text = f"Numbers, not booleans: {', '.join(booleans)}. For booleans write ?tinyint1=boolean in the address."
        yield Finding("tinyint(1)", Level.NOTE, text, None, name)


def _cascades(session: Connection, name: TableName) -> Iterator[Finding]:
    for key in cascades(session, name):
        text = f"Rows that change through the foreign key {key} (CASCADE, SET NULL) are not in this server's log."
        fix = (
            f"ALTER TABLE {name.sql} DROP FOREIGN KEY {quoted(key)}, ADD FOREIGN KEY (…) REFERENCES … (…); -- RESTRICT"
        )
        yield Finding("cascades", Level.WARNING, text, fix, str(name))


def _summary(tables: Sequence[CatalogTable]) -> Iterator[Finding]:
    """Of all tables, only those that need something."""
    problems = [finding for table in tables for finding in _table(table) if finding.level is Level.PROBLEM]
    fine = len(tables) - len(problems)
    yield Finding("tables", Level.OK, f"{fine} of {len(tables)} tables can be captured.")
    for finding in problems:
        yield Finding(finding.check, Level.WARNING, finding.text, finding.fix, finding.table)
