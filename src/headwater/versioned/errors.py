"""Errors of versioned tables: what happened, under what the caller must do (:mod:`headwater.errors`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.errors import CorruptionError, HeadwaterError, InputError, NotFoundError, TransientError
from headwater.log_store.errors import EpochGone


class VersionedError(HeadwaterError):
    """Any error of :mod:`headwater.versioned`."""


class TableNotKept(VersionedError, NotFoundError):
    """There is no versioned table of that name in the folder."""


class NotComplete(VersionedError, TransientError):
    """The history of the table is not read yet, or is being read once more.

    :ivar progress: what is known of it: phase, rows and the like.
    """

    def __init__(self, message: str, progress: Mapping[str, Any], *, next_step: str) -> None:
        self.progress = dict(progress)
        super().__init__(message, next_step=next_step)


class BaseGone(VersionedError, EpochGone):
    """An epoch before the base of the table: it is folded, and cannot be read any more.

    :ivar oldest: the oldest epoch that can be read.
    """


class NotYet(VersionedError, TransientError):
    """An epoch that is not sealed yet, or from which on the table is being read once more."""


class RunCorrupt(VersionedError, CorruptionError):
    """A file of a versioned table is not what was written."""


class UnknownVnodes(VersionedError, InputError):
    """Vnodes that the table does not have."""


class UnsupportedKey(VersionedError, InputError):
    """A key that has no order here."""


class TableBusy(VersionedError, TransientError):
    """Others changed the table all the time."""


class FolderUnwritable(VersionedError, InputError):
    """A folder in which tables cannot be kept."""
