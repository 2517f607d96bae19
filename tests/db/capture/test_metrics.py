"""The figures of a capture, as Prometheus reads them."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path

import pytest
from tests.db.capture.running import running
from tests.servers.postgres import Database

from headwater.capture.metrics import serve_capture
from headwater.errors import InputError
from headwater.spark.capture_child import capture_facts


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {match[1]: float(match[2]) for line in lines if (match := re.fullmatch(r"(\S+(?:\{.*\})?) (\S+)", line))}


def test_the_figures_of_the_capture_and_its_logs_can_be_scraped(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with running(newest_postgres, tmp_path, "t") as capture:
        server = serve_capture(capture.capture, str(capture.store), 0)
        newest_postgres.execute("INSERT INTO t SELECT generate_series(1, 30)")
        capture.catch_up()
        found = scraped(server.port)
        source = capture.capture.source.name
        assert newest_postgres.server.password not in "".join(found)
        assert found['capture_rows_total{log="public.t"}'] == 30
        assert found[f'capture_up{{source="{source}"}}'] == 1
        assert found[f'capture_transactions_total{{source="{source}"}}'] >= 1
        assert any(name.startswith("log_store_latest_write_epoch") for name in found)
        buffer = capture.capture.statistics.buffer
        assert buffer is not None
        assert buffer.rows_in == 30, "all rows pass the one buffer of the capture"
        assert (buffer.rows, found[f'kv_log_store_buffer_row_count{{source="{source}"}}']) == (0, 0)
        assert capture_facts(capture.capture)["buffer"]["rows_in"] == 30
        server.close()


def test_a_port_that_is_taken_is_refused(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with running(newest_postgres, tmp_path, "t") as capture, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match="cannot be used"):
            serve_capture(capture.capture, str(capture.store), port)
