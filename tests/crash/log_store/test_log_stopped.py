"""A consumer whose process is stopped (SIGSTOP) while it comes or goes back: the log waits, and it misses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, numbered_chunk

from headwater import failpoints
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_view import LogView
from headwater.state import open_writer
from headwater.stream import Epoch, EpochPair

CONSUMER = """
import sys
from headwater.log_store.errors import EpochGone
from tests.logs import LogConsumer
from tests.logs import epoch
location, move = sys.argv[1:]
with LogConsumer.open(location, "t", "late") as consumer:
    if move == "back":
        consumer.rewind(epoch(2))
    after, upto = consumer.wait(5.0)
    keys = [key for batch in consumer.read(after, upto) for key in batch.column("id").to_pylist()]
    print(after.ms, upto.ms, len(keys), min(keys), max(keys))
"""


@pytest.mark.parametrize("move", ["come", "back"])
def test_a_consumer_that_is_stopped_between_its_two_steps_misses_nothing(move: str, tmp_path: Path) -> None:
    location = str(tmp_path / "store")
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        writer = factory.writer(factory.log("t", SCHEMA, KEY))
        writer.init(EpochPair(epoch(1), Epoch(0)))

        def seal() -> None:
            number = writer.epoch.ms
            writer.write_chunk(numbered_chunk(100 * number, 10))
            writer.end_epoch(epoch(number + 1))
            factory.sealer.seal(epoch(number))

        seal()
        with LogConsumer.open(location, "t", "fast") as fast:
            if move == "back":
                LogConsumer.open(location, "t", "late").close()
            for _ in range(4):
                seal()
            fast.commit(epoch(5))
            if move == "back":
                with LogConsumer.open(location, "t", "late") as late:
                    late.commit(epoch(5))
            step = {"come": "log_store.consumer_coming", "back": "log_store.consumer_going_back"}[move]
            child = subprocess.Popen(
                [sys.executable, "-c", CONSUMER, location, move],
                env=os.environ | {failpoints.VARIABLE: f"{step}=sleep:3"},
                stdout=subprocess.PIPE,
                text=True,
            )
            place = {"come": Epoch(0), "back": epoch(2)}[move]
            wait_until_known(factory, place)
            child.send_signal(signal.SIGSTOP)
            for _ in range(5):
                seal()
                fast.commit(store.committed_epoch())
            with store.snapshot() as view:
                assert LogView.open(view, "t").bounds().gone == place, "it is held for the one that sleeps"
            child.send_signal(signal.SIGCONT)
            out, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        after, upto, rows, least, most = map(int, out.split())
        assert (after, upto) == (place.ms, 10)
        assert (rows, least, most) == (10 * (upto - after), 100 * (after + 1), 100 * upto + 9)
        factory.close()


def wait_until_known(factory: KvLogStoreFactory, place: Epoch) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if any(found.name == "late" and found.delivered() == place for found in factory.consumers.all()):
            return
        time.sleep(0.02)
    raise AssertionError("the consumer did not come")
