"""The state store on an object store: SlateDB for keys and progress, plain objects for large values.

For clusters, where executors share no disk. Durability is the object store's: on S3 a seal survives anything; in a
local directory SlateDB does not sync files, so it survives ``kill -9`` but not power loss.

Inside SlateDB, keys of the store begin with ``d``, our own records with ``m``: ``m/committed`` (the newest epoch),
``m/objects/<name>`` (how many cells point into a value object), ``m/garbage/<epoch><name>`` (value objects that nobody
points into any more). Beside it live the ``owner/``, ``pins/``, ``acks/`` and ``values/`` objects. Byte layout:
docs/formats/state.md.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from headwater import failpoints
from headwater.state.batch import Delete, DeleteRange, Puts, Value, WriteBatch, prefix_end
from headwater.state.engines import lease
from headwater.state.engines.large_values import INLINE_BYTES, OBJECTS, pointer_of, read_values, write_cells
from headwater.state.engines.object_pins import PinBoard
from headwater.state.engines.slate import Place, map_errors, run, slate
from headwater.state.epochs import check_epoch, wait_until
from headwater.state.errors import (
    EpochNotHeld,
    EpochNotIncreasing,
    StateError,
    StoreClosed,
    StoreNotFound,
    StoreUnavailable,
    WriterFenced,
)
from headwater.state.handle import Handle, SnapshotBase
from headwater.state.store import Owner, Pin, StoreStatistics
from headwater.stream.epoch import Epoch

SEAL_VALUES_WRITTEN = failpoints.register("state.object_store.seal_values_written")
SEAL_BEFORE_WRITE = failpoints.register("state.object_store.seal_before_write")
SEAL_BEFORE_FLUSH = failpoints.register("state.object_store.seal_before_flush")
SEAL_AFTER_FLUSH = failpoints.register("state.object_store.seal_after_flush")
OPEN_CLAIMED = failpoints.register("state.object_store.open_claimed")

SNAPSHOT_SECONDS = 3000.0
"""How long a snapshot of a reader stays valid: after that SlateDB may drop what it reads."""

GARBAGE_SECONDS = 3600.0
"""How long an unreferenced value object is kept for snapshots that were open when it lost its last reference."""

_DATA = b"d"
_COMMITTED = b"m/committed"
_OBJECTS = b"m/objects/"
_GARBAGE = b"m/garbage/"
_SCAN_CELLS = 1000
_FOLLOW_MS = 100
_SETTLE_SECONDS = 0.02
_HOUSEKEEPING_SECONDS = 1.0


class ObjectSnapshot(SnapshotBase):
    """A view of one epoch, over anything of SlateDB's that can get and scan."""

    def __init__(
        self, place: Place, view: Any, value: Callable[[bytes], Any], release: Callable[[], None], limit: float | None
    ) -> None:
        self._place = place
        self._view = view
        self._value = value
        self._release = release
        self._deadline = None if limit is None else time.monotonic() + limit
        with map_errors(place.location):
            super().__init__(_epoch_of(run(view.get(_COMMITTED))))

    def get(self, key: bytes) -> Any:
        self._check_open()
        with map_errors(self._place.location):
            cell = run(self._view.get(_DATA + key))
        self._check_frozen()
        return None if cell is None else self._value(read_values(self._place, [cell])[0])

    def scan(
        self, start: bytes | None = None, end: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, Any]]:
        self._check_open()
        return self._scan(start, end, reverse)

    def _scan(self, start: bytes | None, end: bytes | None, reverse: bool) -> Iterator[tuple[bytes, Any]]:
        for keys, cells in _scan_cells(self._place, self._view, _DATA, start, end, reverse):
            self._check_open()
            self._check_frozen()
            for key, value in zip(keys, read_values(self._place, cells), strict=True):
                yield key, self._value(value)
                self._check_open()

    def scan_prefix(self, prefix: bytes, *, reverse: bool = False) -> Iterator[tuple[bytes, Any]]:
        return self.scan(prefix, prefix_end(prefix), reverse=reverse)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._release()

    def _check_frozen(self) -> None:
        """A reader of SlateDB's looks for news once more after it was opened; what it then shows is another epoch."""
        with map_errors(self._place.location):
            seen = _epoch_of(run(self._view.get(_COMMITTED)))
        if seen != self.epoch:
            raise StoreUnavailable(
                f"A snapshot of {self._place.location} moved on to a newer epoch while it was opened.",
                next_step="Open the snapshot again.",
            )

    def _check_open(self) -> None:
        super()._check_open()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise StoreClosed(
                f"This snapshot of {self._place.location} is older than {SNAPSHOT_SECONDS / 60:.0f} minutes.",
                next_step="Pin the epoch and open snapshots at the pin.",
            )


class ObjectReader(Handle):
    """A reading handle: follows the database, and opens a frozen reader for each snapshot."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.location)
        self._place = place
        self._pin_board = PinBoard(place)
        self._follower = self._open_follower()

    def _open_follower(self) -> Any:
        return self._open_view(_FOLLOW_MS)

    def _open_view(self, poll_ms: int, checkpoint: str | None = None) -> Any:
        builder = slate.DbReaderBuilder(self._place.path, self._place.database_store())
        if checkpoint is not None:
            builder.with_reader_mode(slate.ReaderMode.CHECKPOINT(checkpoint))
        builder.with_options(
            slate.ReaderOptions(
                manifest_poll_interval_ms=poll_ms,
                checkpoint_lifetime_ms=max(60_000, 3 * poll_ms),
                max_memtable_bytes=64 << 20,
                skip_wal_replay=False,
            )
        )
        with map_errors(self.location):
            return run(builder.build())

    def committed_epoch(self) -> Epoch:
        self._check_open()
        with map_errors(self.location):
            return _epoch_of(run(self._follower.get(_COMMITTED)))

    def wait_for_epoch(self, after: int, timeout: float) -> Epoch | None:
        return wait_until(self.committed_epoch, after, timeout)

    def snapshot(self, epoch: int | None = None) -> ObjectSnapshot:
        return self._snapshot(epoch, bytes)

    def mapped_snapshot(self, epoch: int | None = None) -> ObjectSnapshot:
        return self._snapshot(epoch, memoryview)

    def _snapshot(self, epoch: int | None, value: Callable[[bytes], Any]) -> ObjectSnapshot:
        self._check_open()
        newest = self._newest_snapshot(value)
        if epoch is None or newest.epoch == epoch:
            return newest
        newest.close()
        checkpoint = self._pin_board.checkpoint_of(epoch)
        if checkpoint is None:
            raise EpochNotHeld(epoch, (*self._pin_board.epochs(), newest.epoch))
        view = self._open_view(_FOLLOW_MS, checkpoint)
        return ObjectSnapshot(self._place, view, value, lambda: run(view.shutdown()), None)

    def _newest_snapshot(self, value: Callable[[bytes], Any]) -> ObjectSnapshot:
        # A reader that does not poll for longer than the snapshot lives is frozen, but for one look for news right
        # after its opening, which takes about as long as the opening did: let that pass.
        begun = time.monotonic()
        view = self._open_view(int(SNAPSHOT_SECONDS * 1200))
        time.sleep(max(_SETTLE_SECONDS, time.monotonic() - begun))
        return ObjectSnapshot(self._place, view, value, lambda: run(view.shutdown()), SNAPSHOT_SECONDS)

    def pin(self, name: str, epoch: int | None = None) -> Pin:
        """As in the contract; a process that is not the writer waits for the writer's answer, about a second."""
        self._check_open()
        with self._newest_snapshot(bytes) as newest:
            committed = newest.epoch
        return self._pin_board.request(name, epoch, committed)

    def unpin(self, name: str) -> None:
        self._check_open()
        self._pin_board.release(name)

    def pins(self) -> tuple[Pin, ...]:
        self._check_open()
        return self._pin_board.pins(self.committed_epoch())

    def owner(self) -> Owner | None:
        self._check_open()
        current = lease.current_claim(self._place)
        return current.owner() if current else None

    def statistics(self) -> StoreStatistics:
        self._check_open()
        size = 0
        with map_errors(self.location):
            for page in self._place.objects.list():
                size += sum(meta["size"] for meta in page)
        return StoreStatistics(
            "slatedb", self.location, self.committed_epoch(), None, size, 0, self.pins(), self.owner()
        )

    def close(self) -> None:
        if not self.closed:
            super().close()
            with map_errors(self.location):
                run(self._follower.shutdown())


class ObjectStoreStore(ObjectReader):
    """The writing handle."""

    def __init__(self, place: Place, claim: lease.Claim, *, garbage_seconds: float) -> None:
        self._claim = claim
        self._garbage_seconds = garbage_seconds
        self._seal_lock = threading.RLock()
        self._objects: Counter[str] = Counter()
        self._attempts = 0
        self._broken: StateError | None = None
        self._stopping = threading.Event()
        super().__init__(place)
        self._committed = super().committed_epoch()
        for keys, cells in _scan_cells(place, self._follower, _OBJECTS, None, None, False):
            for key, count in zip(keys, cells, strict=True):
                self._objects[key.decode()] = int.from_bytes(count, "big")
        self._pin_board.adopt(self._committed, self._checkpoint, self._drop_checkpoint)
        self._housekeeper = threading.Thread(target=self._keep_house, name="headwater-state", daemon=True)
        self._housekeeper.start()

    def _open_follower(self) -> Any:
        builder = slate.DbBuilder(self._place.path, self._place.database_store())
        settings = slate.Settings.default()
        settings.set("l0_sst_size_bytes", str(16 << 20))
        builder.with_settings(settings)
        with map_errors(self.location):
            return run(builder.build())

    def committed_epoch(self) -> Epoch:
        self._check_open()
        return self._committed

    def _newest_snapshot(self, value: Callable[[bytes], Any]) -> ObjectSnapshot:
        with self._seal_lock, map_errors(self.location):
            view = run(self._follower.snapshot())
            return ObjectSnapshot(self._place, view, value, lambda: None, None)

    def pin(self, name: str, epoch: int | None = None) -> Pin:
        self._check_open()
        with self._seal_lock:
            return self._pin_board.grant(name, epoch, self._committed, self._checkpoint)

    def seal(self, epoch: int, batch: WriteBatch) -> None:
        self._check_open()
        checked = check_epoch(epoch)
        with self._seal_lock:
            if self._broken is not None:
                raise self._broken
            if checked <= self._committed:
                raise EpochNotIncreasing(checked, self._committed)
            self._write(checked, batch, seals=True)
            self._committed = checked

    def stage(self, batch: WriteBatch) -> None:
        self._check_open()
        with self._seal_lock:
            if self._broken is not None:
                raise self._broken
            self._write(self._committed, batch, seals=False)

    def _write(self, epoch: Epoch, batch: WriteBatch, *, seals: bool) -> None:
        try:
            self._write_all(epoch, batch, seals)
        except StateError as error:
            # the outcome is unknown, or another writer is there: only a fresh open can tell
            self._broken = error
            raise

    def _write_all(self, epoch: Epoch, batch: WriteBatch, seals: bool) -> None:
        pending, lost = self._fold(batch)
        self._attempts += 1
        name = f"{OBJECTS}{self._claim.generation:010}-{int(epoch):020}-{self._attempts}"
        puts = [(key, value) for key, value in pending.items() if value is not None]
        cells = write_cells(self._place, name, [value for _, value in puts])
        failpoints.hit(SEAL_VALUES_WRITTEN)
        references = self._objects.copy()
        references.subtract(lost)
        references[name] += sum(len(value) > INLINE_BYTES for _, value in puts)
        with map_errors(self.location):
            writes = slate.WriteBatch()
            for (key, _), cell in zip(puts, cells, strict=True):
                writes.put(_DATA + key, cell)
            for key, value in pending.items():
                if value is None:
                    writes.delete(_DATA + key)
            for changed in {name, *lost}:
                self._note_references(writes, epoch, changed, references[changed])
            if seals:
                writes.put(_COMMITTED, epoch.to_bytes(8, "big"))
            failpoints.hit(SEAL_BEFORE_WRITE)
            run(self._follower.write(writes))
            failpoints.hit(SEAL_BEFORE_FLUSH)
            run(self._follower.flush())
        failpoints.hit(SEAL_AFTER_FLUSH)
        self._objects = +references

    def _note_references(self, writes: Any, epoch: Epoch, name: str, count: int) -> None:
        if count > 0:
            writes.put(_OBJECTS + name.encode(), count.to_bytes(8, "big"))
        elif name in self._objects:
            writes.delete(_OBJECTS + name.encode())
            writes.put(_GARBAGE + epoch.to_bytes(8, "big") + name.encode(), str(time.time()).encode())

    def _fold(self, batch: WriteBatch) -> tuple[dict[bytes, Value | None], Counter[str]]:
        """What the batch leaves of each key that it touches, and how many pointers into which objects it removes."""
        pending: dict[bytes, Value | None] = {}
        lost: Counter[str] = Counter()
        seen: set[bytes] = set()

        def forget(key: bytes, cell: bytes | None) -> None:
            if key not in seen:
                seen.add(key)
                pointer = pointer_of(cell) if cell else None
                if pointer is not None:
                    lost[pointer.name] += 1

        for step in batch.steps():
            match step:
                case Puts(items):
                    for key, value in items:
                        # a small value over a large one leaves its object to vacuum(): not worth a read per put
                        if len(value) > INLINE_BYTES and self._objects:
                            forget(key, self._stored(key))
                        pending[key] = value
                case Delete(key):
                    forget(key, self._stored(key))
                    pending[key] = None
                case DeleteRange(start, end):
                    for key in [key for key in pending if (start or b"") <= key and (end is None or key < end)]:
                        forget(key, self._stored(key))
                        pending[key] = None
                    for keys, cells in _scan_cells(self._place, self._follower, _DATA, start, end, False):
                        for key, cell in zip(keys, cells, strict=True):
                            forget(key, cell)
                            pending[key] = None
        return pending, lost

    def _stored(self, key: bytes) -> bytes | None:
        with map_errors(self.location):
            found: bytes | None = run(self._follower.get(_DATA + key))
        return found

    def vacuum(self) -> int:
        """Delete value objects that no key points to (left by failed seals); returns how many.

        It reads every key. Objects that a pin or a fresh snapshot may need are kept.
        """
        self._check_open()
        with self._seal_lock:
            live: set[str] = set()
            for _, cells in _scan_cells(self._place, self._follower, _DATA, None, None, False):
                live.update(pointer.name for pointer in map(pointer_of, cells) if pointer is not None)
            stored = self._place.names(OBJECTS)
            if self._pin_board.epochs():
                return 0
            dropped = [name for name in stored if name not in live and name not in self._objects]
            for name in dropped:
                self._place.delete(name)
            return len(dropped)

    # -- housekeeping: heartbeat, pins asked for by readers, garbage --------------------------------------------

    def _keep_house(self) -> None:
        last_beat = 0.0
        while not self._stopping.wait(_HOUSEKEEPING_SECONDS):
            try:
                if time.monotonic() - last_beat > lease.HEARTBEAT:
                    last_beat = time.monotonic()
                    if not lease.beat(self._place, self._claim):
                        self._broken = WriterFenced(
                            f"The state store at {self.location} was taken over; this writer has ended."
                        )
                        return
                with self._seal_lock:
                    if self._stopping.is_set() or self._broken is not None:
                        return
                    self._pin_board.adopt(self._committed, self._checkpoint, self._drop_checkpoint)
                    self._collect_garbage()
            except StateError:
                continue  # the object store did not answer; the next round tries again

    def _checkpoint(self) -> str:
        """A checkpoint of exactly the committed epoch; call under the seal lock."""
        with map_errors(self.location):
            run(self._follower.flush_with_options(slate.FlushOptions(flush_type=slate.FlushType.MEM_TABLE)))
            options = slate.CheckpointOptions(lifetime_ms=None, source=None, name="headwater-pin")
            made = run(self._admin().create_detached_checkpoint(options))
        return str(made.id)

    def _drop_checkpoint(self, checkpoint: str) -> None:
        with map_errors(self.location):
            run(self._admin().delete_checkpoint(checkpoint))

    def _admin(self) -> Any:
        return slate.AdminBuilder(self._place.path, self._place.database_store()).build()

    def _collect_garbage(self) -> None:
        pinned = self._pin_board.epochs()
        now = time.time()
        for keys, cells in _scan_cells(self._place, self._follower, _GARBAGE, None, None, False):
            for key, since in zip(keys, cells, strict=True):
                epoch, name = int.from_bytes(key[:8], "big"), key[8:].decode()
                if now - float(since) < self._garbage_seconds or any(pin < epoch for pin in pinned):
                    continue
                self._place.delete(name)
                with map_errors(self.location):
                    run(self._follower.delete(_GARBAGE + key))

    def close(self) -> None:
        if self.closed:
            return
        self._stopping.set()
        self._housekeeper.join(10)
        try:
            super().close()
        except WriterFenced:
            return
        lease.release(self._place, self._claim)


def open_object_writer(
    url: str, *, takeover: bool = False, garbage_seconds: float = GARBAGE_SECONDS
) -> ObjectStoreStore:
    """The writer of the store at *url* (``file:///…`` or ``s3://…``), made when it does not exist.

    :raises StoreOwned: a live writer has it.
    """
    place = Place.parse(url, create=True)
    claim = lease.claim(place, takeover=takeover)
    failpoints.hit(OPEN_CLAIMED)
    return ObjectStoreStore(place, claim, garbage_seconds=garbage_seconds)


def open_object_reader(url: str) -> ObjectReader:
    """A reader of the store at *url*. :raises StoreNotFound: there is none."""
    place = Place.parse(url, create=False)
    if not place.names("db/manifest"):
        raise StoreNotFound(f"There is no state store at {place.location}.")
    return ObjectReader(place)


def _epoch_of(stored: bytes | None) -> Epoch:
    return Epoch(int.from_bytes(stored, "big") if stored else 0)


def _scan_cells(
    place: Place, view: Any, space: bytes, start: bytes | None, end: bytes | None, reverse: bool
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Keys (without their *space*) and raw cells, page by page."""
    if start is not None and end is not None and start >= end:
        return
    high = prefix_end(space) if end is None else space + end
    wanted = slate.KeyRange(start=space + (start or b""), start_inclusive=True, end=high, end_inclusive=False)
    order = slate.IterationOrder.DESCENDING if reverse else slate.IterationOrder.ASCENDING
    options = slate.ScanOptions(
        durability_filter=slate.DurabilityLevel.MEMORY,
        dirty=False,
        read_ahead_bytes=1 << 20,
        cache_blocks=True,
        max_fetch_tasks=2,
        order=order,
    )
    with map_errors(place.location):
        cursor = run(view.scan_with_options(wanted, options))
    while True:
        with map_errors(place.location):
            page = run(cursor.next_batch(_SCAN_CELLS))
        if not page:
            return
        yield [cell.key[len(space) :] for cell in page], [cell.value for cell in page]
