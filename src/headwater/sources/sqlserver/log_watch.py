"""LogWatch: how far the capture job is known to have read the log, also while nothing is changed.

The job shows commits in their order, so all that lies before the last one that is shown was read. Behind it, a place of
the log was read when the job has looked twice since and found nothing: the first look may have begun before. But a look
finds nothing, too, where the job may not read the log yet:

====================================  ==================================================================================
what holds the job back               how far looks that found nothing are believed
====================================  ==================================================================================
nothing that is known                 up to the end of the log
replicas of an availability group     up to where all of them have written the log, as far as the user may see it
the log waits for its backup          not at all
errors of the job                     not at all
====================================  ==================================================================================

Where they are not believed the position goes on with the commits that are shown, and with the entries without changes
that the server makes every few minutes. What holds the job back and is not known here is noticed when the commits come
after all (:mod:`.changes`, :mod:`.offset`), and is an error then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from headwater.sources.errors import AccessDenied, SourceBusy, SourceError, SourceMisconfigured, SourceNotFound
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.offset import Lsn, SqlServerOffset
from headwater.sources.sqlserver.server import captured_end, log_end, shown_end

_SCAN: Final = """
SELECT TOP (1) s.session_id AS id, s.empty_scan_count AS empty,
       COALESCE(s.error_count, 0) + COALESCE(s.failed_sessions_count, 0) AS failures
FROM sys.dm_cdc_log_scan_sessions AS s WHERE s.session_id > 0 ORDER BY s.session_id DESC
"""
_HOLDS: Final = """
SELECT CASE WHEN d.replica_id IS NULL THEN 0 ELSE 1 END AS has_replicas,
       CONVERT(int, DATABASEPROPERTYEX(d.name, 'IsSyncWithBackup')) AS waits_for_backup
FROM sys.databases AS d WHERE d.database_id = DB_ID()
"""
_HARDENED: Final = """
SELECT COUNT(*) AS replicas, COUNT(r.last_hardened_lsn) AS known,
       CONVERT(varchar(30), MIN(r.last_hardened_lsn)) AS hardened
FROM sys.dm_hadr_database_replica_states AS r WHERE r.database_id = DB_ID() AND r.is_local = 0
"""
_POLLS: Final = """
SELECT j.pollinginterval AS seconds FROM msdb.dbo.cdc_jobs AS j
WHERE j.database_id = DB_ID() AND j.job_type = N'capture'
"""
SETTLE_SECONDS: Final = 60.0
"""How long the end of the log is waited for; longer where the job looks so rarely that it cannot be reached by then."""
LOOKS: Final = 4
"""As many looks of the job are waited for: one that may have begun before, two that find nothing, one to spare."""
_LOOK_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Scan:
    """How often the capture job has looked at the log and found nothing, in a row; how often it failed."""

    session: int
    empty: int
    failures: int = 0

    def has_looked_twice_since(self, earlier: Scan) -> bool:
        """Whether a look began and ended after *earlier*, none since has found anything, and none has failed."""
        return self.session == earlier.session and self.failures == earlier.failures and self.empty >= earlier.empty + 2

    def goes_on_from(self, earlier: Scan) -> bool:
        """Whether looks can be counted from *earlier* on."""
        return (self.session, self.failures) == (earlier.session, earlier.failures) and self.empty >= earlier.empty


def scan_of(session: Session) -> Scan | None:
    """What the job does; ``None`` where it was not seen since the server started."""
    rows = session.ask(_SCAN)
    if not rows:
        return None
    return Scan(int(rows[0]["id"]), int(rows[0]["empty"] or 0), int(rows[0]["failures"] or 0))


@dataclass(frozen=True, slots=True)
class Holds:
    """What may hold the job back from the log. :ivar hardened: where all replicas have it; ``None``: not known."""

    has_replicas: bool = False
    waits_for_backup: bool = False
    hardened: Lsn | None = None

    def readable(self, end: Lsn) -> Lsn | None:
        """Up to where the job may read, at most *end*; ``None``: it cannot be told."""
        if self.waits_for_backup:
            return None
        if not self.has_replicas:
            return end
        return None if self.hardened is None else min(end, self.hardened)


def holds_of(session: Session) -> Holds:
    """What may hold the job back now."""
    (row,) = session.ask(_HOLDS)
    if not row["has_replicas"]:
        return Holds(waits_for_backup=bool(row["waits_for_backup"]))
    try:
        (found,) = session.ask(_HARDENED)
    except (AccessDenied, SourceNotFound):
        return Holds(has_replicas=True, waits_for_backup=bool(row["waits_for_backup"]))
    hardened = None
    if not int(found["replicas"]):
        hardened = Lsn((1 << 80) - 1)  # a group of one
    elif int(found["known"]) == int(found["replicas"]):
        hardened = Lsn.of_decimal(int(found["hardened"]))
    return Holds(True, bool(row["waits_for_backup"]), hardened)


def poll_seconds(session: Session) -> int | None:
    """How often the job looks; ``None``: the user may not see it."""
    try:
        rows = session.ask(_POLLS)
    except SourceError as error:
        if not isinstance(error, AccessDenied | SourceNotFound):
            raise
        return None
    return int(rows[0]["seconds"] or 0) if rows else None


def settled_end(session: Session, seconds: float = SETTLE_SECONDS) -> SqlServerOffset:
    """A place of now: the capture job has read everything before it, so that it is on disk, and seen by everybody.

    :raises SourceMisconfigured: the user may not ask for it. :raises SourceBusy: the job does not come to it.
    """
    begun = captured_end(session)
    end = log_end(session)  # in this order: looks that are counted later began after it
    readable = holds_of(session).readable(end)
    before = scan_of(session)
    until, is_extended = time.monotonic() + seconds, False
    while (shown := shown_end(session)) < end:
        scan = scan_of(session)
        if readable is None or readable < begun or before is None or scan is None or not scan.goes_on_from(before):
            readable = holds_of(session).readable(end)
            before = scan_of(session)
        elif scan.has_looked_twice_since(before):
            shown = shown_end(session)
            return SqlServerOffset(
                max(readable, shown), told_lsn=shown or begun
            )  # none where the cleanup job took them all
        if time.monotonic() > until and not is_extended:
            until, is_extended = until + max(0.0, LOOKS * (poll_seconds(session) or 0) - seconds), True
        if time.monotonic() > until:
            raise SourceBusy(
                f"{session.dsn}: the capture job has not come to the end of the log in time.",
                next_step=f"Look whether it runs, and what holds it back: headwater doctor {session.dsn}",
            )
        time.sleep(_LOOK_SECONDS)
    return SqlServerOffset(shown)


class LogWatch:
    """How far the log is known to be read while nothing is changed. One session at a time.

    :ivar is_allowed: the user may ask for it; otherwise it tells nothing.
    """

    def __init__(self) -> None:
        self.is_allowed = True
        self._seen: tuple[Lsn, Scan] | None = None

    def reached(self, session: Session) -> Lsn | None:
        """A place of the log that the job has passed; commits before it are shown by now. ``None``: not known."""
        if not self.is_allowed:
            return None
        try:
            readable = holds_of(session).readable(log_end(session))  # before the looks that are counted
            scan = scan_of(session)
        except (SourceMisconfigured, AccessDenied, SourceNotFound):
            self.is_allowed = False
            return None
        if scan is None or readable is None:
            self._seen = None
            return None
        seen = self._seen
        if seen is not None and scan.has_looked_twice_since(seen[1]):
            self._seen = readable, scan
            return seen[0]
        if seen is None or not scan.goes_on_from(seen[1]):
            self._seen = readable, scan
        return None
