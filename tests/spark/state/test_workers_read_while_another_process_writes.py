"""Spark's Python workers read a state store that another process is writing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.state import open_reader

WRITER = """
import sys, time
from headwater.state import WriteBatch, open_writer
from headwater.stream.epoch import Epoch
store = open_writer(sys.argv[1])
for number in range(1, 1_000_000):
    batch = WriteBatch()
    batch.put_many((b"%04d" % place, str(number).encode()) for place in range(400))
    batch.put(b"large", str(number).encode() * 20_000)
    store.seal(Epoch.from_ms(number), batch)
    print(number, flush=True)
    time.sleep(0.002)
"""


@pytest.fixture(params=["embedded", "slatedb"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    location = f"{tmp_path}/store" if request.param == "embedded" else f"slatedb+file://{tmp_path}/store"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, location], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.readline()
    yield location
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()


def look(location: str, parts: Iterable[int]) -> Iterator[tuple[int, int, int, bool]]:
    """One task: a snapshot at the newest epoch; is it one whole epoch?"""
    with open_reader(location) as store:
        for part in parts:
            with store.snapshot() as view:
                cells = dict(view.scan())
                number = str(view.epoch.ms).encode()
                whole = (
                    len(cells) == 401
                    and cells.pop(b"large") == number * 20_000
                    and set(cells.values()) == {number}
                    and view.get(b"0007") == number
                )
                yield part, os.getpid(), view.epoch.ms, whole


def look_at(location: str, epoch: int, parts: Iterable[int]) -> Iterator[tuple[int, int, int, bool]]:
    """One task: its share of the keys at a pinned epoch."""
    with open_reader(location) as store:
        for part in parts:
            with store.snapshot(epoch) as view:
                cells = list(view.scan(b"%04d" % (part * 100), b"%04d" % (part * 100 + 100)))
                number = str(view.epoch.ms).encode()
                yield part, os.getpid(), len(cells), {value for _, value in cells} == {number}


def test_every_task_sees_one_whole_epoch(spark: Any, written: str) -> None:
    epochs: list[int] = []
    for _ in range(3):
        rows = spark.sparkContext.parallelize(range(8), 4).mapPartitions(lambda parts: look(written, parts)).collect()
        assert len(rows) == 8
        assert all(whole for *_, whole in rows), rows
        assert os.getpid() not in {pid for _, pid, *_ in rows}
        epochs.append(max(epoch for _, _, epoch, _ in rows))
    assert epochs == sorted(set(epochs)), "the writer went on between the jobs, and the workers saw it"


def test_all_tasks_of_a_job_read_the_same_pinned_epoch(spark: Any, written: str) -> None:
    with open_reader(written) as store:
        pin = store.pin("job")
        for _ in range(2):
            rows = (
                spark.sparkContext.parallelize(range(4), 4)
                .mapPartitions(lambda parts: look_at(written, int(pin.epoch), parts))
                .collect()
            )
            assert sorted(part for part, *_ in rows) == [0, 1, 2, 3]
            assert all(count == 100 and whole for _, _, count, whole in rows), rows
        assert store.committed_epoch() > pin.epoch
        store.unpin("job")
