"""Connection strings in files: the file is read again for each connection, so that a password can be rotated.

``file:/run/secrets/shop`` is accepted wherever a connection string is. Only the path travels to other processes and to
the tasks of Spark, never the password; each of them reads the file itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol, TypeVar

from headwater.errors import LoginError
from headwater.sources.errors import SourceError

_FILE: Final = "file:"


class DsnUnreadable(SourceError, LoginError):
    """The file of a connection string is missing, empty or not readable."""


class _Address(Protocol):
    """A parsed connection string. :ivar origin: the text that it was created from."""

    origin: str
    timeout_seconds: float

    def __init__(self, text: str, timeout_seconds: float) -> None: ...


A = TypeVar("A", bound=_Address)


def dsn_in_file(path: Path) -> str:
    """The text that stands for the connection string in the file *path*."""
    return f"{_FILE}{path.absolute()}"


def is_in_file(text: str) -> bool:
    """Whether *text* names a file that has the connection string."""
    return text.startswith(_FILE)


def current_dsn(text: str) -> str:
    """The connection string itself: *text*, or what its file holds now.

    :raises DsnUnreadable: the file cannot be read. Nothing of its content is shown.
    """
    if not is_in_file(text):
        return text
    path = Path(text.removeprefix(_FILE))
    try:
        dsn = path.read_text(encoding="utf-8").strip()
        reason = "it is empty"
    except OSError as error:
        dsn, reason = "", error.strerror or type(error).__name__
    except UnicodeDecodeError:
        dsn, reason = "", "it is not UTF-8"
    if not dsn or is_in_file(dsn):
        reason = "it names another file" if dsn else reason
        raise DsnUnreadable(
            f"The connection string cannot be read from {path}: {reason}.",
            next_step="Write one line to the file: postgresql://user:password@host:5432/database.",
        )
    return dsn


def has_password(text: str) -> bool:
    """Whether the connection string *text* holds a password itself."""
    login, found, _ = text.partition("://")[2].partition("@")
    return (bool(found) and ":" in login) or "password=" in text.lower()


def reread(address: A) -> A:
    """*address* as its file has it now; the same where it is from no file. :raises DsnUnreadable: see above."""
    if not is_in_file(address.origin):
        return address
    return type(address)(address.origin, address.timeout_seconds)
