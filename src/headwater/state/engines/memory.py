"""The state store in memory: for tests, simulation and small tools. It ends with the process.

``memory://name`` names a store that all handles of this process share. Same contract as the durable engines:
snapshots, pins and fencing included.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from headwater.state import versions
from headwater.state.batch import Delete, DeleteRange, Puts, WriteBatch, check_bounds, prefix_end
from headwater.state.errors import (
    EpochNotHeld,
    EpochNotIncreasing,
    PinExists,
    PinNotFound,
    StoreNotFound,
    StoreOwned,
    WriterFenced,
)
from headwater.state.handle import Handle, SnapshotBase, check_epoch, check_pin_name, wait_until
from headwater.state.store import Owner, Pin, StoreStatistics
from headwater.stream.epoch import Epoch
from headwater.system.process import host_name, started


class _SortedMap:
    """A dict with ordered iteration; keys are sorted when they are next read in order."""

    def __init__(self) -> None:
        self.cells: dict[bytes, bytes] = {}
        self._order: list[bytes] = []
        self._stale = False

    def get(self, key: bytes) -> bytes | None:
        return self.cells.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self._stale = self._stale or key not in self.cells
        self.cells[key] = value

    def delete(self, key: bytes) -> None:
        if self.cells.pop(key, None) is not None:
            self._stale = True

    def keys(self, start: bytes | None, end: bytes | None) -> list[bytes]:
        if self._stale:
            self._order = sorted(self.cells)
            self._stale = False
        low = 0 if start is None else bisect_left(self._order, start)
        high = len(self._order) if end is None else bisect_left(self._order, end)
        return self._order[low:high]

    def items(self, start: bytes | None, end: bytes | None, reverse: bool) -> Iterator[tuple[bytes, bytes]]:
        keys = self.keys(start, end)
        return iter([(key, self.cells[key]) for key in (reversed(keys) if reverse else keys)])

    def delete_range(self, start: bytes | None, end: bytes | None) -> None:
        for key in self.keys(start, end):
            self.delete(key)


@dataclass(slots=True)
class _Shared:
    """What all handles of one named store see.

    :ivar version: counts the batches that were applied, staged ones too: a view and a pin show one of them.
    """

    main: _SortedMap = field(default_factory=_SortedMap)
    undo: _SortedMap = field(default_factory=_SortedMap)
    committed: Epoch = field(default_factory=lambda: Epoch(0))
    version: int = 0
    pins: dict[str, Pin] = field(default_factory=dict)
    pinned: dict[Epoch, int] = field(default_factory=dict)
    views: dict[int, int] = field(default_factory=dict)
    owner: Owner | None = None
    owner_alive: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def held(self) -> list[int]:
        return sorted({*self.pinned.values(), *self.views.values()})


_stores: dict[str, _Shared] = {}
_stores_lock = threading.Lock()


class MemorySnapshot(SnapshotBase):
    """A view of one epoch; while it is open it counts as a pin."""

    def __init__(self, shared: _Shared, epoch: Epoch, version: int, value: Callable[[bytes], Any]) -> None:
        super().__init__(epoch)
        self._shared = shared
        self._value = value
        self._version = version
        shared.views[id(self)] = version

    def get(self, key: bytes) -> Any:
        self._check_open()
        check_bounds(key, None)
        with self._shared.lock:
            found = versions.get_at(self._shared.main, self._shared.undo, self._labels(), key)
        return None if found is None else self._value(found)

    def scan(
        self, start: bytes | None = None, end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Any]]:
        self._check_open()
        check_bounds(start, end)
        with self._shared.lock:
            shared = self._shared
            found = list(versions.scan_at(shared.main, shared.undo, self._labels(), start, end, reverse))
        return iter([(key, self._value(value)) for key, value in found])

    def scan_prefix(self, prefix: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, Any]]:
        return self.scan(prefix, prefix_end(prefix), reverse=reverse)

    def close(self) -> None:
        super().close()
        with self._shared.lock:
            self._shared.views.pop(id(self), None)

    def _labels(self) -> list[int]:
        return versions.labels_from(self._shared.undo, self._version)


class MemoryReader(Handle):
    """A reading handle."""

    def __init__(self, name: str, shared: _Shared) -> None:
        super().__init__(f"memory://{name}")
        self._shared = shared

    def committed_epoch(self) -> Epoch:
        self._check_open()
        return self._shared.committed

    def wait_for_epoch(self, after: int, timeout: float) -> Epoch | None:
        return wait_until(self.committed_epoch, self.location, after, timeout)

    def snapshot(self, epoch: int | None = None) -> MemorySnapshot:
        return self._snapshot(epoch, bytes)

    def mapped_snapshot(self, epoch: int | None = None) -> MemorySnapshot:
        return self._snapshot(epoch, memoryview)

    def _snapshot(self, epoch: int | None, value: Callable[[bytes], Any]) -> MemorySnapshot:
        self._check_open()
        shared = self._shared
        with shared.lock:
            found = self._readable(epoch)
            version = shared.version if epoch is None else shared.pinned.get(found, shared.version)
            return MemorySnapshot(shared, found, version, value)

    def _readable(self, epoch: int | None) -> Epoch:
        shared = self._shared
        if epoch is None or epoch == shared.committed:
            return shared.committed
        pinned = sorted(pin.epoch for pin in shared.pins.values())
        if epoch not in pinned:
            raise EpochNotHeld(epoch, (*pinned, shared.committed))
        return Epoch(epoch)

    def pin(self, name: str, epoch: int | None = None) -> Pin:
        self._check_open()
        check_pin_name(name)
        with self._shared.lock:
            target = self._readable(epoch)
            old = self._shared.pins.get(name)
            if old is not None and (epoch is None or old.epoch == epoch):
                return old
            if old is not None:
                raise PinExists(f"Pin {name!r} holds epoch {old.epoch}.", next_step="Release it first.")
            pin = Pin(name, target, host_name(), os.getpid(), datetime.fromtimestamp(time.time(), UTC))
            self._shared.pins[name] = pin
            self._shared.pinned.setdefault(target, self._shared.version)
            return pin

    def unpin(self, name: str) -> None:
        self._check_open()
        with self._shared.lock:
            released = self._shared.pins.pop(name, None)
            if released is None:
                raise PinNotFound(f"There is no pin {name!r}.")
            if all(pin.epoch != released.epoch for pin in self._shared.pins.values()):
                del self._shared.pinned[released.epoch]

    def pins(self) -> tuple[Pin, ...]:
        self._check_open()
        with self._shared.lock:
            return tuple(sorted(self._shared.pins.values(), key=lambda pin: (pin.epoch, pin.name)))

    def owner(self) -> Owner | None:
        self._check_open()
        return self._shared.owner

    def statistics(self) -> StoreStatistics:
        self._check_open()
        with self._shared.lock:
            cells = self._shared.main.cells
            size = sum(map(len, cells)) + sum(map(len, cells.values()))
            return StoreStatistics(
                "memory",
                self.location,
                self._shared.committed,
                len(cells),
                size,
                0,
                self.pins(),
                self.owner(),
            )


class MemoryStore(MemoryReader):
    """The writing handle."""

    def __init__(self, name: str, shared: _Shared, owner: Owner) -> None:
        super().__init__(name, shared)
        self._owner = owner

    def seal(self, epoch: int, batch: WriteBatch) -> None:
        self._check_open()
        checked = check_epoch(epoch)
        shared = self._shared
        with shared.lock:
            self._check_owner()
            if checked <= shared.committed:
                raise EpochNotIncreasing(checked, shared.committed)
            self._apply(batch)
            shared.committed = checked

    def stage(self, batch: WriteBatch) -> None:
        self._check_open()
        with self._shared.lock:
            self._check_owner()
            self._apply(batch)

    def _check_owner(self) -> None:
        if self._shared.owner != self._owner:
            raise WriterFenced(f"Another writer took over the state store at {self.location}.")

    def _apply(self, batch: WriteBatch) -> None:
        shared = self._shared
        held = shared.held()
        versions.purge(shared.undo, held[0] if held else None)
        label = versions.label_for(shared.undo, held[-1]) if held else 0
        for step in batch.steps():
            if held:
                versions.record(shared.main, shared.undo, label, self._touched(step))
            match step:
                case Puts(items):
                    for key, value in items:
                        shared.main.put(key, value)
                case Delete(key):
                    shared.main.delete(key)
                case DeleteRange(start, end):
                    shared.main.delete_range(start, end)
        shared.version += 1

    def _touched(self, step: Puts | Delete | DeleteRange) -> list[bytes]:
        match step:
            case Puts(items):
                return [key for key, _ in items]
            case Delete(key):
                return [key]
            case DeleteRange(start, end):
                return self._shared.main.keys(start, end)

    def close(self) -> None:
        if not self.closed and self._shared.owner == self._owner:
            self._shared.owner_alive = False
        super().close()


def open_memory_writer(name: str, *, takeover: bool = False) -> MemoryStore:
    """The writer of the store *name*, made when it does not exist."""
    with _stores_lock:
        shared = _stores.setdefault(name, _Shared())
    with shared.lock:
        old = shared.owner
        if old is not None and shared.owner_alive and not takeover:
            raise StoreOwned(f"memory://{name}", old.host, old.pid, old.started)
        generation = old.generation + 1 if old else 1
        shared.owner = Owner(generation, host_name(), os.getpid(), started())
        shared.owner_alive = True
        return MemoryStore(name, shared, shared.owner)


def open_memory_reader(name: str) -> MemoryReader:
    """A reader of the store *name*. :raises StoreNotFound: no writer made it yet."""
    with _stores_lock:
        shared = _stores.get(name)
    if shared is None:
        raise StoreNotFound(f"There is no state store at memory://{name} in this process.")
    return MemoryReader(name, shared)


def memory_names() -> list[str]:
    """The stores of this process."""
    with _stores_lock:
        return sorted(_stores)
