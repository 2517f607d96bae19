"""Deliveries into Postgres that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.servers.postgres import PostgresServer

from headwater.sinks.postgres import SESSIONS

from .sql_killed import Database, KilledScenarios


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as made:
        yield made


@pytest.fixture
def database(server: PostgresServer) -> Database:
    @contextmanager
    def made() -> Iterator[str]:
        with server.database() as fresh:
            yield fresh.dsn
            SESSIONS.close()

    return made


class TestPostgresKilled(KilledScenarios):
    kind = "postgres"
