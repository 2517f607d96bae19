"""SqlDriver: what the library of a database does for a sink in it: addresses, sessions, errors in our own words.

A library is loaded when a sink is first used, not when it is made: one that is missing is told then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headwater.errors import HeadwaterError
from headwater.sinks.errors import SinkDriverMissing
from headwater.sinks.sql_target import Target


@dataclass(frozen=True, slots=True)
class SqlDriver:
    """The library of one kind of database.

    :ivar name: of the kind. :ivar error: what all errors of the library are.
    :ivar address: reads a connection string; the text of an address shows no password.
    :ivar connect: a connection to an address.
    :ivar target: a session, of a connection, its address, where our own tables are, and what becomes of columns that
        are renamed, or dropped.
    :ivar told: the error of our tree for one of the library, at an address, about a table, or ``""``, and our own.
    """

    name: str
    error: type[Exception]
    address: Callable[[str], Any]
    connect: Callable[[Any], Any]
    target: Callable[..., Target]
    told: Callable[[Any, Any, str, str], HeadwaterError]


@contextmanager
def needs_library(module: str, database: str, extra: str) -> Iterator[None]:
    """Around imports of what needs *module*. :raises SinkDriverMissing: it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise SinkDriverMissing(
            f"The library for {database} is not installed.", next_step=f"Run: pip install 'headwater[{extra}]'"
        ) from None
