"""When something that failed is started again. Pure: no clock, no threads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from headwater.spark.failure import Failure, Remedy

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
UNSURE_ATTEMPTS: Final = 5
"""So often a failure that nobody knows is tried again before a person is called."""


class RestartPolicy:
    """Pauses that grow with each failure, up to a minute, and are forgotten once there was progress.

    :param random_share: of a pause that is waited, between 0 and 1; injected for tests.
    """

    def __init__(self, random_share: Callable[[], float] = random.random) -> None:
        self._random_share = random_share
        self._failures = 0
        self._has_started = False

    def started(self) -> None:
        """It could log in: a login that is refused later passes."""
        self._has_started = True

    def progressed(self) -> None:
        """It works: the next failure is the first one."""
        self._failures = 0

    def pause(self, failure: Failure) -> float | None:
        """Seconds to wait before the next start; ``None``: do not start it again."""
        if failure.remedy is Remedy.PERSON or (failure.remedy is Remedy.LOGIN and not self._has_started):
            return None
        self._failures += 1
        if failure.remedy is Remedy.UNSURE and self._failures > UNSURE_ATTEMPTS:
            return None
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * (1 << min(self._failures - 1, 10)))
        return longest * (0.5 + 0.5 * self._random_share())
