"""A server that takes our bytes and says nothing: a capture notices, and goes on through a new connection."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.mongodb.delivering import TABLE
from tests.db.mongodb.running import running
from tests.db.mongodb.test_failures import COLUMNS, insert
from tests.servers.mongodb import MongoServer
from tests.servers.proxy import TcpProxy


@pytest.mark.soak
def test_a_capture_reconnects_to_a_server_that_fell_silent(server: MongoServer, tmp_path: Path) -> None:
    server.client.shop.create_collection("orders")
    with TcpProxy("127.0.0.1", server.port) as proxy:
        dsn = server.dsn.replace(f":{server.port}/", f":{proxy.port}/")
        # else the driver goes past the proxy, to the address that the replica set has
        dsn = dsn.replace(f"replicaSet={server.set_name}", "directConnection=true")
        with running(server, tmp_path, TABLE, dsn=dsn, columns=COLUMNS, timeout_seconds=2.0) as capture:
            insert(server, 1, 10, state="new")
            capture.catch_up()
            proxy.swallow()
            insert(server, 11, 20, state="new")
            capture.wait_for(lambda: capture.capture.statistics.restarts > 0)
            proxy.resume()
            insert(server, 21, 30, state="new")
            capture.catch_up()
            assert sorted(row["_id"] for row in capture.rows(TABLE)) == list(range(1, 31))
            capture.assert_once(TABLE)
