"""What can go wrong with the backfill of one table."""

from __future__ import annotations

from headwater.backfill.errors import BackfillError
from headwater.errors import ConflictError, CorruptionError, InputError


class InvalidBackfillOption(BackfillError, InputError):
    """An option with which no table can be backfilled."""


class PlanOutOfOrder(BackfillError, ConflictError):
    """A plan that hands out must be newer than all that handed out before."""


class BackfillStateCorrupt(BackfillError, CorruptionError):
    """The stored state of a backfill is not what was written."""
