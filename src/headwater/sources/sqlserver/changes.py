"""SqlServerChangeStream: what change data capture shows, as what the capture is told (:mod:`headwater.sources.events`).

It is polled: the commits that follow the position, then the rows of each table in them. A commit is read as a whole,
over all tables, before a boundary is told. While nothing is changed the position goes on with the log
(:mod:`.log_watch`).

Commits that follow the last one that was really told are asked for each time, and not those that follow the position:

====================================  =======================================================================
a commit is shown that lies           what happens
====================================  =======================================================================
behind the position                   it is told
before it, after the last sealed one  the session ends, and the next one tells it, from the last seal on
before the last sealed position       :class:`CommitsCameLate`: whoever went by that position lacks it
====================================  =======================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from headwater.sources.errors import (
    CommitsCameLate,
    LogPurged,
    RefusedValue,
    SchemaStopped,
    SourceBusy,
    SourceError,
    SourceNotFound,
)
from headwater.sources.events import Boundary, Changes, Event, StreamStatus
from headwater.sources.offset import CdcOffset
from headwater.sources.sqlserver.connection import RESNAPSHOT, Dsn, Session
from headwater.sources.sqlserver.followed import FollowedTables, Stretch
from headwater.sources.sqlserver.instances import CaptureInstance, column_came, has_changes, read_instances
from headwater.sources.sqlserver.log_watch import LogWatch
from headwater.sources.sqlserver.lsn import Lsn
from headwater.sources.sqlserver.offset import SqlServerOffset
from headwater.sources.sqlserver.rows import Interval, read_stretch
from headwater.sources.sqlserver.server import commits_after, has_commits_after
from headwater.sources.sqlserver.server_clock import ServerClock
from headwater.sources.table import SourceTable

MAX_ROWS: Final = 32_768
MAX_COMMITS: Final = 1_000
INTERVAL_ROWS: Final = 100_000
"""About how many rows are read before a boundary: transactions may be as large as they like, intervals need not."""
PAUSE_SECONDS: Final = 0.1
WATCH_SECONDS: Final = 0.5
INSTANCES_SECONDS: Final = 2.0


class SqlServerChangeStream:
    """The changes of *tables* after *start*.

    :param sleep: waits; for tests.
    """

    def __init__(
        self, dsn: Dsn, tables: FollowedTables, start: SqlServerOffset, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._dsn, self._tables, self._sleep = dsn, tables, sleep
        self._session = Session(dsn)
        self._told = self._sealed = start
        self._reading: Iterator[Event] | None = None
        self._after: dict[tuple[str, str], Lsn] = {}
        self._most = MAX_COMMITS
        self._clock = ServerClock(dsn.time_zone)
        self._watch = LogWatch()
        self._watched = 0.0
        self._looked = 0.0
        self._told_idle = False
        self._bytes = 0

    # -- tables ----------------------------------------------------------------------------------------------------

    def begin_at(self, table: SourceTable, position: SqlServerOffset) -> None:
        """What comes up to *position* of a table that is about to be added is not of interest."""
        self._after[table.namespace, table.name] = position.commit_lsn

    def add_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`. Call it at a boundary."""
        self._tables.add(table, self._after.pop((table.namespace, table.name), self._told.commit_lsn))

    def remove_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        self._tables.remove(table)

    def has_reached(self, position: SqlServerOffset) -> bool:
        """Whether all that was committed before *position* was told."""
        return self._told >= position

    # -- polling ---------------------------------------------------------------------------------------------------

    def poll(self, timeout: float, *, linger: float = 0.0, stop_at_boundary: bool) -> list[Event]:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        began = time.monotonic()
        end = began + timeout
        events: list[Event] = []
        while not (events := self._read(stop_at_boundary=stop_at_boundary, until=began + linger)):
            left = end - time.monotonic()
            if left <= 0:
                break
            self._sleep(min(left, PAUSE_SECONDS))
        return events

    def _read(self, *, stop_at_boundary: bool, until: float) -> list[Event]:
        """What is there now: up to a boundary, or as many rows as are told at once."""
        events: list[Event] = []
        rows = 0
        while rows < MAX_ROWS:
            if self._reading is None and not self._begin_interval():
                if not events:
                    self._tell_idle(events)
                break
            assert self._reading is not None
            event = next(self._reading, None)
            if event is None:
                self._reading = None
                continue
            events.append(event)
            if isinstance(event, Changes):
                rows += event.rows.num_rows
                self._bytes += event.rows.nbytes
            if isinstance(event, Boundary) and (stop_at_boundary or time.monotonic() >= until):
                break
        return events

    def _begin_interval(self) -> bool:
        """Whether there are commits that were not told. :raises CommitsCameLate: before the position that is sealed."""
        commits = commits_after(self._session, self._told, self._most, self._clock)
        if not commits:
            return False
        if commits[0].lsn <= self._told.commit_lsn:
            raise self._late(commits[0].lsn)
        self._reading = self._interval(Interval(commits))
        return True

    def _late(self, commit: Lsn) -> SourceError:
        if commit > self._sealed.commit_lsn:
            return SourceBusy(
                f"{self._dsn} showed the commit {commit.hex} late: the capture job was held back from the log.",
                next_step="Nothing is to be done: it is told from the last seal on.",
            )
        return CommitsCameLate(
            f"{self._dsn} showed the commit {commit.hex} only now, and we hold all up to"
            f" {self._sealed.commit_lsn.hex}: its capture job had found nothing while it was held back from the log.",
            next_step=f"{RESNAPSHOT}. What holds it back, such as a replica that is away: headwater doctor {self._dsn}",
        )

    def _interval(self, interval: Interval) -> Iterator[Event]:
        first, last = self._told.commit_lsn.following, interval.last
        instances = read_instances(self._session, self._tables.ids)
        read: list[Stretch] = []
        rows = 0
        for found in self._tables.stretches(
            instances,
            first,
            last,
            lambda instance, names, before: column_came(self._session, instance, names, before),
            lambda instance, begin, end: has_changes(self._session, instance, begin, end),
        ):
            if not isinstance(found, Stretch):
                yield found
                continue
            read.append(found)
            try:
                for changes in read_stretch(self._session, found, interval, self._dsn.ticks):
                    rows += changes.rows.num_rows
                    yield changes
            except SourceNotFound:
                if not self._session.is_open:
                    self._session = Session(self._dsn)
                read.remove(found)
                yield self._tables.removed(found.projection.table)
            except (RefusedValue, SchemaStopped) as error:
                if not self._session.is_open:
                    self._session = Session(self._dsn)
                read.remove(found)
                yield self._tables.stopped(found.projection.table, error)
        yield from self._require_kept(read)
        if rows > INTERVAL_ROWS:
            self._most = max(1, len(interval.commits) * INTERVAL_ROWS // rows)
        else:
            self._most = min(MAX_COMMITS, self._most * 2)
        self._told, self._told_idle = SqlServerOffset(last), False
        yield Boundary(self._told, interval.commits[-1].time_us, len(interval.commits))

    def _require_kept(self, read: list[Stretch]) -> Iterator[Event]:
        """Stops tables whose instance was made anew. :raises LogPurged: the cleanup job was at rows that were read."""
        if not read:
            return
        now: dict[str, CaptureInstance] = {
            instance.name: instance
            for instances in read_instances(self._session, self._tables.ids).values()
            for instance in instances
        }
        for stretch in read:
            instance = now.get(stretch.instance.name)
            if instance is None:
                continue  # all of it was read before it was removed
            if instance.change_id != stretch.instance.change_id:
                yield self._tables.removed(stretch.projection.table)
            elif instance.start > max(stretch.first, stretch.instance.start):
                raise LogPurged(
                    f"The cleanup job removed changes of {stretch.projection.table.full_name} while they were read.",
                    next_step=RESNAPSHOT,
                )

    def _tell_idle(self, events: list[Event]) -> None:
        """The log went on without changes of captured tables, or nothing happened at all."""
        now = time.monotonic()
        if now - self._watched < WATCH_SECONDS:
            return
        self._watched = now
        reached = self._watch.reached(self._session)
        goes_on = reached is not None and reached > self._told.commit_lsn
        if goes_on or now - self._looked >= INSTANCES_SECONDS:
            if has_commits_after(self._session, self._told):
                return  # of the time before that place, perhaps: they are told first
            self._looked = now
            instances = read_instances(self._session, self._tables.ids)
            events.extend(self._tables.uncovered(instances, self._told.commit_lsn.following))
        if goes_on:
            assert reached is not None
            self._told = SqlServerOffset(reached, told_lsn=self._told.told)
            events.append(Boundary(self._told, None, 0))
            self._told_idle = True
        elif not self._told_idle or events:
            events.append(Boundary(self._told, None, 0))
            self._told_idle = True

    def acknowledge(self, position: CdcOffset) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`: changes are kept by age, whoever has read them."""
        assert isinstance(position, SqlServerOffset)
        self._sealed = position

    def status(self) -> StreamStatus:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        return StreamStatus(self._bytes, None, None, 0)

    def close(self) -> None:
        """End the connection."""
        self._session.close()
