"""The consumers of a store's logs: who they are and how far each vnode is delivered to them.

One row of the state table ``log_consumers`` per log and consumer. Instances of a log report what their readers have
truncated; the row is written with the next seal. A log is forgotten up to the epoch that all its consumers have
delivered, for all vnodes (:mod:`headwater.log_store.truncation`); a log without consumers forgets nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakSet

from headwater.log_store.bounds import LogBounds
from headwater.log_store.errors import EpochGone, LogNotFound, RetentionMiss, WrongCall
from headwater.log_store.item import Done
from headwater.log_store.link import ReaderLink
from headwater.log_store.log import Log
from headwater.log_store.offset import StoragePlace
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch
from headwater.stream import Epoch, VnodeBitmap

CONSUMERS = TableSchema(
    "log_consumers",
    1,
    key=(Field("log", FieldType.TEXT), Field("consumer", FieldType.TEXT)),
    value=(Field("progress", FieldType.JSON), Field("started", FieldType.UINT)),
)


@dataclass(slots=True)
class Consumer:
    """One consumer of one log.

    :ivar unreadable: its progress cannot be read: it holds the whole log.
    """

    log: str
    name: str
    progress: LogStoreVnodeProgress
    started: Epoch
    changed: bool = False
    unreadable: bool = False

    def delivered(self) -> Epoch:
        """The newest epoch that all vnodes have delivered as a whole."""
        least = self.progress.minimum(VnodeBitmap.full(self.progress.vnode_count))
        if least is None:
            return self.started
        return least.epoch if least.seq is None else least.epoch.prev()


class ConsumerBook:
    """All consumers of one store, as its writer keeps them."""

    def __init__(self, catalog: Catalog, view: Snapshot, batch: WriteBatch) -> None:
        self._table: StateTable = catalog.open_or_create(CONSUMERS, batch)
        self.bounds = LogBounds(catalog, view, batch)
        self._consumers: dict[tuple[str, str], Consumer] = {}
        self._readers: dict[tuple[str, str], WeakSet[ReaderLink]] = {}
        for (log, name), (progress, started) in self._table.scan(view, 0):
            stored = LogStoreVnodeProgress.from_json(progress)
            self._consumers[log, name] = Consumer(log, name, stored, Epoch(started))

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._consumers.values())

    def of(self, log: str) -> list[Consumer]:
        return [consumer for (name, _), consumer in sorted(self._consumers.items()) if name == log]

    def gone(self, log: str) -> Epoch:
        """The newest epoch that the log has forgotten."""
        return self.bounds.of(log).gone

    def register(self, log: Log, name: str, start: Epoch | None = None) -> Consumer:
        """The consumer *name*; a new one starts after *start*, by default at the oldest epoch that is held.

        :raises EpochGone: *start* is before what the log still holds.
        :raises RetentionMiss: retention dropped what this consumer had not read.
        """
        gone, dropped = self.bounds.of(log.name).gone, self.bounds.of(log.name).dropped
        known = self._consumers.get((log.name, name))
        if known is not None:
            if known.delivered() < dropped:
                raise RetentionMiss(
                    f"Retention dropped epochs of log {log.name!r} up to {dropped}, unread by consumer {name!r}.",
                    gone,
                    next_step=f"Drop the consumer and start it again at epoch {gone} or with a new snapshot.",
                )
            return known
        begin = gone if start is None else start
        if begin < gone:
            raise EpochGone(
                f"Log {log.name!r} holds epochs after {gone} only; consumer {name!r} cannot start after {begin}.",
                gone,
                next_step=f"Start it at epoch {gone}.",
            )
        progress = LogStoreVnodeProgress(log.vnode_count)
        if begin:
            progress = LogStoreVnodeProgress.aligned(VnodeBitmap.full(log.vnode_count), StoragePlace(begin))
        made = Consumer(log.name, name, progress, begin, changed=True)
        self._consumers[log.name, name] = made
        return made

    def attach(self, log: str, link: ReaderLink) -> None:
        """A reader of this process delivers to the consumer that *link* names, until it is detached or forgotten."""
        self._readers.setdefault((log, link.consumer), WeakSet()).add(link)

    def detach(self, log: str, link: ReaderLink) -> None:
        self._readers[log, link.consumer].discard(link)

    def _known(self, log: str, name: str) -> Consumer:
        """A consumer that nobody is.

        :raises LogNotFound: no such consumer. :raises WrongCall: a reader of this process is it.
        """
        consumer = self._consumers.get((log, name))
        if consumer is None:
            raise LogNotFound(f"Log {log!r} has no consumer {name!r}.")
        live = len(self._readers.get((log, name), ()))
        if live:
            raise WrongCall(
                f"Consumer {name!r} of log {log!r} is read by {live} live reader{'s' * (live > 1)} of this process.",
                next_step="End its writers with a barrier that stops them first; to try a delivery again, use rewind() "
                "of the reader.",
            )
        return consumer

    def drop(self, batch: WriteBatch, log: str, name: str) -> None:
        """Forget a consumer. :raises LogNotFound: no such consumer. :raises WrongCall: a live reader is it."""
        self._known(log, name)
        del self._consumers[log, name]
        self._table.delete(batch, 0, (log, name))

    def rewind(self, log: Log, name: str, epoch: Epoch) -> None:
        """Send a consumer back to just after *epoch*.

        :raises LogNotFound: no such consumer. :raises EpochGone: the log no longer holds it.
        :raises WrongCall: a live reader is it; its next truncation would undo the rewind.
        """
        consumer = self._known(log.name, name)
        gone = self.gone(log.name)
        if epoch < gone:
            raise EpochGone(
                f"Log {log.name!r} no longer holds what comes after epoch {epoch}.",
                gone,
                next_step=f"Rewind to epoch {gone} or later.",
            )
        full = VnodeBitmap.full(log.vnode_count)
        consumer.progress = LogStoreVnodeProgress.aligned(full, StoragePlace(epoch))
        consumer.changed = True

    def apply(self, log: Log, name: str, done: list[Done], owned: VnodeBitmap) -> None:
        """Note what a reader has truncated; it speaks for its own vnodes only."""
        consumer = self._consumers[log.name, name]
        if done:
            # A copy, put in place as a whole: readers in other threads look at it, and an error leaves all as it was.
            made = LogStoreVnodeProgress(log.vnode_count, dict(consumer.progress.places()))
            for step in done:
                step.apply_to(made, owned)
            consumer.progress = made
            consumer.changed = True

    def write(self, batch: WriteBatch) -> None:
        """Add changed rows to *batch*."""
        for consumer in self._consumers.values():
            if consumer.changed:
                values = (consumer.progress.to_json(), int(consumer.started))
                self._table.put(batch, 0, (consumer.log, consumer.name), values)
                consumer.changed = False

    def drop_epochs(self, batch: WriteBatch, log: Log, upto: Epoch) -> None:
        """Retention: forget epochs that not every consumer has delivered."""
        self.bounds.drop(batch, log, upto)
