"""The embedded state store: LMDB, one directory on a local disk. The default.

One process writes, any number of others read at the same time, each from its own consistent view, without locks
between them. A seal is one LMDB transaction with an fdatasync, so it survives power loss.

Three tables in one environment: ``main`` (the newest epoch, plain keys), ``undo`` (what pinned epochs need, see
:mod:`headwater.state.versions`) and ``meta`` (format, committed epoch, owner, pins). The map is sparse and large, so it
never has to grow under a running reader; the file on disk has only the pages in use, and freed pages are used again.
Byte layout: docs/formats/state.md.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lmdb

from headwater import failpoints
from headwater.state import versions
from headwater.state.batch import (
    MAX_KEY_BYTES,
    Delete,
    DeleteRange,
    Puts,
    Step,
    WriteBatch,
    check_bounds,
    prefix_end,
)
from headwater.state.engines.claim import TAKEOVER_SECONDS, claim, owner_in, refuse_if_owned, refuse_if_stuck
from headwater.state.engines.environment import Environment, LmdbCells, MappedCells, Txn, borrow, map_errors
from headwater.state.engines.filesystem import prepare_directory
from headwater.state.errors import (
    EpochNotHeld,
    EpochNotIncreasing,
    PinExists,
    PinNotFound,
    WriterFenced,
)
from headwater.state.handle import Handle, SnapshotBase, check_epoch, check_pin_name, wait_until
from headwater.state.ownership import OwnerLock
from headwater.state.store import Owner, Pin, StoreStatistics
from headwater.stream.epoch import Epoch
from headwater.system.process import host_name

SEAL_BEGUN = failpoints.register("state.embedded.seal_begun")
SEAL_BEFORE_COMMIT = failpoints.register("state.embedded.seal_before_commit")
SEAL_AFTER_COMMIT = failpoints.register("state.embedded.seal_after_commit")
STAGE_BEFORE_COMMIT = failpoints.register("state.embedded.stage_before_commit")
PIN_BEFORE_COMMIT = failpoints.register("state.embedded.pin_before_commit")
UNPIN_BEFORE_COMMIT = failpoints.register("state.embedded.unpin_before_commit")

DEFAULT_MAX_BYTES = 1 << 40
"""Size of the sparse map: the most that a store can hold. Virtual address space, not disk."""

_COMMITTED = b"committed"
_PIN = b"pin/"
_STALE_READERS_EVERY = 1.0


class EmbeddedSnapshot(SnapshotBase):
    """A view of one epoch: an LMDB read transaction, with the undo log over it when the epoch is an older one."""

    def __init__(
        self, environment: Environment, txn: Txn, epoch: Epoch, labels: list[int], cells: type[LmdbCells]
    ) -> None:
        super().__init__(epoch)
        self._environment = environment.borrow()
        self._txn = txn
        self._main = cells(txn, environment.main)
        self._undo = cells(txn, environment.undo)
        self._labels = labels

    def get(self, key: bytes) -> Any:
        self._check_open()
        check_bounds(key, None)
        with map_errors(self._environment.path):
            if not 0 < len(key) <= MAX_KEY_BYTES:
                return None
            return versions.get_at(self._main, self._undo, self._labels, key)

    def scan(
        self, start: bytes | None = None, end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Any]]:
        self._check_open()
        check_bounds(start, end)
        if self._labels:
            return self._walk(versions.scan_at(self._main, self._undo, self._labels, start or None, end, reverse))
        return self._walk(self._main.items(start or None, end, reverse))

    def scan_prefix(self, prefix: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, Any]]:
        return self.scan(prefix, prefix_end(prefix), reverse=reverse)

    def _walk(self, items: Iterator[tuple[bytes, Any]]) -> Iterator[tuple[bytes, Any]]:
        try:
            yield from items
        except lmdb.Error:
            self._check_open()  # a closed snapshot says so in our words
            with map_errors(self._environment.path):
                raise

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._pid == os.getpid():
                self._environment.end_read(self._txn)
                self._environment.give_back()


class EmbeddedReader(Handle):
    """A reading handle on an embedded store."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(str(environment.path))
        self._environment = environment

    def committed_epoch(self) -> Epoch:
        self._check_open()
        with self._reading() as txn:
            return _committed(txn, self._environment)

    def wait_for_epoch(self, after: int, timeout: float) -> Epoch | None:
        return wait_until(self.committed_epoch, self.location, after, timeout)

    def snapshot(self, epoch: int | None = None) -> EmbeddedSnapshot:
        return self._snapshot(epoch, LmdbCells)

    def mapped_snapshot(self, epoch: int | None = None) -> EmbeddedSnapshot:
        return self._snapshot(epoch, MappedCells)

    def _snapshot(self, epoch: int | None, cells: type[LmdbCells]) -> EmbeddedSnapshot:
        self._check_open()
        environment = self._environment
        txn = environment.begin_read(mapped=cells is MappedCells)
        try:
            target = _readable(txn, environment, epoch)
            labels = [] if epoch is None else versions.labels_from(cells(txn, environment.undo), target)
            return EmbeddedSnapshot(environment, txn, target, labels, cells)
        except BaseException:
            environment.end_read(txn)
            raise

    def pin(self, name: str, epoch: int | None = None) -> Pin:
        self._check_open()
        check_pin_name(name)
        environment = self._environment
        with map_errors(environment.path), environment.write() as txn:
            known = {pin.name: pin for pin in _pins(txn, environment)}
            old = known.get(name)
            if old is not None and (epoch is None or old.epoch == epoch):
                return old
            target = _readable(txn, environment, epoch)
            if old is not None:
                raise PinExists(f"Pin {name!r} holds epoch {old.epoch}.", next_step="Release it first.")
            pin = Pin(name, target, host_name(), os.getpid(), datetime.fromtimestamp(time.time(), UTC))
            txn.put(_PIN + name.encode(), _pin_to_bytes(pin), db=environment.meta)
            failpoints.hit(PIN_BEFORE_COMMIT)
        return pin

    def unpin(self, name: str) -> None:
        self._check_open()
        check_pin_name(name)
        environment = self._environment
        with map_errors(environment.path), environment.write() as txn:
            if not txn.delete(_PIN + name.encode(), db=environment.meta):
                raise PinNotFound(f"There is no pin {name!r} in {self.location}.")
            failpoints.hit(UNPIN_BEFORE_COMMIT)

    def pins(self) -> tuple[Pin, ...]:
        self._check_open()
        with self._reading() as txn:
            return _pins(txn, self._environment)

    def owner(self) -> Owner | None:
        self._check_open()
        with self._reading() as txn:
            return owner_in(txn, self._environment)

    def statistics(self) -> StoreStatistics:
        self._check_open()
        environment = self._environment
        with self._reading() as txn:
            tables = [txn.stat(db) for db in (environment.main, environment.undo, environment.meta)]
            committed, pins, owner = (
                _committed(txn, environment),
                _pins(txn, environment),
                owner_in(txn, environment),
            )
        used = sum(t["branch_pages"] + t["leaf_pages"] + t["overflow_pages"] for t in tables)
        page, last = environment.page_geometry()
        size = (environment.path / "data.mdb").stat()
        return StoreStatistics(
            engine="embedded",
            location=self.location,
            committed_epoch=committed,
            keys=tables[0]["entries"],
            bytes_on_disk=size.st_blocks * 512,
            bytes_free_inside=max(0, last + 1 - 2 - used) * page,
            pins=pins,
            owner=owner,
        )

    @contextmanager
    def _reading(self) -> Iterator[Txn]:
        txn = self._environment.begin_read()
        try:
            with map_errors(self._environment.path):
                yield txn
        finally:
            self._environment.end_read(txn)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._environment.give_back()


class EmbeddedStore(EmbeddedReader):
    """The writing handle on an embedded store."""

    def __init__(self, environment: Environment, generation: int, lock: OwnerLock) -> None:
        super().__init__(environment)
        self._generation = generation
        self._owner_lock = lock
        self._seal_lock = threading.Lock()
        self._readers_checked = 0.0

    def seal(self, epoch: int, batch: WriteBatch) -> None:
        checked = check_epoch(epoch)
        environment = self._environment
        with self._writing() as txn:
            committed = _committed(txn, environment)
            if checked <= committed:
                raise EpochNotIncreasing(checked, committed)
            failpoints.hit(SEAL_BEGUN)
            self._apply(txn, batch)
            txn.put(_COMMITTED, checked.to_bytes(8, "big"), db=environment.meta)
            failpoints.hit(SEAL_BEFORE_COMMIT)
        failpoints.hit(SEAL_AFTER_COMMIT)

    def stage(self, batch: WriteBatch) -> None:
        with self._writing() as txn:
            self._apply(txn, batch)
            failpoints.hit(STAGE_BEFORE_COMMIT)

    @contextmanager
    def _writing(self) -> Iterator[Txn]:
        """A write transaction of the writer that still owns the store."""
        self._check_open()  # a forked child must not wait for a lock that nobody gives back there
        with self._seal_lock:
            self._check_open()
            self._forget_dead_readers()
            with map_errors(self._environment.path), self._environment.write() as txn:
                self._check_generation(txn)
                yield txn
            self._environment.cover_pages()

    def _apply(self, txn: Txn, batch: WriteBatch) -> None:
        main, undo = LmdbCells(txn, self._environment.main), LmdbCells(txn, self._environment.undo)
        pins = _pins(txn, self._environment)
        versions.purge(undo, pins[0].epoch if pins else None)
        label = versions.label_for(undo, pins[-1].epoch) if pins else 0
        for step in batch.steps():
            if pins:
                versions.record(main, undo, label, _touched(main, step))
            _apply(main, step)

    def _check_generation(self, txn: Txn) -> None:
        owner = owner_in(txn, self._environment)
        if owner is None or owner.generation != self._generation:
            by = f" by host {owner.host}, pid {owner.pid}" if owner else ""
            raise WriterFenced(f"The state store at {self.location} was taken over{by}; this writer has ended.")

    def _forget_dead_readers(self) -> None:
        """A reader killed inside a snapshot would hold back the reuse of pages for ever."""
        now = time.monotonic()
        if now - self._readers_checked > _STALE_READERS_EVERY:
            self._readers_checked = now
            self._environment.forget_dead_readers()

    def close(self) -> None:
        with self._seal_lock:  # a seal under way in another thread ends first
            if not self.closed:
                super().close()
                if self._pid == os.getpid():
                    self._owner_lock.release()


def open_embedded_writer(path: Path, *, takeover: bool = False, max_bytes: int = DEFAULT_MAX_BYTES) -> EmbeddedStore:
    """The writer of the store in directory *path*, made when it does not exist.

    A writer that died is succeeded without a word; a live one refuses, unless *takeover* fences it.

    :raises StoreOwned: a live writer has it.
    :raises StoreUnavailable: the live writer was stopped inside a seal, so nobody can fence it.
    """
    prepare_directory(path)
    if takeover:
        refuse_if_stuck(path, TAKEOVER_SECONDS)
    else:
        refuse_if_owned(path)
    environment = borrow(path, create=True, max_bytes=max_bytes)
    try:
        owner, lock = claim(environment, takeover=takeover)
        return EmbeddedStore(environment, owner.generation, lock)
    except BaseException:
        environment.give_back()
        raise


def open_embedded_reader(path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> EmbeddedReader:
    """A reader of the store in directory *path*. :raises StoreNotFound: there is none.

    :param max_bytes: addresses to map; a store that grew beyond them is mapped as a whole.
    """
    return EmbeddedReader(borrow(path, create=False, max_bytes=max_bytes))


def _apply(main: LmdbCells, step: Step) -> None:
    match step:
        case Puts(items):
            main.put_many(items)
        case Delete(key):
            main.delete(key)
        case DeleteRange(start, end):
            main.delete_range(start, end)


def _touched(main: LmdbCells, step: Step) -> list[bytes]:
    match step:
        case Puts(items):
            return [key for key, _ in items]
        case Delete(key):
            return [key]
        case DeleteRange(start, end):
            return main.keys(start, end)


def _committed(txn: Txn, environment: Environment) -> Epoch:
    stored = txn.get(_COMMITTED, db=environment.meta)
    return Epoch(int.from_bytes(stored, "big") if stored else 0)


def _readable(txn: Txn, environment: Environment, epoch: int | None) -> Epoch:
    committed = _committed(txn, environment)
    if epoch is None or epoch == committed:
        return committed
    pinned = [pin.epoch for pin in _pins(txn, environment)]
    if epoch not in pinned:
        raise EpochNotHeld(epoch, (*pinned, committed))
    return Epoch(epoch)


def _pins(txn: Txn, environment: Environment) -> tuple[Pin, ...]:
    found = []
    with txn.cursor(db=environment.meta) as cursor:
        if cursor.set_range(_PIN):
            for key, value in cursor.iternext():
                name = bytes(key)
                if not name.startswith(_PIN):
                    break
                fields = json.loads(bytes(value))
                created = datetime.fromisoformat(fields["created"])
                found.append(
                    Pin(
                        name[len(_PIN) :].decode(),
                        Epoch(fields["epoch"]),
                        fields["host"],
                        fields["pid"],
                        created,
                    )
                )
    return tuple(sorted(found, key=lambda pin: (pin.epoch, pin.name)))


def _pin_to_bytes(pin: Pin) -> bytes:
    fields = {"epoch": int(pin.epoch), "host": pin.host, "pid": pin.pid, "created": pin.created.isoformat()}
    return json.dumps(fields).encode()
