"""Where a database is: the one reader of connection strings, and the base of the address of each kind of database.

A connection string is ``scheme://user:password@host:port/database?option=value``, with %-escapes, or the file that has
it (:mod:`headwater.databases.secret_files`). No text and no error shows the password.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from headwater.databases.secret_files import current
from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.errors import InputError

_HIDDEN: Final = "***"


class InvalidAddress(InputError):
    """The connection string cannot be used. Its text is never shown."""


@dataclass(frozen=True, slots=True)
class Url:
    """The parts of a connection string. :ivar hosts: as they are written, with their ports."""

    scheme: str
    user: str
    password: str = field(repr=False)
    hosts: tuple[str, ...]
    database: str
    options: Mapping[str, str] = field(repr=False)

    @classmethod
    def parse(cls, text: str, *, strict: bool = True) -> Self:
        """:param strict: a part of the options that is none is an error. :raises ValueError: it is no URL."""
        parts = urlsplit(text)
        login, _, hosts = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        return cls(
            parts.scheme,
            unquote(user),
            unquote(password),
            tuple(hosts.split(",")),
            unquote(parts.path.lstrip("/")),
            dict(parse_qsl(parts.query, strict_parsing=strict and bool(parts.query))),
        )

    @property
    def host(self) -> str:
        """Of the first one, without its port, in lower case; empty where none is named."""
        return host_of(self.hosts[0]).lower()

    @property
    def port(self) -> int | None:
        """Of the first host. :raises ValueError: it is no port."""
        return urlsplit(f"//{self.hosts[0]}").port


def host_of(text: str) -> str:
    """Of ``host:port`` or ``[address]:port``."""
    return text[1:].partition("]")[0] if text.startswith("[") else unquote(text.partition(":")[0])


def one_of(*words: str) -> Callable[[str], str]:
    """The reader of an option with these values."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return read


class Address:
    """Where a database is. Each kind of database says what is particular to it, and may read its text differently.

    :param text: a connection string, or the file that has it.
    :param timeout_seconds: a server that is silent for this long counts as unreachable.
    :ivar origin: the *text*. :ivar options: their values, as their readers gave them.
    :raises InvalidAddress: it cannot be read, or an option is not valid; the text is not repeated.
    :raises SecretUnreadable: its file cannot be read.
    """

    KIND: ClassVar[str]
    """For errors."""
    SCHEMES: ClassVar[tuple[str, ...]]
    """The first one is shown."""
    PORT: ClassVar[int]
    OPTIONS: ClassVar[Mapping[str, Callable[[str], Any]]] = {}
    """The readers of the valid options by name; they raise ValueError."""
    NEXT_STEP: ClassVar[str]
    """What to write, for errors."""
    INVALID: ClassVar[type[InvalidAddress]] = InvalidAddress
    """The error for a text that cannot be read."""

    host: str
    port: int
    user: str
    database: str
    options: dict[str, Any]
    _secrets: tuple[str, ...]

    def __init__(self, text: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self.origin = text
        text = self._current(text)
        try:
            self._read(text)
        except ValueError:
            raise self.INVALID(f"The connection string is not one of {self.KIND}.", next_step=self.NEXT_STEP) from None

    @staticmethod
    def _current(text: str) -> str:
        """The connection string itself: *text*, or what its file holds now."""
        return current(text)

    def _read(self, text: str) -> None:
        """Take the parts of *text*. :raises ValueError: it is not of this kind."""
        url = Url.parse(text)
        if url.scheme not in self.SCHEMES or len(url.hosts) > 1 or not self.OPTIONS.keys() >= url.options.keys():
            raise ValueError
        self.options = {name: self.OPTIONS[name](value) for name, value in url.options.items()}
        self.host, self.port = url.host or "localhost", url.port or self.PORT
        self.user, self.database, self._secrets = url.user, url.database, (url.password,)

    @property
    def _password(self) -> str:
        return self._secrets[0]

    @property
    def _place(self) -> str:
        """The start of its text, without the user: the scheme, and the hosts with their ports."""
        return f"{self.SCHEMES[0]}://{self.host}:{self.port}"

    def hide(self, text: str) -> str:
        """*text* without the password, should a server or a library have repeated it."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN) if secret else text
        return text

    def __str__(self) -> str:
        scheme, _, hosts = self._place.partition("://")
        return f"{scheme}://{f'{self.user}@' if self.user else ''}{hosts}/{self.database}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"
