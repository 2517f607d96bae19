"""CopyReader: what a ``COPY … TO STDOUT`` sends, in blocks of whole messages.

Where it was compiled, and psycopg has a libpq whose functions can be found, the messages of a block are taken and
joined by compiled code, without an object for each and without holding other threads back. Else Python takes them one
by one, which costs three times as much. Both give the same blocks, but for where one ends.
"""

from __future__ import annotations

import ctypes
import functools
import select
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Final

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn

from headwater import compiled

Receive = Callable[[int, int, int, int, int, int, int], tuple[int, bytes]]
Full = Generator[bytes, None, bytes]

_TLS_PATIENCE_MS: Final = 20
_PATIENCE_MS: Final = 500
_ENDED, _FAILED, _BROKEN = -1, -2, -3
_FUNCTIONS: Final = ("PQgetCopyData", "PQconsumeInput", "PQfreemem")


def compiled_receive() -> Receive | None:
    """The compiled code, where it was built and is wanted."""
    if not compiled.is_wanted():
        return None
    try:
        from headwater.sources.postgres._receive import receive
    except ImportError:
        return None
    return receive


@functools.cache
def libpq_functions() -> tuple[int, int, int] | None:
    """Where the libpq of psycopg has what the compiled code calls; ``None`` where that cannot be told.

    They are looked for in the library of psycopg's own that is linked with it: a process may have several libpq, and a
    connection belongs to one of them.
    """
    library = getattr(sys.modules.get(pq.PGconn.__module__), "__file__", None)
    if library is None or library.endswith(".py"):
        return None
    try:
        loaded = ctypes.CDLL(library)
        found = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    except (OSError, AttributeError):
        return None
    get_copy_data, consume_input, free = found
    return (get_copy_data, consume_input, free) if get_copy_data and consume_input and free else None


class CopyReader:
    """Reads one COPY over *connection*, which does nothing else meanwhile.

    :param check_answers: called with the seconds for which nothing has come, twice a second.
    """

    def __init__(self, connection: PGconn, check_answers: Callable[[float], None] = lambda _: None) -> None:
        self._connection = connection
        self._check_answers = check_answers
        self._heard_at = time.monotonic()
        # libpq may leave a part of a TLS record behind, of which the socket tells nothing
        self._patience = _TLS_PATIENCE_MS if connection.ssl_in_use else _PATIENCE_MS
        self._input, self._output = select.poll(), select.poll()
        self._input.register(connection.socket, select.POLLIN)
        self._output.register(connection.socket, select.POLLIN | select.POLLOUT)

    def blocks(self, statement: bytes, size: int) -> Iterator[bytes]:
        """The messages, joined to blocks of *size* bytes or a little more.

        :raises psycopg.Error: the server's, or the connection's.
        """
        self._start(statement)
        receive, functions = compiled_receive(), libpq_functions()
        address = getattr(self._connection, "pgconn_ptr", None)
        if receive is None or functions is None or address is None:
            rest = yield from self._taken(size)
        else:
            rest = yield from self._received(functools.partial(receive, *functions, address), size)
        results = []
        while True:
            while self._connection.is_busy():  # get_result would wait itself, and let no other thread run meanwhile
                self._wait()
            if (result := self._connection.get_result()) is None:
                break
            results.append(result)
        for result in results:
            if result.status != ExecStatus.COMMAND_OK:
                raise error_from_result(result)
        if rest:
            yield rest

    def _received(self, receive: Callable[[int, int, int], tuple[int, bytes]], size: int) -> Full:
        """The full blocks; the rest is returned."""
        connection, held = self._connection, b""
        status = 0
        while status != _ENDED:
            status, block = receive(connection.socket, self._patience, size - len(held))
            held = held + block if held else block
            self._came(bool(block))
            if status == _FAILED:
                raise psycopg.OperationalError(connection.error_message.decode(errors="replace"))
            if status == _BROKEN:
                connection.consume_input()  # raises, with what is wrong
            if len(held) >= size:
                yield held
                held, self._heard_at = b"", time.monotonic()
        return held

    def _taken(self, size: int) -> Full:
        """The same. What one read of the socket gave is joined first: many small messages that live long cost more."""
        get_copy_data, pieces, held = self._connection.get_copy_data, list[bytes](), 0
        messages: list[memoryview] = []
        length = 0
        while length >= 0:
            length, message = get_copy_data(1)
            if length > 0:
                messages.append(message)
                continue
            pieces.append(b"".join(messages))
            messages.clear()
            held += len(pieces[-1])
            if held >= size:
                yield b"".join(pieces)
                pieces, held, self._heard_at = [], 0, time.monotonic()
            if length == 0:
                self._wait()
        return b"".join(pieces)

    def _start(self, statement: bytes) -> None:
        connection = self._connection
        connection.send_query(statement)
        while connection.flush():
            self._came(bool(self._output.poll(self._patience)))
            connection.consume_input()
        while connection.is_busy():
            self._wait()
        result = connection.get_result()
        assert result is not None
        if result.status != ExecStatus.COPY_OUT:
            while connection.get_result() is not None:
                pass
            raise error_from_result(result)

    def _wait(self) -> None:
        """Until something may have come."""
        self._came(bool(self._input.poll(self._patience)))
        self._connection.consume_input()

    def _came(self, something: bool) -> None:
        now = time.monotonic()
        if something:
            self._heard_at = now
        elif now > self._heard_at:
            self._check_answers(now - self._heard_at)
