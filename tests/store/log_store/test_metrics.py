"""Figures with their metric names."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.store.log_store.tools import Table

from headwater.log_store import DrainTimeout, FlushOptions
from headwater.log_store.metrics import log_metrics
from headwater.log_store.remote import LogConsumer
from headwater.log_store.testing import Instance, epoch, random_chunk
from headwater.state import open_writer
from headwater.system.metrics import Metric, render


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
    assert figures["log_store_delivered_epoch"] == epoch(1)
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
        assert figures["kv_log_store_buffer_unconsumed_min_epoch"] == epoch(1), "the oldest one"
        assert figures["kv_log_store_buffer_unconsumed_row_count"] == 30
        assert figures["kv_log_store_buffer_unconsumed_epoch_count"] == 2, "the one that is written, too"
        assert figures["log_store_first_unsealed_epoch"] == epoch(2)
        assert figures["log_store_first_write_epoch"] == figures["log_store_last_ended_epoch"] == epoch(1)
        instance.until_barrier()
        instance.next_chunk()
        figures = by_name(log_metrics(instance.factory))
        assert figures["log_store_latest_read_epoch"] == epoch(2)
        assert figures["kv_log_store_buffer_unconsumed_row_count"] == 20
        assert figures["kv_log_store_buffer_unconsumed_epoch_count"] == 1
        instance.reader.rewind()
        instance.reader.start_from(epoch(1))
        instance.next_chunk()
        figures = by_name(log_metrics(instance.factory))
        assert figures["kv_log_store_buffer_unconsumed_row_count"] == 20
        assert figures["log_store_reader_wait_new_future_duration_ns"] > 0
        while instance.next() is not None:
            pass
        figures = by_name(log_metrics(instance.factory))
        assert figures["kv_log_store_buffer_unconsumed_row_count"] == 0
        assert figures["kv_log_store_buffer_unconsumed_epoch_count"] == 0


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
        assert figures["log_store_read_rows"] == 60
        reads = {m.labels[-1]: m.value for m in log_metrics(instance.factory) if "storage_read_count" in m.name}
        assert reads == {("read_type", "persistent_log"): 0, ("read_type", "flushed_buffer"): 60}
        assert figures["kv_log_store_rewind_count"] == 1
        assert figures["log_store_drain_count"] == 1
        assert figures["log_store_drain_seconds"] > 0


def test_delays_of_rewinds_are_counted_in_buckets(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store") as store:
        instance = Instance.open(store, 1)
        assert instance.writer.link is not None
        for delay in (0.2, 1.0, 1.1, 3.5, 128.0, 170.0):
            instance.writer.link.rewound(delay)
        instance.flush(2)
        found = log_metrics(instance.factory)
    buckets = {dict(m.labels)["le"]: m.value for m in found if m.name == "kv_log_store_rewind_delay_bucket"}
    bounds = ("1", "2", "4", "8", "16", "32", "64", "128", "+Inf")
    assert buckets == dict(zip(bounds, (2, 3, 4, 4, 4, 4, 4, 5, 6), strict=True))
    assert by_name(found)["kv_log_store_rewind_delay_sum"] == pytest.approx(303.8)
    assert by_name(found)["kv_log_store_rewind_count"] == 6


def test_what_is_rendered_for_prometheus_reads_back(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store") as store:
        instance = Instance.open(store, 1, consumer='a "quoted" \\ name\nof two lines')
        instance.writer.write_chunk(random_chunk(random.Random(1), 30))
        instance.flush(2)
        metrics = log_metrics(instance.factory, vnodes=True)
    families = list(text_string_to_metric_families(render(metrics)))
    assert len({family.name for family in families}) == len(families), "one family, one block"
    found = [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]
    assert sorted(found, key=repr) == sorted(((m.name, dict(sorted(m.labels)), m.value) for m in metrics), key=repr)
    assert all(family.documentation for family in families), "every family says what it is"
    kinds = {family.name: family.type for family in families}
    assert set(kinds.values()) == {"gauge", "histogram"}
    assert kinds["kv_log_store_rewind_delay"] == "histogram"
    buckets = [(m.name, m.value) for m in metrics if m.name.endswith("_bucket")]
    assert [(name, value) for name, _, value in found if name.endswith("_bucket")] == buckets


def test_totals_are_counters() -> None:
    text = render([Metric("capture_rows_total", (("log", "public.t"),), 30)])
    assert "# TYPE capture_rows_total counter" in text
    assert 'capture_rows_total{log="public.t"} 30.0' in text
