"""A capture of the double of SQL Server, killed at every step and at random under live writers: each change once.

The double is killed with its connections, not with its data: that a real server survives a crash is its own promise.
``HEADWATER_SEED`` gives the seed that a failed run has printed; ``HEADWATER_SOAK=1`` makes it 30 rounds.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.crash.capture.capture_process import CaptureProcess, wait_for
from tests.crash.capture.sqlserver_shop import TABLES, Writer, make_tables, verify
from tests.db.sqlserver.running import stored_offset
from tests.sampled import SOAK, share
from tests.servers.sqlserver import AnySqlServer, start_sqlserver
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.capture import session as capture_session
from headwater.log_store import sealer
from headwater.sources.sqlserver.lsn import Lsn
from headwater.sources.sqlserver.offset import SqlServerOffset

STEPS = (
    (capture_session.AFTER_BEGIN, 1),
    (sealer.BEFORE_SEAL, 3),
    (sealer.AFTER_SEAL, 3),
    (capture_session.BEFORE_ACKNOWLEDGE, 2),
)


class SqlServerProcess(CaptureProcess):
    """One capture of *server*."""

    def __init__(self, server: AnySqlServer, folder: Path) -> None:
        self._server = server
        super().__init__(server, folder, TABLES)  # type: ignore[arg-type]

    def catch_up(self) -> None:
        """Until all that the server has committed by now is durable."""
        target = SqlServerOffset(Lsn(self._server.last_change()))

        def is_there() -> bool:
            assert self.process.poll() is None, self.said
            offset = stored_offset(self.store)
            return offset is not None and offset >= target

        wait_for(is_there, "the capture to come to the last change")

    def wait_until_it_reads(self) -> None:
        """Until it holds a position."""
        wait_for(lambda: self.process.poll() is not None or stored_offset(self.store) is not None, "a position")


@pytest.mark.timeout(900)
def test_every_change_arrives_exactly_once_whoever_is_killed(tmp_path: Path) -> None:
    seed = os.environ.get("HEADWATER_SEED") or str(time.time_ns())
    print(f"HEADWATER_SEED={seed}")
    rng = random.Random(seed)
    with start_sqlserver() as server:
        make_tables(server)
        capture = SqlServerProcess(server, tmp_path)
        writers = [Writer(server, f"{seed} {number}", number * 1_000_000) for number in (1, 2)]
        try:
            for step, hit in share(STEPS, 0, 2):
                capture.start(armed=f"{step}=kill@{hit}")
                capture.wait_until_it_reads()
                if stored_offset(capture.store) is not None and not writers[0].is_alive():
                    for writer in writers:
                        writer.start()
                capture.killed_by_failpoint()
            capture.start()
            for _ in range(30 if SOAK else 1):
                capture.wait_until_it_reads()
                if not writers[0].is_alive():
                    for writer in writers:
                        writer.start()
                time.sleep(rng.uniform(0.2, 1.0))
                if isinstance(server, SqlServerDouble) and rng.random() < 0.5:
                    server.drop_connections()
                capture.kill9()
                capture.start()
            for writer in writers:
                writer.end()
            capture.catch_up()
            capture.stop()
            assert verify(server, capture.store, [number for writer in writers for number in writer.confirmed]) > 10
            assert capture.said == ""
        finally:
            capture.close()
