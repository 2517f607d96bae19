"""How long a sink waits before it is built again: 1, 2, 4, 8, 16, 30, 30 … s, full jitter. Pure.

The log's own delay (:mod:`headwater.log_store.rewind`) comes before it and grows as long as nothing is delivered; this
one spares the other side a sink that is built, delivers a little and fails, again and again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

BASE_DELAY = 1.0
FACTOR = 2.0
MAX_DELAY = 30.0
LONG_LIFE = 60.0
"""A sink that lived this long before it failed is one that works: the delays begin anew."""


class SinkBackoff:
    """The delays of one sink.

    :param jitter: gives a number in [0, 1) for each delay.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._attempt = 0

    @property
    def ceiling(self) -> float:
        """The longest that the next delay can be."""
        # 2.0**1000 overflows long after the maximum was reached
        return min(BASE_DELAY * FACTOR ** min(self._attempt, 64), MAX_DELAY)

    def next(self, lived: float) -> float:
        """Seconds to wait now, given how many the sink lived that failed."""
        if lived >= LONG_LIFE:
            self._attempt = 0
        delay = self.ceiling * self._jitter()
        self._attempt += 1
        return delay
