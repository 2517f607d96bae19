"""Figures of the logs of a store at this moment, with their metric names; no registry, no thread, no state of its own.

From any process (a location): what the store holds and how far each consumer is. In the process that writes (a
factory) also what its writers and readers did since they were opened, and their live buffers. Units are in the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from headwater.log_store.link import DELAY_BUCKETS, ReaderFigures
from headwater.log_store.state import now_ms
from headwater.log_store.status import ConsumerStatus, LogStatus, log_status
from headwater.state import open_reader
from headwater.system.metrics import Labels, Metric, describe

if TYPE_CHECKING:
    from headwater.log_store.factory import KvLogStoreFactory
    from headwater.log_store.writer import KvLogStoreWriter


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
        for writer in source.live_writers(name):
            found += _of_writer(name, writer)
    return found


def _of_log(log: LogStatus, vnodes: bool) -> Iterator[Metric]:
    labels = (("log", log.name),)
    yield Metric("log_store_first_held_epoch", labels, float(log.oldest or 0))
    yield Metric("log_store_latest_write_epoch", labels, float(log.newest or log.gone))
    yield Metric("log_store_truncated_epoch", labels, float(log.gone))
    yield Metric("log_store_oldest_epoch_age_seconds", labels, log.oldest_age_seconds)
    yield Metric("log_store_backlog_epochs", labels, log.epochs)
    yield Metric("log_store_backlog_rows", labels, log.rows)
    yield Metric("log_store_backlog_bytes", labels, log.bytes)
    for consumer in log.consumers:
        yield from _of_consumer(log, consumer, vnodes)


def _of_consumer(log: LogStatus, consumer: ConsumerStatus, vnodes: bool) -> Iterator[Metric]:
    labels = (("log", log.name), ("consumer", consumer.name))
    yield Metric("log_store_delivered_epoch", labels, float(consumer.delivered))
    yield Metric("log_store_lag_epochs", labels, consumer.lag_epochs)
    yield Metric("log_store_lag_rows", labels, consumer.lag_rows)
    yield Metric("log_store_lag_bytes", labels, consumer.lag_bytes)
    yield Metric("log_store_lag_seconds", labels, consumer.lag_seconds)
    yield Metric("log_store_holds_back", labels, float(consumer.holds_back))
    yield Metric("log_store_consumer_unreadable", labels, float(consumer.unreadable))
    yield Metric("log_store_retention_missed", labels, float(consumer.missed))
    if vnodes:
        for vnode, place in consumer.progress.places():
            yield Metric("log_store_vnode_epoch", (*labels, ("vnode", str(vnode))), float(place.epoch))


def _of_writer(log: str, writer: KvLogStoreWriter) -> Iterator[Metric]:
    labels: Labels = (("log", log), ("first_vnode", str(next(iter(writer.store_state.vnodes)))))
    counters = writer.store_state.counters
    yield Metric("log_store_first_write_epoch", labels, float(writer.first_epoch))
    yield Metric("log_store_last_ended_epoch", labels, float(writer.last_epoch))
    yield Metric("log_store_first_unsealed_epoch", labels, float(writer.epoch))
    yield Metric("log_store_write_rows", labels, counters.write_rows)
    yield Metric("kv_log_store_storage_write_count", labels, counters.storage_write_count)
    yield Metric("kv_log_store_storage_write_size", labels, counters.storage_write_size)
    yield Metric("log_store_drain_count", labels, counters.drain_count)
    yield Metric("log_store_drain_seconds", labels, counters.drain_seconds)
    if writer.buffer is None or writer.link is None:
        return
    yield Metric("log_store_read_rows", labels, counters.read_rows)
    kinds = (("persistent_log", counters.persistent_log), ("flushed_buffer", counters.flushed_buffer))
    for kind, read in kinds:
        yield Metric("kv_log_store_storage_read_count", (*labels, ("read_type", kind)), read.rows)
        yield Metric("kv_log_store_storage_read_size", (*labels, ("read_type", kind)), read.bytes)
    yield from _of_reader(labels, writer.link.figures)
    figures = writer.buffer.statistics()
    yield Metric("kv_log_store_buffer_unconsumed_item_count", labels, figures.unconsumed_items)
    yield Metric("kv_log_store_buffer_unconsumed_row_count", labels, figures.unconsumed_rows)
    yield Metric("kv_log_store_buffer_unconsumed_epoch_count", labels, figures.unconsumed_epochs)
    yield Metric("kv_log_store_buffer_unconsumed_min_epoch", labels, float(figures.oldest_unconsumed_epoch or 0))
    yield Metric("kv_log_store_buffer_row_count", labels, figures.rows)
    yield Metric("kv_log_store_buffer_spilled_row_count", labels, figures.spilled_rows)
    yield Metric("kv_log_store_buffer_memory_bytes", labels, figures.bytes_held)


def _of_reader(labels: Labels, figures: ReaderFigures) -> Iterator[Metric]:
    yield Metric("log_store_latest_read_epoch", labels, float(figures.latest_epoch))
    yield Metric("log_store_reader_wait_new_future_duration_ns", labels, figures.busy_ns)
    sums = list(accumulate(figures.delays))
    yield Metric("kv_log_store_rewind_count", labels, sums[-1])
    for bound, count in zip((*map(str, DELAY_BUCKETS), "+Inf"), sums, strict=True):
        yield Metric("kv_log_store_rewind_delay_bucket", (*labels, ("le", bound)), count)
    yield Metric("kv_log_store_rewind_delay_sum", labels, figures.delay_seconds)
    yield Metric("kv_log_store_rewind_delay_count", labels, sums[-1])


_HELP = {
    "log_store_first_held_epoch": "The oldest epoch that the log holds.",
    "log_store_latest_write_epoch": "The newest epoch that is sealed.",
    "log_store_truncated_epoch": "The newest epoch that the log has forgotten.",
    "log_store_oldest_epoch_age_seconds": "Age in seconds of the oldest epoch that is held.",
    "log_store_backlog_epochs": "Epochs that the log holds.",
    "log_store_backlog_rows": "Rows that the log holds.",
    "log_store_backlog_bytes": "Bytes that the log holds.",
    "log_store_delivered_epoch": "The newest epoch that was delivered for all vnodes.",
    "log_store_lag_epochs": "Epochs that were not delivered yet.",
    "log_store_lag_rows": "Rows that were not delivered yet.",
    "log_store_lag_bytes": "Bytes that were not delivered yet.",
    "log_store_lag_seconds": "Age in seconds of the oldest epoch that was not delivered.",
    "log_store_holds_back": "Whether this consumer keeps the log from forgetting.",
    "log_store_consumer_unreadable": "Whether the progress of this consumer cannot be read: it holds everything.",
    "log_store_retention_missed": "Whether retention dropped epochs that this consumer had not read.",
    "log_store_vnode_epoch": "The epoch up to which a vnode was delivered.",
    "log_store_first_write_epoch": "The first epoch of this writer.",
    "log_store_last_ended_epoch": "The newest epoch that this writer ended.",
    "log_store_first_unsealed_epoch": "The epoch that is being written.",
    "log_store_write_rows": "Rows that were written.",
    "kv_log_store_storage_write_count": "Rows that were encoded for the store.",
    "kv_log_store_storage_write_size": "Bytes that were encoded for the store.",
    "log_store_drain_count": "Barriers that waited for the reader.",
    "log_store_drain_seconds": "Time that they blocked the writer.",
    "log_store_read_rows": "Rows that were read.",
    "kv_log_store_storage_read_count": "Rows that were read from the store.",
    "kv_log_store_storage_read_size": "Stored bytes that were read for them.",
    "log_store_latest_read_epoch": "The epoch of the newest item that was read.",
    "log_store_reader_wait_new_future_duration_ns": "Time that the reader waited for deliveries.",
    "kv_log_store_rewind_count": "Deliveries that were tried again.",
    "kv_log_store_rewind_delay": "Seconds waited before a delivery was tried again.",
    "kv_log_store_buffer_unconsumed_item_count": "Items in the live buffer that were not read.",
    "kv_log_store_buffer_unconsumed_row_count": "Rows in the live buffer that were not read, spilled ones too.",
    "kv_log_store_buffer_unconsumed_epoch_count": "Epochs in the live buffer that were not read as a whole.",
    "kv_log_store_buffer_unconsumed_min_epoch": "The oldest of them.",
    "kv_log_store_buffer_row_count": "Rows in memory, read or not.",
    "kv_log_store_buffer_spilled_row_count": "Rows that the buffer refers to in the store.",
    "kv_log_store_buffer_memory_bytes": "Bytes in memory, read or not.",
}
describe(_HELP)
