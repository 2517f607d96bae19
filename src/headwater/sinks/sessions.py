"""Sessions: connections to the databases of sinks, kept open between batches.

A sink holds none itself, so that it can be pickled; those of a process are here, by address. One is used by one thread
at a time. One that an error came out of is closed, one that rested for a while is asked first whether it is alive.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, Protocol, TypeVar

REST_SECONDS: Final = 5.0
"""After so long a connection may be gone without our knowing."""
MOST_IDLE: Final = 8


class Session(Protocol):
    """A connection, and what is known of the database through it."""

    def is_alive(self) -> bool: ...

    def close(self) -> None: ...


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """The sessions of this process, by address."""

    def __init__(self) -> None:
        atexit.register(self.close)
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, Hashable], list[tuple[float, S]]] = {}

    @contextlib.contextmanager
    def borrowed(self, address: Hashable, connect: Callable[[], S]) -> Iterator[S]:
        """A session with *address*, made by *connect* where none is idle.

        A process that was forked never uses those of its parent: they are kept by the number of the process.
        """
        place = (os.getpid(), address)
        session = self._rested(place) or connect()
        try:
            yield session
        except BaseException:
            session.close()
            raise
        with self._lock:
            idle = self._idle.setdefault(place, [])
            if len(idle) < MOST_IDLE:
                idle.append((time.monotonic(), session))
                return
        session.close()

    def _rested(self, place: tuple[int, Hashable]) -> S | None:
        while True:
            with self._lock:
                idle = self._idle.get(place)
                if not idle:
                    return None
                since, session = idle.pop()
            if time.monotonic() - since < REST_SECONDS or session.is_alive():
                return session
            session.close()

    def close(self) -> None:
        """Close those that are idle."""
        own = os.getpid()
        with self._lock:
            ended = [session for place, idle in self._idle.items() if place[0] == own for _, session in idle]
            self._idle.clear()
        for session in ended:
            session.close()
