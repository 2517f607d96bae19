"""Deliveries into MariaDB that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.servers.mariadb import MariaDbServer

from headwater.sinks.mysql import SESSIONS

from .sql_killed import Database, KilledScenarios


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDbServer]:
    with MariaDbServer() as made:
        yield made


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
