"""TableProgress: how far the history of a table is, for people and other processes.

Rows are counted when they are handed out; a plan that is rolled back does not take them back: what a person has seen
never decreases. Totals are estimates until everything is handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

_WINDOW_SECONDS: Final = 60.0
_SAMPLE_SECONDS: Final = 0.5
_LEAST_SECONDS: Final = 1.0


class Phase(StrEnum):
    """The life of a table's backfill.

    ============  ==========================================================  ==========================
    phase         meaning                                                     goes to
    ============  ==========================================================  ==========================
    ``waiting``   nothing is planned yet                                      reading, settling, done
    ``reading``   a part was not handed out yet                               settling, done
    ``settling``  all is handed out; the log has not passed all snapshots     done, reading (rolled back)
    ``done``      the log alone tells everything                              (a renewal begins anew)
    ============  ==========================================================  ==========================
    """

    WAITING = "waiting"
    READING = "reading"
    SETTLING = "settling"
    DONE = "done"


_ORDER: Final = tuple(Phase)


@dataclass(frozen=True, slots=True)
class TableProgress:
    """How far one table is, or several.

    :ivar total_rows: an estimate; ``None`` where nothing is known.
    :ivar rows_per_second: of the last minute. :ivar eta_seconds: to the end of the reading, at that rate.
    :ivar limit: rows per second at most. :ivar waiting: why nothing is handed out; empty while it is.
    :ivar origin: where its rows come from: the ``source``, or ``tables`` that we keep.
    :ivar lag_epochs: of the log, after a snapshot of our own table.
    :ivar rereading: the sink has the table and reads it again. :ivar columns: only these columns; empty: all.
    """

    table: str
    phase: Phase
    rows: int = 0
    total_rows: int | None = None
    size: int = 0
    total_size: int | None = None
    splits: int = 0
    total_splits: int = 0
    rows_per_second: float | None = None
    eta_seconds: float | None = None
    paused: bool = False
    limit: int | None = None
    waiting: str = ""
    origin: str = "source"
    lag_epochs: int | None = None
    rereading: bool = False
    columns: tuple[str, ...] = ()

    @property
    def fraction(self) -> float | None:
        """From 0 to 1; ``None`` where no total is known."""
        if self.phase in (Phase.SETTLING, Phase.DONE):
            return 1.0
        return min(1.0, self.rows / self.total_rows) if self.total_rows else None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "phase": self.phase.value}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TableProgress:
        columns = tuple(value.get("columns", ()))
        return cls(**{**value, "phase": Phase(value["phase"]), "columns": columns})


def merged(name: str, parts: Sequence[TableProgress]) -> TableProgress:
    """The progress of all tables of a query as one, called *name*; it is where the slowest of them is."""
    if not parts:
        return TableProgress(name, Phase.DONE)
    rates = [part.rows_per_second for part in parts if part.rows_per_second is not None]
    rate = sum(rates) if rates else None
    rows, total = sum(part.rows for part in parts), _sum([part.total_rows for part in parts])
    phase = min((part.phase for part in parts), key=_ORDER.index)
    if phase is Phase.WAITING and any(part.phase is not Phase.WAITING for part in parts):
        phase = Phase.READING
    limits = [part.limit for part in parts]
    return TableProgress(
        name,
        phase,
        rows=rows,
        total_rows=total,
        size=sum(part.size for part in parts),
        total_size=_sum([part.total_size for part in parts]),
        splits=sum(part.splits for part in parts),
        total_splits=sum(part.total_splits for part in parts),
        rows_per_second=rate,
        eta_seconds=seconds_left(phase, rows, total, rate),
        paused=all(part.paused for part in parts if part.phase is not Phase.DONE) and phase is not Phase.DONE,
        limit=None if None in limits else sum(limit or 0 for limit in limits),
        waiting="; ".join(dict.fromkeys(part.waiting for part in parts if part.waiting)),
    )


def seconds_left(phase: Phase, rows: int, total: int | None, rate: float | None) -> float | None:
    """How long the reading takes from here."""
    if phase in (Phase.SETTLING, Phase.DONE):
        return 0.0
    return max(0, total - rows) / rate if total is not None and rate else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


class RecentRate:
    """Rows per second of the last minute. Pure: the time is given."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, rows: int, now: float) -> None:
        """So many rows in all by *now*."""
        samples = self._samples
        if len(samples) > 1 and now - samples[-2][0] < _SAMPLE_SECONDS:
            samples[-1] = (now, rows)
        elif not samples or now > samples[-1][0]:
            samples.append((now, rows))
        while len(samples) > 2 and now - samples[1][0] >= _WINDOW_SECONDS:
            samples.popleft()

    def per_second(self) -> float | None:
        """``None`` where too little is known."""
        if len(self._samples) < 2:
            return None
        (then, before), (now, after) = self._samples[0], self._samples[-1]
        # The first rows are handed out at once, before any was read: that is no rate.
        return max(0, after - before) / (now - then) if now - then >= _LEAST_SECONDS else None
