"""The doctor: whether a database can be captured, what could stop it later, and the statement that mends each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from headwater.sources.diagnosis import Diagnosis, Finding, Level, statement_of
from headwater.sources.errors import SourceError, SourceNotFound
from headwater.sources.postgres.catalog import all_table_names, read_table, read_tables
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.connection import Connection, Dsn, connect, server_errors
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.publication import read_publication
from headwater.sources.postgres.server_checks import Server, check_server
from headwater.sources.postgres.table_checks import check_publication, check_table, check_together


def examine(
    dsn: Dsn,
    tables: Sequence[str] = (),
    *,
    slot: str = "headwater",
    publication: str = "headwater",
    hidden: Collection[TableName] = (),
) -> Diagnosis:
    """Look at the server and at *tables*; at every table of the database where none is named. Nothing is changed.

    :param hidden: tables that are not examined unless they are named.
    :raises InputError: a text is no table name.
    """
    names = [TableName.parse(text) for text in tables]
    try:
        session = connect(dsn)
    except SourceError as error:
        return Diagnosis(
            str(dsn), None, [Finding("connection", Level.PROBLEM, error.message, statement_of(error.next_step))]
        )
    with session, server_errors(dsn):
        findings = [Finding("connection", Level.OK, f"{dsn} answers.")]
        server = Server.ask(dsn, session, slot)
        findings += check_server(server)
        findings += _tables(session, names, publication, server, hidden)
    return Diagnosis(str(dsn), server.settings.get("server_version"), findings)


def _tables(
    session: Connection, names: Sequence[TableName], publication: str, server: Server, hidden: Collection[TableName]
) -> Iterator[Finding]:
    found: list[CatalogTable] = []
    for name in names:
        try:
            found.append(read_table(session, name))
        except SourceNotFound as error:
            yield Finding("table", Level.PROBLEM, error.message, statement_of(error.next_step), str(name))
    if not names:
        found = read_tables(session, [name for name in all_table_names(session) if name not in hidden])
    published = read_publication(session, publication)
    about = {table.name: list(check_table(table, server.role.name, server.version, published)) for table in found}
    if names:
        yield from check_publication(session, publication, published, found)
        yield from check_together(found)
        for table in found:
            yield from about[table.name]
        return
    yield from _summary(about)


def _summary(about: dict[TableName, list[Finding]]) -> Iterator[Finding]:
    """Of all tables, only those that need something."""
    fine = [name for name, findings in about.items() if all(one.level is not Level.PROBLEM for one in findings)]
    yield Finding("tables", Level.OK, f"{len(fine)} of {len(about)} tables can be captured.")
    for findings in about.values():
        for finding in findings:
            if finding.level is Level.PROBLEM:
                yield Finding(finding.check, Level.WARNING, finding.text, finding.fix, finding.table)
            elif finding.level is Level.WARNING:
                yield finding
