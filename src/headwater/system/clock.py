"""Clock: the time, the pauses and the new ids of a process. What decides takes one, so that a test can give another."""

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
