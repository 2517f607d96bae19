"""Errors between a log and its sink: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from headwater.errors import CapacityError, ConflictError, FencedError, HeadwaterError, InputError, TransientError


class SinkError(HeadwaterError):
    """Any error of :mod:`headwater.sinks`."""


class SinkInputError(SinkError, InputError):
    """Settings that contradict each other, or changes that a sink of this mode cannot take."""


class EpochTooLarge(SinkError, CapacityError):
    """The changes of one epoch do not fit into the memory that they may take.

    :ivar nbytes: what they take.
    :ivar limit: what they may take.
    """

    def __init__(self, message: str, *, nbytes: int, limit: int, next_step: str) -> None:
        self.nbytes = nbytes
        self.limit = limit
        super().__init__(message, next_step=next_step)


class NotRewindable(SinkError, ConflictError):
    """A sink that must begin anew, on a log that cannot be rewound."""


class HandOverTimeout(SinkError, TransientError):
    """The sink did not let go of its log in the time that was given."""


class SinkSchemaError(SinkError, InputError):
    """A table whose columns the sink cannot hold, or cannot change to.

    :ivar table: its full name.
    """

    def __init__(self, table: str, message: str, *, next_step: str) -> None:
        self.table = table
        super().__init__(f"Table {table} cannot be delivered: {message}", next_step=next_step)


class SinkUnwritable(SinkError, InputError):
    """The place that a sink writes to is not there, not writable, or not what it was."""


class SinkDriverMissing(SinkError, InputError):
    """The library of a sink is not installed."""


class OtherAttempt(SinkError, ConflictError):
    """The sink has the history of this plan from another attempt: what was read anew does not go with it."""


class SinkBusy(SinkError, TransientError):
    """Others committed to the sink all the time."""


class SinkFenced(SinkError, FencedError):
    """Another process delivers to the sink now: this one must not."""
