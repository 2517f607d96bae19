"""Real sizes: a log that is delivered does not grow on disk, and one that nobody reads does not grow in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, numbered_chunk

from headwater.log_store.factory import KvLogStoreFactory
from headwater.state import open_writer
from headwater.stream import Epoch, EpochPair


def size_on_disk(folder: Path) -> int:
    """The store, and the stores of its consumers beside it."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("log_format", [1, 2] if "HEADWATER_SOAK" in os.environ else [2])
def test_a_thousand_epochs_delivered_and_truncated_take_no_more_room_than_ten(log_format: int, tmp_path: Path) -> None:
    location = str(tmp_path / "store")
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store, max_bytes=2000)
        writer = factory.writer(factory.log("t", SCHEMA, KEY, log_format))
        writer.init(EpochPair(epoch(1), Epoch(0)))
        sizes = {}
        consumer: LogConsumer | None = None
        for number in range(1, 1001):
            writer.write_chunk(numbered_chunk(100 * number, 100))
            writer.end_epoch(epoch(number + 1))
            factory.sealer.seal(epoch(number))
            consumer = consumer or LogConsumer.open(location, "t", "mirror")
            after, upto = consumer.wait(1)
            assert sum(batch.num_rows for batch in consumer.read(after, upto)) == 100
            consumer.commit(upto)
            if number in (10, 1000):
                sizes[number] = size_on_disk(tmp_path)
        assert consumer is not None
        consumer.close()
        factory.close()
    assert sizes[1000] < 2 * sizes[10]


GROWTH = """
import resource, sys
import numpy as np, pyarrow as pa
from headwater.log_store.factory import KvLogStoreFactory
from tests.logs import epoch
from headwater.state import open_writer
from headwater.stream import Chunk, EpochPair
fields = [pa.field(f"c{place}", pa.int64()) for place in range(9)]
schema = pa.schema([pa.field("id", pa.int64()), *fields])
rng = np.random.default_rng(1)
columns = [pa.array(rng.integers(0, 1 << 40, 10_000)) for _ in range(10)]
def chunk(number):
    ids = pa.array(np.arange(number * 10_000, (number + 1) * 10_000))
    return Chunk.inserts(pa.RecordBatch.from_arrays([ids, *columns[1:]], schema=schema), ("id",))
def resident():
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) / 1024
with open_writer(sys.argv[1]) as store:
    factory = KvLogStoreFactory(store, max_bytes=16 << 20)
    log = factory.log("t", schema, ("id",))
    writer = factory.writer(log)
    writer.init(EpochPair(epoch(1), epoch(0)))
    writer.write_chunk(chunk(0))
    before = resident()
    for number in range(1, 100):
        writer.write_chunk(chunk(number))
        if number % 40 == 0:  # epochs larger than what may wait in memory
            writer.end_epoch(epoch(number + 1))
            factory.sealer.seal(epoch(number))
    print(resident() - before)
"""


def test_a_million_rows_that_nobody_reads_stay_out_of_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(GROWTH), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200, "megabytes"
