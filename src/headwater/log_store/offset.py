"""Places in a log: what a reader got last, and what it may forget.

A reader's offset is ``(epoch, chunk id)``, or the barrier that ends an epoch, which counts as after all its chunks. A
place in storage is ``(epoch, seq id)``, or the whole epoch with its barrier. Both are totally ordered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering

from headwater.log_store.errors import InvalidOffset
from headwater.stream import Epoch

_END = float("inf")


@total_ordering
@dataclass(frozen=True, slots=True)
class LogOffset:
    """A place in what a reader yields: a chunk of an epoch, or (``chunk_id`` is ``None``) its barrier."""

    epoch: Epoch
    chunk_id: int | None = None

    @property
    def is_barrier(self) -> bool:
        return self.chunk_id is None

    def _rank(self) -> tuple[int, float]:
        return self.epoch, _END if self.chunk_id is None else self.chunk_id

    def __lt__(self, other: LogOffset) -> bool:
        return self._rank() < other._rank()

    def check_next_epoch(self, epoch: Epoch) -> None:
        """:raises InvalidOffset: an item of *epoch* cannot come after this one."""
        if self.is_barrier and epoch <= self.epoch:
            raise InvalidOffset(f"An item of epoch {epoch} came after the barrier of epoch {self.epoch}.")
        if not self.is_barrier and epoch != self.epoch:
            raise InvalidOffset(f"An item of epoch {epoch} came inside epoch {self.epoch}.")


@total_ordering
@dataclass(frozen=True, slots=True)
class StoragePlace:
    """How far a vnode is done: up to a seq id of an epoch, or (``seq`` is ``None``) the whole of it."""

    epoch: Epoch
    seq: int | None = None

    def _rank(self) -> tuple[int, float]:
        return self.epoch, _END if self.seq is None else self.seq

    def __lt__(self, other: StoragePlace) -> bool:
        return self._rank() < other._rank()

    def covers(self, epoch: int, seq: int) -> bool:
        """Whether the row ``(epoch, seq)`` is done."""
        return (epoch, seq) <= self._rank()
