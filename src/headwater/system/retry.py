"""How long to wait before a failed operation is tried again. One class; a policy is a value of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that grow with each failure in a row. Pure: the caller counts the failures and sleeps.

    :param base: seconds after the first failure. :param factor: how much longer each further delay is.
    :param maximum: the longest delay, in seconds.
    :param jitter: the random share of a delay: 0 none, 1 all of it ("full jitter").
    """

    base: float
    factor: float
    maximum: float
    jitter: float = 1.0

    def ceiling(self, failures: int) -> float:
        """The longest that the delay after *failures* failures in a row can be."""
        # 2.0**1000 overflows long after the maximum was reached
        return min(self.base * self.factor ** min(max(failures - 1, 0), 64), self.maximum)

    def delay(self, failures: int, share: Callable[[], float] = random.random) -> float:
        """Seconds to wait after *failures* failures in a row.

        :param share: gives a number in [0, 1): how much of the random share is waited.
        """
        return self.ceiling(failures) * (1 - self.jitter + self.jitter * share())


REWIND_BASE_DELAY: Final = 1.0
REWIND_BACKOFF_FACTOR: Final = 2.0
REWIND_MAX_DELAY: Final = 180.0
DELIVERY: Final = Backoff(REWIND_BASE_DELAY, REWIND_BACKOFF_FACTOR, REWIND_MAX_DELAY)
"""A delivery that failed: up to 1, 2, 4 … 180 s. The loop then goes back to what the sink has; progress resets it."""

RESTART: Final = Backoff(base=1.0, factor=2, maximum=60.0, jitter=0.5)
"""A process or a session that ended: half of 1, 2, 4 … 60 s at least."""

READ: Final = Backoff(base=0.05, factor=4, maximum=3.0, jitter=0)
"""A read of a database whose connection broke: 0.05, 0.2, 0.8 and 3 s. Then Spark tries the task again."""
READ_RETRIES: Final = 4


class Retries:
    """Counts the failures of one operation in a row, and waits after each.

    :param most: retries before the error is raised. :param sleep: injected for tests.
    """

    def __init__(
        self, backoff: Backoff = READ, most: int = READ_RETRIES, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._backoff, self._most, self._sleep = backoff, most, sleep
        self._failures = 0

    def progressed(self) -> None:
        """The operation works: the next failure is the first one."""
        self._failures = 0

    def wait_after(self, error: Exception) -> None:
        """Wait before the next attempt. :raises: *error*, when there have been enough."""
        if self._failures == self._most:
            raise error
        self._failures += 1
        self._sleep(self._backoff.delay(self._failures))
