"""What the logs of one store write until the next seal, and the seal itself: all tables of a source in one epoch.

Small epochs wait in memory. Above ``stage_bytes`` the chunks that wait are staged into the store ahead of the seal, so
an epoch of any size needs bounded memory; without its barrier a staged chunk counts for nothing, and a new writer
removes it.

One thread writes and seals; readers of other threads may look at what waits. A chunk that leaves memory is in the store
by then, so whoever misses it here finds it in a snapshot taken after.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from headwater import failpoints
from headwater.log_store.errors import InvalidOffset
from headwater.log_store.owners import VnodeOwners
from headwater.state import StateStore, WriteBatch
from headwater.stream import Epoch

BEFORE_STAGE = failpoints.register("log_store.before_stage")
AFTER_STAGE = failpoints.register("log_store.after_stage")
BEFORE_SEAL = failpoints.register("log_store.before_seal")
AFTER_SEAL = failpoints.register("log_store.after_seal")

STAGE_BYTES = 64 << 20


class SealPart(Protocol):
    """What has something to say in every seal."""

    def add_to(self, batch: WriteBatch) -> None:
        """Once per seal, when no other is under way; again when the seal failed and is tried again."""

    def sealed(self) -> None:
        """What it added last is durable."""


class Sealer:
    """The pending writes of all logs of *store*."""

    def __init__(self, store: StateStore, stage_bytes: int = STAGE_BYTES) -> None:
        self.store = store
        self.batch = WriteBatch()
        self.parts: list[SealPart] = []
        self.begun: set[int] = set()
        """The numbers of the logs that a writer of this process writes."""
        self.owners = VnodeOwners()
        self.ended = Epoch(0)
        """The newest epoch that ended, with or without rows: it can be read once it, or a later one, is sealed."""
        self.seconds = 0.0
        """How long the last seal in the background took."""
        self.on_sealed: Callable[[Epoch], None] = lambda _: None
        """Called with each epoch that was sealed in the background, in the thread that sealed it."""
        self._stage_bytes = stage_bytes
        self._chunks: dict[bytes, bytes] = {}
        self._flying: dict[bytes, bytes] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self._under_way: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "headwater-seal")

    def put(self, key: bytes, value: bytes) -> None:
        """A chunk of a log. An error has added nothing."""
        self.put_many([(key, value)])

    def put_many(self, items: list[tuple[bytes, bytes]]) -> None:
        """Rows of a log. An error has added nothing."""
        size = sum(len(key) + len(value) for key, value in items)
        if self._chunks and self._bytes + size > self._stage_bytes:
            self.stage()  # before the new ones: when there is no room they are refused as a whole
        with self._lock:
            self._chunks.update(items)
            self._bytes += size

    def pending(self, key: bytes) -> bytes | None:
        """A value that waits in memory, for its seal or in one that is under way."""
        return self._chunks.get(key) or self._flying.get(key)

    def pending_items(self) -> list[tuple[bytes, bytes]]:
        """All chunks and rows that wait in memory, in the order in which they came."""
        with self._lock:
            return [*self._flying.items(), *self._chunks.items()]

    @property
    def pending_bytes(self) -> int:
        return self._bytes

    def stage(self) -> None:
        """Move the chunks that wait into the store."""
        failpoints.hit(BEFORE_STAGE)
        batch = WriteBatch()
        batch.put_many(self._chunks.items())
        self.store.stage(batch)
        failpoints.hit(AFTER_STAGE)
        self._start_anew()

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
        self._start_anew()

    def seal_in_background(self, epoch: Epoch) -> None:
        """As :meth:`seal`, while the caller goes on with the next epoch; waits for the seal before, if it is under way.

        The epoch is durable once :meth:`wait` or the next seal has returned: acknowledge the source then, not earlier.

        :raises InvalidOffset: a later epoch has ended already.
        """
        self._check(epoch)
        self.wait()
        failpoints.hit(BEFORE_SEAL)
        batch = self._collect()
        with self._lock:
            self._flying = self._chunks  # before the next line: a reader finds a chunk in one of both at any time
            self._chunks = {}
            self._bytes = 0
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
                self._flying = {}
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
        batch.put_many(self._chunks.items())  # first: what is delivered already is then forgotten with its epoch
        batch.extend(self.batch)
        return batch

    def _start_anew(self) -> None:
        with self._lock:
            self._chunks = {}
            self._bytes = 0

    def close(self) -> None:
        """Wait for the seal that is under way, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
