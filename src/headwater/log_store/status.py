"""What a log holds and how far its consumers are, as any process sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from headwater.log_store.consumers import Consumer, Consumers
from headwater.log_store.log import Log, LogRegistry
from headwater.log_store.log_view import EpochEnd, LogView
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.log_store.state import now_ms
from headwater.state import Snapshot, StateReader
from headwater.stream import Epoch


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """One consumer, and what it has not delivered yet.

    :ivar lag_seconds: how long ago the oldest epoch that it has not delivered was sealed.
    :ivar holds_back: it is the one that keeps the log from forgetting.
    :ivar missed: retention dropped epochs that it had not read.
    :ivar unreadable: its progress cannot be read: it holds the whole log.
    """

    name: str
    delivered: Epoch
    lag_epochs: int
    lag_rows: int
    lag_bytes: int
    lag_seconds: float
    holds_back: bool
    missed: bool
    progress: LogStoreVnodeProgress
    unreadable: bool


@dataclass(frozen=True, slots=True)
class LogStatus:
    """One log."""

    name: str
    format: int
    formats_held: tuple[int, ...]
    vnode_count: int
    schema_version: int
    epochs: int
    rows: int
    bytes: int
    oldest: Epoch | None
    newest: Epoch | None
    oldest_age_seconds: float
    gone: Epoch
    dropped: Epoch
    consumers: tuple[ConsumerStatus, ...]

    @property
    def held_back_by(self) -> str | None:
        """The consumer that keeps the log from forgetting."""
        return next((consumer.name for consumer in self.consumers if consumer.holds_back), None)


def log_status(store: StateReader, log: str | None = None, clock: Callable[[], int] = now_ms) -> list[LogStatus]:
    """The state of *log*, or of all logs of *store*.

    :raises LogNotFound: no such log, or none at all.
    """
    now = clock()
    with closing(Consumers(store.location)) as known:
        consumers = known.all()
    with store.snapshot() as view:
        registry = LogRegistry.load(view)
        names = registry.names() if log is None else [registry.get(log).name]
        return [_status(view, registry.get(name), [one for one in consumers if one.log == name], now) for name in names]


def _status(view: Snapshot, log: Log, known: Sequence[Consumer], now: int) -> LogStatus:
    shown = LogView(view, log)
    ends = list(shown.epochs())
    bounds = shown.bounds()
    slowest = min(known, key=lambda one: (one.delivered(), one.name), default=None)
    consumers = tuple(_consumer(consumer, ends, bounds.dropped, consumer is slowest, now) for consumer in known)
    formats = sorted({number for end in ends for number in end.formats.numbers})
    return LogStatus(
        log.name,
        log.format,
        tuple(formats),
        log.vnode_count,
        log.schema_version,
        len(ends),
        sum(end.rows for end in ends),
        sum(end.size for end in ends),
        ends[0].epoch if ends else None,
        ends[-1].epoch if ends else None,
        _age(ends, now),
        bounds.gone,
        bounds.dropped,
        consumers,
    )


def _consumer(consumer: Consumer, ends: list[EpochEnd], dropped: Epoch, slowest: bool, now: int) -> ConsumerStatus:
    delivered = consumer.delivered()
    left = [end for end in ends if end.epoch > delivered]
    return ConsumerStatus(
        consumer.name,
        delivered,
        len(left),
        sum(end.rows for end in left),
        sum(end.size for end in left),
        _age(left, now),
        slowest and bool(left),
        delivered < dropped,
        consumer.progress,
        consumer.unreadable,
    )


def _age(ends: list[EpochEnd], now: int) -> float:
    return max(0, now - ends[0].sealed_ms) / 1000 if ends else 0.0
