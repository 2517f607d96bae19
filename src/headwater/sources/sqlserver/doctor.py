"""The doctor: whether a database can be captured, what could stop it later, and the statement that mends each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from headwater.sources.diagnosis import Diagnosis, Finding, Level, statement_of
from headwater.sources.errors import (
    AccessDenied,
    SourceBusy,
    SourceError,
    SourceMisconfigured,
    SourceNotFound,
    UnsupportedTable,
)
from headwater.sources.sqlserver.catalog import CatalogTable, all_table_names, present_tables, read_tables
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.followed import disable_table, enable_table, with_key
from headwater.sources.sqlserver.instances import CaptureInstance, read_instances
from headwater.sources.sqlserver.log_watch import holds_of, scan_of
from headwater.sources.sqlserver.names import TableName, quoted
from headwater.sources.sqlserver.server import GRANT, Server, log_end
from headwater.sources.sqlserver.server_clock import zone_of

SHORT_RETENTION: Final = 24 * 60
SLOW_POLLS: Final = 5
SLOWEST_POLLS: Final = 30
"""Seconds: a task that reads history waits for up to three looks of the job, and no longer than two minutes."""
_AGENT: Final = """
SELECT s.status AS status FROM sys.dm_server_services AS s WHERE s.servicename LIKE N'SQL Server Agent%'
"""
_JOBS: Final = """
SELECT j.job_type AS job, j.pollinginterval AS polls, j.retention AS retention, j.continuous AS continuous
FROM msdb.dbo.cdc_jobs AS j WHERE j.database_id = DB_ID()
"""
_LONGEST: Final = """
SELECT CONVERT(bigint, c.value_in_use) AS longest FROM sys.configurations AS c
WHERE c.name = N'max text repl size (B)'
"""
_RUNNING: Final = 4


def check_server(session: Session, server: Server) -> Iterator[Finding]:
    """All findings about the database, in the order in which they matter."""
    yield Finding("version", Level.OK, f"SQL Server {server.version}, {server.edition}.")
    if not server.has_cdc:
        text = f"The database {server.database} has no change data capture."
        yield Finding("change data capture", Level.PROBLEM, text, "EXEC sys.sp_cdc_enable_db;")
    else:
        yield Finding("change data capture", Level.OK, "Change data capture is on for the database.")
        yield from _agent(session)
        yield from _jobs(session)
        yield from _holds(session)
        yield from _long_values(session)
        yield from _clock(session)
    yield from _log(session, server)
    yield from _isolation(server)


def _asked(session: Session, statement: str) -> list[dict[str, Any]] | None:
    """``None`` where the user may not ask, or the server has no such thing."""
    try:
        return session.ask(statement)
    except SourceError:
        return None


def _agent(session: Session) -> Iterator[Finding]:
    rows = _asked(session, _AGENT)
    if rows is None:
        text = "Whether SQL Server Agent runs could not be seen (VIEW SERVER STATE)."
        yield Finding("agent", Level.NOTE, text)
    elif not rows:
        yield Finding("agent", Level.NOTE, "The server has no SQL Server Agent: it captures by itself.")
    elif int(rows[0]["status"]) != _RUNNING:
        text = "SQL Server Agent does not run: nothing is captured until it does."
        fix = "EXEC master.dbo.xp_servicecontrol N'START', N'SQLServerAGENT'; -- and let it start with the server"
        yield Finding("agent", Level.PROBLEM, text, fix)
    else:
        yield Finding("agent", Level.OK, "SQL Server Agent runs.")


def _jobs(session: Session) -> Iterator[Finding]:
    rows = _asked(session, _JOBS)
    if rows is None:
        yield Finding("jobs", Level.NOTE, "The jobs of change data capture could not be seen (msdb.dbo.cdc_jobs).")
        return
    jobs = {str(row["job"]): row for row in rows}
    if "capture" not in jobs:
        fix = "EXEC sys.sp_cdc_add_job @job_type = N'capture';"
        yield Finding("capture job", Level.PROBLEM, "The database has no capture job: nothing is captured.", fix)
    else:
        yield from _capture_job(session, jobs["capture"])
    if "cleanup" not in jobs:
        fix = "EXEC sys.sp_cdc_add_job @job_type = N'cleanup';"
        yield Finding("retention", Level.WARNING, "The database has no cleanup job: changes are kept for ever.", fix)
        return
    minutes = int(jobs["cleanup"]["retention"] or 0)
    text = f"Changes are kept for {minutes / 60:.0f} hours: a capture may stop for that long."
    if minutes < SHORT_RETENTION:
        fix = "EXEC sys.sp_cdc_change_job @job_type = N'cleanup', @retention = 10080;"
        yield Finding("retention", Level.WARNING, text, fix)
    else:
        yield Finding("retention", Level.OK, text)


def _capture_job(session: Session, job: dict[str, Any]) -> Iterator[Finding]:
    seconds = int(job["polls"] or 0)
    if not job["continuous"]:
        text = "The capture job looks once and ends: changes come when it is started the next time."
        fix = "EXEC sys.sp_cdc_change_job @job_type = N'capture', @continuous = 1; -- then stop and start the job"
        yield Finding("capture job", Level.WARNING, text, fix)
    elif seconds >= SLOW_POLLS:
        text = f"The capture job looks every {seconds} s: changes come that late, and history waits for three looks."
        fix = (
            "EXEC sys.sp_cdc_change_job @job_type = N'capture', @pollinginterval = 1;"
            " EXEC sys.sp_cdc_stop_job @job_type = N'capture'; EXEC sys.sp_cdc_start_job @job_type = N'capture';"
        )
        level = Level.NOTE
        if seconds > SLOWEST_POLLS:
            level, text = Level.PROBLEM, f"{text} That is too long: above {SLOWEST_POLLS} s histories come to no end."
        yield Finding("capture job", level, text, fix)
    else:
        yield Finding("capture job", Level.OK, f"The capture job looks every {seconds} s.")
    try:
        scan = scan_of(session)
    except AccessDenied:
        text = f"The user {session.dsn.user!r} may not see what the capture job does: the position stands still between"
        grant = statement_of(GRANT.format(user=session.dsn.user))
        yield Finding("capture job runs", Level.PROBLEM, f"{text} changes, and history cannot be read.", grant)
        return
    except SourceError:
        return
    if scan is None:
        fix = "EXEC sys.sp_cdc_start_job @job_type = N'capture';"
        text = "The capture job has not looked at the log since the server started."
        yield Finding("capture job runs", Level.WARNING, text, fix)


def _holds(session: Session) -> Iterator[Finding]:
    """What lets the capture job find nothing though something was committed."""
    holds = holds_of(session)
    if holds.waits_for_backup:
        text = "The capture job reads only what was backed up: the position stands still between changes."
        fix = f"EXEC sys.sp_replicationdboption N'{session.dsn.database}', N'sync with backup', N'false';"
        yield Finding("log held back", Level.PROBLEM, f"{text} Histories come to no end.", fix)
    if not holds.has_replicas:
        return
    if holds.hardened is None:
        text = f"How far the replicas of the availability group are is not known, or the user {session.dsn.user!r} may"
        text += " not see it: the position stands still between changes, and histories come to no end."
        fix = f"GRANT VIEW SERVER STATE TO {quoted(session.dsn.user)}; -- in master; and look whether all are connected"
        yield Finding("replicas", Level.PROBLEM, text, fix)
    else:
        text = "The database is in an availability group: the capture job waits for its replicas, and so do changes."
        yield Finding("replicas", Level.NOTE, text)


def _log(session: Session, server: Server) -> Iterator[Finding]:
    try:
        log_end(session)
        yield Finding("log", Level.OK, "The user may ask how far the log is.")
    except SourceMisconfigured as error:
        text = f"The user {session.dsn.user!r} may not ask how far the log is: changes come, history cannot be read."
        yield Finding("log", Level.PROBLEM, text, statement_of(error.next_step))


def _clock(session: Session) -> Iterator[Finding]:
    try:
        zone = zone_of(session, session.dsn.time_zone)
    except SourceMisconfigured as error:
        yield Finding("time zone", Level.PROBLEM, f"{error.message} {error.next_step}")
        return
    if zone is not None:
        yield Finding("time zone", Level.OK, f"The server's clock is that of the time zone {zone!r}.")
        return
    text = "The server does not say its time zone: times of commits from before its clock was put on or back are off."
    text += " Name it in the address: ?time_zone=, as sys.time_zone_info has it."
    yield Finding("time zone", Level.NOTE, text)


def _long_values(session: Session) -> Iterator[Finding]:
    rows = _asked(session, _LONGEST)
    if rows and int(rows[0]["longest"]) >= 0:
        text = f"Writes of values of more than {rows[0]['longest']} bytes into captured tables fail (error 7139)."
        fix = "EXEC sys.sp_configure N'max text repl size', -1; RECONFIGURE;"
        yield Finding("long values", Level.NOTE, text, fix)


def _isolation(server: Server) -> Iterator[Finding]:
    if server.allows_snapshots:
        yield Finding("isolation", Level.OK, "History is read in snapshots: nobody waits for anybody.")
        return
    text = "Snapshot isolation is not allowed: reading history waits for writers, and they for it, row by row."
    fix = f"ALTER DATABASE {quoted(server.database)} SET ALLOW_SNAPSHOT_ISOLATION ON;"
    yield Finding("isolation", Level.WARNING, text, fix)


_MASKED: Final = """
SELECT c.object_id AS id, c.name AS column_name, HAS_PERMS_BY_NAME(DB_NAME(), 'DATABASE', 'UNMASK') AS unmasks
FROM sys.masked_columns AS c WHERE c.is_masked = 1 AND c.object_id IN ({ids}) ORDER BY c.object_id, c.column_id
"""
_POLICIES: Final = """
SELECT p.target_object_id AS id, s.name AS policy
FROM sys.security_predicates AS p JOIN sys.security_policies AS s ON s.object_id = p.object_id
WHERE s.is_enabled = 1 AND p.predicate_type = 0 AND p.target_object_id IN ({ids}) ORDER BY p.target_object_id, s.name
"""
_SWITCHED: Final = """
SELECT i.source_object_id AS id, i.capture_instance AS instance FROM cdc.change_tables AS i
WHERE i.partition_switch = 1 AND i.source_object_id IN ({ids}) AND EXISTS (SELECT 1 FROM sys.partitions AS p
      WHERE p.object_id = i.source_object_id AND p.index_id IN (0, 1) AND p.partition_number > 1)
ORDER BY i.source_object_id, i.create_date
"""


def check_hidden(session: Session, tables: Sequence[CatalogTable]) -> Iterator[Finding]:
    """What of *tables* the user sees otherwise than it is, or what their changes do not tell."""
    if not tables:
        return
    names = {table.id: table.name for table in tables}
    for number, rows in _found(session, _MASKED, tables).items():
        if rows[0]["unmasks"]:
            continue
        masked = ", ".join(str(row["column_name"]) for row in rows)
        text = f"The user {session.dsn.user!r} sees masks instead of the values of {masked}: history would have them."
        fix = f"GRANT UNMASK TO {quoted(session.dsn.user)};"
        yield Finding("masked columns", Level.PROBLEM, text, fix, str(names[number]))
    for number, rows in _found(session, _POLICIES, tables).items():
        policies = ", ".join(dict.fromkeys(str(row["policy"]) for row in rows))
        text = f"The security policy {policies} hides rows: history lacks those that the user may not see, changes have"
        text += f" them. Let its function show all of them to {session.dsn.user!r}."
        yield Finding("row-level security", Level.WARNING, text, None, str(names[number]))
    for number, rows in _found(session, _SWITCHED, tables).items():
        name, instance = names[number], str(rows[-1]["instance"])
        text = f"Its partitions can be switched in and out, which the capture instance {instance} does not tell."
        closed = f"{enable_table(name).removesuffix(';')}, @allow_partition_switch = 0;"
        fix = f"{disable_table(name, instance)} {closed} -- then: headwater resnapshot {name}"
        yield Finding("partitions", Level.WARNING, text, fix, str(name))


def _found(session: Session, statement: str, tables: Sequence[CatalogTable]) -> dict[int, list[dict[str, Any]]]:
    """The rows of *statement* by table; none where the user may not ask."""
    try:
        rows = session.ask(statement.format(ids=", ".join(str(table.id) for table in tables)))
    except SourceError:
        return {}
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(int(row["id"]), []).append(row)
    return found


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
