"""A synced log is killed at the steps of its commit: every row is worked on once, as the seal says."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sampled import share
from tests.store.log_store.synced_tools import Run, by_vnode, committed, log_keys, rows_in_order

from headwater import failpoints
from headwater.log_store.testing import numbered_chunk
from headwater.log_store.watermarks import Watermark
from headwater.state import open_reader, open_writer
from headwater.stream import BarrierKind, Chunk

ROOT = Path(__file__).parents[3]
ROWS = 30
LIFE = """
import sys
import pyarrow as pa
from tests.store.log_store.synced_tools import Run
from headwater.log_store.testing import numbered_chunk
from headwater.log_store.watermarks import Watermark
from headwater.state import open_writer
from headwater.stream import BarrierKind
location, log_format, max_rows, epochs = sys.argv[1], *map(int, sys.argv[2:])
store = open_writer(location)
run = Run(store, log_format, max_rows=max_rows, pause_seconds=0, history_rows=7)
for _ in range(epochs):
    number = run.now
    for part in range(3):
        run.synced.push(numbered_chunk(1000 * number + 10 * part, 10))
    run.synced.push(Watermark("id", pa.scalar(1000 * number + 30, pa.int64())))
    run.poll()
    run.checkpoint(BarrierKind.BARRIER if number % 4 == 0 else BarrierKind.CHECKPOINT)
    run.poll()
print("lived")
"""
STEPS = ("log_store.before_seal", "log_store.after_seal")


def chunks_up_to(number: int) -> list[Chunk]:
    """What an upstream sends in the epochs up to *number*: the same whenever it has to send it again."""
    return [numbered_chunk(1000 * epoch, ROWS) for epoch in range(1, number + 1)]


def live(location: str, log_format: int, max_rows: int, epochs: int, armed: str = "") -> int:
    process = subprocess.run(
        [sys.executable, "-c", LIFE, location, str(log_format), str(max_rows), str(epochs)],
        env=os.environ | {failpoints.VARIABLE: armed},
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert process.returncode in (0, -signal.SIGKILL), process.stderr
    return process.returncode


def check(location: str) -> int:
    """What was worked on is what the sealed epochs have, vnode by vnode a prefix of it; returns how many rows."""
    with open_reader(location) as store:
        sealed, found = store.committed_epoch().ms, committed(store)
    expected = by_vnode(rows_in_order(chunks_up_to(sealed)))
    for vnode, rows in by_vnode(found).items():
        assert rows == expected[vnode][: len(rows)]
    return len(found)


@pytest.mark.parametrize("log_format", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize("max_rows", share([0, 15, 2048], 1, 3))
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_before_or_after_the_seal_of_a_checkpoint_works_on_every_row_once(
    step: str, max_rows: int, log_format: int, tmp_path: Path
) -> None:
    location = str(tmp_path / "store")
    for hit in (1, 2, 3):
        assert live(location, log_format, max_rows, 6, f"{step}=kill@{hit}") == -signal.SIGKILL
        check(location)
    with open_writer(location) as store:
        run = Run(store, log_format)
        sealed = run.now - 1
        found = run.polls()
        newest = [item.value.as_py() for item in found if isinstance(item, Watermark)]
        run.drain()
        assert by_vnode(committed(store)) == by_vnode(rows_in_order(chunks_up_to(sealed)))
        assert newest in ([], [1000 * sealed + 30])
        assert newest or not found  # rows that waited had their watermark behind them
        for _ in range(3):
            run.drain()
        assert log_keys(store) == 0


@pytest.mark.parametrize("log_format", [1, 2], ids=["v1", "v2"])
def test_many_lives_that_end_at_random_steps_work_on_every_row_once(log_format: int, tmp_path: Path) -> None:
    rng = random.Random(log_format)
    location = str(tmp_path / "store")
    kills, rows = 0, 0
    for _ in range(40 if "HEADWATER_SOAK" in os.environ else 8):
        armed = f"{rng.choice(STEPS)}=kill@{rng.randint(1, 5)}"
        kills += live(location, log_format, rng.choice((0, 15, 25, 2048)), rng.randint(1, 7), armed) != 0
        now = check(location)
        assert now >= rows
        rows = now
    assert kills
    assert rows
    with open_writer(location) as store:
        run = Run(store, log_format)
        sealed = run.now - 1
        run.checkpoint(BarrierKind.SYNC_CHECKPOINT)
        assert by_vnode(committed(store)) == by_vnode(rows_in_order(chunks_up_to(sealed)))
