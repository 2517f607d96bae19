"""What can go wrong with an upstream table.

A :class:`RetentionMiss` stops the stream where it is: nothing is read any more, and nothing tries again. All others
end the query, which goes on from what is stored when it is started again.
"""

from __future__ import annotations

from headwater.backfill.errors import BackfillError
from headwater.errors import ConflictError, CorruptionError, InputError, NotFoundError, TransientError


class RetentionMiss(BackfillError, ConflictError):
    """What comes next is no longer kept upstream: only a new snapshot helps."""


class ChangeLogGone(RetentionMiss):
    """The change log of an epoch is no longer kept, or was never written."""


class VersionExpired(RetentionMiss):
    """The version of the snapshot is no longer kept."""


class EpochMismatch(RetentionMiss):
    """The table is another one, or was restored to before what was consumed."""


class UpstreamDropped(BackfillError, NotFoundError):
    """The table is gone."""


class UpstreamUnreadable(BackfillError, TransientError):
    """The table cannot be read at the moment."""


class UpstreamWaits(UpstreamUnreadable):
    """The table is not there as a whole now; it will be, and whoever waits for it need not ask."""


class InvalidUpstream(BackfillError, InputError):
    """A table that cannot be consumed as it is, or an option that makes no sense."""


class KeyNotUnique(BackfillError, ConflictError):
    """Two rows of one version have the same key."""


class EpochGap(BackfillError, CorruptionError):
    """Progress that does not fit the epochs of the table."""


class SinceOutOfRange(BackfillError, InputError):
    """A point to begin at that is not kept any more, or not there yet."""
