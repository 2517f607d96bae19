"""When something that failed is started again. Pure: no clock, no threads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from headwater.spark.failure import Failure, Remedy
from headwater.system.retry import RESTART, Backoff

UNSURE_ATTEMPTS: Final = 5
"""So often a failure that nobody knows is tried again before a person is called."""


class RestartPolicy:
    """Pauses that grow with each failure, and are forgotten once there was progress.

    :param backoff: how long the pauses are. :param random_share: between 0 and 1; injected for tests.
    """

    def __init__(self, backoff: Backoff = RESTART, random_share: Callable[[], float] = random.random) -> None:
        self._backoff, self._random_share = backoff, random_share
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
        return self._backoff.delay(self._failures, self._random_share)
