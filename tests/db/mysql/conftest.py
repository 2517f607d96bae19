"""Servers of the MySQL family, without databases at the start of a test."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator

import pytest
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import FAMILY

_SHARED_OUT = ("test_backfill", "test_capture", "test_failures", "test_doctor", "test_statement_format")
_ON_BOTH = (
    "replayed_log",
    "goes_on",
    "columns_that_come",
    "m2",
    "zero_dates",
    "xa_transaction",
    "reset",
    "partitioned",
    "values_of_every_type",
    "stops_the_tables_that_it_writes",
    "load_data",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What hardly depends on the family is shared out over both, one each; in a soak every test runs on both."""
    named = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "server" not in metafunc.fixturenames or "server" in named:
        return
    module, name = metafunc.module.__name__.rpartition(".")[2], metafunc.function.__name__
    is_shared = module in _SHARED_OUT and os.environ.get("HEADWATER_SOAK") != "1"
    on_both = not is_shared or any(part in name for part in _ON_BOTH)
    families = FAMILY if on_both else [FAMILY[zlib.crc32(name.encode()) % len(FAMILY)]]
    metafunc.parametrize("server", families, indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest, mysql_servers: Callable[[str], MariaDbServer]) -> Iterator[MariaDbServer]:
    """MariaDB and MySQL in turn, with the database ``shop`` and no other."""
    with _emptied(mysql_servers(request.param)) as made:
        yield made


@pytest.fixture
def mariadb(mysql_servers: Callable[[str], MariaDbServer]) -> Iterator[MariaDbServer]:
    """MariaDB, for what does not depend on the family."""
    with _emptied(mysql_servers("mariadb")) as made:
        yield made


@contextlib.contextmanager
def _emptied(server: MariaDbServer) -> Iterator[MariaDbServer]:
    with server.fresh():
        server.execute("CREATE DATABASE shop")
        yield server
