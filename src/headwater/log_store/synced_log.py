"""The durable side of a synced log: rows that were not emitted at a checkpoint, and how far emission is.

Emission is consumption. What is emitted before a checkpoint barrier is in the state of whoever gets it, and that state
is sealed with the barrier: so the progress in the same seal covers exactly that, and no more. A crash goes back to the
seal on both sides, and every row is worked on once. There is nothing to rewind and nothing to truncate.

Nothing is written while nothing is held: no rows, no barrier, no progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headwater.log_store import layout
from headwater.log_store.buffer import SpilledRef
from headwater.log_store.consumers import SYNCED, Consumer, ConsumerBook
from headwater.log_store.errors import InvalidOffset, WrongCall
from headwater.log_store.history import HISTORY_ROWS, read_history, steps_to_end
from headwater.log_store.item import ChunkItem, Done, LogItem
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.log_store.sealer import Sealer
from headwater.log_store.state import LogStoreState
from headwater.log_store.synced_counters import SyncedCounters
from headwater.log_store.watermarks import Watermark, WatermarkBook
from headwater.state import WriteBatch
from headwater.stream import (
    Barrier,
    BarrierKind,
    Chunk,
    Epoch,
    EpochPair,
    SchemaChange,
    Stop,
    StreamPhase,
    StreamState,
    UpdateVnodeBitmap,
)


@dataclass(slots=True)
class _Stored:
    """What was written of one epoch."""

    rows: int = 0
    size: int = 0
    chunks: int = 0


class SyncedLog:
    """One instance of a synced log, as both of its modes use it.

    :param owner: the name under which mutations speak of this instance.
    :param held: by log the newest epoch that has rows in the store; shared by all instances.
    """

    def __init__(
        self,
        state: LogStoreState,
        sealer: Sealer,
        book: ConsumerBook,
        consumer: Consumer,
        watermarks: WatermarkBook,
        held: dict[str, Epoch],
        owner: str,
        history_rows: int = HISTORY_ROWS,
    ) -> None:
        self.owner = owner
        self.counters = SyncedCounters()
        self.state = state
        self._sealer = sealer
        self._book = book
        self._consumer = consumer
        self._watermarks = watermarks
        self._held = held
        self._history_rows = history_rows
        self._stream = StreamState()
        self._stop_seen = False
        self._first_epoch = Epoch(0)
        self._history: Iterator[tuple[LogItem, Done]] | None = None
        self._history_over = False
        self._ahead: tuple[Chunk, Done] | None = None
        self._done: list[Done] = []
        self._recovered: list[Watermark] = []
        self._passed: dict[str, Watermark] = {}
        self._stored: dict[Epoch, _Stored] = {}
        self._unsealed: WriteBatch | None = None

    # -- what comes in -----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        """The open epoch, to which the next rows belong."""
        return self._stream.epoch

    def follow(self, message: Chunk | Barrier | Watermark) -> None:
        """Check *message*, and take note of a barrier; an error has changed nothing.

        :raises MessageOrderError: it may not come now. :raises WrongCall: it cannot be followed.
        :raises ForeignSchema: rows or a watermark of other columns. :raises ForeignVnode: rows of other owners.
        :raises InvalidOffset: the first epoch is sealed already.
        """
        if self._stop_seen:
            raise WrongCall("Received a message after the barrier that stops this log.")
        if isinstance(message, Watermark):
            if self._stream.phase is not StreamPhase.RUNNING:
                raise WrongCall("Received a watermark before the first barrier.")
            message.check(self.state.log.schema)
            return
        following = self._stream.after(message)
        if isinstance(message, Chunk):
            self.state.check(message)
            return
        self._check_mutation(message)
        if message.kind is BarrierKind.INITIAL:
            self._begin(message.epoch)
        self._stream = following
        if self.stops(message):
            self._stop_seen = True
            self._sealer.owners.release(self, self.state.log)

    @property
    def is_stopped(self) -> bool:
        """Whether the barrier that stops it came."""
        return self._stop_seen

    def stops(self, barrier: Barrier) -> bool:
        """Whether this instance ends after *barrier*."""
        return isinstance(barrier.mutation, Stop) and barrier.mutation.stops(self.owner)

    def _check_mutation(self, barrier: Barrier) -> None:
        mutation = barrier.mutation
        if isinstance(mutation, UpdateVnodeBitmap):
            vnodes = mutation.bitmap_of(self.owner)
            if vnodes is not None and vnodes != self.state.vnodes:
                raise WrongCall(
                    f"The vnodes of the synced log {self.state.log.name!r} cannot change while it runs.",
                    next_step="Open the store again, with the new vnodes for each instance.",
                )
        if isinstance(mutation, SchemaChange) and mutation.table == self.state.log.name:
            raise WrongCall(
                f"The columns of the synced log {self.state.log.name!r} cannot change.",
                next_step="Drain it with a sync checkpoint that stops it, then go on with a log of another name.",
            )

    def _begin(self, epochs: EpochPair) -> None:
        store, log = self._sealer.store, self.state.log
        if epochs.curr <= store.committed_epoch():
            raise InvalidOffset(f"Epoch {epochs.curr} cannot be written: epoch {store.committed_epoch()} is sealed.")
        self._sealer.owners.check(self, log, self.state.vnodes)
        self._sealer.owners.claim(self, log, self.state.vnodes, epochs.curr)
        self.state.discard_unsealed()
        low, high = layout.barriers_from(log.number), layout.space_end(log.number, layout.BARRIERS)
        with store.snapshot() as view:
            newest = next(iter(view.scan(low, high, reverse=True)), None)
        if newest is not None:
            epoch, _ = layout.parse_barrier_key(newest[0])
            self._held[log.name] = max(epoch, self._held.get(log.name, epoch))
        self._first_epoch = epochs.curr
        self._recovered = self._watermarks.kept(log.name, self.state.vnodes)

    # -- what was not emitted before the last start ------------------------------------------------------------

    def has_history(self) -> bool:
        """Whether there are persisted rows of earlier runs that were not emitted."""
        while self._ahead is None and not self._history_over:
            found = self._next_of_history()
            if found is None:
                self._history_over = True
            elif isinstance(found[0], ChunkItem):
                self._ahead = found[0].chunk, found[1]
            else:
                self._done.append(found[1])  # the rows before it were emitted
        return self._ahead is not None

    def take_history(self) -> Chunk | None:
        """Emit the next of them."""
        if not self.has_history() or self._ahead is None:
            return None
        (chunk, done), self._ahead = self._ahead, None
        self._done.append(done)
        return chunk

    def take_recovered(self) -> Watermark | None:
        """Emit the next watermark that was not emitted; they follow the rows of :meth:`take_history`."""
        while self._recovered:
            watermark = self._recovered.pop(0)
            if self.passes(watermark):
                return watermark
        return None

    @property
    def recovered(self) -> dict[str, Watermark]:
        """The watermarks of earlier runs that were not emitted yet, by column."""
        return {watermark.column: watermark for watermark in self._recovered}

    def _next_of_history(self) -> tuple[LogItem, Done] | None:
        if self._history is None:
            progress = LogStoreVnodeProgress(self.state.log.vnode_count, dict(self._consumer.progress.places()))
            for done in self._done:
                done.apply_to(progress, self.state.vnodes)
            self._history = read_history(
                self._sealer.store,
                self.state,
                self.state.vnodes,
                progress,
                self._first_epoch,
                consumer=SYNCED,
                rows=self._history_rows,
            )
        try:
            return next(self._history, None)
        except BaseException:
            self._history = None  # read on after what was emitted
            raise

    # -- what goes out -----------------------------------------------------------------------------------------

    def passes(self, watermark: Watermark) -> bool:
        """Whether *watermark* promises more than those of its column that were emitted: then it is, too."""
        last = self._passed.get(watermark.column)
        if last is not None and not watermark.is_after(last):
            return False
        self._passed[watermark.column] = watermark
        return True

    def write(self, epoch: Epoch, first_seq: int, chunk: Chunk) -> None:
        """Rows for the store, of an epoch whose barrier was not committed yet. An error has written nothing."""
        size = self.state.write_chunk(epoch, first_seq, chunk)
        stored = self._stored.setdefault(epoch, _Stored())
        stored.rows += chunk.num_rows
        stored.size += size
        stored.chunks += 1
        self._held[self.state.log.name] = max(epoch, self._held.get(self.state.log.name, epoch))

    def read_spilled(self, place: SpilledRef) -> Chunk:
        """Rows again that were written. :raises LogCorrupt: they are not there."""
        return self.state.read_spilled(place.epoch, place.first_seq, place.last_seq, place.log, place.vnodes)

    def check_sealed(self) -> None:
        """:raises WrongCall: the last checkpoint was not sealed."""
        if self._unsealed is not None and self._unsealed is self._sealer.batch:
            raise WrongCall(
                f"The last checkpoint of log {self.state.log.name!r} is not sealed.",
                next_step="After a durable barrier: write your state into the sealer's batch, seal, then poll on.",
            )

    def commit(self, barrier: Barrier, oldest: tuple[Epoch, int] | None, watermarks: Mapping[str, Watermark]) -> None:
        """The next seal covers *barrier*: with the barriers of the written epochs, progress and watermarks.

        :param oldest: epoch and seq of the first row that was not emitted.
        :param watermarks: those that were not emitted, by column.
        """
        closes, log, vnodes = barrier.closes, self.state.log, self.state.vnodes
        read_all = not self.has_history()  # it may fail: nothing is done yet
        for epoch in sorted(epoch for epoch in self._stored if epoch <= closes):
            stored = self._stored.pop(epoch)
            last = epoch == closes
            self.state.write_barrier(
                epoch,
                is_checkpoint=last,
                is_stop=last and self.stops(barrier),
                rows=stored.rows,
                size=stored.size,
                chunks=stored.chunks,
            )
        first = oldest if oldest is not None and oldest[0] <= closes else None
        self._commit_progress(closes, first, read_all)
        self._watermarks.keep(self._sealer.batch, log.name, vnodes, watermarks)
        self._unsealed = self._sealer.batch

    def _commit_progress(self, closes: Epoch, first: tuple[Epoch, int] | None, read_all: bool) -> None:
        """Everything before the row *first* was emitted, if history was *read_all*; else what was emitted of it."""
        log, vnodes = self.state.log, self.state.vnodes
        steps, self._done = self._done, []
        if self._held.get(log.name, Epoch(0)) <= self._book.gone(log.name):
            return  # nothing is held: there is nothing to be done with
        self._book.apply(log, SYNCED, steps, vnodes)
        if read_all:
            ended = closes if first is None else first[0].prev()
            steps = steps_to_end(self._consumer.progress, vnodes, ended)
            if first is not None and first[1]:
                steps.append(Done(first[0], vnodes, dict.fromkeys(vnodes, first[1] - 1)))
            self._book.apply(log, SYNCED, steps, vnodes)
