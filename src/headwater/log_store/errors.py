"""Errors of the log store: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from headwater.errors import (
    ConflictError,
    CorruptionError,
    HeadwaterError,
    InputError,
    NotFoundError,
)


class LogStoreError(HeadwaterError):
    """Any error of :mod:`headwater.log_store`."""


class InvalidOffset(LogStoreError, InputError):
    """An epoch out of order, or one that is not sealed."""


class ProgressConflict(LogStoreError, ConflictError):
    """Progress that would go back, or skip the end of an epoch."""


class LogCorrupt(LogStoreError, CorruptionError):
    """Stored bytes of a log are not what was written."""


class UnknownVersion(LogStoreError, InputError):
    """A log format that this release does not know."""


class ForeignSchema(LogStoreError, InputError):
    """Rows whose columns are not those of the log."""


class ForeignVnode(LogStoreError, InputError):
    """A vnode that the log does not have."""


class WrongCall(LogStoreError, InputError):
    """A call that is not allowed now."""


class LogNotFound(LogStoreError, NotFoundError):
    """There is no log of that table, or no consumer of that name."""


class EpochGone(LogStoreError, NotFoundError):
    """An epoch that the log no longer holds.

    :ivar oldest: the oldest epoch that can still be read.
    """

    def __init__(self, message: str, oldest: int, *, next_step: str | None = None) -> None:
        self.oldest = oldest
        super().__init__(message, next_step=next_step)


class RetentionMiss(EpochGone):
    """Retention dropped epochs that this consumer had not read."""


class RetentionRefused(LogStoreError, ConflictError):
    """Retention would drop epochs that a consumer has not read."""
