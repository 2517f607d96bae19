"""What can go wrong with a query and its backfill."""

from __future__ import annotations

from headwater.errors import ConflictError, HeadwaterError, InputError, NotFoundError, TransientError


class BackfillError(HeadwaterError):
    """Base of the errors of this package."""


class ForeignQueryOffset(BackfillError, InputError):
    """An offset that this release did not write."""


class QueryStateLost(BackfillError, ConflictError):
    """The checkpoint of a query knows more than the query's own state."""


class TableNotCaptured(BackfillError, NotFoundError):
    """A table of the query has no log: nobody captures it."""


class LogBehind(BackfillError, TransientError):
    """The log has not come to a snapshot yet that a task reads in."""


class OldRowsMissing(BackfillError, InputError):
    """The source does not log what rows were before they changed, and history cannot be read without."""


class SourceBehind(BackfillError, TransientError):
    """The server that history is read from, a standby, does not show yet what the log has."""


class InvalidQuery(BackfillError, InputError):
    """An option of a query that makes no sense."""


class SinceGone(BackfillError, InputError):
    """The log no longer holds what a query wants to begin with.

    :ivar oldest: the epoch after which it holds everything.
    """

    def __init__(self, message: str, oldest: int, *, next_step: str) -> None:
        self.oldest = oldest
        super().__init__(message, next_step=next_step)
