"""A synced log whose items are sent to others, which takes a while: what is polled counts as sent only when it was.

While an item is being sent nothing else is given out, and messages from above go on being taken in. A barrier that
comes meanwhile goes after that item and before the next rows, so the progress that it seals is what was sent before it.
A barrier that was sent to all comes out of :meth:`SyncedLogDispatch.next_barrier`: seal its epoch then.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from headwater.log_store.errors import WrongCall
from headwater.log_store.synced import SyncedMessage
from headwater.stream import Barrier


class SyncedStore(Protocol):
    """A synced log in either mode."""

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`push` may be called."""

    def push(self, message: SyncedMessage) -> None:
        """Take in what comes from above."""

    def poll(self) -> SyncedMessage | None:
        """What goes on."""


class SyncedLogDispatch:
    """The items of *store*, one at a time."""

    def __init__(self, store: SyncedStore) -> None:
        self._store = store
        self._sending: SyncedMessage | None = None
        self._barriers: deque[Barrier] = deque()

    @property
    def wants_input(self) -> bool:
        """Whether :meth:`push` may be called."""
        return self._store.wants_input

    def push(self, message: SyncedMessage) -> None:
        """Take in what comes from above, also while an item is being sent."""
        self._store.push(message)

    def poll(self) -> SyncedMessage | None:
        """The next item to send; ``None`` while one is being sent, or when there is none."""
        if self._sending is not None:
            return None
        self._sending = self._store.poll()
        return self._sending

    def sent(self) -> None:
        """The item that was polled last has reached everybody. :raises WrongCall: none is being sent."""
        if self._sending is None:
            raise WrongCall("Nothing is being sent.")
        if isinstance(self._sending, Barrier):
            self._barriers.append(self._sending)
        self._sending = None

    def next_barrier(self) -> Barrier | None:
        """The oldest barrier that was sent and not asked for yet."""
        return self._barriers.popleft() if self._barriers else None
