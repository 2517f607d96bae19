"""Figures of the logs of a store at this moment, with their metric names; no registry, no thread, no state of its own.

From any process: what the store holds and how far each consumer is. Units are in the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headwater.log_store.state import now_ms
from headwater.log_store.status import ConsumerStatus, LogStatus, log_status
from headwater.state import open_reader
from headwater.system.metrics import Metric, describe


def log_metrics(location: str, *, vnodes: bool = False, clock: Callable[[], int] = now_ms) -> list[Metric]:
    """The metrics of all logs.

    :param vnodes: also the progress of every vnode of every consumer: many series.
    :raises LogNotFound: the store holds no logs.
    """
    with open_reader(location) as store:
        return [metric for log in log_status(store, clock=clock) for metric in _of_log(log, vnodes)]


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
}
describe(_HELP)
