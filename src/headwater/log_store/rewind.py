"""How long to wait before a failed delivery is tried again: 1 s, 2 s, 4 s … 180 s, full jitter. Pure.

The delay is reset by progress: a rewind whose truncation is beyond that of the rewind before starts again at the base,
the first progress after none included.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from headwater.log_store.offset import LogOffset

REWIND_BASE_DELAY = 1.0
REWIND_BACKOFF_FACTOR = 2.0
REWIND_MAX_DELAY = 180.0


class RewindDelay:
    """The delays of one reader.

    :param jitter: gives a number in [0, 1) for each delay.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._attempt = 0
        self._last: LogOffset | None = None

    @property
    def ceiling(self) -> float:
        """The longest that the next delay can be."""
        # 2.0**1000 overflows long after the maximum was reached
        growth = REWIND_BACKOFF_FACTOR ** min(self._attempt, 64)
        return min(REWIND_BASE_DELAY * growth, REWIND_MAX_DELAY)

    def next(self, truncated: LogOffset | None) -> float:
        """Seconds to wait now, given how far the reader has truncated."""
        if truncated is not None and (self._last is None or truncated > self._last):
            self._last = truncated
            self._attempt = 0
        delay = self.ceiling * self._jitter()
        self._attempt += 1
        return delay

    def reset(self) -> None:
        self._attempt = 0
        self._last = None
