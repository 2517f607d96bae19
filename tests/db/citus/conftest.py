"""A double of a Citus cluster for each test, over servers of the session; see tests/servers/citus_double.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.servers.citus_double import CitusDouble, Nodes


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Servers of the session."""
    made = Nodes()
    yield made
    made.close()


@pytest.fixture
def double(nodes: Nodes) -> Iterator[CitusDouble]:
    """A coordinator and two workers; plain Postgres, not Citus."""
    with CitusDouble([nodes.server(place) for place in range(3)], nodes.name()) as made:
        yield made
