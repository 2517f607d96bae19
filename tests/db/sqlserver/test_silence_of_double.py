"""A server that takes our bytes and says nothing: a capture notices, and goes on through a new connection."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.sqlserver.running import TABLE, create, running
from tests.servers.proxy import TcpProxy
from tests.servers.sqlserver_double.server import SqlServerDouble


@pytest.mark.soak
def test_a_capture_reconnects_to_a_server_that_fell_silent(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    with (
        TcpProxy("127.0.0.1", double.port) as proxy,
        running(
            double, tmp_path, TABLE, dsn=double.dsn.replace(f":{double.port}/", f":{proxy.port}/"), timeout_seconds=2.0
        ) as capture,
    ):
        double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        capture.catch_up()
        proxy.swallow()
        double.execute("INSERT INTO shop.orders VALUES (2, 'a', 1, NULL)")
        capture.wait_for(lambda: capture.capture.statistics.restarts > 0)
        proxy.resume()
        double.execute("INSERT INTO shop.orders VALUES (3, 'a', 1, NULL)")
        capture.catch_up()
        assert [row["id"] for row in capture.rows(TABLE)] == [1, 2, 3]
