"""The kinds of databases that the demo can run with: a server on this machine, and the shop in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from headwater.errors import InputError

DSN_VARIABLE: Final = "HEADWATER_DEMO_DSN"
"""The environment variable with the connection string, for the pipeline and the shop's process."""
KINDS: Final = ("postgres", "mariadb")


@dataclass(frozen=True, slots=True)
class Database:
    """One kind.

    :ivar server: starts one in a folder, and gives its connection string.
    :ivar shop: the module with its tables, its history and the application that writes.
    """

    title: str
    server: Callable[[Path], AbstractContextManager[str]]
    shop: ModuleType


def database_of(kind: str) -> Database:
    """The database of *kind*. :raises InputError: there is none."""
    if kind == "mariadb":
        from headwater.demo.mariadb_server import local_mariadb

        return Database("MariaDB", local_mariadb, import_module("headwater.demo.mariadb_shop"))
    if kind == "postgres":
        from headwater.demo.server import embedded_postgres

        return Database("Postgres", embedded_postgres, import_module("headwater.demo.shop"))
    raise InputError(f"Received source {kind!r}; valid values are {', '.join(KINDS)}.")
