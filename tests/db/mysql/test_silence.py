"""A server that takes our bytes and says nothing: a capture notices, and goes on through a new connection."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.mysql.running import running
from tests.db.mysql.test_capture import LOG, ORDERS, fill
from tests.servers.mariadb import MariaDbServer
from tests.servers.proxy import TcpProxy

from headwater.sources.errors import SourceUnreachable
from headwater.sources.mysql.connection import Dsn, ask, connect, server_errors


def through(proxy: TcpProxy, server: MariaDbServer) -> str:
    return server.dsn.replace(f":{server.port}/", f":{proxy.port}/")


@pytest.mark.parametrize("server", ["mariadb", pytest.param("mysql", marks=pytest.mark.soak)], indirect=True)
def test_a_capture_reconnects_to_a_server_that_fell_silent(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS)
    with (
        TcpProxy("127.0.0.1", server.port) as proxy,
        running(server, tmp_path, LOG, dsn=through(proxy, server), timeout_seconds=1.0) as capture,
    ):
        fill(server, 1, 10)
        capture.catch_up()
        proxy.swallow()
        fill(server, 11, 20)
        capture.wait_for(lambda: capture.capture.statistics.restarts > 0)
        proxy.resume()
        fill(server, 21, 30)
        capture.assert_equal(LOG)
        capture.assert_once(LOG)


@pytest.mark.soak
def test_a_session_notices_silence_and_waits_for_a_slow_statement(server: MariaDbServer) -> None:
    """A statement that takes longer than the timeout is not silence: the server works on it."""
    with TcpProxy("127.0.0.1", server.port) as proxy:
        dsn = Dsn(through(proxy, server), 2.0)
        session = connect(dsn)
        assert ask(session, "SELECT SLEEP(2.5) AS slept") == [{"slept": "0"}]
        proxy.swallow()
        proxy.resume()  # a second connection shows that the server waits for us
        with pytest.raises(SourceUnreachable), server_errors(dsn):
            ask(session, "SELECT 1")
        proxy.swallow()
        with pytest.raises(SourceUnreachable):
            connect(dsn)
