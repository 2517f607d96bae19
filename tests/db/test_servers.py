"""The servers that other tests stand on: versions, restarts, kills, and that nothing outlives the tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from tests.servers.postgres import VERSIONS, Database, PostgresServer
from tests.servers.proxy import TcpProxy

from headwater.system.process import status_fields

StartPostgres = Callable[..., PostgresServer]


def test_each_version_is_real_logical_and_unprivileged(postgres: Database) -> None:
    assert postgres.server.major in VERSIONS
    assert postgres.value("SHOW server_version").startswith(f"{postgres.server.major}.")
    assert postgres.value("SHOW wal_level") == "logical"
    data = postgres.server.data.stat()
    assert data.st_uid != 0
    postgres.execute("SELECT pg_create_logical_replication_slot('left_behind', 'pgoutput')")
    role = postgres.role("reader", "REPLICATION")
    with psycopg.connect(postgres.dsn_of(role)) as session:
        assert session.info.user == role


def test_each_test_has_a_database_of_its_own(newest_postgres: Database) -> None:
    newest_postgres.execute("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
    with newest_postgres.server.database() as other:
        assert other.value("SELECT to_regclass('t')") is None


def test_a_server_survives_restart_and_kill_with_its_port_and_rows(start_postgres: StartPostgres) -> None:
    server = start_postgres(settings={"fsync": "on"})
    port = server.port
    with server.database() as database:
        database.execute("CREATE TABLE t (id int)", "INSERT INTO t VALUES (1)")
        server.restart({"max_slot_wal_keep_size": "48MB"})
        assert database.value("SHOW max_slot_wal_keep_size") == "48MB"
        database.execute("INSERT INTO t VALUES (2)")
        server.kill9()
        with pytest.raises(psycopg.OperationalError):
            database.connect()
        server.start()
        assert server.port == port
        assert database.value("SELECT count(*) FROM t") == 2
        server.reload(work_mem="5MB")
        assert database.value("SHOW work_mem") == "5MB"


def test_a_server_ends_by_itself_when_its_test_process_is_killed() -> None:
    code = (
        "from tests.servers.postgres import PostgresServer; import time;"
        "s = PostgresServer(); print(s.base, s._process.pid, flush=True); time.sleep(600)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        base, pid = tests.stdout.readline().split()
        assert Path(base, "data").exists()
        tests.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while Path(base).exists():
        assert time.monotonic() < deadline, "the watchdog did not clear up"
        time.sleep(0.05)
    assert status_fields(int(pid))[:1] in ([], ["Z"])


def test_the_proxy_forwards_cuts_refuses_and_stalls(newest_postgres: Database) -> None:
    server = newest_postgres.server
    with TcpProxy("127.0.0.1", server.port) as proxy:
        dsn = newest_postgres.dsn.replace(f":{server.port}/", f":{proxy.port}/")
        with psycopg.connect(dsn, autocommit=True) as session:
            assert session.execute("SELECT 1").fetchone() == (1,)
            proxy.refuse()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(dsn)
            assert session.execute("SELECT 2").fetchone() == (2,)
            proxy.cut()
            with pytest.raises(psycopg.OperationalError):
                session.execute("SELECT 3")
        proxy.resume()
        psycopg.connect(dsn).close()
        proxy.stall()
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(dsn, connect_timeout=2)
        proxy.resume()
        psycopg.connect(dsn).close()
        assert proxy.accepted == 5
