"""Forgets what all consumers of a log have delivered: once per seal for all logs of a store, in two steps.

Part of every seal: progress of the consumers of this process becomes durable, then each log forgets and announces as
:mod:`headwater.log_store.bounds` tells. A log without consumers forgets only what an unforced retention asks for.
"""

from __future__ import annotations

from headwater.log_store.consumers import ConsumerBook
from headwater.log_store.log import LogRegistry
from headwater.log_store.remote_consumers import RemoteConsumers
from headwater.state import WriteBatch
from headwater.stream import Epoch


class Truncation:
    """The truncation of all logs of a store, in its writer's process."""

    def __init__(self, registry: LogRegistry, book: ConsumerBook, remote: RemoteConsumers) -> None:
        self.registry = registry
        self.book = book
        self.remote = remote
        self._unwanted: dict[str, Epoch] = {}

    def forget_unneeded(self, log: str, upto: Epoch) -> None:
        """Forget the epochs of *log* up to *upto*, as long as it has no consumer."""
        self._unwanted[log] = max(upto, self._unwanted.get(log, Epoch(0)))

    def add_to(self, batch: WriteBatch) -> None:
        self.book.write(batch)
        delivered: dict[str, Epoch] = {}
        for consumer in (*self.book, *self.remote.all()):
            done = consumer.delivered()
            delivered[consumer.log] = min(done, delivered.get(consumer.log, done))
        for name, upto in (self._unwanted | delivered).items():
            log = self.registry.find(name)
            if log is not None:
                self.book.bounds.truncate(batch, log, upto)

    def sealed(self) -> None:
        self.book.bounds.sealed()
