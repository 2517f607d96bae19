"""What the doctor looks at in a database of SQL Server: change data capture, its jobs, rights, and isolation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from headwater.sources.diagnosis import Finding, Level, statement_of
from headwater.sources.errors import AccessDenied, SourceError, SourceMisconfigured
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.log_watch import holds_of, scan_of
from headwater.sources.sqlserver.names import quoted
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
