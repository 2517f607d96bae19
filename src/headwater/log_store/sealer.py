"""What the logs of one store write until the next seal, and the seal itself: all tables of a source in one epoch.

Small epochs wait in memory. Above ``stage_bytes`` the chunks that wait are staged into the store ahead of the seal, so
an epoch of any size needs bounded memory; without its barrier a staged chunk counts for nothing, and a new writer
removes it.
"""

from __future__ import annotations

from headwater import failpoints
from headwater.state import StateStore, WriteBatch
from headwater.stream import Epoch

BEFORE_SEAL = failpoints.register("log_store.before_seal")
AFTER_SEAL = failpoints.register("log_store.after_seal")

STAGE_BYTES = 64 << 20


class Sealer:
    """The pending writes of all logs of *store*."""

    def __init__(self, store: StateStore, stage_bytes: int = STAGE_BYTES) -> None:
        self.store = store
        self.batch = WriteBatch()
        self._stage_bytes = stage_bytes
        self._chunks: dict[bytes, bytes] = {}
        self._bytes = 0

    def put(self, key: bytes, value: bytes) -> None:
        """A chunk or row of a log."""
        self._chunks[key] = value
        self._bytes += len(key) + len(value)
        if self._bytes > self._stage_bytes:
            self.stage()

    def put_many(self, items: list[tuple[bytes, bytes]]) -> None:
        self._chunks.update(items)
        self._bytes += sum(len(key) + len(value) for key, value in items)
        if self._bytes > self._stage_bytes:
            self.stage()

    def pending(self, key: bytes) -> bytes | None:
        """A value that waits in memory."""
        return self._chunks.get(key)

    def pending_range(self, low: bytes, high: bytes) -> list[tuple[bytes, bytes]]:
        """The keys and values in ``[low, high)`` that wait in memory."""
        return [(key, value) for key, value in self._chunks.items() if low <= key < high]

    @property
    def pending_bytes(self) -> int:
        return self._bytes

    def stage(self) -> None:
        """Move the chunks that wait into the store."""
        batch = WriteBatch()
        batch.put_many(self._chunks.items())
        self.store.stage(batch)
        self._chunks.clear()
        self._bytes = 0

    def seal(self, epoch: Epoch) -> None:
        """Make everything durable under *epoch*. An error leaves all as it was: seal again."""
        failpoints.hit(BEFORE_SEAL)
        batch = WriteBatch()
        batch.extend(self.batch)
        batch.put_many(self._chunks.items())
        self.store.seal(epoch, batch)
        failpoints.hit(AFTER_SEAL)
        self.batch = WriteBatch()
        self._chunks.clear()
        self._bytes = 0
