"""A capture and its MariaDB or MySQL, both killed at random under live writers: every change arrives exactly once.

``HEADWATER_SEED`` gives the seed that a failed run has printed; ``HEADWATER_SOAK=1`` makes it 30 rounds on both.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.crash.capture.capture_process import CaptureProcess, wait_for
from tests.crash.capture.mysql_shop import TABLES, Writer, make_tables, verify
from tests.db.mysql.running import end_of_log
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import start_server

from headwater.capture import SourceState
from headwater.capture import session as capture_session
from headwater.log_store import sealer
from headwater.sources.mysql.offset import MySqlOffset
from headwater.state import open_reader

SOAK = os.environ.get("HEADWATER_SOAK") == "1"
SAFE = {"sync-binlog": "1", "innodb-flush-log-at-trx-commit": "1"}
STEPS = (
    (capture_session.AFTER_BEGIN, 1),
    (sealer.BEFORE_SEAL, 3),
    (sealer.AFTER_SEAL, 3),
    (capture_session.BEFORE_ACKNOWLEDGE, 2),
)


class MySqlProcess(CaptureProcess):
    """One capture of *server*."""

    def __init__(self, server: MariaDbServer, folder: Path) -> None:
        self._server = server
        super().__init__(server, folder, TABLES)  # type: ignore[arg-type]

    def offset(self) -> MySqlOffset | None:
        try:
            with open_reader(self.store) as reader, reader.snapshot() as view:
                record, _ = SourceState.read(view)
        except LookupError:
            return None
        if record is None:
            return None
        assert isinstance(record.offset, MySqlOffset)
        return record.offset

    def catch_up(self) -> None:
        """Until all that the server has committed by now is durable."""
        target = end_of_log(self._server.dsn)

        def is_there() -> bool:
            assert self.process.poll() is None, self.said
            offset = self.offset()
            return offset is not None and offset >= target

        wait_for(is_there, "the capture to come to the end of the log")

    def wait_until_it_reads(self) -> None:
        """Until it holds a position."""
        wait_for(lambda: self.process.poll() is not None or self.offset() is not None, "the capture to begin")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["mariadb", "mysql"] if SOAK else ["mariadb"])
def test_every_change_arrives_exactly_once_whoever_is_killed(family: str, tmp_path: Path) -> None:
    seed = os.environ.get("HEADWATER_SEED") or str(time.time_ns())
    print(f"HEADWATER_SEED={seed}")
    rng = random.Random(seed)
    with start_server(family, SAFE) as server:
        make_tables(server)
        capture = MySqlProcess(server, tmp_path)
        writers = [Writer(server, f"{seed} {number}") for number in range(2)]
        try:
            for step, hit in STEPS:  # each at least once, then at random
                capture.start(armed=f"{step}=kill@{hit}")
                capture.wait_until_it_reads()
                if capture.offset() is not None and not writers[0].is_alive():
                    for writer in writers:
                        writer.start()
                capture.killed_by_failpoint()
            capture.start()
            for _ in range(30 if SOAK else 3):
                capture.wait_until_it_reads()
                time.sleep(rng.uniform(0.0, 1.0))
                victims = rng.choice((["capture"], ["server"], ["capture", "server"]))
                if "capture" in victims:
                    capture.kill9()
                if "server" in victims:
                    server.kill9()
                    server.start()
                if rng.random() < 0.5:
                    server.execute("FLUSH LOGS")
                if "capture" in victims:
                    capture.start()
            for writer in writers:
                writer.end()
            capture.catch_up()
            capture.stop()
            confirmed = [number for writer in writers for number in writer.confirmed]
            assert verify(server, capture.store, confirmed) > 20
            assert capture.said == ""
        finally:
            capture.close()
