"""What a log has forgotten, and what it is about to forget: once per seal for all logs of a store.

Epochs are forgotten in two steps, so that a consumer can come at any time. A seal *announces* the epoch that every
consumer has delivered; a later seal deletes up to it, if the consumers that the writer then finds have delivered it,
too. A consumer first makes itself known and then starts after the newest announcement: a writer that had not seen it
deletes up to that epoch at most, a writer that has seen it deletes nothing that it needs.

========  =======================================================  ===================================================
step      writer, at a seal (none other is under way)              consumer
========  =======================================================  ===================================================
1         looks at all consumers: *d*, what they all delivered     makes itself known, durably; it holds everything
2         deletes up to ``min(d, announced in a sealed epoch)``    reads *announced* from the newest snapshot
3         announces ``max(d, gone)``                               starts after it; that is durable before it reads
========  =======================================================  ===================================================

A log without consumers forgets only what a retention asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.log_store.consumers import Consumers
from headwater.log_store.log import Log, LogRegistry
from headwater.log_store.log_events import LogEvents
from headwater.log_store.serde import barriers_from, chunks_from, rows_from
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch
from headwater.stream import Epoch

BOUNDS = TableSchema(
    "log_bounds",
    1,
    key=(Field("log", FieldType.TEXT),),
    value=(Field("gone", FieldType.UINT), Field("dropped", FieldType.UINT)),
)
ANNOUNCED = TableSchema(
    "log_announced",
    1,
    key=(Field("log", FieldType.TEXT),),
    value=(Field("epoch", FieldType.UINT),),
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The newest epoch that is gone, and the newest that went undelivered, by retention."""

    gone: Epoch
    dropped: Epoch


NOTHING = Bounds(Epoch(0), Epoch(0))


def announced(view: Snapshot, log: str) -> Epoch:
    """The epoch after which a consumer that is known by now may start: nothing after it goes without its word."""
    catalog = Catalog.load(view)
    found = [catalog.open(table).get(view, 0, (log,)) for table in (BOUNDS, ANNOUNCED) if table.name in catalog.names()]
    return Epoch(max((row[0] for row in found if row is not None), default=0))


class Truncation:
    """The truncation of all logs of a store, in its writer's process; part of every seal.

    :ivar registry: the logs. :ivar consumers: all that read them. :ivar events: what was noted beside their rows.
    """

    def __init__(
        self, catalog: Catalog, view: Snapshot, batch: WriteBatch, registry: LogRegistry, consumers: Consumers
    ) -> None:
        self.registry, self.consumers = registry, consumers
        self._bounds: StateTable = catalog.open_or_create(BOUNDS, batch)
        self._announced: StateTable = catalog.open_or_create(ANNOUNCED, batch)
        self.events = LogEvents(catalog, batch)
        self._now = {log: Bounds(Epoch(gone), Epoch(dropped)) for (log,), (gone, dropped) in self._bounds.scan(view, 0)}
        self._sealed = {log: Epoch(epoch) for (log,), (epoch,) in self._announced.scan(view, 0)}
        self._unsealed: dict[str, Epoch] = {}
        self._unwanted: dict[str, Epoch] = {}

    def gone(self, log: str) -> Epoch:
        """The newest epoch that the next seal leaves forgotten."""
        return self._now.get(log, NOTHING).gone

    def forget_unneeded(self, log: str, upto: Epoch) -> None:
        """Forget the epochs of *log* up to *upto*, as long as it has no consumer."""
        self._unwanted[log] = max(upto, self._unwanted.get(log, Epoch(0)))

    def drop(self, batch: WriteBatch, log: Log, upto: Epoch) -> None:
        """Forget epochs that not every consumer has delivered: the read of one that missed some fails."""
        self._forget(batch, log, upto, dropped=upto)

    def add_to(self, batch: WriteBatch) -> None:
        delivered: dict[str, Epoch] = {}
        for consumer in self.consumers.all():
            done = consumer.delivered()
            delivered[consumer.log] = min(done, delivered.get(consumer.log, done))
        for name, upto in (self._unwanted | delivered).items():
            log = self.registry.find(name)
            if log is not None:
                self._truncate(batch, log, upto)

    def sealed(self) -> None:
        """What was announced is durable: from now on it may be deleted."""
        self._sealed.update(self._unsealed)
        self._unsealed.clear()

    def _truncate(self, batch: WriteBatch, log: Log, delivered: Epoch) -> None:
        """Forget what was announced and *delivered*, and announce what was delivered since."""
        self._forget(batch, log, min(delivered, self._sealed.get(log.name, Epoch(0))), dropped=None)
        following = max(delivered, self.gone(log.name))
        known = self._unsealed.get(log.name, self._sealed.get(log.name, Epoch(0)))
        if following != known:
            self._unsealed[log.name] = following
            self._announced.put(batch, 0, (log.name,), (int(following),))

    def _forget(self, batch: WriteBatch, log: Log, upto: Epoch, dropped: Epoch | None) -> None:
        gone = self.gone(log.name)
        if upto <= gone:
            return
        number = log.number
        batch.delete_range(chunks_from(number), chunks_from(number, upto + 1))
        batch.delete_range(barriers_from(number), barriers_from(number, upto + 1))
        if log.may_hold_rows:
            for vnode in range(log.vnode_count):
                batch.delete_range(rows_from(number, vnode, gone + 1), rows_from(number, vnode, upto + 1))
        self.events.forget(batch, log.name, upto)
        bounds = Bounds(upto, dropped or self._now.get(log.name, NOTHING).dropped)
        self._now[log.name] = bounds
        self._bounds.put(batch, 0, (log.name,), (int(bounds.gone), int(bounds.dropped)))
