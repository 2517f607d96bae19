"""SIGTERM ends a capture within ten seconds, whatever it waits for; the next one goes on from the last seal."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.capture.capture_process import PostgresProcess, wait_for
from tests.servers.postgres import Database
from tests.servers.proxy import TcpProxy

from headwater.log_store import sealer

WITHIN_SECONDS = 10.0


class Behind:
    """The database as it is reached through *proxy*."""

    def __init__(self, database: Database, proxy: TcpProxy) -> None:
        self.dsn = database.dsn.replace(f":{database.server.port}/", f":{proxy.port}/")


class ProxiedProcess(PostgresProcess):
    """A capture through a proxy that can fall silent."""

    def __init__(self, database: Database, proxy: TcpProxy, folder: Path) -> None:
        super().__init__(database, folder, ["t"])
        self._source = Behind(database, proxy)

    def end(self) -> None:
        """:raises AssertionError: SIGTERM does not end it in time."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WITHIN_SECONDS) == 0, self.said


@pytest.fixture
def proxy(database: Database) -> Iterator[TcpProxy]:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with TcpProxy("127.0.0.1", database.server.port) as made:
        yield made


@pytest.fixture
def capture(database: Database, proxy: TcpProxy, tmp_path: Path) -> Iterator[ProxiedProcess]:
    made = ProxiedProcess(database, proxy, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("timeout", ["2", pytest.param("60", marks=pytest.mark.soak)])
def test_while_it_connects_to_a_server_that_says_nothing(
    proxy: TcpProxy, capture: ProxiedProcess, timeout: str
) -> None:
    proxy.swallow()
    capture.start("--timeout-seconds", timeout)
    wait_for(lambda: capture.runs() and proxy.accepted, "the capture to connect")
    capture.end()


def test_while_the_source_is_away_and_it_waits_to_try_again(proxy: TcpProxy, capture: ProxiedProcess) -> None:
    proxy.refuse()
    capture.start()
    wait_for(lambda: capture.runs() and proxy.accepted > 2, "the capture to try again")
    capture.end()


@pytest.mark.parametrize("timeout", ["2", pytest.param("60", marks=pytest.mark.soak)])
def test_while_the_stream_is_silent(database: Database, proxy: TcpProxy, capture: ProxiedProcess, timeout: str) -> None:
    capture.start("--timeout-seconds", timeout)
    capture.wait_until_it_reads()
    database.execute("INSERT INTO t VALUES (1)")
    capture.catch_up()
    proxy.swallow()
    database.execute("INSERT INTO t VALUES (2)")
    capture.end()


def is_asleep(capture: ProxiedProcess) -> bool:
    """Nothing became durable for a while."""
    before = capture.durable()
    time.sleep(0.7)
    return capture.durable() == before


@pytest.mark.soak
def test_while_a_seal_waits(database: Database, capture: ProxiedProcess) -> None:
    capture.start()
    capture.wait_until_it_reads()
    capture.catch_up()
    capture.end()
    capture.start(armed=f"{sealer.BEFORE_SEAL}=sleep:60@1")
    capture.wait_until_it_reads()
    database.execute("INSERT INTO t VALUES (1)")
    is_sent = "SELECT bool_and(sent_lsn >= pg_current_wal_flush_lsn()) FROM pg_stat_replication"
    wait_for(lambda: database.value(is_sent) and is_asleep(capture), "the capture to seal")
    capture.end()
    assert "was ended" in capture.said
    capture.start()
    capture.catch_up()
    capture.end()
