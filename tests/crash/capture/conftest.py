"""A Postgres for the tests of this folder, that loses nothing when it is killed and streams what is not tiny."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.servers.postgres import Database, PostgresServer

SAFE = {"fsync": "on", "full_page_writes": "on", "logical_decoding_work_mem": "64kB", "wal_sender_timeout": "4s"}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(settings=SAFE) as made:
        yield made


@pytest.fixture
def database(server: PostgresServer) -> Iterator[Database]:
    with server.database() as made:
        yield made
