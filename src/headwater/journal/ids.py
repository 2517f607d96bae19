"""UUIDv7 identifiers: string order is creation order.

Layout of the 128 bits: 48 bits of Unix milliseconds, version 7, a 42-bit counter (12 bits before the
variant, 30 after it), 32 random bits. The counter starts at a random value below half of its range in
each new millisecond and rises by one inside it, so ids of one process strictly increase, also when the
clock stands still or steps back; a counter that overflows moves on to the next millisecond. A child of
``os.fork`` reseeds: it shares no counter with its parent.

The only accepted spelling is lower case with hyphens.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable

from headwater.journal.errors import InvalidNameError

_CANONICAL = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.ASCII)
_COUNTER_BITS = 42
_COUNTER_LIMIT = 1 << _COUNTER_BITS


def _random_bits(count: int) -> int:
    return int.from_bytes(os.urandom((count + 7) // 8), "big") >> (-count % 8)


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000


class IdGenerator:
    """Makes strictly increasing UUIDv7 strings; safe for threads and for fork."""

    def __init__(
        self, clock: Callable[[], int] = _milliseconds, random_bits: Callable[[int], int] = _random_bits
    ) -> None:
        self._clock = clock
        self._random_bits = random_bits
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._ms = -1
        self._counter = 0

    def reseed(self) -> None:
        """Forget the counter but not the time, so a child neither repeats its parent nor goes below it."""
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._counter = self._random_bits(_COUNTER_BITS - 1)
        self._ms += self._ms >= 0

    def new(self) -> str:
        """The next id."""
        if self._pid != os.getpid():  # a fork that bypassed os.register_at_fork
            self.reseed()
        with self._lock:
            now = self._clock()
            if now > self._ms:
                self._ms = now
                self._counter = self._random_bits(_COUNTER_BITS - 1)
            else:
                self._counter += 1
                if self._counter == _COUNTER_LIMIT:
                    self._ms += 1
                    self._counter = self._random_bits(_COUNTER_BITS - 1)
            ms, counter = self._ms, self._counter
        high, low = counter >> 30, counter & 0x3FFF_FFFF
        value = (ms & 0xFFFF_FFFF_FFFF) << 80 | 7 << 76 | high << 64 | 0b10 << 62 | low << 32
        text = f"{value | self._random_bits(32):032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_process = IdGenerator()
os.register_at_fork(after_in_child=_process.reseed)


def new_id() -> str:
    """A new session or segment id of this process."""
    return _process.new()


def is_id(text: str) -> bool:
    """Is *text* a UUID in canonical spelling?"""
    return _CANONICAL.fullmatch(text) is not None


def check_id(text: str, what: str) -> str:
    """*text* itself.

    :raises InvalidNameError: when it is not a lower-case hyphenated UUID.
    """
    given: object = text
    if not isinstance(given, str) or not is_id(given):
        raise InvalidNameError(
            f"Received {what} `{text}`; valid is a lower-case hyphenated UUID.",
            next_step="Make one with headwater.journal.new_id().",
        )
    return text


def created_ms(identifier: str) -> int:
    """Unix milliseconds inside a UUIDv7."""
    return int(identifier[:8] + identifier[9:13], 16)
