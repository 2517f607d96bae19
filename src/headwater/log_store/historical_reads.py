"""How many readers of a process may read history at the same time.

After a restart every reader has a history, and each of them reads it as fast as it can: a limit keeps hundreds of logs
from doing so at once. A reader that has no permit yet waits for one in ``next_item``; its writer goes on, and what it
writes waits in the buffer or in the store. The permit is given back when the history ends, when the reader is rewound,
begins anew or is closed, and when it is dropped.

One object may serve several factories, so that the limit holds for the whole process. A thread that drives several
readers gives ``next_item`` a timeout: a reader whose turn has not come returns nothing until another one has finished.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue

from headwater.log_store.errors import WrongCall


class Permit:
    """The right to read history, until it is released or dropped."""

    __slots__ = ("_free",)

    def __init__(self, free: SimpleQueue[None] | None) -> None:
        self._free = free

    def release(self) -> None:
        """Give it back; a second time is no error."""
        free, self._free = self._free, None
        if free is not None:
            free.put(None)

    def __del__(self) -> None:
        self.release()  # SimpleQueue.put may be called from a destructor, whatever its thread was doing


class HistoricalReads:
    """Permits to read history.

    :param limit: how many there are; ``None`` is no limit.
    :raises WrongCall: a limit below 1.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise WrongCall(f"Received limit={limit}.", next_step="Allow 1 historical read or more, or None for all.")
        self.limit = limit
        self._free: SimpleQueue[None] | None = None
        if limit is not None:
            self._free = SimpleQueue()
            for _ in range(limit):
                self._free.put(None)

    @property
    def free(self) -> int | None:
        """Permits that nobody has; ``None`` when there is no limit."""
        return None if self._free is None else self._free.qsize()

    def acquire(self, timeout: float | None = None) -> Permit | None:
        """Wait for a permit; ``None`` after *timeout* seconds."""
        if self._free is None:
            return Permit(None)
        try:
            self._free.get(timeout=timeout)
        except Empty:
            return None
        return Permit(self._free)
