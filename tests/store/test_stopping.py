"""A signal ends a process that waits for a server that says nothing, also where the client holds Python's lock."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headwater import compiled

_HAS_HELPER = compiled.is_wanted() and importlib.util.find_spec("headwater._stop_watch") is not None
_CHILD = """
import signal, sys
from headwater.stopping import stop_on_signals
address, folder = sys.argv[1:]
stop_on_signals(lambda: None, signal.SIGTERM, seconds=0.5)
{wait}
"""
_WAITS = {
    "delta": """
from headwater.sinks.delta import DeltaSink
from tests.servers.s3 import aws_options
sink = DeltaSink("s3://lake/here", storage_options=aws_options(f"http://{address}"))
sink.check()
""",
    "rest catalog": """
from headwater.sinks.iceberg import IcebergSink
IcebergSink(folder, catalog_uri=f"http://{address}", catalog_options={"token": "t"}).check()
""",
    "kafka": """
from headwater.sinks.kafka import KafkaSink
KafkaSink(brokers=address, staging=folder).check()
""",
    "store": """
from headwater.state import open_writer
open_writer(f"slatedb+s3://lake/here?endpoint=http://{address}&region=us-east-1")
""",
}


@pytest.mark.parametrize(
    "kind", [kind if kind == "delta" else pytest.param(kind, marks=pytest.mark.soak) for kind in _WAITS]
)
@pytest.mark.skipif(not _HAS_HELPER, reason="the helper was not compiled: Python alone cannot end such a process")
def test_sigterm_ends_a_process_whose_server_is_silent(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        environment = {**os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(wait=_WAITS[kind]), address, str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            with listener.accept()[0] as connection:
                assert connection.recv(1)
                child.send_signal(signal.SIGTERM)
                _, said = child.communicate(timeout=10)
            assert (child.returncode, said.count("was ended")) == (0, 1)
        finally:
            child.kill()
            child.communicate()
