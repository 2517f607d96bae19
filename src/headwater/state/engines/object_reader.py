"""Reading a state store on an object store: one follower of the database, and a frozen reader for each snapshot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from headwater.state.engines import lease
from headwater.state.engines.object_pins import PinBoard
from headwater.state.engines.object_snapshot import SNAPSHOT_SECONDS, ObjectSnapshot, committed_in
from headwater.state.engines.slate import CLOSE_SECONDS, Place, map_errors, run, shut_down, slate
from headwater.state.errors import EpochNotHeld, StoreNotFound
from headwater.state.handle import Handle, wait_until
from headwater.state.store import Owner, Pin, StoreStatistics
from headwater.stream.epoch import Epoch

_FOLLOW_MS = 100
_SETTLE_SECONDS = 0.02


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
        return committed_in(self._place, self._follower)

    def wait_for_epoch(self, after: int, timeout: float) -> Epoch | None:
        return wait_until(self.committed_epoch, self.location, after, timeout)

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
        ack = self._pin_board.held().get(epoch)
        if ack is None:
            raise EpochNotHeld(epoch, self._pin_board.readable(newest.epoch))
        view = self._open_view(_FOLLOW_MS, ack.checkpoint)
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
        return self._pin_board.request(name, epoch, self._newest_epoch)

    def _newest_epoch(self) -> Epoch:
        """The newest epoch as of now: the follower may be a little behind."""
        with self._newest_snapshot(bytes) as newest:
            return newest.epoch

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
        if self.closed:
            return
        super().close()
        if self._pid == os.getpid():
            with map_errors(self.location):
                shut_down(self._follower, CLOSE_SECONDS)


def open_object_reader(url: str) -> ObjectReader:
    """A reader of the store at *url*.

    :raises StoreNotFound: there is none.
    :raises InvalidLocation: it may not be written: readers register there what they read.
    """
    place = Place.parse(url, create=False)
    if not place.names("db/manifest"):
        raise StoreNotFound(f"There is no state store at {place.location}.")
    place.check_writable()
    return ObjectReader(place)
