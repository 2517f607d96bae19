"""SteadyClock: the wall clock without its jumps. Pure: the clocks are given."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_FASTEST: Final = 2.0
_SLOWEST: Final = 0.5


class SteadyClock:
    """Milliseconds since 1970 that never go back and never jump; any thread.

    It starts with the wall clock. When that jumps, it runs up to twice as fast as time passes, or half as fast, until
    both agree again. So a clock that is wrong for a minute moves epochs by a minute at most, and a log never ages by
    years at once.

    :param wall_ms: the wall clock, milliseconds since 1970.
    :param elapsed_ms: a clock that is never set; also counts while the machine sleeps, if it can.
    """

    def __init__(self, wall_ms: Callable[[], int], elapsed_ms: Callable[[], float]) -> None:
        self._wall_ms, self._elapsed_ms = wall_ms, elapsed_ms
        self._lock = threading.Lock()
        self._at, self._read = float(wall_ms()), elapsed_ms()

    def __call__(self) -> int:
        with self._lock:
            read = self._elapsed_ms()
            passed = max(0.0, read - self._read)
            self._at = min(max(self._wall_ms(), self._at + _SLOWEST * passed), self._at + _FASTEST * passed)
            self._read = read
            return int(self._at)
