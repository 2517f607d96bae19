"""A capture and its Postgres, both killed at random under live writers: every change arrives exactly once.

``HEADWATER_SEED`` gives the seed that a failed run has printed; ``HEADWATER_SOAK=1`` makes it 30 rounds.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.crash.capture.capture_process import CaptureProcess
from tests.crash.capture.shop import TABLES, Writer, make_tables, verify
from tests.servers.postgres import Database, PostgresServer

ROUNDS = 30 if os.environ.get("HEADWATER_SOAK") == "1" else 5


@pytest.mark.timeout(900)
def test_every_change_arrives_exactly_once_whoever_is_killed(
    server: PostgresServer, database: Database, tmp_path: Path
) -> None:
    seed = os.environ.get("HEADWATER_SEED") or str(time.time_ns())
    print(f"HEADWATER_SEED={seed}")
    rng = random.Random(seed)
    make_tables(database)
    capture = CaptureProcess(database, tmp_path, TABLES)
    capture.start()
    capture.wait_until_it_reads()
    writers = [Writer(database, f"{seed} {number}") for number in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(ROUNDS):
            if rng.random() < 0.7:
                capture.wait_until_it_reads()
            time.sleep(rng.uniform(0.0, 1.5))
            victims = rng.choice((["capture"], ["capture"], ["postgres"], ["capture", "postgres"]))
            if "capture" in victims:
                capture.kill9()
            if "postgres" in victims:
                server.kill9()
                server.start()
            if "capture" in victims:
                capture.start()
        for writer in writers:
            writer.end()
        capture.catch_up()
        capture.stop()
        confirmed = [number for writer in writers for number in writer.confirmed]
        assert verify(database, capture.store, confirmed) > 20
        assert capture.said == ""
    finally:
        capture.close()
