"""The databases that the suite runs on; see :mod:`tests.db.backfill.shops`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.db.backfill.shops import POSTGRES, MySqlShop, PostgresShop, Shop
from tests.servers.mariadb import MariaDbServer
from tests.servers.postgres import NEWEST, PostgresServer


@pytest.fixture
def shop(
    request: pytest.FixtureRequest,
    postgres_servers: Callable[[int], PostgresServer],
    mysql_servers: Callable[[str], MariaDbServer],
) -> Iterator[Shop]:
    """A fresh database, of the family that the test asks for."""
    if request.param == POSTGRES:
        with postgres_servers(NEWEST).database() as database:
            yield PostgresShop(database)
        return
    server = mysql_servers(request.param)
    with server.fresh():
        server.execute("CREATE DATABASE `public`")
        yield MySqlShop(server)
