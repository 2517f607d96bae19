"""The doctor: whether a database can be captured, what could stop it later, and the statement that mends each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from headwater.sources.diagnosis import Diagnosis, Finding, Level, statement_of
from headwater.sources.errors import SourceError, SourceNotFound, UnsupportedTable
from headwater.sources.postgres.catalog import all_table_names, read_table, read_tables
from headwater.sources.postgres.catalog_table import CatalogColumn, CatalogTable, Generated, ReplicaIdentity
from headwater.sources.postgres.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.postgres.names import TableName, quoted
from headwater.sources.postgres.publication import (
    GENERATED_SINCE,
    Publication,
    creation,
    read_publication,
    require_disjoint,
)
from headwater.sources.postgres.server_checks import Server, check_server

_MAY_CREATE = "SELECT pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE') AS may"


def check_publication(
    session: Connection, name: str, publication: Publication | None, tables: Sequence[CatalogTable]
) -> Iterator[Finding]:
    """Whether the publication sends the tables, or can be made to by this user."""
    if publication is None:
        yield from _to_be_made(session, name, tables)
        return
    problems = publication.problems(tables)
    may = publication.owned and all(table.owned for table in tables)
    for text, fix in problems:
        addable = fix.startswith("ALTER PUBLICATION") and " ADD TABLE " in fix and "DROP TABLE" not in fix
        if addable and may:
            yield Finding("publication", Level.NOTE, f"{text} The capture will add it.")
        else:
            yield Finding("publication", Level.PROBLEM, text, fix)
    if not problems:
        yield Finding("publication", Level.OK, f"The publication {name!r} sends what is needed.")


def _to_be_made(session: Connection, name: str, tables: Sequence[CatalogTable]) -> Iterator[Finding]:
    foreign = [table for table in tables if not table.owned]
    if not tables:
        yield Finding("publication", Level.OK, f"The publication {name!r} will be made by the first capture.")
    elif foreign or not ask(session, _MAY_CREATE)[0].may:
        text = f"There is no publication {name!r}, and the user {session.info.user!r} may not make it"
        text += f": {foreign[0].name} belongs to {foreign[0].owner!r}." if foreign else " in this database."
        publishable = [table for table in tables if table.kind in ("r", "p") and table.identity_columns]
        fix = creation(name, publishable, session.info.server_version) if publishable else None
        yield Finding("publication", Level.PROBLEM, text, fix)
    else:
        yield Finding("publication", Level.OK, f"The publication {name!r} will be made by the first capture.")


def check_table(
    table: CatalogTable, user: str, server_version: int, publication: Publication | None = None
) -> Iterator[Finding]:
    """All findings about one table; one that is fine where there is nothing to say."""
    sent = None if publication is None else publication.tables.get(table.oid)
    stored = server_version >= GENERATED_SINCE if publication is None else publication.stored_generated
    captured = table.captured_columns(None if sent is None else sent.columns, stored_generated=stored)
    found = list(_of_table(table, captured, user))
    if not any(finding.level is Level.PROBLEM for finding in found):
        key = ", ".join(table.key_columns(captured))
        parts = f", {len(table.leaves)} partitions" if table.is_partitioned else ""
        yield Finding("table", Level.OK, f"It can be captured; its key is ({key}){parts}.", None, str(table.name))
    yield from found


def check_together(tables: Sequence[CatalogTable]) -> Iterator[Finding]:
    """Whether the tables can be captured beside each other."""
    try:
        require_disjoint(tables)
    except UnsupportedTable as error:
        yield Finding("partitions", Level.PROBLEM, error.reason, statement_of(error.next_step), error.table)


def _of_table(table: CatalogTable, captured: Sequence[CatalogColumn], user: str) -> Iterator[Finding]:
    name = str(table.name)
    try:
        table.require_capturable()
    except UnsupportedTable as error:
        yield Finding("logging", Level.PROBLEM, error.reason, statement_of(error.next_step), name)
        return
    try:
        table.key_columns(captured)
    except UnsupportedTable as error:
        yield Finding("replica identity", Level.PROBLEM, error.reason, statement_of(error.next_step), name)
    else:
        yield from _identity(table, name)
    if not table.selectable:
        fix = f"GRANT USAGE ON SCHEMA {quoted(table.name.namespace)} TO {quoted(user)}; "
        fix += f"GRANT SELECT ON {table.name.sql} TO {quoted(user)};"
        yield Finding("grants", Level.PROBLEM, f"The user {user!r} may not read all of its columns.", fix, name)
    if table.row_security:
        text = f"Row security hides rows from the user {user!r}; the log tells all of them."
        yield Finding("row security", Level.PROBLEM, text, f"ALTER ROLE {quoted(user)} BYPASSRLS;", name)
    left_out = [column for column in table.columns if column.generated is not Generated.NO and column not in captured]
    if left_out:
        names = ", ".join(column.name for column in left_out)
        why = "Postgres logs stored ones from 18 on, virtual ones never"
        yield Finding(
            "generated columns", Level.NOTE, f"Left out, because they are generated: {names} ({why}).", None, name
        )
    if table.inherited:
        text = "Other tables inherit from it: their rows are not its own, and each is captured by its own name."
        yield Finding("inheritance", Level.NOTE, text, None, name)
    if table.ancestors:
        text = f"It is a partition of {table.ancestors[-1]}: captured alone, under its own name."
        yield Finding("partitions", Level.NOTE, text, None, name)


def _identity(table: CatalogTable, name: str) -> Iterator[Finding]:
    if table.identity is ReplicaIdentity.FULL:
        if table.primary_key:
            return
        text = (
            "It has no primary key: all columns together name a row, equal rows are one, and changes are logged whole."
        )
        yield Finding(
            "replica identity", Level.WARNING, text, f"ALTER TABLE {table.name.sql} ADD PRIMARY KEY (…);", name
        )
        return
    large = [column.name for column in table.columns if column.toasted and column.generated is Generated.NO]
    if large:
        text = f"Large values that an update leaves alone are read again from the table ({', '.join(large[:5])})."
        fix = f"ALTER TABLE {table.name.sql} REPLICA IDENTITY FULL; -- logs them, for more log"
        yield Finding("large values", Level.NOTE, text, fix, name)


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
