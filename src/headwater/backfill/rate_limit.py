"""RateLimit: how many rows of history may be handed out now.

History is handed out in plans, one each interval, so what a rate allows gathers between them: in any time the rows are
at most what the rate allows and one burst more. What was taken beyond that is owed first.
"""

from __future__ import annotations

from typing import Final

from headwater.stream import Throttle

NO_LIMIT: Final = 1 << 62
"""More rows than any table has."""


class RowRate:
    """How many rows may pass now. Pure: the time is given.

    :param rows_per_second: ``None`` is no limit, 0 stands still.
    :raises BarrierError: a negative rate.
    """

    def __init__(self, rows_per_second: int | None = None) -> None:
        self._rate = Throttle(rows_per_second).rows_per_second
        self._owed = 0.0
        self._at = 0.0

    @property
    def rows_per_second(self) -> int | None:
        return self._rate

    def change(self, rows_per_second: int | None, now: float) -> None:
        """Another rate from *now* on; what is owed is owed still. :raises BarrierError: a negative rate."""
        rate = Throttle(rows_per_second).rows_per_second
        self._settle(now)
        self._rate = rate

    def wait(self, now: float) -> float | None:
        """Seconds until rows may pass; ``None`` is until the rate is changed."""
        self._settle(now)
        if self._rate == 0:
            return None
        return self._owed / self._rate if self._rate else 0.0

    def take(self, rows: int, now: float) -> None:
        """Rows passed."""
        self._settle(now)
        self._owed += rows if self._rate else 0

    def _settle(self, now: float) -> None:
        if self._rate is None:
            self._owed = 0.0
        else:
            self._owed = max(0.0, self._owed - self._rate * max(0.0, now - self._at))
        if self._owed < 1e-6:
            self._owed = 0.0
        self._at = max(now, self._at)


class RateLimit:
    """Pure: the time is given.

    :param rows_per_second: ``None`` is no limit, 0 stands still.
    :param burst_seconds: for how long what is allowed may gather.
    :raises BarrierError: a negative rate.
    """

    def __init__(self, rows_per_second: int | None = None, burst_seconds: float = 1.0) -> None:
        self._rate = RowRate(rows_per_second)
        self._burst = max(burst_seconds, 1.0)

    @property
    def rows_per_second(self) -> int | None:
        return self._rate.rows_per_second

    def change(self, rows_per_second: int | None, now: float) -> None:
        """Another rate from *now* on. :raises BarrierError: a negative rate."""
        self._rate.change(rows_per_second, now)

    def allowed(self, now: float) -> int:
        """Rows that may be handed out at *now*."""
        rate, owed_seconds = self._rate.rows_per_second, self._rate.wait(now)
        if rate is None:
            return NO_LIMIT
        if owed_seconds is None:
            return 0
        return max(0, int(rate * (self._burst - owed_seconds) + 1e-6))

    def take(self, rows: int, now: float) -> None:
        """Rows were handed out."""
        self._rate.take(rows, now)
