"""A consumer in another process than the writer: a Spark driver, a sink of its own.

The writer alone writes the store, so a remote consumer keeps its progress in a small store of its own, beside it
(``<store>/consumers/<log>/<consumer>``), of which it is the one fenced writer. The log's writer finds these stores at
each barrier, and forgets only what all consumers have delivered.

    consumer = LogConsumer.open(location, "public.orders", "mirror")
    while True:
        after, upto = consumer.wait(timeout=1.0)
        for batch in consumer.read(after, upto):
            deliver(batch)
        consumer.commit(upto)        # durable: these epochs do not come again
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from headwater import failpoints
from headwater.log_store.consumers import Consumer
from headwater.log_store.errors import EpochGone, InvalidOffset, RetentionMiss
from headwater.log_store.log_view import LogView
from headwater.log_store.offset import StoragePlace
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.state import (
    Catalog,
    Field,
    FieldType,
    StateReader,
    StateStore,
    TableSchema,
    WriteBatch,
    beside,
    open_reader,
    open_writer,
    stores_beside,
)
from headwater.state.errors import StateError
from headwater.stream import Epoch, EpochClock, VnodeBitmap

COMMIT = failpoints.register("log_store.consumer_before_commit")

PROGRESS = TableSchema(
    "consumer_progress",
    1,
    key=(Field("consumer", FieldType.TEXT),),
    value=(Field("progress", FieldType.JSON), Field("started", FieldType.UINT)),
)
_FOLDER = "consumers"


class LogConsumer:
    """One named consumer of one log. Only one process can be it at a time."""

    def __init__(self, log: str, name: str, source: StateReader, own: StateStore, start: Epoch | None) -> None:
        self.log = log
        self.name = name
        self._source = source
        self._own = own
        self._clock = EpochClock(lambda: time.time_ns() // 1_000_000, own.committed_epoch())
        batch = WriteBatch()
        with own.snapshot() as view, source.snapshot() as seen:
            self._table = Catalog.load(view).open_or_create(PROGRESS, batch)
            row = self._table.get(view, 0, (name,))
            shown = LogView.open(seen, log)
            self.vnode_count = shown.log.vnode_count
            if row is not None:
                self._progress = LogStoreVnodeProgress.from_json(row[0])
                self._started = Epoch(row[1])
                return
            gone = shown.bounds().gone
            if start is not None and start < gone:
                raise EpochGone(
                    f"Log {log!r} holds epochs after {gone} only; consumer {name!r} cannot start after {start}.",
                    gone,
                    next_step=f"Start it at epoch {gone}.",
                )
        self._started = gone if start is None else start
        self._progress = LogStoreVnodeProgress(self.vnode_count)
        if self._started:
            self._progress.apply_aligned(VnodeBitmap.full(self.vnode_count), self._started)
        self._write(batch)

    @classmethod
    def open(
        cls, location: str, log: str, name: str, *, start: Epoch | None = None, takeover: bool = False
    ) -> LogConsumer:
        """The consumer *name* of *log* in the store at *location*; a new one begins after epoch *start*.

        :raises StoreOwned: another process is this consumer. :raises LogNotFound: no such log.
        :raises EpochGone: *start* is before what the log holds.
        """
        source = open_reader(location)
        try:
            with source.snapshot() as view:
                LogView.open(view, log)  # before anything is made: a name that does not exist leaves no trace
            own = open_writer(beside(location, _FOLDER, log, name), takeover=takeover)
            try:
                return cls(log, name, source, own, start)
            except BaseException:
                own.close()
                raise
        except BaseException:
            source.close()
            raise

    @property
    def progress(self) -> LogStoreVnodeProgress:
        return self._progress

    def delivered(self) -> Epoch:
        """The newest epoch that was delivered for all vnodes."""
        return Consumer(self.log, self.name, self._progress, self._started).delivered()

    def wait(self, timeout: float) -> tuple[Epoch, Epoch]:
        """The epochs ``(after, upto]`` that are sealed and not delivered; empty when none came in *timeout* seconds.

        :raises RetentionMiss: retention dropped a part of them.
        """
        after = self.delivered()
        upto = self._source.wait_for_epoch(after, timeout)
        if upto is None:
            return after, after
        with self._source.snapshot() as view:
            bounds = LogView.open(view, self.log).bounds()
        if after < bounds.dropped:
            raise RetentionMiss(
                f"Retention dropped epochs of log {self.log!r} up to {bounds.dropped}, unread by {self.name!r}.",
                bounds.gone,
                next_step="Drop the consumer and start it with a new snapshot of the table.",
            )
        return after, upto

    def read(self, after: Epoch, upto: Epoch, vnodes: VnodeBitmap | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of ``(after, upto]``; what was delivered in part comes without that part's vnodes."""
        wanted = VnodeBitmap.full(self.vnode_count) if vnodes is None else vnodes
        with self._source.mapped_snapshot() as view:
            log = LogView.open(view, self.log)
            log.check_range(after, upto)
            for end in log.epochs(after, upto):
                done = [v for v, place in self._progress.places() if place >= StoragePlace(end.epoch)]
                open_vnodes = wanted - VnodeBitmap.of(done, self.vnode_count)
                yield from log.read_epoch(end, open_vnodes)

    def commit(self, upto: Epoch, vnodes: VnodeBitmap | None = None) -> None:
        """The epochs up to *upto* are delivered, for *vnodes* or all. Durable on return.

        :raises InvalidOffset: *upto* is not sealed.
        """
        if upto > self._source.committed_epoch():
            raise InvalidOffset(f"Epoch {upto} is not sealed; it cannot be delivered.")
        self._progress.apply_ended(VnodeBitmap.full(self.vnode_count) if vnodes is None else vnodes, upto)
        self._write(WriteBatch())

    def rewind(self, epoch: Epoch) -> None:
        """Deliver again what came after *epoch*. :raises EpochGone: the log no longer holds it."""
        with self._source.snapshot() as view:
            LogView.open(view, self.log).check_range(epoch, self._source.committed_epoch())
        self._progress = LogStoreVnodeProgress.aligned(VnodeBitmap.full(self.vnode_count), StoragePlace(epoch))
        self._write(WriteBatch())

    def _write(self, batch: WriteBatch) -> None:
        self._table.put(batch, 0, (self.name,), (self._progress.to_json(), int(self._started)))
        failpoints.hit(COMMIT)
        self._own.seal(self._clock.next(), batch)

    def close(self) -> None:
        self._own.close()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RemoteConsumers:
    """The remote consumers of a store, as others see them."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._readers: dict[tuple[str, str], StateReader] = {}

    def all(self) -> list[Consumer]:
        """Every remote consumer, with its progress of this moment."""
        found: list[Consumer] = []
        for log, name in stores_beside(self._location, _FOLDER, 2):
            consumer = self._read(log, name)
            if consumer is not None:
                found.append(consumer)
        return found

    def _read(self, log: str, name: str) -> Consumer | None:
        try:
            reader = self._readers.get((log, name))
            if reader is None:
                reader = self._readers[log, name] = open_reader(beside(self._location, _FOLDER, log, name))
            with reader.snapshot() as view:
                row: Any = Catalog.load(view).open(PROGRESS).get(view, 0, (name,))
        except StateError:
            return None  # being made this instant: it starts at what the log holds then
        if row is None:
            return None
        return Consumer(log, name, LogStoreVnodeProgress.from_json(row[0]), Epoch(row[1]))

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
