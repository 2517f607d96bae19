"""The doctor: whether a database can be captured, what could stop it later, and the statement that mends each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headwater.sources.diagnosis import Diagnosis, Finding, Level, statement_of
from headwater.sources.errors import AccessDenied, SourceBusy, SourceError, SourceNotFound, UnsupportedTable
from headwater.sources.sqlserver.catalog import CatalogTable, all_table_names, present_tables, read_tables
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.followed import disable_table, enable_table, with_key
from headwater.sources.sqlserver.hidden_checks import check_hidden
from headwater.sources.sqlserver.instances import CaptureInstance, read_instances
from headwater.sources.sqlserver.names import TableName, quoted
from headwater.sources.sqlserver.server import Server
from headwater.sources.sqlserver.server_checks import check_server


def examine(dsn: Dsn, tables: Sequence[str] = ()) -> Diagnosis:
    """Look at the database and at *tables*; at every table where none is named. Nothing is changed.

    :raises InputError: a text is no table name.
    """
    names = [TableName.parse(text) for text in tables]
    try:
        session = Session(dsn)
    except SourceError as error:
        return Diagnosis(str(dsn), None, [_problem("connection", error)])
    with session:
        findings = [Finding("connection", Level.OK, f"{dsn} answers.")]
        try:
            server = Server.ask(session)
        except SourceError as error:
            return Diagnosis(str(dsn), None, [*findings, _problem("version", error)])
        findings += check_server(session, server)
        try:
            findings += _tables(session, server, names)
        except AccessDenied as error:
            fix = statement_of(error.next_step)
            if fix is None or not fix.startswith("ALTER ROLE"):
                fix = f"GRANT SELECT ON SCHEMA::cdc TO {quoted(dsn.user)};"
            findings.append(Finding("rights", Level.PROBLEM, error.message, fix))
        except SourceBusy as error:
            findings.append(_problem("capture instance", error))
    return Diagnosis(str(dsn), f"SQL Server {server.version}", findings)


def _problem(check: str, error: SourceError) -> Finding:
    return Finding(check, Level.PROBLEM, error.message, statement_of(error.next_step))


def _tables(session: Session, server: Server, names: Sequence[TableName]) -> Iterator[Finding]:
    there = all_table_names(session)
    for name in names:
        try:
            (table,) = read_tables(session, [name])
        except SourceNotFound as error:
            yield Finding("table", Level.PROBLEM, error.message, statement_of(error.next_step), str(name))
            continue
        yield from _table(table, _instances(session, server, [table]).get(table.id, []))
        yield from check_hidden(session, [table])
    if names:
        return
    present = present_tables(session, there)
    instances = _instances(session, server, list(present.values()))
    problems = [
        finding
        for table in present.values()
        for finding in _table(table, instances.get(table.id, []))
        if finding.level is Level.PROBLEM
    ]
    yield Finding("tables", Level.OK, f"{len(present) - len(problems)} of {len(present)} tables can be captured.")
    for finding in (*problems, *check_hidden(session, [one for one in present.values() if instances.get(one.id)])):
        yield Finding(finding.check, Level.WARNING, finding.text, finding.fix, finding.table)


def _instances(session: Session, server: Server, tables: Sequence[CatalogTable]) -> dict[int, list[CaptureInstance]]:
    return read_instances(session, [table.id for table in tables]) if server.has_cdc else {}


def _table(table: CatalogTable, instances: Sequence[CaptureInstance]) -> Iterator[Finding]:
    name = str(table.name)
    try:
        table.require_capturable()
    except UnsupportedTable as error:
        yield Finding("table", Level.PROBLEM, error.reason, statement_of(error.next_step), name)
        return
    if not instances:
        text = "Change data capture is off for it."
        yield Finding("capture instance", Level.PROBLEM, text, enable_table(table.name), name)
        return
    newest = instances[-1]
    captured = {column.number for column in newest.columns}
    key = [column.number for column in table.columns if column.name in table.key]
    if any(number not in captured for number in key):
        text = f"Its capture instance {newest.name} does not have its key."
        fix = with_key(table.name, newest, is_only=len(instances) == 1)
        yield Finding("capture instance", Level.PROBLEM, text, fix, name)
        return
    text = f"The capture instance {newest.name} tells it from {newest.start.hex} on; its rows are named by the key "
    yield Finding("table", Level.OK, f"{text}{', '.join(table.key)}.", None, name)
    left = [one.name for one in table.columns if not one.computed and one.number not in captured]
    if left:
        text = f"The capture instance {newest.name} does not have the columns {', '.join(left)}."
        fix = enable_table(table.name, "_".join(left)[:40])
        if len(instances) > 1:  # there may be two
            fix = f"{disable_table(table.name, instances[0].name)} {fix}"
        yield Finding("columns", Level.WARNING, text, fix, name)
    computed = [column.name for column in table.columns if column.computed]
    if computed:
        text = f"Computed columns are not captured: {', '.join(computed)}."
        yield Finding("computed columns", Level.NOTE, text, None, name)
