"""A consumer in another process than the writer: a Spark driver, a sink of its own.

The writer alone writes the store, so a remote consumer keeps its progress in a small store of its own, beside it
(``<store>/consumers/<log>/<consumer>``), of which it is the one fenced writer. The log's writer finds these stores at
each seal, and forgets only what all consumers have delivered.

    consumer = LogConsumer.open(location, "public.orders", "mirror")
    while True:
        after, upto = consumer.wait(timeout=1.0)
        for batch in consumer.read(after, upto):
            deliver(batch)
        consumer.commit(upto)        # durable: these epochs do not come again

Where a consumer starts, or goes back to, is settled in two steps; :mod:`headwater.log_store.bounds` tells why:

============  ======================================  ============================================================
state         its row                                 goes to
============  ======================================  ============================================================
coming        no place: it holds the whole log        ready, after what was announced, or a later epoch as told
ready         a place for each vnode                  going back
going back    the earlier place, and the one before   ready: there, or where it was when that is announced as gone
============  ======================================  ============================================================

A process that dies in between leaves the second step to the next one that is this consumer.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa

from headwater import failpoints
from headwater.log_store.bounds import announced
from headwater.log_store.consumers import CONSUMERS, SYNCED, Consumer, synced_refused
from headwater.log_store.errors import EpochGone, InvalidOffset, LogCorrupt
from headwater.log_store.log_view import LogView
from headwater.log_store.offset import StoragePlace
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.state import (
    Catalog,
    Field,
    FieldType,
    Snapshot,
    StateReader,
    StateStore,
    StateTable,
    TableSchema,
    WriteBatch,
    open_reader,
    stores_beside,
)
from headwater.state.beside import marks_beside, open_beside_reader, open_beside_writer
from headwater.state.errors import StateError, StoreNotFound, StoreUnavailable
from headwater.stream import DEFAULT_VNODE_COUNT, Epoch, EpochClock, VnodeBitmap

BEFORE_COMMIT = failpoints.register("log_store.consumer_before_commit")
AFTER_COMMIT = failpoints.register("log_store.consumer_after_commit")
COMING = failpoints.register("log_store.consumer_coming")
GOING_BACK = failpoints.register("log_store.consumer_going_back")

PROGRESS = TableSchema(
    "consumer_progress",
    2,
    key=(Field("consumer", FieldType.TEXT),),
    value=(
        Field("progress", FieldType.JSON),
        Field("started", FieldType.UINT),
        Field("before", FieldType.JSON, nullable=True),
    ),
)
_MIGRATIONS = {1: lambda values: (*values, None)}
_FOLDER = "consumers"
_TRIES = 5
_T = TypeVar("_T")


class LogConsumer:
    """One named consumer of one log. Only one process can be it at a time."""

    def __init__(self, log: str, name: str, source: StateReader, own: StateStore, start: Epoch | None) -> None:
        self.log = log
        self.name = name
        self._source = source
        self._own = own
        self._clock = EpochClock(lambda: time.time_ns() // 1_000_000, own.committed_epoch())
        self.vnode_count = self._look(lambda view: LogView.open(view, log).log.vnode_count)
        with own.snapshot() as view:
            self._table: StateTable = Catalog.load(view).open_or_create(PROGRESS, WriteBatch(), _MIGRATIONS)
            row: Any = self._table.get(view, 0, (name,))
        if row is None:
            self._started = Epoch(0)
            self._write(LogStoreVnodeProgress(self.vnode_count))
            failpoints.hit(COMING)
            self._start(start)
            return
        self._progress = LogStoreVnodeProgress.from_json(row[0])
        self._started = Epoch(row[1])
        if self._progress.kind == "none":
            self._start(start)
        elif row[2] is not None:
            with suppress(EpochGone):  # who asked for it is dead: it was too late, and nothing has changed
                self._go_back(LogStoreVnodeProgress.from_json(row[2]))

    @classmethod
    def open(
        cls, location: str, log: str, name: str, *, start: Epoch | None = None, takeover: bool = False
    ) -> LogConsumer:
        """The consumer *name* of *log* in the store at *location*; a new one begins after epoch *start*.

        :raises StoreOwned: another process is this consumer. :raises LogNotFound: no such log.
        :raises EpochGone: *start* is before what the log holds. :raises InvalidOffset: *start* is not sealed yet.
        :raises WrongCall: it is a synced log, which holds only what was not emitted.
        """
        source = open_reader(location)
        try:
            # Before anything is made: what is refused leaves no trace, and holds no epoch back.
            _looked(source, lambda view: _check_not_synced(view, LogView.open(view, log).log.name))
            if start is not None and (log, name) not in stores_beside(location, _FOLDER, 2):
                _check(log, name, start, *_looked(source, lambda view: (announced(view, log), view.epoch)))
            own = open_beside_writer(location, _FOLDER, log, name, takeover=takeover)
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

    @property
    def started(self) -> Epoch:
        """The epoch after which it began."""
        return self._started

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
        self._look(lambda view: LogView.open(view, self.log).check_not_dropped(after, self.name))
        return after, upto

    def read(self, after: Epoch, upto: Epoch, vnodes: VnodeBitmap | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of ``(after, upto]``; what was delivered in part comes without that part's vnodes.

        :raises StoreUnavailable: the store did not answer inside an epoch: read the range again.
        """
        wanted = VnodeBitmap.full(self.vnode_count) if vnodes is None else vnodes
        inside, tries = False, 0
        while True:
            try:
                with self._source.mapped_snapshot() as view:
                    log = LogView.open(view, self.log)
                    log.check_range(after, upto)
                    for end in log.epochs(after, upto):
                        done = [v for v, place in self._progress.places() if place >= StoragePlace(end.epoch)]
                        for batch in log.read_epoch(end, wanted - VnodeBitmap.of(done, self.vnode_count)):
                            inside = True
                            yield batch
                        after, inside = end.epoch, False
                return
            except StoreUnavailable:
                tries += 1
                if inside or tries == _TRIES:
                    raise

    def commit(self, upto: Epoch, vnodes: VnodeBitmap | None = None) -> None:
        """The epochs up to *upto* are delivered, for *vnodes* or all. Durable on return.

        :raises InvalidOffset: *upto* is not sealed.
        """
        if upto > self._source.committed_epoch():
            raise InvalidOffset(f"Epoch {upto} is not sealed; it cannot be delivered.")
        made = LogStoreVnodeProgress(self.vnode_count, dict(self._progress.places()))
        made.apply_ended(VnodeBitmap.full(self.vnode_count) if vnodes is None else vnodes, upto)
        self._write(made)

    def rewind(self, epoch: Epoch) -> None:
        """Deliver again what came after *epoch*. Durable on return.

        :raises EpochGone: the log no longer holds it, or is about to forget it; nothing has changed.
        :raises InvalidOffset: *epoch* is not sealed yet.
        """
        _check(self.log, self.name, epoch, *self._look(lambda view: (announced(view, self.log), view.epoch)))
        before = self._progress
        self._write(self._all_at(epoch), before)
        failpoints.hit(GOING_BACK)
        self._go_back(before)

    def drop(self) -> None:
        """Forget this consumer: the log waits for it no longer. Close it then."""
        batch = WriteBatch()
        self._table.delete(batch, 0, (self.name,))
        self._own.seal(self._clock.next(), batch)

    def _start(self, start: Epoch | None) -> None:
        """Begin after what a writer that does not know of this consumer may still forget."""
        found, sealed = self._look(lambda view: (announced(view, self.log), view.epoch))
        oldest = max(found, self._started)
        begin = oldest if start is None else start
        try:
            _check(self.log, self.name, begin, oldest, max(oldest, sealed))
        except BaseException:
            self.drop()
            raise
        self._started = begin
        self._write(self._all_at(begin))

    def _go_back(self, before: LogStoreVnodeProgress) -> None:
        """Stay at the earlier place if no writer that does not know of it can forget what comes after it."""
        oldest, wanted = self._look(lambda view: announced(view, self.log)), self.delivered()
        if wanted < oldest:
            self._write(before)
            raise _gone(self.log, self.name, wanted, oldest)
        self._write(self._progress)

    def _look(self, look: Callable[[Snapshot], _T]) -> _T:
        return _looked(self._source, look)

    def _all_at(self, epoch: Epoch) -> LogStoreVnodeProgress:
        return LogStoreVnodeProgress.aligned(VnodeBitmap.full(self.vnode_count), StoragePlace(epoch))

    def _write(self, progress: LogStoreVnodeProgress, before: LogStoreVnodeProgress | None = None) -> None:
        """Make *progress* durable; it counts only then."""
        batch = WriteBatch()
        values = (progress.to_json(), int(self._started), None if before is None else before.to_json())
        self._table.put(batch, 0, (self.name,), values)
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


def _check_not_synced(view: Snapshot, log: str) -> None:
    catalog = Catalog.load(view)
    if CONSUMERS.name in catalog.names() and catalog.open(CONSUMERS).get(view, 0, (log, SYNCED)) is not None:
        raise synced_refused(log)


def _looked(source: StateReader, look: Callable[[Snapshot], _T]) -> _T:
    """What *look* finds in the newest snapshot. One of an object store may have to be opened again."""
    for _ in range(_TRIES - 1):
        with suppress(StoreUnavailable), source.snapshot() as view:
            return look(view)
    with source.snapshot() as view:
        return look(view)


def _check(log: str, name: str, epoch: Epoch, oldest: Epoch, sealed: Epoch) -> None:
    if epoch < oldest:
        raise _gone(log, name, epoch, oldest)
    if epoch > sealed:
        raise InvalidOffset(f"Consumer {name!r} cannot start after epoch {epoch}: the newest sealed one is {sealed}.")


def _gone(log: str, name: str, epoch: Epoch, oldest: Epoch) -> EpochGone:
    return EpochGone(
        f"Log {log!r} keeps epochs after {oldest} only; consumer {name!r} cannot start after {epoch}.",
        oldest,
        next_step=f"Start it at epoch {oldest}.",
    )


@dataclass(slots=True)
class _Known:
    """A consumer as it was read last, its mark of just before, and its store if that is kept open."""

    mark: Hashable = None
    consumer: Consumer | None = None
    reader: StateReader | None = None
    table: StateTable | None = None


class RemoteConsumers:
    """The remote consumers of a store, as others see them. One that has not changed costs a look at its mark."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._known: dict[tuple[str, ...], _Known] = {}
        self._may_open = _stores_kept_open(location)

    def all(self) -> list[Consumer]:
        """Every remote consumer, with its progress of this moment."""
        marks = marks_beside(self._location, _FOLDER, 2)
        for names in self._known.keys() - marks.keys():
            self._close(self._known.pop(names))
        found = (self._look(names, mark) for names, mark in sorted(marks.items(), key=lambda item: item[0]))
        return [consumer for consumer in found if consumer is not None]

    def of(self, log: str) -> list[Consumer]:
        """Those of *log*."""
        return [consumer for consumer in self.all() if consumer.log == log]

    def _look(self, names: tuple[str, ...], mark: Hashable) -> Consumer | None:
        known = self._known.setdefault(names, _Known())
        if mark is not None and mark == known.mark:
            return known.consumer
        log, name = names
        try:
            row = self._row(known, log, name)
        except StoreNotFound:
            return None  # being made this instant: it starts after what is announced then
        except StateError:
            # It is there, but cannot be looked at now, and may have gone back: the whole log must stay.
            known.mark = None
            self._close(known)
            return _unreadable(log, name)
        known.mark = mark
        try:
            known.consumer = row and Consumer(log, name, LogStoreVnodeProgress.from_json(row[0]), Epoch(row[1]))
        except LogCorrupt:
            known.consumer = _unreadable(log, name)
        return known.consumer

    def _row(self, known: _Known, log: str, name: str) -> Any:
        reader = known.reader or open_beside_reader(self._location, _FOLDER, log, name)
        try:
            with reader.snapshot() as view:
                if known.table is None:
                    catalog = Catalog.load(view)
                    if PROGRESS.name not in catalog.names():
                        return None
                    known.table = catalog.open(PROGRESS, _MIGRATIONS)
                return known.table.get(view, 0, (name,))
        finally:
            if known.reader is None and self._may_open:
                known.reader = reader
                self._may_open -= 1
            elif known.reader is None:
                reader.close()
                known.table = None

    def _close(self, known: _Known) -> None:
        if known.reader is not None:
            known.reader.close()
            self._may_open += 1
        known.reader = known.table = None

    def close(self) -> None:
        for known in self._known.values():
            self._close(known)
        self._known.clear()


def _unreadable(log: str, name: str) -> Consumer:
    return Consumer(log, name, LogStoreVnodeProgress(DEFAULT_VNODE_COUNT), Epoch(0), unreadable=True)


def _stores_kept_open(location: str) -> int:
    """An eighth of the file descriptors, two for each; a reader of an object store never rests, so only a few."""
    return 32 if location.startswith("slatedb") else resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16
