"""Figures with their metric names."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.store.log_store.tools import Table

from headwater.log_store import DrainTimeout, FlushOptions
from headwater.log_store.metrics import Metric, log_metrics
from headwater.log_store.remote import LogConsumer
from headwater.log_store.testing import Instance, epoch, random_chunk
from headwater.state import open_writer


def by_name(metrics: list[Metric]) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics}


def test_backlog_age_and_lag_from_any_process(tmp_path: Path) -> None:
    table = Table(str(tmp_path / "store"))
    for _ in range(3):
        table.write()
    with LogConsumer.open(table.location, "orders", "mirror") as consumer:
        consumer.commit(epoch(1))
    found = log_metrics(table.location, clock=lambda: 1_010_000)
    figures = by_name(found)
    assert figures["log_store_backlog_rows"] == 240
    assert figures["log_store_backlog_bytes"] > figures["log_store_lag_bytes"] > 0
    assert figures["log_store_oldest_epoch_age_seconds"] == 9
    assert figures["log_store_lag_seconds"] == 8
    assert figures["log_store_lag_epochs"] == 2
    assert figures["log_store_latest_write_epoch"] == epoch(3)
    assert figures["log_store_latest_read_epoch"] == epoch(1)
    assert {("log", "orders")} <= {label for metric in found for label in metric.labels}
    assert ("consumer", "mirror") in {label for metric in found for label in metric.labels}
    assert sum(metric.name == "log_store_vnode_epoch" for metric in log_metrics(table.location, vnodes=True)) == 256
    table.close()


def test_the_live_buffer_in_the_writers_process(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store") as store:
        instance = Instance.open(store, 1, max_rows=15)
        instance.flush(2)
        for _ in range(3):
            instance.writer.write_chunk(random_chunk(random.Random(1)))
        figures = by_name(log_metrics(instance.factory))
        assert figures["kv_log_store_buffer_row_count"] == 20
        assert figures["kv_log_store_buffer_spilled_row_count"] == 10
        assert figures["kv_log_store_buffer_memory_bytes"] > 0
        assert figures["kv_log_store_buffer_unconsumed_min_epoch"] == epoch(1)
        assert figures["log_store_first_unsealed_epoch"] == epoch(2)


def test_what_writers_and_readers_did(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store") as store:
        instance = Instance.open(store, 1, max_rows=0)
        instance.writer.write_chunk(random_chunk(random.Random(1), 30))
        instance.flush(2)
        instance.next_chunk()
        instance.reader.rewind()
        instance.reader.start_from()
        instance.next_chunk()
        with pytest.raises(DrainTimeout):
            instance.writer.flush_current_epoch(epoch(3), FlushOptions(drain_seconds=0.01))
        figures = by_name(log_metrics(instance.factory))
        assert figures["log_store_write_rows"] == 30
        assert figures["kv_log_store_storage_write_count"] == 30
        assert figures["kv_log_store_storage_write_size"] > 0
        assert figures["log_store_read_rows"] == figures["kv_log_store_spilled_read_rows"] == 60
        assert figures["kv_log_store_rewind_count"] == 1
        assert figures["log_store_drain_count"] == 1
        assert figures["log_store_drain_seconds"] > 0
