"""ServerClock: the times of commits, which servers tell as they have them on their wall, as instants.

Change data capture keeps ``tran_end_time`` in the server's local time, without an offset. The rules of its time zone
are asked of the server itself: what its offset is at given instants (``AT TIME ZONE``).

==========================  ============================================================================================
local time                  instant
==========================  ============================================================================================
once                        by the offset that the zone had then
twice, the clocks went      the first one before the commit at which the times of the server's own list go back, the
back                        second one from it on; the first one where the list does not show that
never, the clocks went on   by the offset from before
the zone is not known       by the offset that the server has now
==========================  ============================================================================================

The zone is what the address names, or what the server says (2022 and later, Azure); it counts only while its offset of
now is the server's own.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from headwater.errors import TransientError
from headwater.sources.errors import SourceError, SourceMisconfigured
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.names import literal
from headwater.sources.sqlserver.offset import Lsn

_ZONE: Final = "SELECT CURRENT_TIMEZONE_ID() AS zone"
_NOW: Final = """
SELECT DATEPART(tzoffset, SYSDATETIMEOFFSET()) AS own,
       DATEPART(tzoffset, SYSUTCDATETIME() AT TIME ZONE N'UTC' AT TIME ZONE {zone}) AS of_zone
"""
_OFFSETS: Final = """
SELECT v.n AS n, DATEPART(tzoffset, CONVERT(datetime2(3), v.t) AT TIME ZONE N'UTC' AT TIME ZONE {zone}) AS minutes
FROM (VALUES {instants}) AS v (n, t) ORDER BY v.n
"""
_FELL: Final = """
SELECT TOP (1) w.lsn AS lsn FROM (SELECT m.start_lsn AS lsn,
       DATEDIFF(second, m.tran_end_time, LAG(m.tran_end_time) OVER (ORDER BY m.start_lsn)) AS fell
FROM cdc.lsn_time_mapping AS m WHERE m.start_lsn <= sys.fn_cdc_get_max_lsn()
      AND m.tran_end_time >= CONVERT(datetime, '{begin}', 126) AND m.tran_end_time < CONVERT(datetime, '{end}', 126)
) AS w WHERE w.fell > {seconds} ORDER BY w.lsn
"""
_EPOCH: Final = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - local times have no zone
_MINUTE: Final = 60_000_000
_DAY: Final = 1440 * _MINUTE
_REACH: Final = 15 * 60 * _MINUTE
"""Local times are no further from UTC."""
_MOST_INSTANTS: Final = 500
_EXACT: Final = 1_000
FELL_SECONDS: Final = 600
"""Times of commits are in order but for moments; clocks that are put back go back by more than this."""


@dataclass(frozen=True, slots=True)
class Shift:
    """From the instant *at_us* on the offset is *after*; it was *before*. Both in minutes."""

    at_us: int
    before: int
    after: int

    @property
    def twice(self) -> tuple[int, int]:
        """The local times that come twice: from, up to; nothing where the clocks go on."""
        return self.at_us + self.after * _MINUTE, self.at_us + self.before * _MINUTE

    def repeats(self, local_us: int) -> bool:
        """Whether *local_us* comes twice."""
        begin, end = self.twice
        return begin <= local_us < end


@dataclass(frozen=True, slots=True)
class Offsets:
    """The offsets of a zone between two instants: *first*, then those of *shifts*."""

    begin_us: int
    end_us: int
    first: int
    shifts: tuple[Shift, ...] = ()

    def covers(self, begin_us: int, end_us: int) -> bool:
        return self.begin_us <= begin_us and end_us <= self.end_us

    def instant(self, local_us: int, has_fallen: Callable[[Shift], bool]) -> int:
        """The instant of a local time. :param has_fallen: whether the clocks had been put back, of times twice."""
        minutes = self.first
        for shift in self.shifts:
            if local_us - shift.before * _MINUTE < shift.at_us:
                if shift.repeats(local_us) and has_fallen(shift):
                    return local_us - shift.after * _MINUTE
                break
            if local_us - shift.after * _MINUTE < shift.at_us:  # the clocks went over it
                return local_us - shift.before * _MINUTE
            minutes = shift.after
        return local_us - minutes * _MINUTE


def find_offsets(begin_us: int, end_us: int, ask: Callable[[Sequence[int]], Sequence[int]]) -> Offsets:
    """The offsets between two instants. :param ask: the offsets at some instants. Two shifts are days apart."""
    begin_us, end_us = begin_us // _EXACT * _EXACT, -(-end_us // _EXACT) * _EXACT
    step = max(_DAY, _step(begin_us, end_us))
    instants = [*range(begin_us, end_us, step), end_us]
    minutes = ask(instants)
    shifts = []
    for (start, before), (end, after) in pairwise(zip(instants, minutes, strict=True)):
        if before != after:
            shifts.append(Shift(_narrowed(start, end, before, ask), before, after))
    return Offsets(begin_us, end_us, minutes[0], tuple(shifts))


def _step(begin: int, end: int) -> int:
    """Whole milliseconds between instants, of which there are not too many."""
    return -(-(end - begin) // (_MOST_INSTANTS * _EXACT)) * _EXACT


def _narrowed(start: int, end: int, before: int, ask: Callable[[Sequence[int]], Sequence[int]]) -> int:
    """The first instant after *start* with another offset than *before*, to the millisecond."""
    while end - start > _EXACT:
        instants = list(range(start, end, _step(start, end)))
        same = bisect_right([minutes != before for minutes in ask(instants)], False)
        start, end = instants[same - 1], instants[same] if same < len(instants) else end
    return end


def zone_of(session: Session, named: str | None) -> str | None:
    """The time zone of the server; ``None``: not known.

    :param named: what somebody says that it is. :raises SourceMisconfigured: it is another.
    """
    try:
        zone = str(session.ask(_ZONE)[0]["zone"]) if named is None else named
        (now,) = session.ask(_NOW.format(zone=literal(zone)))
        if now["own"] == now["of_zone"]:
            return zone
    except TransientError:
        raise
    except SourceError:  # an older server; or it has no such zone
        pass
    if named is not None:
        raise SourceMisconfigured(
            f"The time zone {named!r} is not that of {session.dsn}: its clock is another.",
            next_step="Give the one that the server's system has, by its name in sys.time_zone_info, or leave"
            " time_zone out.",
        )
    return None


class ServerClock:
    """The clock of a server. One stream.

    :param zone: its time zone, by the name that servers have for it; ``None``: what it says itself.
    """

    def __init__(self, zone: str | None = None) -> None:
        self._zone, self._is_asked = zone, False
        self._offsets: Offsets | None = None
        self._fell: dict[Shift, Lsn | None] = {}

    def instants(self, session: Session, commits: Sequence[tuple[Lsn, int]], now_minutes: int) -> list[int]:
        """The instants of *commits*, which have a number and a local time, in microseconds.

        :param now_minutes: the offset that the server has now.
        :raises SourceMisconfigured: the time zone that was named is not that of the server.
        """
        if not self._is_asked:
            self._zone, self._is_asked = zone_of(session, self._zone), True
        if self._zone is None:
            return [local_us - now_minutes * _MINUTE for _, local_us in commits]
        begin = min(local_us for _, local_us in commits) - _REACH
        end = max(local_us for _, local_us in commits) + _REACH
        if self._offsets is None or not self._offsets.covers(begin, end):
            self._offsets = find_offsets(begin, end + _DAY, lambda instants: self._ask(session, instants))
        self._fell = {shift: lsn for shift, lsn in self._fell.items() if lsn is not None}
        return [self._instant(session, self._offsets, lsn, local_us) for lsn, local_us in commits]

    def _instant(self, session: Session, offsets: Offsets, lsn: Lsn, local_us: int) -> int:
        return offsets.instant(local_us, lambda shift: self._has_fallen(session, shift, lsn))

    def _ask(self, session: Session, instants: Sequence[int]) -> list[int]:
        values = ", ".join(f"({n}, '{_text(instant)}')" for n, instant in enumerate(instants))
        assert self._zone is not None
        rows = session.ask(_OFFSETS.format(zone=literal(self._zone), instants=values))
        return [int(row["minutes"]) for row in rows]

    def _has_fallen(self, session: Session, shift: Shift, lsn: Lsn) -> bool:
        """Whether the clocks had been put back when *lsn* committed, as far as the server's list of times shows it."""
        if shift not in self._fell:
            begin, end = shift.twice
            rows = session.ask(_FELL.format(begin=_text(begin), end=_text(end), seconds=FELL_SECONDS))
            self._fell[shift] = Lsn.parse(rows[0]["lsn"]) if rows else None
        fell = self._fell[shift]
        return fell is not None and lsn >= fell


def _text(instant_us: int) -> str:
    return (_EPOCH + dt.timedelta(microseconds=instant_us)).isoformat(timespec="milliseconds")
