"""A capture of the double of SQL Server, killed at every step and at random under live writers: each change once.

The double is killed with its connections, not with its data: that a real server survives a crash is its own promise.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.capture.rounds import Victim, assert_exactly_once
from tests.crash.capture.shop import ShopProcess
from tests.crash.capture.sqlserver_shop import SqlServerShop
from tests.sampled import SOAK
from tests.servers.sqlserver import start_sqlserver
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.sources.sqlserver.offset import Lsn, SqlServerOffset


class Connections:
    """Those of the double, which are all of it that can be killed."""

    def __init__(self, server: SqlServerDouble) -> None:
        self._server = server

    def kill9(self) -> None:
        self._server.drop_connections()

    def start(self) -> None:
        """They are made anew by whoever needs them."""


@pytest.mark.timeout(900)
def test_every_change_arrives_exactly_once_whoever_is_killed(tmp_path: Path) -> None:
    with start_sqlserver() as server:
        shop = SqlServerShop(server)
        capture = ShopProcess(shop, tmp_path, lambda: SqlServerOffset(Lsn(server.last_change())))
        victims: list[list[Victim]] = [[capture]]
        if isinstance(server, SqlServerDouble):
            victims.append([Connections(server), capture])
        assert_exactly_once(shop, capture, victims, steps=2, rounds=30 if SOAK else 1)
