"""Connection strings in files: the file is read again for each connection, so that a password can be rotated.

``file:/run/secrets/shop`` is accepted wherever a connection string is. Only the path travels to other processes and to
the tasks of Spark, never the password; each of them reads the file itself.
"""

from __future__ import annotations

from typing import TypeVar

from headwater.databases.address import Address
from headwater.databases.secret_files import SecretUnreadable, current, is_in_file, path_of
from headwater.errors import LoginError
from headwater.sources.errors import InvalidDsn, SourceError


class DsnUnreadable(SourceError, LoginError):
    """The file of a connection string is missing, empty or not readable."""


A = TypeVar("A", bound=Address)


def current_dsn(text: str) -> str:
    """The connection string itself: *text*, or what its file holds now.

    :raises DsnUnreadable: the file cannot be read. Nothing of its content is shown.
    """
    try:
        return current(text)
    except SecretUnreadable as error:
        raise DsnUnreadable(
            f"The connection string cannot be read from {path_of(text)}: {error.reason}.",
            next_step="Write one line to the file: postgresql://user:password@host:5432/database.",
        ) from error.__cause__


class SourceAddress(Address):
    """An address whose errors are those of sources: :class:`InvalidDsn` and :class:`DsnUnreadable`."""

    INVALID = InvalidDsn

    @staticmethod
    def _current(text: str) -> str:
        return current_dsn(text)


def has_password(text: str) -> bool:
    """Whether the connection string *text* holds a password itself."""
    login, found, _ = text.partition("://")[2].partition("@")
    return (bool(found) and ":" in login) or "password=" in text.lower()


def reread(address: A) -> A:
    """*address* as its file has it now; the same where it is from no file. :raises DsnUnreadable: see above."""
    if not is_in_file(address.origin):
        return address
    return type(address)(address.origin, address.timeout_seconds)
