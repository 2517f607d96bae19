"""What a reader had to read again because its buffer had no room, in rows and bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.log_store import FlushOptions, LogView
from headwater.log_store.testing import SCHEMA, Instance, epoch, random_chunk
from headwater.state import open_writer
from headwater.stream import Chunk


@pytest.mark.parametrize("log_format", [1, 2])
def test_spilled_chunks_count_as_flushed_buffer(tmp_path: Path, log_format: int) -> None:
    with open_writer(tmp_path / "store") as store:
        instance = Instance.open(store, 1, log_format=log_format, max_rows=15)
        for _ in range(3):
            instance.writer.write_chunk(random_chunk(random.Random(1)))
        instance.flush(2)
        counters = instance.writer.store_state.counters
        assert (counters.flushed_buffer.rows, counters.flushed_buffer.bytes) == (0, 0)
        chunks, _ = instance.until_barrier()
        assert sum(chunk.num_rows for chunk in chunks) == 30
        assert counters.flushed_buffer.rows == 10
        assert 0 < counters.flushed_buffer.bytes < counters.storage_write_size


def test_one_range_over_a_change_of_the_schema(tmp_path: Path) -> None:
    wider = SCHEMA.append(pa.field("added", pa.int32()))
    rows = pa.RecordBatch.from_arrays([pa.array([7]), pa.array(["seven"]), pa.array([1], pa.int32())], schema=wider)
    with open_writer(tmp_path / "store") as store:
        instance = Instance.open(store, 1)
        instance.writer.write_chunk(random_chunk(random.Random(1), 30))
        ended = instance.writer.epoch
        instance.writer.flush_current_epoch(epoch(2), FlushOptions(schema_change=wider)).finish()
        instance.factory.sealer.seal(ended)
        instance.writer.write_chunk(Chunk.inserts(rows, ["id"]))
        instance.flush(3)
        with store.snapshot() as view:
            first, second = LogView.open(view, "orders").read_range(0, epoch(2))
        assert first.num_rows == 30
        assert "added" not in first.schema.names
        assert second.select(wider.names).equals(rows)
