"""Real servers for the tests of databases: one per version and test session, a fresh database per test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping

import pytest
from tests.servers.kafka import KafkaServer
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import start_server
from tests.servers.postgres import NEWEST, VERSIONS, Database, PostgresServer

StartPostgres = Callable[..., PostgresServer]
StartServer = Callable[..., MariaDbServer]


@pytest.fixture(scope="session")
def postgres_servers() -> Iterator[Callable[[int], PostgresServer]]:
    """Gives the session's server of a version, started when it is first asked for."""
    started: dict[int, PostgresServer] = {}

    def server(major: int) -> PostgresServer:
        if major not in started:
            started[major] = PostgresServer(major)
        return started[major]

    yield server
    for one in started.values():
        one.close()


@pytest.fixture(params=VERSIONS, ids=[f"pg{version}" for version in VERSIONS])
def postgres(request: pytest.FixtureRequest, postgres_servers: Callable[[int], PostgresServer]) -> Iterator[Database]:
    """A fresh database, on each version in turn."""
    with postgres_servers(request.param).database() as database:
        yield database


@pytest.fixture
def newest_postgres(postgres_servers: Callable[[int], PostgresServer]) -> Iterator[Database]:
    """A fresh database on the newest version, for what does not depend on it."""
    with postgres_servers(NEWEST).database() as database:
        yield database


@pytest.fixture
def start_postgres() -> Iterator[StartPostgres]:
    """Starts servers of the test's own, to be killed, restarted or set up as it likes; see :class:`PostgresServer`."""
    with contextlib.ExitStack() as servers:

        def start(
            major: int = NEWEST, settings: Mapping[str, str] | None = None, *, primary: PostgresServer | None = None
        ) -> PostgresServer:
            return servers.enter_context(PostgresServer(major, settings, primary=primary))

        yield start


@pytest.fixture(scope="session")
def mysql_servers() -> Iterator[Callable[[str], MariaDbServer]]:
    """Gives the session's server of a family, started when it is first asked for."""
    started: dict[str, MariaDbServer] = {}

    def server(family: str) -> MariaDbServer:
        if family not in started:
            started[family] = started_or_skipped(family)
        return started[family]

    yield server
    for one in started.values():
        one.close()


@pytest.fixture
def start_mysql() -> Iterator[StartServer]:
    """Starts servers of the test's own, to be killed, restarted or set up as it likes."""
    with contextlib.ExitStack() as servers:

        def start(family: str = "mariadb", settings: Mapping[str, str] | None = None) -> MariaDbServer:
            return servers.enter_context(started_or_skipped(family, settings))

        yield start


def started_or_skipped(family: str, settings: Mapping[str, str] | None = None) -> MariaDbServer:
    """A server; where it is not on this machine the test is skipped, but never in CI."""
    try:
        return start_server(family, settings)
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaServer]:
    """The session's Kafka broker."""
    if os.environ.get("HEADWATER_NO_KAFKA"):
        pytest.skip("HEADWATER_NO_KAFKA is set: no real broker, and nothing else is one")
    with KafkaServer() as server:
        yield server
