"""What can go wrong with a backfill from a table of ours."""

from __future__ import annotations

from headwater.backfill.errors import BackfillError
from headwater.errors import ConflictError, CorruptionError, InputError


class InvalidSnapshotOption(BackfillError, InputError):
    """An option with which no table can be backfilled."""


class ProgressWentBack(BackfillError, ConflictError):
    """Progress that does not follow what was there: two processes backfill one table."""


class BarrierOutOfOrder(BackfillError, ConflictError):
    """A barrier that does not follow the one before it."""


class VnodeStateCorrupt(BackfillError, CorruptionError):
    """The stored progress of a vnode is not what was written."""
