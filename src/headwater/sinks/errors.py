"""Errors of sinks: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from typing import Final

from headwater.errors import (
    ConflictError,
    FencedError,
    HeadwaterError,
    InputError,
    LoginError,
    TransientError,
)

SINK_NAME: Final = "NAME"
"""Stands in a next step for the name of the sink, which the pipeline knows and puts in its place."""


class SinkError(HeadwaterError):
    """Any error of :mod:`headwater.sinks`."""


class SinkInputError(SinkError, InputError):
    """Settings that contradict each other, or changes that a sink of this mode cannot take."""


class SinkSchemaError(SinkError, InputError):
    """A table whose columns the sink cannot hold, or cannot change to.

    :ivar table: its full name.
    """

    def __init__(self, table: str, message: str, *, next_step: str) -> None:
        self.table = table
        super().__init__(f"Table {table} cannot be delivered: {message}", next_step=next_step)


class SinkUnwritable(SinkError, InputError):
    """The place that a sink writes to is not there, not writable, or not what it was."""


class SinkLoginRefused(SinkUnwritable, LoginError):
    """The server of a sink refused the login."""


class SinkDriverMissing(SinkError, InputError):
    """The library of a sink is not installed."""


class OtherAttempt(SinkError, TransientError):
    """The sink has the history of this plan from another attempt: what was read anew does not go with it."""


class SinkBusy(SinkError, TransientError):
    """Others committed to the sink all the time."""


class SinkFenced(SinkError, FencedError):
    """Another process delivers to the sink now: this one must not."""


class SinkBehind(SinkError, ConflictError):
    """The sink has less than what was committed to it: it was restored from a backup, or somebody changed it.

    :ivar table: of which it has less.
    """

    def __init__(self, table: str, sink: str, has: int, committed: int) -> None:
        self.table = table
        super().__init__(
            f"{sink} has {table} up to epoch {has}, and epoch {committed} was committed to it: it was restored from a "
            "backup, or changed by others.",
            next_step=f"Deliver again what it lacks. Run: headwater sink rewind {SINK_NAME}",
        )


class SinkUnreachable(SinkError, TransientError):
    """The server of a sink did not answer, is starting or stopping, or ended the connection: try again."""


class StagedLost(SinkError, TransientError):
    """What was staged for a batch is gone: the batch must be staged anew."""


class SinkRowError(SinkError, InputError):
    """The sink does not take a row that is right at the source. Nothing of the batch was committed.

    :ivar table: its full name at the source. :ivar column: where it is known. :ivar reason: without the value.
    """

    def __init__(self, table: str, reason: str, *, column: str | None = None) -> None:
        self.table, self.column, self.reason = table, column, reason
        place = f"a row of {table}" if column is None else f"a row of {table} for its column {column!r}"
        super().__init__(
            f"The sink does not take {place}: {reason}.",
            next_step="Change the column or the constraint there, or let such rows be parked.",
        )


class RowsRefused(SinkError, TransientError):
    """The sink refused rows that are to be parked: the batch is staged anew, each of its rows tried before."""


class SinkRefuses(SinkError, InputError):
    """The sink takes none of the tables any more."""
