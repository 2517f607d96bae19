"""The SQL Server of the tests of this folder: by default a double that speaks its protocol, no real server.

``HEADWATER_TEST_SQLSERVER`` gives the address of a real one; what needs the double is skipped then.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.servers.sqlserver import ADDRESS, AnySqlServer, start_sqlserver
from tests.servers.sqlserver_double.server import SqlServerDouble


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double's capture job looks every 20 ms: what is asked of it is asked more often, too."""
    if not ADDRESS:
        monkeypatch.setattr("headwater.sources.sqlserver.changes.WATCH_SECONDS", 0.05)
        monkeypatch.setattr("headwater.sources.sqlserver.changes.INSTANCES_SECONDS", 0.2)


@pytest.fixture
def server() -> Iterator[AnySqlServer]:
    """The double, or the real server, without tables."""
    with start_sqlserver() as made:
        yield made


@pytest.fixture
def double() -> Iterator[SqlServerDouble]:
    """The double, for what a test must make a server do: lose connections, purge, stop its jobs."""
    if ADDRESS:
        pytest.skip("this is done to the double alone")
    made = start_sqlserver()
    assert isinstance(made, SqlServerDouble)
    with made:
        yield made
