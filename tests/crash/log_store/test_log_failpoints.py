"""A kill at every durable step of the log store leaves the old or the new state, whole; then work goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.crash.log_store_tools.test_tools_killed import MIGRATION_STEPS
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, numbered_chunk

import headwater.log_store.buffer
import headwater.log_store.reader
import headwater.log_store.sealer
import headwater.log_store.state  # noqa: F401  (they register their failpoints)
from headwater import failpoints
from headwater.log_store import compaction
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_view import LogView
from headwater.state import open_reader, open_writer
from headwater.stream import Epoch, EpochPair

PRELUDE = """
import sys
from headwater.log_store.factory import KvLogStoreFactory
from tests.logs import LogConsumer
from tests.logs import KEY, SCHEMA, epoch, numbered_chunk
from headwater.state import open_writer
from headwater.stream import EpochPair
location, log_format = sys.argv[1], int(sys.argv[2])
def writer(stage_bytes=1 << 20):
    factory = KvLogStoreFactory(open_writer(location), max_bytes=stage_bytes)
    made = factory.writer(factory.log("t", SCHEMA, KEY, log_format))
    made.init(EpochPair(epoch(3), epoch(2)))
    return factory, made
"""
SEAL = """
factory, made = writer()
made.write_chunk(numbered_chunk(300, 50))
made.end_epoch(epoch(4))
factory.sealer.seal(epoch(3))
"""
STAGE = """
factory, made = writer(stage_bytes=500)
for place in range(6):
    made.write_chunk(numbered_chunk(9000 + 50 * place, 50))
"""
COMMIT = """
consumer = LogConsumer.open(location, "t", "mirror")
consumer.commit(epoch(2))
"""
COME = """
LogConsumer.open(location, "t", "late", start=epoch(1))
"""
GO_BACK = """
LogConsumer.open(location, "t", "mirror").rewind(epoch(0))
"""
STEPS = {
    # failpoint: (what is done, epochs that may be sealed after the kill, epochs that the consumer may have delivered)
    "log_store.before_stage": (STAGE, {2}, {1}),
    "log_store.after_stage": (STAGE, {2}, {1}),
    "log_store.before_discard": (SEAL, {2}, {1}),
    "log_store.before_seal": (SEAL, {2}, {1}),
    "log_store.after_seal": (SEAL, {3}, {1}),
    "log_store.consumer_before_commit": (COMMIT, {2}, {1}),
    "log_store.consumer_after_commit": (COMMIT, {2}, {2}),
    "log_store.consumer_coming": (COME, {2}, {1}),
    "log_store.consumer_going_back": (GO_BACK, {2}, {0}),
}


def test_every_durable_step_of_the_log_store_has_a_crash_test() -> None:
    names = {name for name in failpoints.registered() if name.startswith("log_store.")}
    assert names == {*STEPS, *MIGRATION_STEPS, compaction.BEFORE_EPOCH}


def ids(location: str) -> tuple[int, dict[int, list[int]]]:
    """The newest epoch, and the rows of all that are held."""
    with open_reader(location) as store, store.snapshot() as view:
        shown = LogView.open(view, "t")
        found: dict[int, list[int]] = {end.epoch.ms: [] for end in shown.epochs()}
        for batch in shown.read_range(shown.bounds().gone, view.epoch):
            for number, key in zip(batch.column("_epoch").to_pylist(), batch.column("id").to_pylist(), strict=True):
                found[Epoch(number).ms].append(key)
        return view.epoch.ms, {number: sorted(keys) for number, keys in found.items()}


@pytest.mark.parametrize("log_format", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_a_durable_step_leaves_the_old_or_the_new_state(step: str, log_format: int, tmp_path: Path) -> None:
    location = str(tmp_path / "store")
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        writer = factory.writer(factory.log("t", SCHEMA, KEY, log_format))
        writer.init(EpochPair(epoch(1), Epoch(0)))
        for number in (1, 2):
            writer.write_chunk(numbered_chunk(100 * number, 50))
            writer.end_epoch(epoch(number + 1))
            factory.sealer.seal(epoch(number))
        factory.close()
    with LogConsumer.open(location, "t", "mirror") as consumer:
        consumer.commit(epoch(1))
    script, sealed, delivered = STEPS[step]
    process = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), location, str(log_format)],
        env=os.environ | {failpoints.VARIABLE: f"{step}=kill"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    number, found = ids(location)
    assert number in sealed
    expected = {number: list(range(100 * number, 100 * number + 50)) for number in range(1, number + 1)}
    assert found == expected, "what was delivered is announced by one seal, deleted by another"
    with LogConsumer.open(location, "t", "mirror") as consumer:
        assert consumer.delivered().ms in delivered
        done = consumer.delivered().ms
    if script == COME:
        with LogConsumer.open(location, "t", "late", start=epoch(1)) as consumer:
            assert consumer.delivered().ms == 1
    with open_writer(location) as store:  # the next writer goes on, with other rows where nothing was sealed
        factory = KvLogStoreFactory(store)
        writer = factory.writer(factory.existing("t"))
        writer.init(EpochPair(epoch(number + 1), epoch(number)))
        for following in (number + 1, number + 2):
            writer.write_chunk(numbered_chunk(1000 * following, 20))
            writer.end_epoch(epoch(following + 1))
            factory.sealer.seal(epoch(following))
            expected[following] = list(range(1000 * following, 1000 * following + 20))
        factory.close()
    assert ids(location) == (number + 2, {number: keys for number, keys in expected.items() if number > done})
