"""Deliveries into MariaDB that are killed; in a soak also into MySQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.sampled import share
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import FAMILY, start_server

from headwater.sinks.mysql import SESSIONS

from .sql_killed import Database, KilledScenarios


@pytest.fixture(scope="module", params=share(FAMILY, 0, len(FAMILY)))
def server(request: pytest.FixtureRequest) -> Iterator[MariaDbServer]:
    with start_server(request.param, {"local-infile": "ON"}) as started:
        yield started


@pytest.fixture
def database(server: MariaDbServer) -> Database:
    """One server for all: a second one at the same time has other databases."""

    @contextmanager
    def made() -> Iterator[str]:
        with server.fresh() as dsn:
            yield dsn
            SESSIONS.close()

    return made


class TestMySqlKilled(KilledScenarios):
    kind = "mysql"
