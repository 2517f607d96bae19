"""A MySQL server can answer any query with a request for a file of the client: it gets none."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.servers.hostile_mysql import HostileServer
from tests.store.sinks.file_sinks import INSERT, ORDERS, Feed, many_changes

from headwater.sinks.errors import SinkUnwritable
from headwater.sinks.mysql import SESSIONS, MySqlSink
from headwater.sources.errors import SourceMisconfigured
from headwater.sources.mysql.connection import Dsn, ask, connect, server_errors

SECRET = "of this machine alone"
ANSWERS = {"VERSION()": "8.4.0", "@@local_infile": "1", "information_schema": "1"}


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return str(path)


@pytest.mark.parametrize(
    ("moment", "asks_for_stream"),
    [
        ("SET SESSION", False),
        ("SELECT VERSION()", False),
        ("CREATE TABLE", False),
        ("CREATE TABLE", True),
        ("LOAD DATA", False),
    ],
)
def test_a_sink_sends_its_own_rows_and_only_when_it_loads_them(moment: str, asks_for_stream: bool, secret: str) -> None:
    with HostileServer(moment, "headwater" if asks_for_stream else secret, ANSWERS) as server:
        sink = MySqlSink(server.dsn)
        with pytest.raises(SinkUnwritable, match="asked for a file of this machine") as caught:
            sink.stage_changes(ORDERS, Feed(sink).token(1), iter([many_changes(np.arange(50_000), INSERT)]), None)
        SESSIONS.close()
    assert "ssl_ca" in str(caught.value.next_step)
    assert moment in server.queries[-1]
    assert server.sent == []


@pytest.mark.parametrize("moment", ["SET SESSION", "SELECT 1"])
def test_a_source_sends_no_file(moment: str, secret: str) -> None:
    with HostileServer(moment, secret) as server:
        dsn = Dsn(server.dsn)
        refused = pytest.raises(SourceMisconfigured, match="asked for a file of this machine")
        with refused, server_errors(dsn), closing(connect(dsn)) as session:
            ask(session, "SELECT 1")
    assert server.sent == []
