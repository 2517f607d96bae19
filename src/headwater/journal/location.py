"""Where a journal is."""

from __future__ import annotations

import os
from pathlib import Path

from headwater.errors import NotFoundError
from headwater.journal.errors import JournalError
from headwater.journal.fs_store import FsStore

VARIABLE = "HEADWATER_JOURNAL"
DEFAULT_LOCATION = Path(".headwater/journal")


class JournalNotFoundError(JournalError, NotFoundError):
    """There is no journal at this location."""


def default_location() -> Path:
    """`HEADWATER_JOURNAL`, or `.headwater/journal` below the current directory."""
    return Path(os.environ.get(VARIABLE) or DEFAULT_LOCATION)


def open_existing(location: Path) -> FsStore:
    """:raises JournalNotFoundError: *location* is no directory."""
    if not location.is_dir():
        problem = f"There is no journal at {location}."
        if location.exists():
            problem = f"{location} is no journal: a journal is a directory."
        raise JournalNotFoundError(problem, next_step=f"Name one with --root or {VARIABLE}.")
    return FsStore(location)
