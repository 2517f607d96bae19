"""Where a journal is: a directory (files) or a database file (SQLite)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headwater.errors import NotFoundError
from headwater.journal import files
from headwater.journal.errors import JournalError
from headwater.journal.fs import FsStore
from headwater.journal.sqlite import SqliteStore
from headwater.journal.store import Store

VARIABLE = "HEADWATER_JOURNAL"
DEFAULT_LOCATION = Path(".headwater/journal")
_DATABASE_ENDINGS = {".db", ".sqlite", ".sqlite3"}


class JournalNotFoundError(JournalError, NotFoundError):
    """There is no journal at this place."""


def default_location() -> Path:
    """`HEADWATER_JOURNAL`, or `.headwater/journal` below the current directory."""
    return Path(os.environ.get(VARIABLE) or DEFAULT_LOCATION)


def open_journal(location: str | os.PathLike[str], **options: Any) -> Store:
    """The store at *location*: a name that ends in .db or .sqlite is a database, all others are directories.

    :param options: those of the store, such as `durability`.
    """
    path = Path(location)
    if path.suffix in _DATABASE_ENDINGS or path.is_file():
        return SqliteStore(path, **options)
    return FsStore(path, **options)


def open_existing(location: str | os.PathLike[str], **options: Any) -> Store:
    """:raises JournalNotFoundError: there is nothing at *location*."""
    if not files.present(Path(location)):
        raise JournalNotFoundError(
            f"There is no journal at {location}.", next_step=f"Name one with --root or {VARIABLE}."
        )
    return open_journal(location, **options)
