"""Errors of the state store: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from datetime import datetime

from headwater.errors import (
    CapacityError,
    ClosedError,
    ConflictError,
    CorruptionError,
    FencedError,
    HeadwaterError,
    InputError,
    NotFoundError,
    TransientError,
)


class StateError(HeadwaterError):
    """Any error of :mod:`headwater.state`."""


class StoreNotFound(StateError, NotFoundError):
    """There is no state store at this place."""


class StoreClosed(StateError, ClosedError):
    """The handle was closed, or belongs to the process that this one was forked from."""


class StoreCorrupt(StateError, CorruptionError):
    """The stored bytes are not a state store of a version that this release reads."""


class StoreFull(StateError, CapacityError):
    """The disk, the file-size limit or the store's own limit is reached. Nothing of the batch was written."""


class StoreBusy(StateError, TransientError):
    """Somebody has the store open, and this needs it closed."""


class StoreUnavailable(StateError, TransientError):
    """The engine did not answer: try again."""


class StoreOwned(StateError, FencedError):
    """Another live writer owns the store.

    :ivar host: host name of the owner.
    :ivar pid: its process id.
    :ivar started: when that process started.
    """

    def __init__(self, location: str, host: str, pid: int, started: datetime) -> None:
        self.location, self.host, self.pid, self.started = location, host, pid, started
        super().__init__(
            f"The state store at {location} is owned by a writer on host {host}, pid {pid}, "
            f"started {started:%Y-%m-%d %H:%M:%S} UTC.",
            next_step="Stop that process, or take the store over from it (takeover=True).",
        )


class WriterFenced(StateError, FencedError):
    """Another writer took the store over; this handle can write no more. Nothing of the batch was written."""


class EpochNotIncreasing(StateError, ConflictError):
    """A seal must be newer than everything sealed before.

    :ivar committed: the newest sealed epoch.
    """

    def __init__(self, epoch: int, committed: int) -> None:
        self.epoch, self.committed = epoch, committed
        super().__init__(
            f"Cannot seal epoch {epoch}: epoch {committed} is sealed already.",
            next_step="Read committed_epoch() and go on from there.",
        )


class InvalidEpoch(StateError, InputError):
    """Not an epoch that can be sealed."""


class EpochNotHeld(StateError, NotFoundError):
    """That epoch can no longer, or not yet, be read.

    :ivar readable: the epochs that can be read now: the pinned ones and the newest.
    """

    def __init__(self, epoch: int, readable: tuple[int, ...]) -> None:
        self.epoch, self.readable = epoch, readable
        held = ", ".join(map(str, readable)) or "none"
        super().__init__(
            f"Epoch {epoch} cannot be read: it is not pinned and not the newest. Readable now: {held}.",
            next_step="Pin an epoch while it is the newest, then read at it.",
        )


class PinNotFound(StateError, NotFoundError):
    """No pin of that name."""


class PinExists(StateError, ConflictError):
    """A pin of that name holds another epoch already."""


class InvalidKey(StateError, InputError):
    """A key is empty, too long, or not of its declared type."""


class InvalidValue(StateError, InputError):
    """A value does not fit its declared type."""


class InvalidLocation(StateError, InputError):
    """The store's place cannot be used: unknown engine, a network file system, not a directory."""


class SchemaMismatch(StateError, InputError):
    """A state table is stored under another schema or version than the one asked for."""
