"""The state store: an ordered key-value store whose writes become visible epoch by epoch.

Contract, the same for every engine (one conformance suite proves it):

* Keys are bytes, compared as unsigned bytes. One process writes; any number read, in any process.
* :meth:`StateStore.seal` makes one :class:`~headwater.state.batch.WriteBatch` durable under an epoch: all of it or
  nothing, in order, never twice. When it returns the epoch survives ``kill -9`` (and power loss where the engine
  syncs).
* A :class:`Snapshot` sees exactly one epoch for its whole life: the newest sealed one, or an older one that is pinned.
* A pin keeps an epoch readable while newer ones are sealed. Pins belong to the store, not to a process: they
  survive restarts until they are released.
* The writer is fenced. A second one is refused with the owner's host, pid and start time, or takes over; the
  old one then fails at its next seal, having written nothing after the takeover.

``headwater.state.open_writer`` and ``open_reader`` give these for a URL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self

from headwater.state.batch import WriteBatch
from headwater.stream.epoch import Epoch


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that may write: who it is, and which generation of writers it belongs to."""

    generation: int
    host: str
    pid: int
    started: datetime


@dataclass(frozen=True, slots=True)
class Pin:
    """An epoch that is kept readable, by whom and since when."""

    name: str
    epoch: Epoch
    host: str
    pid: int
    created: datetime


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Figures for status pages and metrics."""

    engine: str
    location: str
    committed_epoch: Epoch
    keys: int | None
    bytes_on_disk: int
    bytes_free_inside: int
    pins: tuple[Pin, ...]
    owner: Owner | None


class Snapshot(Protocol):
    """A consistent view of one epoch, for one thread at a time. Close it soon: it may hold back the reuse of space."""

    @property
    def epoch(self) -> Epoch:
        """The epoch that this snapshot sees."""

    def get(self, key: bytes) -> bytes | None:
        """The value of *key*, or ``None``. :raises StoreClosed: after :meth:`close`."""

    def scan(
        self, start: bytes | None = None, end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of ``[start, end)`` in key order, or from the end backwards."""

    def scan_prefix(self, prefix: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values of all keys that begin with *prefix*."""

    def close(self) -> None:
        """Release what the snapshot holds; closing twice is no error."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StateReader(Protocol):
    """What every process may do with a store."""

    @property
    def location(self) -> str:
        """The URL that opens this store."""

    def committed_epoch(self) -> Epoch:
        """The newest sealed epoch as this process sees it; 0 when nothing was sealed yet."""

    def wait_for_epoch(self, after: int, timeout: float) -> Epoch | None:
        """Wait until an epoch newer than *after* is sealed; ``None`` after *timeout* seconds."""

    def snapshot(self, epoch: int | None = None) -> Snapshot:
        """A view of *epoch*, or of the newest one.

        :raises EpochNotHeld: *epoch* is neither the newest nor pinned.
        """

    def mapped_snapshot(self, epoch: int | None = None) -> Snapshot:
        """As :meth:`snapshot`, but values are memoryviews that live only as long as the snapshot.

        The embedded engine gives them without a copy, straight from the mapped file.
        """

    def pin(self, name: str, epoch: int | None = None) -> Pin:
        """Keep *epoch* (the newest by default) readable under *name*; the same call again is no error.

        :raises EpochNotHeld: *epoch* is neither the newest nor pinned by another name.
        :raises PinExists: *name* holds another epoch.
        """

    def unpin(self, name: str) -> None:
        """Release a pin. :raises PinNotFound: no such pin."""

    def pins(self) -> tuple[Pin, ...]:
        """All pins, oldest epoch first."""

    def owner(self) -> Owner | None:
        """The writer on record: the current one, or the last one when none is alive."""

    def statistics(self) -> StoreStatistics:
        """Figures of the store."""

    def close(self) -> None:
        """Close this handle; closing twice is no error."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StateStore(StateReader, Protocol):
    """What the one writer may do beside reading."""

    def seal(self, epoch: int, batch: WriteBatch) -> None:
        """Make *batch* durable and visible under *epoch*, all of it or nothing.

        :raises EpochNotIncreasing: *epoch* is not newer than everything sealed.
        :raises WriterFenced: another writer took over.
        :raises StoreFull: no room; make some, then seal the same batch again.
        :raises InvalidKey: a key that this engine cannot hold.
        """

    def stage(self, batch: WriteBatch) -> None:
        """Write *batch* ahead of its epoch's seal, so that a large epoch need not wait in memory.

        For keys that readers ignore until a sealed record speaks of them (a log's keys carry their epoch): what is
        staged may be seen by snapshots and pins taken from now on, not by older pins, and stays after a crash until
        somebody deletes it. All of the batch or nothing of it is written.

        :raises WriterFenced: another writer took over.
        :raises StoreFull: no room.
        """
