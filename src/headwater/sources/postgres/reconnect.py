"""A stream of messages that is opened again when it ends for a reason that passes, in plain sight of its reader.

=============  ==================================================  =======================
state          what ``read`` does                                  goes to
=============  ==================================================  =======================
open           hands out messages                                  waiting, when it ends
waiting        waits for its time, hands out nothing               open, waiting
=============  ==================================================  =======================

The new stream begins at the acknowledged position, so it sends again what came after it. Its reader is told by
:class:`StreamRestarted`, once for each, before the first message: it must forget all that it did not make durable.
Errors that need a person leave ``read`` as they are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, Protocol, Self

from headwater.errors import TransientError
from headwater.sources.errors import SourceClosed, SourceError
from headwater.sources.postgres.offset import Lsn

RECONNECT_BASE_DELAY: Final = 1.0
RECONNECT_BACKOFF_FACTOR: Final = 2.0
RECONNECT_MAX_DELAY: Final = 30.0


class MessageStream(Protocol):
    """Raw messages of a slot, whichever way they come."""

    @property
    def server_wal_end(self) -> int: ...
    @property
    def acknowledged_lsn(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def last_message_time(self) -> float | None: ...
    def read(self, max_messages: int, max_bytes: int, timeout: float) -> list[bytes]: ...
    def acknowledge(self, lsn: int) -> None: ...
    def send_status(self) -> None: ...
    def close(self) -> None: ...


class StreamRestarted(SourceError, TransientError):
    """The stream was opened again: forget what was not made durable and read on.

    :ivar position: what comes next committed there or later.
    :ivar cause: why the stream before ended.
    """

    def __init__(self, position: int, cause: SourceError) -> None:
        self.position, self.cause = Lsn(position), cause
        super().__init__(f"The stream was opened again at {self.position}: {cause.message}", next_step="Read on.")


class ReconnectDelay:
    """How long to wait before the next attempt: up to 1 s, 2 s, 4 s … 30 s, full jitter. Pure.

    :param jitter: gives a number in [0, 1) for each delay.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self._attempt = 0

    def next(self) -> float:
        growth = RECONNECT_BACKOFF_FACTOR ** min(self._attempt, 64)
        self._attempt += 1
        return min(RECONNECT_BASE_DELAY * growth, RECONNECT_MAX_DELAY) * self._jitter()

    def reset(self) -> None:
        self._attempt = 0


class FollowedStream:
    """One stream after another, over the same slot.

    :param open_stream: opens the stream at a position, and looks that nothing is missing between it and the slot.
    :param start_lsn: where the first one begins.
    :raises SourceError: the first one cannot be opened.
    """

    def __init__(
        self,
        open_stream: Callable[[int], MessageStream],
        start_lsn: int,
        *,
        delay: ReconnectDelay | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._open_stream = open_stream
        self._delay = delay or ReconnectDelay()
        self._clock = clock
        self._sleep = sleep
        self._acknowledged = start_lsn
        self._bytes = 0
        self._last_message_time: float | None = None
        self._restarts = 0
        self._cause: SourceError | None = None
        self._retry_at = 0.0
        self._closed = False
        self._opened_at = clock()
        self._stream: MessageStream | None = open_stream(start_lsn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        return self._stream is not None

    @property
    def last_error(self) -> SourceError | None:
        """Why there is no connection, or why the one before ended."""
        return self._cause

    @property
    def restarts(self) -> int:
        """How often the stream was opened again."""
        return self._restarts

    @property
    def server_wal_end(self) -> int:
        """How far the server has read its log for us; without a connection only what is durable counts."""
        return self._acknowledged if self._stream is None else self._stream.server_wal_end

    @property
    def acknowledged_lsn(self) -> int:
        return self._acknowledged

    @property
    def bytes_received(self) -> int:
        return self._bytes + (0 if self._stream is None else self._stream.bytes_received)

    @property
    def last_message_time(self) -> float | None:
        return (None if self._stream is None else self._stream.last_message_time) or self._last_message_time

    def read(self, max_messages: int, max_bytes: int, timeout: float) -> list[bytes]:
        """The next messages; none while there is no connection.

        :raises StreamRestarted: the next call reads from a new stream.
        :raises SourceError: the stream ended and cannot go on by itself.
        """
        if self._closed:
            raise SourceClosed("The stream was closed.")
        if self._stream is None:
            return self._reopen(timeout)
        try:
            return self._stream.read(max_messages, max_bytes, timeout)
        except TransientError as error:
            self._lose(error)
            return []

    def acknowledge(self, lsn: int) -> None:
        """All that committed before *lsn* is durable here; a new stream begins there."""
        if lsn > self._acknowledged:
            self._acknowledged = lsn
            self._delay.reset()
            if self._stream is not None:
                self._stream.acknowledge(lsn)

    def send_status(self) -> None:
        if self._stream is not None:
            self._stream.send_status()

    def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def _lose(self, error: TransientError) -> None:
        stream = self._stream
        assert stream is not None
        self._stream = None
        self._bytes += stream.bytes_received
        self._last_message_time = stream.last_message_time or self._last_message_time
        stream.close()
        now = self._clock()
        if now - self._opened_at >= RECONNECT_MAX_DELAY:
            self._delay.reset()
        self._wait_after(error, now)

    def _wait_after(self, error: TransientError, now: float) -> None:
        self._cause = error if isinstance(error, SourceError) else SourceError(error.message, next_step=error.next_step)
        self._retry_at = now + self._delay.next()

    def _reopen(self, timeout: float) -> list[bytes]:
        wait = self._retry_at - self._clock()
        if wait > timeout:
            self._sleep(timeout)
            return []
        if wait > 0:
            self._sleep(wait)
        cause = self._cause
        assert cause is not None
        try:
            self._stream = self._open_stream(self._acknowledged)
        except TransientError as error:
            self._wait_after(error, self._clock())
            return []
        self._opened_at = self._clock()
        self._restarts += 1
        raise StreamRestarted(self._acknowledged, cause)
