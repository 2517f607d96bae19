"""KvLogStoreReader: what one query reads the logs of all its tables with; the progress of all of them is one seal.

The writer of the logs alone writes their store, so a reader keeps its progress in the state of its query, beside it
(:mod:`headwater.log_store.consumers`), of which it is the one fenced writer. The writer reads it at each seal, and
forgets only what all consumers have delivered.

    with KvLogStoreReader.open(location, "mirror", ["public.orders"]) as reader:
        while True:
            sealed = reader.next_item(timeout=1.0)
            if sealed is not None:
                for batch in read_range(location, "public.orders", sealed.after, sealed.end):
                    deliver(batch)
                reader.truncate(sealed.end)      # durable: these epochs do not come again

Where it starts in a log, or goes back to, is settled in two steps (:mod:`headwater.log_store.truncation` says why):

============  ======================================  =============================================================
state         its row                                 goes to
============  ======================================  =============================================================
coming        no place: it holds the whole log        ready, after what was announced, or a later epoch as asked
ready         a place for each vnode                  going back
going back    the earlier place, and the one before   ready: there, or where it was when that is announced as gone
============  ======================================  =============================================================

A process that dies in between leaves the second step to the next one that is this reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from headwater import failpoints
from headwater.log_store.consumers import (
    SINGLE_FOLDER,
    Consumer,
    ProgressBook,
    ProgressRow,
    single_row,
    state_of,
)
from headwater.log_store.errors import EpochGone, InvalidOffset
from headwater.log_store.log import LogRegistry
from headwater.log_store.log_events import RESHAPED, Reshaped
from headwater.log_store.log_view import LogView
from headwater.log_store.progress import LogStoreVnodeProgress, StoragePlace
from headwater.log_store.truncation import announced
from headwater.state import Snapshot, StateReader, open_reader, stores_beside
from headwater.state.beside import open_beside_reader, remove_beside
from headwater.state.errors import StoreNotFound, StoreUnavailable
from headwater.state.query_store import QueryStore, open_query_store, own_state
from headwater.stream import Epoch, VnodeBitmap

COMING = failpoints.register("log_store.consumer_coming")
GOING_BACK = failpoints.register("log_store.consumer_going_back")

_TRIES = 5
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What a range may have at most; it has one epoch with rows at least.

    :ivar end: no epoch after this one. :ivar max_rows: about so many rows, and *max_epochs* epochs that have rows.
    :ivar one_shape: the range ends before rows that have another shape than those before them.
    """

    end: int | None = None
    max_rows: int | None = None
    max_epochs: int | None = None
    one_shape: bool = False


@dataclass(frozen=True, slots=True)
class SealedRange:
    """The sealed epochs ``(after, end]`` of all logs of a reader: a consistent cut, always with the same rows."""

    after: Epoch
    end: Epoch


@dataclass(slots=True)
class ReaderStatistics:
    """What a reader did since it was opened.

    :ivar ranges: that it gave, the newest up to *read_epoch*. :ivar truncations: deliveries that became durable, the
        newest up to *truncated_epoch*. :ivar rewinds: how often it went back.
    """

    ranges: int = 0
    read_epoch: int = 0
    truncations: int = 0
    truncated_epoch: int = 0
    rewinds: int = 0


class KvLogStoreReader:
    """The reader of the query whose state is *store*, in the logs that *source* shows.

    :ivar name: of the consumer: that of the query. :ivar statistics: what it did.
    """

    def __init__(self, source: StateReader, store: QueryStore) -> None:
        self._source, self.name = source, store.query
        self._book = ProgressBook(store)
        self._consumers: dict[str, Consumer] = {}
        self._after = Epoch(0)
        self._single = {log for log, name in stores_beside(source.location, SINGLE_FOLDER, 2) if name == self.name}
        self._stack = ExitStack()
        self.statistics = ReaderStatistics()

    @classmethod
    def open(
        cls,
        location: str,
        name: str,
        logs: Collection[str],
        *,
        start: Epoch | None = None,
        takeover: bool = False,
    ) -> Self:
        """The reader *name* of *logs* in the store at *location*, ready after what it has delivered.

        :raises StoreOwned: another process is this reader. As :meth:`init`.
        """
        with ExitStack() as stack:
            source = stack.enter_context(open_reader(location))
            states = (state_of(location, name, log) for log in logs)
            state = next((state for state in states if state is not None), None)
            if state is None:  # what is refused leaves no trace, and holds no epoch back
                alone = {log for log, consumer in stores_beside(location, SINGLE_FOLDER, 2) if consumer == name}
                _looked(source, lambda view: _check_new(view, name, set(logs) - alone, start))
            store = stack.enter_context(open_query_store(state or own_state(location, name), name, takeover=takeover))
            reader = cls(source, store)
            reader.init(logs, start)
            reader.start_from(min((reader.consumer(log).delivered() for log in logs), default=Epoch(0)))
            reader._stack = stack.pop_all()
        return reader

    def init(self, logs: Collection[str], start: Epoch | None = None) -> None:
        """Make the reader known in *logs*: from now on they wait for it. Where it is new it begins after *start*.

        :param start: by default what is held. :raises LogNotFound: no such log.
        :raises EpochGone: *start* is before what a log holds. :raises InvalidOffset: *start* is not sealed yet.
        """
        counts = self._look(lambda view: _vnode_counts(view, logs))
        for log in self._single & set(logs):
            self._adopt(log)
        rows = self._book.all()
        new = {log for log in logs if log not in rows}
        self._look(lambda view: _check_new(view, self.name, new, start))
        if new:
            nowhere = {log: LogStoreVnodeProgress(counts[log]) for log in new}
            self._book.put({log: ProgressRow(progress.to_json(), 0) for log, progress in nowhere.items()})
            rows |= {log: ProgressRow(progress.to_json(), 0) for log, progress in nowhere.items()}
            failpoints.hit(COMING)
        for log in logs:
            row = rows[log]
            progress = LogStoreVnodeProgress.from_json(row.progress)
            self._consumers[log] = Consumer(log, self.name, progress, Epoch(row.started))
        coming = [log for log in logs if self._consumers[log].progress.kind == "none"]
        if coming:
            self._begin(coming, start)
        back = {log: rows[log].before for log in logs if log not in coming and rows[log].before is not None}
        if back:
            with suppress(EpochGone):  # the process that wanted it is dead: it was too late, and nothing has changed
                self._go_back({log: LogStoreVnodeProgress.from_json(before) for log, before in back.items()})

    def consumer(self, log: str) -> Consumer:
        """How far the reader is in *log*."""
        return self._consumers[log]

    def start_from(self, epoch: int) -> None:
        """:meth:`next_item` goes on after *epoch*."""
        self._after = Epoch(epoch)

    def next_item(
        self, limits: ReadLimits | None = None, *, views: Mapping[str, LogView] | None = None, timeout: float = 0.0
    ) -> SealedRange | None:
        """The next sealed epochs; ``None`` when there are none within *timeout* seconds.

        :param views: the logs in a snapshot that the caller has open; then nothing is waited for.
        :raises RetentionMiss: retention dropped a part of them.
        """
        limits = limits or ReadLimits()
        if views is None:
            if self._source.wait_for_epoch(self._after, timeout) is None:
                return None
            return self._look(lambda view: self._next(self._opened(view), limits, view.epoch))
        newest = max((view.sealed for view in views.values()), default=self._after)
        return self._next(views, limits, newest)

    def truncate(
        self, end: Epoch | Mapping[str, Epoch], vnodes: VnodeBitmap | None = None, *, defer: bool = False
    ) -> None:
        """The epochs up to *end* are delivered, in all logs or by log. Durable on return, for all of them or none.

        :param vnodes: those that have delivered them. :param defer: durable with the next seal of the query's state.
        :raises InvalidOffset: an epoch that is not sealed.
        """
        ends = end if isinstance(end, Mapping) else dict.fromkeys(self._consumers, end)
        if not ends:
            return
        newest = max(ends.values())
        if newest > self._source.committed_epoch():
            raise InvalidOffset(f"Epoch {newest} is not sealed; it cannot be delivered.")
        delivered = {log: self._delivered(log, upto, vnodes) for log, upto in ends.items()}
        self._write(delivered, defer=defer)
        self.statistics.truncations += 1
        self.statistics.truncated_epoch = max(self.statistics.truncated_epoch, int(newest))

    def rewind(self, epoch: int, logs: Iterable[str] | None = None) -> None:
        """Give again what came after *epoch*: in all logs, or *logs*. One that is not past it stays. Durable on return.

        :raises EpochGone: a log no longer holds it, or is about to forget it; nothing has changed.
        :raises InvalidOffset: *epoch* is not sealed yet.
        """
        names = list(self._consumers if logs is None else logs)
        self._look(lambda view: _check_starts(view, names, self.name, epoch))
        place = StoragePlace(Epoch(epoch))
        before: dict[str, LogStoreVnodeProgress] = {}
        for log in names:
            consumer = self._consumers[log]
            places = {vnode: min(found, place) for vnode, found in consumer.progress.places()}
            earlier = LogStoreVnodeProgress(consumer.vnode_count, places)
            if earlier != consumer.progress:
                before[log], consumer.progress = consumer.progress, earlier
        if before:
            try:
                self._write({log: self._consumers[log].progress for log in before}, before)
                failpoints.hit(GOING_BACK)
            except BaseException:
                for log, progress in before.items():
                    self._consumers[log].progress = progress
                raise
            self._go_back(before)
        self.statistics.rewinds += 1
        self.start_from(min(self._after, epoch))

    def drop(self, logs: Collection[str], *, defer: bool = False) -> None:
        """Forget the reader in *logs*: they wait for it no longer.

        :param defer: durable with the next seal of the query's state.
        """
        for log in logs:
            self._consumers.pop(log, None)
            if log in self._single:
                self._adopt(log)
        self._book.delete(logs, defer=defer)

    def close(self) -> None:
        """Close what :meth:`open` has opened."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    # -- ranges ----------------------------------------------------------------------------------------------------

    def _opened(self, view: Snapshot) -> dict[str, LogView]:
        views = {log: LogView.open(view, log) for log in self._consumers}
        for log, shown in views.items():
            shown.check_not_dropped(self._consumers[log].delivered(), self.name)
        return views

    def _next(self, views: Mapping[str, LogView], limits: ReadLimits, newest: int) -> SealedRange | None:
        end = newest if limits.end is None else min(limits.end, newest)
        if end <= self._after:
            return None
        if limits.one_shape:
            end = _end_of_shape(views, self._after, end)
        sealed = SealedRange(self._after, Epoch(_end_of_range(views, self._after, end, limits)))
        self._after = sealed.end
        self.statistics.ranges += 1
        self.statistics.read_epoch = int(sealed.end)
        return sealed

    # -- progress --------------------------------------------------------------------------------------------------

    def _delivered(self, log: str, upto: Epoch, vnodes: VnodeBitmap | None) -> LogStoreVnodeProgress:
        consumer = self._consumers[log]
        progress = LogStoreVnodeProgress(consumer.vnode_count, dict(consumer.progress.places()))
        progress.apply_ended(VnodeBitmap.full(consumer.vnode_count) if vnodes is None else vnodes, upto)
        return progress

    def _begin(self, logs: Collection[str], start: Epoch | None) -> None:
        """Begin after what a writer that does not know of this reader may still forget."""
        places, newest = self._look(lambda view: ({log: announced(view, log) for log in logs}, view.epoch))
        begun: dict[str, LogStoreVnodeProgress] = {}
        try:
            for log in logs:
                consumer = self._consumers[log]
                oldest = max(places[log], consumer.started)
                consumer.started = oldest if start is None else start
                _check_start(log, self.name, consumer.started, oldest, max(oldest, newest))
                full = VnodeBitmap.full(consumer.vnode_count)
                begun[log] = LogStoreVnodeProgress.aligned(full, StoragePlace(consumer.started))
        except BaseException:
            self.drop(logs)
            raise
        self._write(begun)

    def _go_back(self, before: Mapping[str, LogStoreVnodeProgress]) -> None:
        """Stay at the earlier places if no writer that does not know of them can forget what comes after them."""
        oldest = self._look(lambda view: {log: announced(view, log) for log in before})
        gone = next((log for log in before if self._consumers[log].delivered() < oldest[log]), None)
        if gone is not None:
            wanted = self._consumers[gone].delivered()
            self._write(before)
            raise _gone(gone, self.name, wanted, oldest[gone])
        self._write({log: self._consumers[log].progress for log in before})

    def _write(
        self,
        progress: Mapping[str, LogStoreVnodeProgress],
        before: Mapping[str, LogStoreVnodeProgress] | None = None,
        *,
        defer: bool = False,
    ) -> None:
        """Make *progress* durable; it counts only then."""
        rows = {
            log: ProgressRow(
                made.to_json(), int(self._consumers[log].started), before[log].to_json() if before else None
            )
            for log, made in progress.items()
        }
        self._book.put(rows, defer=defer)
        for log, made in progress.items():
            self._consumers[log].progress = made

    def _adopt(self, log: str) -> None:
        """A consumer that an earlier release gave a store of its own: it holds its epochs all the time."""
        location = self._source.location
        try:
            with open_beside_reader(location, SINGLE_FOLDER, log, self.name) as reader, reader.snapshot() as view:
                row = single_row(view, self.name)
        except StoreNotFound:
            row = None
        if row is not None and log not in self._book.all():
            self._book.put({log: row})
        remove_beside(location, SINGLE_FOLDER, log, self.name)
        self._single.discard(log)

    def _look(self, look: Callable[[Snapshot], _T]) -> _T:
        return _looked(self._source, look)


def _looked(source: StateReader, look: Callable[[Snapshot], _T]) -> _T:
    """What *look* finds in the newest snapshot. One of an object store may have to be opened again."""
    for _ in range(_TRIES - 1):
        with suppress(StoreUnavailable), source.snapshot() as view:
            return look(view)
    with source.snapshot() as view:
        return look(view)


def _end_of_range(views: Mapping[str, LogView], after: int, end: int, limits: ReadLimits) -> int:
    """The epoch up to which about as many rows lie after *after* as the limits allow."""
    if limits.max_rows is None and limits.max_epochs is None:
        return end
    rows: defaultdict[int, int] = defaultdict(int)
    for view in views.values():
        for one in view.epochs(after, end):
            rows[int(one.epoch)] += one.rows
    total = count = 0
    chosen = after
    for epoch in sorted(rows):
        total += rows[epoch]
        count += rows[epoch] > 0
        is_over = (limits.max_rows and total > limits.max_rows) or (limits.max_epochs and count > limits.max_epochs)
        if chosen > after and is_over:
            return chosen
        chosen = epoch
    return end


def _end_of_shape(views: Mapping[str, LogView], after: int, end: int) -> int:
    """*end*, or where rows end that have another shape than those after them."""
    changed = (Reshaped.KEY.value, Reshaped.COLUMNS.value)
    ends = (
        int(event.epoch.prev())
        for view in views.values()
        for event in view.events(after, end)
        if event.detail.get(RESHAPED) in changed
    )
    return min((found for found in ends if found > after), default=end)


def _vnode_counts(view: Snapshot, logs: Collection[str]) -> dict[str, int]:
    """:raises LogNotFound: a log that is not there."""
    registry = LogRegistry.load(view)
    return {log: registry.get(log).vnode_count for log in logs}


def _check_new(view: Snapshot, name: str, logs: Collection[str], start: Epoch | None) -> None:
    """:raises LogNotFound: a log that is not there. As :func:`_check_start`."""
    _vnode_counts(view, logs)
    if start is not None:
        _check_starts(view, logs, name, start)


def _check_starts(view: Snapshot, logs: Iterable[str], name: str, epoch: int) -> None:
    for log in logs:
        _check_start(log, name, epoch, announced(view, log), view.epoch)


def _check_start(log: str, name: str, epoch: int, oldest: int, sealed: int) -> None:
    """:raises EpochGone: *epoch* is before *oldest*. :raises InvalidOffset: it is after *sealed*."""
    if epoch < oldest:
        raise _gone(log, name, epoch, oldest)
    if epoch > sealed:
        raise InvalidOffset(f"Consumer {name!r} cannot start after epoch {epoch}: the newest sealed one is {sealed}.")


def _gone(log: str, name: str, epoch: int, oldest: int) -> EpochGone:
    return EpochGone(
        f"Log {log!r} keeps epochs after {oldest} only; consumer {name!r} cannot start after {epoch}.",
        oldest,
        next_step=f"Start it at epoch {oldest}.",
    )
