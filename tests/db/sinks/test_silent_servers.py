"""The server of a sink takes our bytes and says nothing: the session ends, and the delivery can try again."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pymysql
import pytest
from tests.servers.mariadb import MariaDbServer
from tests.servers.postgres import Database
from tests.servers.proxy import TcpProxy

from headwater.sinks import mysql_session, postgres_session
from headwater.sinks.errors import SinkUnreachable
from headwater.sources.postgres.connection import Dsn

pytestmark = pytest.mark.soak


def test_a_postgres_that_falls_silent_is_unreachable(newest_postgres: Database) -> None:
    with TcpProxy("127.0.0.1", newest_postgres.server.port) as proxy:
        dsn = Dsn(newest_postgres.dsn.replace(f":{newest_postgres.server.port}/", f":{proxy.port}/"), 2.0)
        session = postgres_session.connect(dsn)
        assert session.execute("SELECT 1 FROM pg_sleep(2.5)").fetchone() == (1,)
        session.execute("CREATE TEMPORARY TABLE t (id int)")
        proxy.swallow()
        proxy.resume()
        with pytest.raises(psycopg.OperationalError) as failure, session.cursor().copy("COPY t FROM STDIN") as copy:
            copy.write(b"1\n")
        assert isinstance(postgres_session.sink_error(failure.value, dsn, "s.t", "headwater"), SinkUnreachable)


def test_a_mariadb_that_falls_silent_is_unreachable(
    mysql_servers: Callable[[str], MariaDbServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = mysql_servers("mariadb")
    monkeypatch.setattr(mysql_session, "TIMEOUT_SECONDS", 2.0)
    with TcpProxy("127.0.0.1", server.port) as proxy:
        place = mysql_session.address(server.dsn.replace(f":{server.port}/", f":{proxy.port}/"))
        session = mysql_session.connect(place)
        with session.cursor() as cursor:
            cursor.execute("SELECT SLEEP(2.5)")
            proxy.swallow()
            proxy.resume()
            with pytest.raises(pymysql.err.MySQLError) as failure:
                cursor.execute("SELECT 1")
        assert isinstance(mysql_session.sink_error(failure.value, place, "s.t", "headwater"), SinkUnreachable)
