"""Deliveries under way: what a sink may truncate when chunks are delivered at the same time and finish in any order.

A sink adds the future of each chunk, and the barriers between them; the next offset to truncate is that of the last
chunk such that it and all before it are delivered. A barrier is never passed over: each is truncated by itself.
One thread adds and asks; the futures may finish in any.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

from headwater.log_store.errors import InvalidOffset
from headwater.log_store.offset import LogOffset


@dataclass(slots=True)
class _Delivery:
    offset: LogOffset
    future: Future[Any] | None


class DeliveryFutures:
    """The chunks that are being delivered, in the order in which they were read.

    :param limit: how many may be under way; :meth:`add` waits for the oldest when there are more.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise InvalidOffset(f"Received limit={limit}.", next_step="Allow 1 delivery or more at a time.")
        self._limit = limit
        self._items: deque[_Delivery] = deque()

    @property
    def under_way(self) -> int:
        """Deliveries that were not waited for yet."""
        return sum(item.future is not None for item in self._items)

    def add(self, offset: LogOffset, future: Future[Any]) -> bool:
        """A chunk is being delivered. Returns whether it had to wait for an older one.

        :raises InvalidOffset: not after what was added before. Whatever an awaited delivery raised is raised here.
        """
        self._check(offset)
        waited = False
        while self.under_way >= self._limit:
            self.await_one()
            waited = True
        self._items.append(_Delivery(offset, future))
        return waited

    def add_barrier(self, offset: LogOffset) -> None:
        """A barrier was read. :raises InvalidOffset: not after what was added before."""
        self._check(offset)
        self._items.append(_Delivery(offset, None))

    def await_one(self) -> None:
        """Wait for the oldest delivery that is under way, if there is one."""
        for item in self._items:
            if item.future is not None:
                item.future.result()
                item.future = None
                return

    def next_offset(self, timeout: float | None = None) -> LogOffset | None:
        """What can be truncated next; ``None`` when nothing is delivered within *timeout* seconds.

        Chunks that are delivered already come as one offset, the last one's; a barrier ends them.
        What a delivery raised is raised here: rewind then.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        found: LogOffset | None = None
        while self._items:
            oldest = self._items[0]
            if oldest.future is not None:
                if found is not None and not oldest.future.done():
                    break
                try:
                    oldest.future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
                except FutureTimeout:
                    if oldest.future.done():
                        raise  # the delivery's own
                    break
            found = self._items.popleft().offset
            if found.is_barrier:
                break
        return found

    def clear(self) -> None:
        """Forget all: the reader was rewound."""
        self._items.clear()

    def _check(self, offset: LogOffset) -> None:
        if self._items and offset <= self._items[-1].offset:
            raise InvalidOffset("Deliveries are added in the order in which they were read.")
