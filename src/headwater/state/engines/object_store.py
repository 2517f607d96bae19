"""The state store on an object store: SlateDB for keys and progress, plain objects for large values.

For clusters, where executors share no disk. Durability is the object store's: on S3 a seal survives anything; in a
local directory SlateDB does not sync files, so it survives ``kill -9`` but not power loss.

Inside SlateDB, keys of the store begin with ``d``, our own records with ``m``: ``m/committed`` (the newest epoch), the
pointers into value objects (:class:`ValueReferences`) and what is to be deleted (:mod:`.object_garbage`). Beside it
live the ``owner/``, ``pins/``, ``acks/`` and ``values/`` objects. Byte layout: docs/formats/state.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from headwater import failpoints
from headwater.state.batch import Delete, DeleteRange, Puts, Value, WriteBatch
from headwater.state.engines import lease
from headwater.state.engines.large_values import INLINE_BYTES, OBJECTS, flat, pointer_of, write_cells
from headwater.state.engines.object_garbage import Garbage, object_name
from headwater.state.engines.object_reader import ObjectReader, open_object_reader
from headwater.state.engines.object_snapshot import (
    COMMITTED,
    DATA,
    SNAPSHOT_SECONDS,
    ObjectSnapshot,
    committed_in,
    scan_cells,
)
from headwater.state.engines.slate import CLOSE_SECONDS, Place, map_errors, run, shut_down, slate
from headwater.state.errors import (
    EpochNotIncreasing,
    StateError,
    StoreFull,
    StoreUnavailable,
    WriterFenced,
)
from headwater.state.handle import Closable, check_epoch
from headwater.state.store import Pin
from headwater.stream.epoch import Epoch

_LARGE = b"m/large/"
_INDEXED = b"m/indexed"
_OLD_COUNTS = b"m/objects/"


@dataclass(frozen=True, slots=True)
class Change:
    """What a batch changes: the keys that get, keep or lose a pointer, and the objects that end with it."""

    pointers: Mapping[bytes, str | None]
    ended: frozenset[str]

    def note(self, writes: Any) -> None:
        """Write it with the batch."""
        for key, name in self.pointers.items():
            if name is None:
                writes.delete(_LARGE + key)
            else:
                writes.put(_LARGE + key, name.encode())


class ValueReferences:
    """Which keys of a store point into which value objects: an object is garbage when its last pointer is removed.

    Kept in the database as ``m/large/<key>`` → name of the object, written in the batch that writes the key, and in the
    writer's memory (some 200 bytes per large value), so that a put or a delete need not read what it replaces.
    """

    def __init__(self, place: Place, database: Any) -> None:
        self._names: dict[bytes, str] = {}
        known: dict[str, str] = {}  # one string for the many pointers into one object
        with map_errors(place.location):
            indexed = run(database.get(_INDEXED))
        if indexed is None:
            _index(place, database)
        for keys, names in scan_cells(place, database, _LARGE):
            for key, stored in zip(keys, names, strict=True):
                name = stored.decode()
                self._names[key] = known.setdefault(name, name)
        self._counts = Counter(self._names.values())

    def objects(self) -> frozenset[str]:
        """The objects that somebody points into."""
        return frozenset(self._counts)

    def change(self, touched: Mapping[bytes, str | None]) -> Change:
        """What changes when the *touched* keys come to point into an object (or, ``None``, into none)."""
        pointers = {key: name for key, name in touched.items() if name is not None or key in self._names}
        counts: Counter[str] = Counter(filter(None, pointers.values()))
        counts.subtract(self._names[key] for key in pointers if key in self._names)
        ended = frozenset(name for name, more in counts.items() if self._counts[name] + more <= 0)
        return Change(pointers, ended)

    def apply(self, change: Change) -> None:
        """The *change* was written."""
        for key, name in change.pointers.items():
            old = self._names.pop(key, None)
            if old is not None:
                self._counts[old] -= 1
            if name is not None:
                self._names[key] = name
                self._counts[name] += 1
        for name in change.ended:
            del self._counts[name]


def _index(place: Place, database: Any) -> None:
    """Make the index of a store that was written without one: it counted the pointers of each object instead."""
    with map_errors(place.location):
        writes = slate.WriteBatch()
        writes.put(_INDEXED, b"1")
        if place.names(OBJECTS):
            for keys, _ in scan_cells(place, database, _OLD_COUNTS):
                for key in keys:
                    writes.delete(_OLD_COUNTS + key)
            for keys, cells in scan_cells(place, database, DATA):
                for key, cell in zip(keys, cells, strict=True):
                    pointer = pointer_of(cell)
                    if pointer is not None:
                        writes.put(_LARGE + key, pointer.name.encode())
        run(database.write(writes))
        run(database.flush())


__all__ = ["GARBAGE_SECONDS", "ObjectStoreStore", "open_object_reader", "open_object_writer"]

SEAL_VALUES_WRITTEN = failpoints.register("state.object_store.seal_values_written")
SEAL_BEFORE_WRITE = failpoints.register("state.object_store.seal_before_write")
SEAL_BEFORE_FLUSH = failpoints.register("state.object_store.seal_before_flush")
SEAL_AFTER_FLUSH = failpoints.register("state.object_store.seal_after_flush")
OPEN_CLAIMED = failpoints.register("state.object_store.open_claimed")

GARBAGE_SECONDS = 3600.0
"""How long what nobody needs any more is kept, for snapshots that are open."""

_BROKEN_SECONDS = 0.5  # of waiting at the close of a handle whose store did not answer before
_HOUSEKEEPING_SECONDS = 1.0
_YIELD_SECONDS = 0.001
_CHECKPOINT = "headwater-pin"


class ObjectStoreStore(ObjectReader):
    """The writing handle."""

    def __init__(self, place: Place, claim: lease.Claim, *, garbage_seconds: float) -> None:
        self._claim = claim
        self._seal_lock = threading.RLock()
        self._attempts = 0
        self._broken: StateError | None = None
        self._stopping = threading.Event()
        self._knocking = threading.Event()
        self._threads: list[threading.Thread] = []
        super().__init__(place)
        try:
            self._committed = committed_in(place, self._follower)
            self._references = ValueReferences(place, self._follower)
            self._garbage = Garbage(place, self._follower, garbage_seconds)
            self._garbage.find_orphans(self._references.objects(), claim.generation, int(self._committed) + 1)
            self._pin_board.adopt(self._committed, self)
            held = {ack.checkpoint for ack in self._pin_board.held().values()}
            self._garbage.find_checkpoints(self._checkpoints(), held)
        except BaseException:
            super().close()
            raise
        for work in (self._beat, self._keep_house):
            self._threads.append(threading.Thread(target=work, name="headwater-state", daemon=True))
            self._threads[-1].start()

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
        with self._seal_lock:
            self._check_sound()
            with map_errors(self.location):
                view = run(self._follower.snapshot())
            return ObjectSnapshot(self._place, view, value, lambda: None, SNAPSHOT_SECONDS)

    def pin(self, name: str, epoch: int | None = None) -> Pin:
        self._check_open()
        with self._seal_lock:
            self._check_sound()
            return self._pin_board.grant(name, epoch, self._committed, self)

    def _check_sound(self) -> None:
        if self._broken is not None:
            raise self._broken

    # -- writing -----------------------------------------------------------------------------------------------

    def seal(self, epoch: int, batch: WriteBatch) -> None:
        self._check_open()
        checked = check_epoch(epoch)
        with self._seal_lock:
            self._check_sound()
            if checked <= self._committed:
                raise EpochNotIncreasing(checked, self._committed)
            self._write(checked, batch, seals=True)
            self._committed = checked
        if self._knocking.is_set():
            time.sleep(_YIELD_SECONDS)  # locks are not fair: readers wait for their pins behind seal upon seal

    def stage(self, batch: WriteBatch) -> None:
        self._check_open()
        with self._seal_lock:
            self._check_sound()
            self._write(self._committed, batch, seals=False)

    def _write(self, epoch: Epoch, batch: WriteBatch, *, seals: bool) -> None:
        """Write *batch*: until SlateDB has it, an error leaves nothing; after that only a new open can tell."""
        pending = self._fold(batch)
        if not pending and not seals:
            return  # SlateDB refuses to write nothing
        puts = [(key, value) for key, value in pending.items() if value is not None]
        self._attempts += 1
        name = object_name(self._claim.generation, epoch, self._attempts)
        try:
            cells = write_cells(self._place, name, [value for _, value in puts])
            failpoints.hit(SEAL_VALUES_WRITTEN)
            touched = {k: name if v is not None and len(v) > INLINE_BYTES else None for k, v in pending.items()}
            change = self._references.change(touched)
            # what is staged over is seen at this very epoch, by its pins
            ends = int(epoch) if seals else int(epoch) + 1
            with map_errors(self.location):
                writes = slate.WriteBatch()
                for (key, _), cell in zip(puts, cells, strict=True):
                    writes.put(DATA + key, cell)
                for key, value in pending.items():
                    if value is None:
                        writes.delete(DATA + key)
                change.note(writes)
                garbage = self._garbage.note(writes, ends, change.ended)
                if seals:
                    writes.put(COMMITTED, epoch.to_bytes(8, "big"))
            failpoints.hit(SEAL_BEFORE_WRITE)
        except StoreUnavailable as error:
            self._broken = error  # what was written of the object is removed by the next handle
            raise
        except BaseException:
            if any(len(value) > INLINE_BYTES for _, value in puts):
                with suppress(StateError):
                    self._place.delete(name)
            raise
        self._commit(epoch, writes)
        self._references.apply(change)
        self._garbage.apply(garbage)

    def _commit(self, epoch: Epoch, writes: Any) -> None:
        try:
            with map_errors(self.location):
                run(self._follower.write(writes))
                failpoints.hit(SEAL_BEFORE_FLUSH)
                run(self._follower.flush())
            failpoints.hit(SEAL_AFTER_FLUSH)
        except WriterFenced as error:
            self._broken = error
            raise
        except BaseException as error:
            self._broken = StoreUnavailable(
                f"Whether the state store at {self.location} holds what was written last (epoch {epoch}) is unknown.",
                next_step="Close this handle, open the store again, and read committed_epoch().",
            )
            if isinstance(error, StoreFull | StoreUnavailable):
                raise self._broken from error
            raise

    def _fold(self, batch: WriteBatch) -> dict[bytes, Value | None]:
        """What the batch leaves of each key that it touches."""
        pending: dict[bytes, Value | None] = {}
        for step in batch.steps():
            match step:
                case Puts(items):
                    for key, value in items:
                        pending[key] = flat(value)
                case Delete(key):
                    pending[key] = None
                case DeleteRange(start, end):
                    for key in [key for key in pending if (start or b"") <= key and (end is None or key < end)]:
                        pending[key] = None
                    for keys, _ in scan_cells(self._place, self._follower, DATA, start, end):
                        pending.update(dict.fromkeys(keys))
        return pending

    # -- what the pin board needs of a writer ------------------------------------------------------------------

    def checkpoint(self) -> str:
        """A checkpoint of exactly the committed epoch; call under the seal lock."""
        with map_errors(self.location):
            run(self._follower.flush_with_options(slate.FlushOptions(flush_type=slate.FlushType.MEM_TABLE)))
            options = slate.CheckpointOptions(lifetime_ms=None, source=None, name=_CHECKPOINT)
            made = str(run(self._admin().create_detached_checkpoint(options)).id)
        try:
            # claimed by nobody since, so opened by nobody before the checkpoint was made: it shows our epoch
            self.confirm()
        except WriterFenced:
            self._drop(made)
            raise
        return made

    def confirm(self) -> None:
        """:raises WriterFenced: another writer has claimed the store."""
        if not lease.owns(self._place, self._claim):
            self._broken = WriterFenced(f"The state store at {self.location} was taken over; this writer has ended.")
            raise self._broken

    def release(self, pins: list[tuple[int, str]]) -> None:
        """Pins were released: what they held is kept a while."""
        self._garbage.release(pins)

    def _checkpoints(self) -> list[str]:
        with map_errors(self.location):
            return [str(made.id) for made in run(self._admin().list_checkpoints(_CHECKPOINT))]

    def _drop(self, checkpoint: str) -> None:
        with map_errors(self.location):
            run(self._admin().delete_checkpoint(checkpoint))

    def _admin(self) -> Any:
        return slate.AdminBuilder(self._place.path, self._place.database_store()).build()

    # -- two threads: the heartbeat, and housekeeping between seals --------------------------------------------

    def _beat(self) -> None:
        """Not behind the seal lock: a writer in a long seal is alive."""
        while not self._stopping.wait(lease.HEARTBEAT):
            try:
                if not lease.beat(self._place, self._claim):
                    self.confirm()
            except WriterFenced:
                return
            except StateError:
                continue  # the object store did not answer; the next round tries again

    def _keep_house(self) -> None:
        """Answer pins, collect garbage."""
        while not self._stopping.wait(_HOUSEKEEPING_SECONDS):
            self._knocking.set()
            try:
                with self._seal_lock:
                    self._knocking.clear()
                    if self._stopping.is_set() or self._broken is not None:
                        return
                    self._pin_board.adopt(self._committed, self)
                    held = self._pin_board.held()
                    checkpoints = {ack.checkpoint for ack in held.values()}
                    self._garbage.collect(held, checkpoints, self.confirm, self._drop)
            except WriterFenced:
                return
            except StateError:
                continue

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StoreUnavailable):
            self._broken = self._broken or error  # do not wait for it again
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self._stopping.set()
        if self._pid != os.getpid():
            super().close()
            return
        Closable.close(self)
        lease.give_up(self._claim)
        seconds = _BROKEN_SECONDS if isinstance(self._broken, StoreUnavailable) else CLOSE_SECONDS
        for thread in self._threads:
            thread.join(seconds)
        has_ended = True
        try:
            with suppress(WriterFenced), map_errors(self.location):
                has_ended = shut_down(self._follower, seconds)
        finally:
            if has_ended:
                lease.release(self._place, self._claim)


def open_object_writer(
    url: str, *, takeover: bool = False, garbage_seconds: float = GARBAGE_SECONDS
) -> ObjectStoreStore:
    """The writer of the store at *url* (``file:///…`` or ``s3://…``), made when it does not exist.

    :raises StoreOwned: a live writer has it.
    """
    place = Place.parse(url, create=True)
    claim = lease.claim(place, takeover=takeover)
    try:
        failpoints.hit(OPEN_CLAIMED)
        return ObjectStoreStore(place, claim, garbage_seconds=garbage_seconds)
    except StoreUnavailable:
        lease.give_up(claim)
        raise
    except BaseException:
        with suppress(StateError):
            lease.release(place, claim)
        raise
