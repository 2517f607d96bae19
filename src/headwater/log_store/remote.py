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
from headwater.state.errors import StateError, StoreNotFound
from headwater.stream import DEFAULT_VNODE_COUNT, Epoch, EpochClock, VnodeBitmap

BEFORE_COMMIT = failpoints.register("log_store.consumer_before_commit")
AFTER_COMMIT = failpoints.register("log_store.consumer_after_commit")

PROGRESS = TableSchema(
    "consumer_progress",
    1,
    key=(Field("consumer", FieldType.TEXT),),
    value=(Field("progress", FieldType.JSON), Field("started", FieldType.UINT)),
)
SETTLE_SECONDS = 0.25
"""How long a new consumer waits for two seals before it begins: after them the writer has seen it."""

_FOLDER = "consumers"
_KEPT_OPEN = 32
"""Stores of consumers that stay open. Each maps a terabyte of addresses, and a process has 128 of them."""


class LogConsumer:
    """One named consumer of one log. Only one process can be it at a time."""

    def __init__(self, log: str, name: str, source: StateReader, own: StateStore, start: Epoch | None) -> None:
        self.log = log
        self.name = name
        self._source = source
        self._own = own
        self._is_new = False
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
                self._is_new = self._progress.kind == "none"
                return
            gone = shown.bounds().gone
            _check_start(log, name, start, gone, seen.epoch)
        self._is_new = start is None
        self._started = gone if start is None else start
        self._write(self._begin(), batch)
        if self._is_new:
            self._settle()

    def _settle(self) -> None:
        """Begin at what is held once the writer knows of this consumer.

        The writer looks for consumers at a barrier and forgets with the seal that follows: a seal that was under way
        when this one came may still forget what it saw as the oldest. So let that pass before anything is delivered.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        sealed = self._source.committed_epoch()
        for _ in range(2):
            found = self._source.wait_for_epoch(sealed, max(0.0, deadline - time.monotonic()))
            if found is None:
                break
            sealed = found
        with self._source.snapshot() as view:
            gone = LogView.open(view, self.log).bounds().gone
        if gone > self._started:
            self._started = gone
            self._write(self._begin(), WriteBatch())

    @classmethod
    def open(
        cls, location: str, log: str, name: str, *, start: Epoch | None = None, takeover: bool = False
    ) -> LogConsumer:
        """The consumer *name* of *log* in the store at *location*; a new one begins after epoch *start*.

        :raises StoreOwned: another process is this consumer. :raises LogNotFound: no such log.
        :raises EpochGone: *start* is before what the log holds. :raises InvalidOffset: *start* is not sealed yet.
        """
        source = open_reader(location)
        try:
            with source.snapshot() as view:
                # Before anything is made: what is refused leaves no trace, and holds no epoch back.
                bounds = LogView.open(view, log).bounds()
                if (log, name) not in stores_beside(location, _FOLDER, 2):
                    _check_start(log, name, start, bounds.gone, view.epoch)
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
        if self._is_new and bounds.dropped <= after < bounds.gone:
            # The writer looked for consumers just before this one was there: the oldest that is held is newer by now.
            after = self._started = bounds.gone
            self._write(self._begin(), WriteBatch())
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
        made = LogStoreVnodeProgress(self.vnode_count, dict(self._progress.places()))
        made.apply_ended(VnodeBitmap.full(self.vnode_count) if vnodes is None else vnodes, upto)
        self._write(made, WriteBatch())
        self._is_new = False

    def rewind(self, epoch: Epoch) -> None:
        """Deliver again what came after *epoch*. :raises EpochGone: the log no longer holds it."""
        with self._source.snapshot() as view:
            LogView.open(view, self.log).check_range(epoch, self._source.committed_epoch())
        full = VnodeBitmap.full(self.vnode_count)
        self._write(LogStoreVnodeProgress.aligned(full, StoragePlace(epoch)), WriteBatch())

    def drop(self) -> None:
        """Forget this consumer: the log waits for it no longer. Close it then."""
        batch = WriteBatch()
        self._table.delete(batch, 0, (self.name,))
        self._own.seal(self._clock.next(), batch)

    def _begin(self) -> LogStoreVnodeProgress:
        """The progress of a consumer that has read nothing yet: no place, unless it was told where to start."""
        if self._is_new:
            return LogStoreVnodeProgress(self.vnode_count)
        return LogStoreVnodeProgress.aligned(VnodeBitmap.full(self.vnode_count), StoragePlace(self._started))

    def _write(self, progress: LogStoreVnodeProgress, batch: WriteBatch) -> None:
        """Make *progress* durable; it counts only then."""
        self._table.put(batch, 0, (self.name,), (progress.to_json(), int(self._started)))
        failpoints.hit(BEFORE_COMMIT)
        self._own.seal(self._clock.next(), batch)
        self._progress = progress
        failpoints.hit(AFTER_COMMIT)

    def close(self) -> None:
        self._own.close()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_start(log: str, name: str, start: Epoch | None, gone: Epoch, sealed: Epoch) -> None:
    if start is not None and start < gone:
        raise EpochGone(
            f"Log {log!r} holds epochs after {gone} only; consumer {name!r} cannot start after {start}.",
            gone,
            next_step=f"Start it at epoch {gone}.",
        )
    if start is not None and start > sealed:
        raise InvalidOffset(f"Consumer {name!r} cannot start after epoch {start}: the newest sealed one is {sealed}.")


class RemoteConsumers:
    """The remote consumers of a store, as others see them."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._seen: dict[tuple[str, str], Consumer] = {}
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
            row = self._row(log, name)
        except StoreNotFound:
            return None  # being made this instant: it starts at what the log holds then
        except StateError:
            # It is there, but cannot be looked at now: what it has not delivered must stay.
            held = LogStoreVnodeProgress(DEFAULT_VNODE_COUNT)
            return self._seen.get((log, name), Consumer(log, name, held, Epoch(0)))
        if row is None:
            return None
        consumer = Consumer(log, name, LogStoreVnodeProgress.from_json(row[0]), Epoch(row[1]))
        self._seen[log, name] = consumer
        return consumer

    def _row(self, log: str, name: str) -> Any:
        reader = self._readers.get((log, name)) or open_reader(beside(self._location, _FOLDER, log, name))
        try:
            with reader.snapshot() as view:
                catalog = Catalog.load(view)
                known = PROGRESS.name in catalog.names()
                return catalog.open(PROGRESS).get(view, 0, (name,)) if known else None
        finally:
            if len(self._readers) < _KEPT_OPEN:
                self._readers[log, name] = reader
            elif (log, name) not in self._readers:
                reader.close()

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
