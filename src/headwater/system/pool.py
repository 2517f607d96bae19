"""Connections that are used again: a login costs more than a small read, most of all with TLS."""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

from headwater.errors import TransientError
from headwater.system.retry import Retries

C = TypeVar("C")
T = TypeVar("T")

MOST_IDLE: Final = 8


class Pool(Generic[C]):
    """The connections of this process, by address. One is used by one thread at a time.

    A process that was forked never uses those of its parent: they are kept by the number of the process.

    :param reset: end what is open in a connection; whether it is still alive.
    :param rest_seconds: one that rested for longer is reset before it is used again.
    :param idle_seconds: one that rested for longer is closed instead.
    """

    def __init__(
        self,
        reset: Callable[[C], bool],
        close: Callable[[C], None],
        *,
        rest_seconds: float = 0.0,
        idle_seconds: float = math.inf,
    ) -> None:
        self._reset, self._close = reset, close
        self._rest_seconds, self._idle_seconds = rest_seconds, idle_seconds
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, Hashable], list[tuple[float, C]]] = {}
        atexit.register(self.close)

    def borrow(self, address: Hashable, connect: Callable[[], C]) -> C:
        """A connection with *address*, by *connect* where none is idle."""
        while True:
            with self._lock:
                idle = self._idle.get((os.getpid(), address))
                if not idle:
                    break
                since, connection = idle.pop()
            rested = time.monotonic() - since
            if rested < self._idle_seconds and (rested < self._rest_seconds or self._reset(connection)):
                return connection
            self._close(connection)
        return connect()

    def give_back(self, address: Hashable, connection: C) -> None:
        """Let the next one have it. Nothing is open in it but perhaps a transaction."""
        if self._rest_seconds or self._reset(connection):
            with self._lock:
                idle = self._idle.setdefault((os.getpid(), address), [])
                if len(idle) < MOST_IDLE:
                    idle.append((time.monotonic(), connection))
                    return
        self._close(connection)

    @contextmanager
    def borrowed(self, address: Hashable, connect: Callable[[], C]) -> Iterator[C]:
        """A connection for a while; one that an error came out of is closed."""
        connection = self.borrow(address, connect)
        try:
            yield connection
        except BaseException:
            self._close(connection)
            raise
        self.give_back(address, connection)

    def ask(self, address: Hashable, connect: Callable[[], C], question: Callable[[C], T]) -> T:
        """The answer to *question*, which is asked again over a new connection when one breaks."""
        retries = Retries()
        while True:
            try:
                with self.borrowed(address, connect) as connection:
                    return question(connection)
            except TransientError as error:
                retries.wait_after(error)

    def close(self) -> None:
        """Close those that are idle."""
        with self._lock:
            idle = [entries for (process, _), entries in self._idle.items() if process == os.getpid()]
            self._idle.clear()
        for _, connection in (entry for entries in idle for entry in entries):
            self._close(connection)
