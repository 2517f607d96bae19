"""Clock: the time, the pauses and the new ids of a process. What decides takes one, so that a test can give another.

What decides does not wait either: it says what is to be waited for (:class:`Wait`), and a loop around it waits.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Clock:
    """Without other functions, that of this machine.

    :ivar monotonic: seconds, for intervals. :ivar unix_ms: milliseconds since 1970.
    :ivar sleep: waits this many seconds. :ivar new_id: 32 hex digits that are not given twice, on any machine.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix_ms: Callable[[], int] = _unix_ms
    sleep: Callable[[float], None] = time.sleep
    new_id: Callable[[], str] = _new_id


SYSTEM_CLOCK: Final = Clock()
"""Of this machine."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a loop waits for where there is nothing to do: for *news*, and for *seconds* at most.

    :ivar news: waits until there are any, for as many seconds as it is given; ``None``: nothing can end the wait.
    """

    seconds: float
    news: Callable[[float], object] | None = None

    def take(self, limit: float, clock: Clock) -> None:
        """Wait, for *limit* seconds at most."""
        (self.news or clock.sleep)(min(limit, self.seconds))
