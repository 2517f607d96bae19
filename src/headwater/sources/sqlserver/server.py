"""What a database tells of itself: who it is, which commits it shows, and how far its log is.

Change data capture shows a commit when its job has read it from the log, seconds after it. So there are two ends: that
of the commits that are shown (:func:`shown_end`), and that of the log itself (:func:`log_end`). While nothing is
changed the first one stands still; how the job is known to have come to the second one is told by :mod:`.log_watch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from headwater.sources.errors import AccessDenied, SourceMisconfigured, SourceNotFound
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.names import quoted
from headwater.sources.sqlserver.offset import Lsn, SqlServerOffset
from headwater.sources.sqlserver.server_clock import ServerClock

OLDEST: Final = (13, 0, 5026)
"""SQL Server 2016 SP2, the first that tells how far its log is."""
LEAST_LEVEL: Final = 130
"""The compatibility level from which on keys can be sent as JSON."""

_SERVER: Final = """
SELECT CONVERT(nvarchar(128), SERVERPROPERTY('ProductVersion')) AS version,
       CONVERT(nvarchar(128), SERVERPROPERTY('Edition')) AS edition, d.name AS name, d.is_cdc_enabled AS cdc,
       d.snapshot_isolation_state AS snapshots, d.is_read_committed_snapshot_on AS versions,
       d.compatibility_level AS level, CONVERT(nvarchar(36), d.service_broker_guid) AS broker
FROM sys.databases AS d WHERE d.database_id = DB_ID()
"""
_FORK: Final = """
SELECT CONVERT(nvarchar(36), r.recovery_fork_guid) AS fork FROM sys.database_recovery_status AS r
WHERE r.database_id = DB_ID()
"""
_COMMITS: Final = """
SELECT TOP ({most}) m.start_lsn AS lsn, DATEDIFF_BIG(microsecond, CONVERT(datetime2(7), '1970-01-01'),
       CONVERT(datetime2(3), m.tran_end_time)) AS local_us, DATEPART(tzoffset, SYSDATETIMEOFFSET()) AS now_minutes
FROM cdc.lsn_time_mapping AS m
WHERE m.start_lsn > {told} AND (m.start_lsn > {place} OR m.tran_id <> 0x00) AND m.start_lsn <= sys.fn_cdc_get_max_lsn()
ORDER BY m.start_lsn
"""
_MAX: Final = "SELECT sys.fn_cdc_get_max_lsn() AS max_lsn, MAX(i.start_lsn) AS start_lsn FROM cdc.change_tables AS i"
_LOG_END: Final = "SELECT l.log_end_lsn AS log_end FROM sys.dm_db_log_stats(DB_ID()) AS l"
GRANT: Final = "Run: GRANT VIEW DATABASE STATE TO [{user}];"


@dataclass(frozen=True, slots=True)
class Server:
    """A database at the moment in which it was asked.

    :ivar broker: a number that the database keeps when it is restored or fails over.
    """

    version: str
    edition: str
    database: str
    has_cdc: bool
    allows_snapshots: bool
    keeps_versions: bool
    broker: str

    @classmethod
    def ask(cls, session: Session) -> Server:
        """:raises SourceMisconfigured: it is too old."""
        (row,) = session.ask(_SERVER)
        made = cls(
            str(row["version"]),
            str(row["edition"]),
            str(row["name"]),
            bool(row["cdc"]),
            int(row["snapshots"] or 0) == 1,
            bool(row["versions"]),
            str(row["broker"]),
        )
        if tuple(int(part) for part in made.version.split(".")[:3]) < OLDEST:
            raise SourceMisconfigured(
                f"{session.dsn} is SQL Server {made.version}, which is too old.",
                next_step="Capture from SQL Server 2016 SP2 or later.",
            )
        if int(row["level"]) < LEAST_LEVEL:
            raise SourceMisconfigured(
                f"{session.dsn} has the compatibility level {row['level']}, which is too low.",
                next_step=f"Run: ALTER DATABASE {quoted(made.database)} SET COMPATIBILITY_LEVEL = {LEAST_LEVEL};",
            )
        return made

    def identity(self, session: Session) -> dict[str, Any]:
        """What is kept beside a position."""
        made = {"family": "SqlServer", "database": self.database, "broker": self.broker}
        fork = recovery_fork(session)
        return made | {"fork": fork} if fork else made

    def require_cdc(self, session: Session) -> None:
        """:raises SourceMisconfigured: change data capture is off for the database."""
        if not self.has_cdc:
            raise SourceMisconfigured(
                f"{session.dsn} has no change data capture.", next_step="Run: EXEC sys.sp_cdc_enable_db;"
            )


def recovery_fork(session: Session) -> str | None:
    """Another one where the log went back: a restore, a failover that lost commits. ``None``: not known."""
    try:
        rows = session.ask(_FORK)
    except (AccessDenied, SourceNotFound):
        return None
    return str(rows[0]["fork"]) if rows and rows[0]["fork"] is not None else None


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that the capture job has read. :ivar time_us: microseconds since 1970, UTC."""

    lsn: Lsn
    time_us: int


def commits_after(session: Session, position: SqlServerOffset, most: int, clock: ServerClock) -> list[Commit]:
    """The next commits that change data capture shows, in their order; also any before *position* that it had not.

    In quiet times the server makes entries without changes, for how far it has come: those before *position* are none.
    """
    rows = session.ask(_COMMITS.format(told=position.told.hex, place=position.commit_lsn.hex, most=most))
    if not rows:
        return []
    shown = [(Lsn.parse(row["lsn"]), int(row["local_us"])) for row in rows]
    times = clock.instants(session, shown, int(rows[0]["now_minutes"]))
    return [Commit(lsn, time_us) for (lsn, _), time_us in zip(shown, times, strict=True)]


def has_commits_after(session: Session, position: SqlServerOffset) -> bool:
    """Whether :func:`commits_after` would tell any."""
    return bool(session.ask(_COMMITS.format(told=position.told.hex, place=position.commit_lsn.hex, most=1)))


def shown_end(session: Session) -> Lsn:
    """The last commit that is shown. The job shows them in their order, so none comes before it any more."""
    (row,) = session.ask(_MAX)
    return Lsn.parse(row["max_lsn"]) if row["max_lsn"] is not None else Lsn(0)


def captured_end(session: Session) -> Lsn:
    """Up to where changes are shown, or would be: instances that were just made begin later than that."""
    (row,) = session.ask(_MAX)
    return max(Lsn.parse(row[name]) if row[name] is not None else Lsn(0) for name in ("max_lsn", "start_lsn"))


def log_end(session: Session) -> Lsn:
    """Where the log ends now: everything that anybody has seen committed is before it.

    :raises SourceMisconfigured: the user may not ask for it.
    """
    try:
        (row,) = session.ask(_LOG_END)
    except AccessDenied:
        raise SourceMisconfigured(
            f"{session.dsn}: the user {session.dsn.user!r} may not ask how far the log is.",
            next_step=GRANT.format(user=session.dsn.user),
        ) from None
    except (SourceNotFound, ValueError):
        raise SourceMisconfigured(
            f"{session.dsn} cannot tell how far its log is: it has no sys.dm_db_log_stats.",
            next_step="Capture from SQL Server 2016 SP2 or later.",
        ) from None
    return Lsn.parse(str(row["log_end"]))
