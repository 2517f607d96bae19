"""The seal: all tables of a source in one epoch, with what other parts have to say in it.

Chunks of rows wait in the :class:`~headwater.log_store.buffer.LogStoreBuffer`; barriers, events and rows of state
tables in :attr:`Sealer.batch`. One thread writes and seals; a seal in the background goes on while the next epoch is
written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from headwater import failpoints
from headwater.log_store.buffer import LogStoreBuffer
from headwater.log_store.errors import InvalidOffset
from headwater.state import WriteBatch
from headwater.stream import Epoch

if TYPE_CHECKING:
    from headwater.log_store.writer import KvLogStoreWriter

BEFORE_SEAL = failpoints.register("log_store.before_seal")
AFTER_SEAL = failpoints.register("log_store.after_seal")


class SealPart(Protocol):
    """What has something to say in every seal."""

    def add_to(self, batch: WriteBatch) -> None:
        """Once per seal, when no other is under way; again when the seal failed and is tried again."""

    def sealed(self) -> None:
        """What it added last is durable."""


class Sealer:
    """The pending writes of all logs, and their seal.

    :ivar buffer: the chunks that wait. :ivar batch: what else the next seal writes.
    """

    def __init__(self, buffer: LogStoreBuffer) -> None:
        self.buffer, self.store = buffer, buffer.store
        self.batch = WriteBatch()
        self.parts: list[SealPart] = []
        self.begun: set[int] = set()
        """The numbers of the logs that a writer of this process writes, or wrote."""
        self.writers: WeakValueDictionary[int, KvLogStoreWriter] = WeakValueDictionary()
        """The writers of this process, by the number of their log: one of each."""
        self.ended = Epoch(0)
        """The newest epoch that ended, with or without rows: it can be read once it, or a later one, is sealed."""
        self.seconds = 0.0
        """How long the last seal in the background took."""
        self.on_sealed: Callable[[Epoch], None] = lambda _: None
        """Called with each epoch that was sealed in the background, in the thread that sealed it."""
        self._under_way: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "headwater-seal")

    def seal(self, epoch: Epoch) -> None:
        """Make everything durable under *epoch*. An error leaves all as it was: seal again.

        :raises InvalidOffset: a later epoch has ended already.
        """
        self._check(epoch)
        self.wait()
        failpoints.hit(BEFORE_SEAL)
        self.store.seal(epoch, self._collect())
        self._sealed()
        self.batch = WriteBatch()
        self.buffer.seal_began()
        self.buffer.seal_ended()

    def seal_in_background(self, epoch: Epoch) -> None:
        """As :meth:`seal`, while the caller goes on with the next epoch; waits for the seal before, if it is under way.

        The epoch is durable once :meth:`wait` or the next seal has returned: acknowledge the source then, not earlier.

        :raises InvalidOffset: a later epoch has ended already.
        """
        self._check(epoch)
        self.wait()
        failpoints.hit(BEFORE_SEAL)
        batch = self._collect()
        self.buffer.seal_began()
        self.batch = WriteBatch()
        self._under_way = self._thread.submit(self._seal_timed, epoch, batch)

    def _seal_timed(self, epoch: Epoch, batch: WriteBatch) -> None:
        began = time.monotonic()
        self.store.seal(epoch, batch)
        self.seconds = time.monotonic() - began
        self.on_sealed(epoch)

    @property
    def is_idle(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._under_way is None or self._under_way.done()

    def wait(self) -> None:
        """Until no seal is under way.

        :raises HeadwaterError: the seal failed. What it held is lost to this sealer: open the store again and go on
            from its committed epoch.
        """
        if self._under_way is not None:
            try:
                self._under_way.result()
            finally:
                self._under_way = None
                self.buffer.seal_ended()
            self._sealed()

    def _check(self, epoch: Epoch) -> None:
        if epoch < self.ended:
            raise InvalidOffset(
                f"Epoch {epoch} cannot be sealed: epoch {self.ended} has ended.", next_step="Seal the newest one."
            )

    def _sealed(self) -> None:
        failpoints.hit(AFTER_SEAL)
        for part in self.parts:
            part.sealed()

    def _collect(self) -> WriteBatch:
        for part in self.parts:
            part.add_to(self.batch)
        batch = WriteBatch()
        batch.put_many(self.buffer.waiting())  # first: what is delivered already is then forgotten with its epoch
        batch.extend(self.batch)
        return batch

    def close(self) -> None:
        """Wait for the seal that is under way, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
