"""A consumer in another process than the writer: a Spark driver, a sink of its own.

The writer alone writes the store, so a remote consumer keeps its progress in a small store of its own, beside it
(:mod:`headwater.log_store.progress_book`), of which it is the one fenced writer. The log's writer finds these stores at
each seal, and forgets only what all consumers have delivered. Who consumes many logs is a
:class:`~headwater.log_store.group.ConsumerGroup`, whose progress in all of them is one store and one seal.

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

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

import pyarrow as pa

from headwater import failpoints
from headwater.log_store.bounds import announced
from headwater.log_store.consumers import Consumer
from headwater.log_store.errors import EpochGone, InvalidOffset
from headwater.log_store.log_view import LogView
from headwater.log_store.offset import StoragePlace
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.log_store.progress_book import ProgressBook, ProgressRow, is_known
from headwater.state import Snapshot, StateReader, open_reader
from headwater.state.errors import StoreUnavailable
from headwater.stream import Epoch, VnodeBitmap

COMING = failpoints.register("log_store.consumer_coming")
GOING_BACK = failpoints.register("log_store.consumer_going_back")

_TRIES = 5
_T = TypeVar("_T")


class LogConsumer:
    """One named consumer of one log. Only one process can be it at a time."""

    def __init__(
        self, log: str, name: str, source: StateReader, book: ProgressBook, start: Epoch | None, *, shared: bool = False
    ) -> None:
        self.log = log
        self.name = name
        self._source = source
        self._book = book
        self._shared = shared
        self.vnode_count = self._look(lambda view: LogView.open(view, log).log.vnode_count)
        row = book.get(log)
        if row is None:
            self._started = Epoch(0)
            self._write(LogStoreVnodeProgress(self.vnode_count))
            failpoints.hit(COMING)
            self._start(start)
            return
        self._progress = LogStoreVnodeProgress.from_json(row.progress)
        self._started = Epoch(row.started)
        if self._progress.kind == "none":
            self._start(start)
        elif row.before is not None:
            with suppress(EpochGone):  # who asked for it is dead: it was too late, and nothing has changed
                self._go_back(LogStoreVnodeProgress.from_json(row.before))

    @classmethod
    def open(
        cls, location: str, log: str, name: str, *, start: Epoch | None = None, takeover: bool = False
    ) -> LogConsumer:
        """The consumer *name* of *log* in the store at *location*; a new one begins after epoch *start*.

        :raises StoreOwned: another process is this consumer. :raises LogNotFound: no such log.
        :raises EpochGone: *start* is before what the log holds. :raises InvalidOffset: *start* is not sealed yet.

        One that is of a group is opened in the group's store.
        """
        source = open_reader(location)
        try:
            # Before anything is made: what is refused leaves no trace, and holds no epoch back.
            _looked(source, lambda view: LogView.open(view, log))
            if start is not None and not is_known(location, log, name):
                check_start(log, name, start, *_looked(source, lambda view: (announced(view, log), view.epoch)))
            book = ProgressBook.open(location, name, log, takeover=takeover)
            try:
                return cls(log, name, source, book, start)
            except BaseException:
                book.close()
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
        self._write(self.committing(upto, vnodes))

    def committing(self, upto: Epoch, vnodes: VnodeBitmap | None = None) -> LogStoreVnodeProgress:
        """The progress that :meth:`commit` makes durable.

        :raises InvalidOffset: *upto* is not sealed.
        """
        if upto > self._source.committed_epoch():
            raise InvalidOffset(f"Epoch {upto} is not sealed; it cannot be delivered.")
        made = LogStoreVnodeProgress(self.vnode_count, dict(self._progress.places()))
        made.apply_ended(VnodeBitmap.full(self.vnode_count) if vnodes is None else vnodes, upto)
        return made

    def rewind(self, epoch: Epoch) -> None:
        """Deliver again what came after *epoch*. Durable on return.

        :raises EpochGone: the log no longer holds it, or is about to forget it; nothing has changed.
        :raises InvalidOffset: *epoch* is not sealed yet.
        """
        check_start(self.log, self.name, epoch, *self._look(lambda view: (announced(view, self.log), view.epoch)))
        before = self._progress
        self._write(self._all_at(epoch), before)
        failpoints.hit(GOING_BACK)
        self._go_back(before)

    def drop(self) -> None:
        """Forget this consumer: the log waits for it no longer. Close it then."""
        self._book.delete(self.log)

    def _start(self, start: Epoch | None) -> None:
        """Begin after what a writer that does not know of this consumer may still forget."""
        found, sealed = self._look(lambda view: (announced(view, self.log), view.epoch))
        oldest = max(found, self._started)
        begin = oldest if start is None else start
        try:
            check_start(self.log, self.name, begin, oldest, max(oldest, sealed))
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
        self._book.put({self.log: self.row(progress, before)})
        self.moved(progress)

    def row(self, progress: LogStoreVnodeProgress, before: LogStoreVnodeProgress | None = None) -> ProgressRow:
        """What is stored of *progress*."""
        return ProgressRow(progress.to_json(), int(self._started), None if before is None else before.to_json())

    def moved(self, progress: LogStoreVnodeProgress) -> None:
        """*progress* is durable."""
        self._progress = progress

    def close(self) -> None:
        if not self._shared:
            self._book.close()
            self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _looked(source: StateReader, look: Callable[[Snapshot], _T]) -> _T:
    """What *look* finds in the newest snapshot. One of an object store may have to be opened again."""
    for _ in range(_TRIES - 1):
        with suppress(StoreUnavailable), source.snapshot() as view:
            return look(view)
    with source.snapshot() as view:
        return look(view)


def check_start(log: str, name: str, epoch: Epoch, oldest: Epoch, sealed: Epoch) -> None:
    """:raises EpochGone: *epoch* is before *oldest*. :raises InvalidOffset: it is after *sealed*."""
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
