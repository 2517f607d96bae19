"""A capture and its MongoDB, both killed at random under live writers: every change arrives exactly once.

``HEADWATER_SEED`` gives the seed that a failed run has printed; ``HEADWATER_SOAK=1`` makes it 30 rounds.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.crash.capture.capture_process import CaptureProcess, wait_for
from tests.crash.capture.mongodb_shop import COLUMNS, TABLES, Writer, make_collections, verify
from tests.db.mongodb.conftest import started_or_skipped
from tests.db.mongodb.running import end_of_log
from tests.sampled import SOAK
from tests.servers.mongodb import MongoServer

from headwater.capture import SourceState
from headwater.capture import session as capture_session
from headwater.log_store import sealer
from headwater.sources.mongodb.offset import MongoOffset
from headwater.state import open_reader

STEPS = (
    (capture_session.AFTER_BEGIN, 1),
    (sealer.BEFORE_SEAL, 3),
    (sealer.AFTER_SEAL, 3),
    (capture_session.BEFORE_ACKNOWLEDGE, 2),
)


class MongoProcess(CaptureProcess):
    """One capture of *server*."""

    def __init__(self, server: MongoServer, folder: Path) -> None:
        self._server = server
        super().__init__(server, folder, TABLES)  # type: ignore[arg-type]

    def start(self, *arguments: str, armed: str = "") -> None:
        columns = [part for name, text in COLUMNS.items() for part in ("--columns", f"{name}={text}")]
        super().start(*columns, *arguments, armed=armed)

    def offset(self) -> MongoOffset | None:
        try:
            with open_reader(self.store) as reader, reader.snapshot() as view:
                record, _ = SourceState.read(view)
        except LookupError:
            return None
        if record is None:
            return None
        assert isinstance(record.offset, MongoOffset)
        return record.offset

    def catch_up(self) -> None:
        """Until all that the server has committed by now is durable."""
        target = end_of_log(self._server)

        def is_there() -> bool:
            assert self.process.poll() is None, self.said
            offset = self.offset()
            return offset is not None and offset >= target

        wait_for(is_there, "the capture to come to the end of the log")

    def wait_until_it_reads(self) -> None:
        """Until it holds a position."""
        wait_for(lambda: self.process.poll() is not None or self.offset() is not None, "the capture to begin")


@pytest.mark.timeout(900)
def test_every_change_arrives_exactly_once_whoever_is_killed(tmp_path: Path) -> None:
    seed = os.environ.get("HEADWATER_SEED") or str(time.time_ns())
    print(f"HEADWATER_SEED={seed}")
    rng = random.Random(seed)
    with started_or_skipped() as server:
        make_collections(server)
        capture = MongoProcess(server, tmp_path)
        writers = [Writer(server, f"{seed} {number}") for number in range(2)]
        try:
            for step, hit in STEPS if SOAK else [rng.choice(STEPS)]:
                capture.start(armed=f"{step}=kill@{hit}")
                capture.wait_until_it_reads()
                if capture.offset() is not None and not writers[0].is_alive():
                    for writer in writers:
                        writer.start()
                capture.killed_by_failpoint()
            capture.start()
            for _ in range(30 if SOAK else 1):
                capture.wait_until_it_reads()
                if not writers[0].is_alive():
                    for writer in writers:
                        writer.start()
                time.sleep(rng.uniform(0.0, 1.0))
                both = ["capture", "server"]
                victims = rng.choice((["capture"], ["server"], both)) if SOAK else both
                if "capture" in victims:
                    capture.kill9()
                if "server" in victims:
                    server.kill9()
                    server.start()
                if "capture" in victims:
                    capture.start()
            wait_for(lambda: sum(len(writer.confirmed) for writer in writers) > 30, "transactions")
            for writer in writers:
                writer.end()
            capture.catch_up()
            capture.stop()
            confirmed = [number for writer in writers for number in writer.confirmed]
            assert verify(server, capture.store, confirmed) > 20
            assert capture.said == ""
        finally:
            capture.close()
