"""Figures of the logs of a store at this moment, with their metric names; no registry, no thread, no state of its own.

From any process (a location): what the store holds and how far each consumer is. In the process that writes (a
factory) also what its writers and readers did since they were opened, and their live buffers. Units are in the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.state import now_ms
from headwater.log_store.status import ConsumerStatus, LogStatus, log_status
from headwater.state import open_reader

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure."""

    name: str
    labels: Labels
    value: float


def log_metrics(
    source: KvLogStoreFactory | str, *, vnodes: bool = False, clock: Callable[[], int] = now_ms
) -> list[Metric]:
    """The metrics of all logs.

    :param vnodes: also the progress of every vnode of every consumer: many series.
    :raises LogNotFound: the store holds no logs.
    """
    if isinstance(source, str):
        with open_reader(source) as store:
            return [metric for log in log_status(store, clock=clock) for metric in _of_log(log, vnodes)]
    found = [metric for log in log_status(source.store, clock=clock) for metric in _of_log(log, vnodes)]
    for name in source.registry.names():
        found += _of_writers(source, name)
    return found


def _of_log(log: LogStatus, vnodes: bool) -> Iterator[Metric]:
    labels = (("log", log.name),)
    yield Metric("log_store_first_held_epoch", labels, float(log.oldest or 0))
    yield Metric("log_store_latest_write_epoch", labels, float(log.newest or 0))
    yield Metric("log_store_truncated_epoch", labels, float(log.gone))
    yield Metric("log_store_oldest_epoch_age_seconds", labels, log.oldest_age_seconds)
    yield Metric("log_store_backlog_epochs", labels, log.epochs)
    yield Metric("log_store_backlog_rows", labels, log.rows)
    yield Metric("log_store_backlog_bytes", labels, log.bytes)
    for consumer in log.consumers:
        yield from _of_consumer(log, consumer, vnodes)


def _of_consumer(log: LogStatus, consumer: ConsumerStatus, vnodes: bool) -> Iterator[Metric]:
    labels = (("log", log.name), ("consumer", consumer.name))
    yield Metric("log_store_latest_read_epoch", labels, float(consumer.delivered))
    yield Metric("log_store_lag_epochs", labels, consumer.lag_epochs)
    yield Metric("log_store_lag_rows", labels, consumer.lag_rows)
    yield Metric("log_store_lag_bytes", labels, consumer.lag_bytes)
    yield Metric("log_store_lag_seconds", labels, consumer.lag_seconds)
    yield Metric("log_store_holds_back", labels, float(consumer.holds_back))
    yield Metric("log_store_retention_missed", labels, float(consumer.missed))
    if vnodes:
        for vnode, place in consumer.progress.places():
            yield Metric("log_store_vnode_epoch", (*labels, ("vnode", str(vnode))), float(place.epoch))


def _of_writers(factory: KvLogStoreFactory, log: str) -> Iterator[Metric]:
    for writer in factory.live_writers(log):
        labels = (("log", log), ("first_vnode", str(next(iter(writer.store_state.vnodes)))))
        counters = writer.store_state.counters
        yield Metric("log_store_write_rows", labels, counters.write_rows)
        yield Metric("kv_log_store_storage_write_count", labels, counters.storage_write_count)
        yield Metric("kv_log_store_storage_write_size", labels, counters.storage_write_size)
        yield Metric("log_store_drain_count", labels, counters.drain_count)
        yield Metric("log_store_drain_seconds", labels, counters.drain_seconds)
        if writer.buffer is None:
            continue
        yield Metric("log_store_read_rows", labels, counters.read_rows)
        yield Metric("kv_log_store_spilled_read_rows", labels, counters.spilled_read_rows)
        yield Metric("kv_log_store_rewind_count", labels, counters.rewind_count)
        yield Metric("kv_log_store_rewind_seconds", labels, counters.rewind_seconds)
        figures = writer.buffer.statistics()
        yield Metric("log_store_first_unsealed_epoch", labels, float(writer.epoch))
        yield Metric("kv_log_store_buffer_unconsumed_item_count", labels, figures.unconsumed_items)
        yield Metric("kv_log_store_buffer_unconsumed_min_epoch", labels, float(figures.oldest_unconsumed_epoch or 0))
        yield Metric("kv_log_store_buffer_row_count", labels, figures.rows)
        yield Metric("kv_log_store_buffer_spilled_row_count", labels, figures.spilled_rows)
        yield Metric("kv_log_store_buffer_memory_bytes", labels, figures.bytes_held)
