"""Secrets in files: ``file:/path`` stands for the line that the file has now, so that a secret can be rotated.

Each connection that is opened reads the file again. Only the path travels to other processes and to the tasks of Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headwater.errors import LoginError

_FILE: Final = "file:"


class SecretUnreadable(LoginError):
    """The file of a secret is missing, empty or not readable. :ivar reason: why."""

    def __init__(self, path: Path, reason: str) -> None:
        self.reason = reason
        super().__init__(f"The secret cannot be read from {path}: {reason}.", next_step="Write one line to the file.")


def is_in_file(text: str) -> bool:
    """Whether *text* names a file that has the secret."""
    return text.startswith(_FILE)


def in_file(path: Path) -> str:
    """The text that stands for the secret in the file *path*."""
    return f"{_FILE}{path.absolute()}"


def path_of(text: str) -> Path:
    """The file that *text* names."""
    return Path(text.removeprefix(_FILE))


def current(text: str) -> str:
    """The secret itself: *text*, or what its file holds now.

    :raises SecretUnreadable: the file cannot be read. Nothing of its content is shown.
    """
    if not is_in_file(text):
        return text
    path = path_of(text)
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SecretUnreadable(path, error.strerror or type(error).__name__) from None
    except UnicodeDecodeError:
        raise SecretUnreadable(path, "it is not UTF-8") from None
    if not secret or is_in_file(secret):
        raise SecretUnreadable(path, "it names another file" if secret else "it is empty")
    return secret


def option_in_file(value: str) -> bool:
    """Whether *value* of an option names a file that has it; ``file://…`` is the address of a directory."""
    return is_in_file(value) and not value.startswith(f"{_FILE}//")


def current_options(options: Mapping[str, str]) -> dict[str, str]:
    """*options* with the secrets that their files hold now. :raises SecretUnreadable: see :func:`current`."""
    return {name: current(value) if option_in_file(value) else value for name, value in options.items()}
