"""Figures of the synced logs of this process, with their metric names."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.log_store.counters import ReadCounters
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.metrics import Metric
from headwater.log_store.synced import SyncedLogStore


def synced_metrics(factory: KvLogStoreFactory) -> list[Metric]:
    """The metrics of the live synced logs of *factory*."""
    stores = sorted(factory.synced.live_stores(), key=lambda store: (store.log.state.log.name, _first_vnode(store)))
    return [metric for store in stores for metric in _of_store(store)]


def _first_vnode(store: SyncedLogStore) -> int:
    return next(iter(store.log.state.vnodes))


def _of_store(store: SyncedLogStore) -> Iterator[Metric]:
    labels = (("log", store.log.state.log.name), ("owner", store.log.owner), ("first_vnode", str(_first_vnode(store))))
    counters, written, held = store.log.counters, store.log.state.counters, store.statistics()
    for state, count in (("clean", counters.clean), ("dirty", counters.dirty)):
        yield Metric("sync_kv_log_store_state", (*labels, ("state", state)), count)
    yield Metric("sync_kv_log_store_wait_next_poll_ns", labels, counters.wait_next_poll_ns)
    yield Metric("sync_kv_log_store_write_pause_duration_ns", labels, counters.write_pause_ns)
    yield Metric("sync_kv_log_store_storage_write_count", labels, written.storage_write_count)
    yield Metric("sync_kv_log_store_storage_write_size", labels, written.storage_write_size)
    parts = (counters.buffer, written.persistent_log, written.flushed_buffer)
    total = ReadCounters(sum(part.rows for part in parts), sum(part.bytes for part in parts))
    kinds = ("buffer", "persistent_log", "flushed_buffer", "total")
    for kind, read in zip(kinds, (*parts, total), strict=True):
        yield Metric("sync_kv_log_store_read_count", (*labels, ("type", kind)), read.rows)
        yield Metric("sync_kv_log_store_read_size", (*labels, ("type", kind)), read.bytes)
    yield Metric("sync_kv_log_store_buffer_unconsumed_item_count", labels, held.items)
    yield Metric("sync_kv_log_store_buffer_unconsumed_row_count", labels, held.rows + held.spilled_rows)
    yield Metric("sync_kv_log_store_buffer_unconsumed_epoch_count", labels, held.epochs)
    yield Metric("sync_kv_log_store_buffer_unconsumed_min_epoch", labels, float(held.oldest_epoch or 0))
    yield Metric("sync_kv_log_store_buffer_memory_bytes", labels, held.bytes_held)
