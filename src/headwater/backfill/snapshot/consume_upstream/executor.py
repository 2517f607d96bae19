"""UpstreamTableExecutor: consumes one upstream table, or some vnodes of it, between barriers.

The order of the calls for each barrier:

1. ``plan(barrier)``: the parts that are read before it. The progress of the vnodes moves with them, in memory;
2. ``save(batch)`` for a durable barrier: what was planned up to it is sealed with it. What was planned since the last
   durable barrier is forgotten by a crash, and planned again, the same;
3. what the barrier carries holds from then on: pause, resume and throttle in every phase, snapshot and change log
   alike.

A table that no longer keeps what comes next stops the stream, not the executor: barriers pass, ``stopped`` tells why,
and nothing is tried again until the executor is made anew, or ``restart`` begins with a new snapshot.

Pure but for the table that it is given: the time is told, and the same calls give the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from headwater.backfill.rate_limit import RateLimit
from headwater.backfill.snapshot.consume_upstream.errors import InvalidUpstream, RetentionMiss
from headwater.backfill.snapshot.consume_upstream.stream import StreamPhase, UpstreamStream
from headwater.backfill.snapshot.consume_upstream.upstream_table import Part, PartKind, UpstreamTable
from headwater.backfill.snapshot.errors import BarrierOutOfOrder, InvalidSnapshotOption
from headwater.backfill.snapshot.state import BackfillState, VnodeProgress
from headwater.state import WriteBatch
from headwater.stream import (
    ALL_TARGETS,
    Barrier,
    BarrierKind,
    EpochPair,
    Pause,
    Resume,
    Throttle,
    VnodeBitmap,
)

ALL_ROWS: Final = 1 << 62
BATCH_ROWS: Final = 10_000_000
BATCH_EPOCHS: Final = 100


@dataclass(frozen=True, slots=True)
class UpstreamOptions:
    """How a table is consumed.

    :ivar batch_rows: read before one barrier, about; a vnode's next piece is never cut.
    :ivar batch_epochs: of the change log that are read before one barrier, at most.
    :ivar rows_per_second: until a throttle says otherwise; ``None`` is no limit, 0 stands still.
    :ivar burst_seconds: for how long what the rate allows may gather: about the time between two barriers.
    :raises InvalidSnapshotOption: a number that makes no sense.
    """

    batch_rows: int = BATCH_ROWS
    batch_epochs: int = BATCH_EPOCHS
    rows_per_second: int | None = None
    burst_seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.batch_rows < 1 or self.batch_epochs < 1 or self.burst_seconds <= 0:
            raise InvalidSnapshotOption(
                f"Received batch_rows={self.batch_rows}, batch_epochs={self.batch_epochs}.",
                next_step="Valid are numbers from 1.",
            )


class UpstreamTableExecutor:
    """Consumes the vnodes of *table* that *state* has.

    :param snapshot_epoch: of the snapshot.
    :raises InvalidUpstream: the state is of a table with another number of vnodes.
    """

    def __init__(
        self,
        table: UpstreamTable,
        state: BackfillState,
        snapshot_epoch: int,
        options: UpstreamOptions | None = None,
        *,
        paused: bool = False,
    ) -> None:
        if state.vnodes.count != table.vnode_count:
            raise InvalidUpstream(
                f"Table {table.name} has {table.vnode_count} vnodes, its progress is of {state.vnodes.count}.",
                next_step="Open it with the number of vnodes that it was begun with, or begin anew.",
            )
        self.table, self.options = table, options or UpstreamOptions()
        self.snapshot_epoch = snapshot_epoch
        self._state = state
        self._stream = UpstreamStream(table, snapshot_epoch, state)
        self._rate = RateLimit(self.options.rows_per_second, self.options.burst_seconds)
        self._paused = paused
        self._epochs: EpochPair | None = None

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> StreamPhase:
        return self._stream.phase

    @property
    def stopped(self) -> RetentionMiss | None:
        """Why nothing is read any more."""
        return self._stream.stopped

    @property
    def is_paused(self) -> bool:
        return self._paused

    @property
    def rows_per_second(self) -> int | None:
        return self._rate.rows_per_second

    @property
    def vnodes(self) -> VnodeBitmap:
        return self._state.vnodes

    def progress(self) -> Iterator[tuple[int, VnodeProgress | None]]:
        """How far each vnode is; ``None``: nothing was read of it."""
        return self._state.items()

    @property
    def consumed_epoch(self) -> int:
        """The epoch that every vnode has finished; 0 where one has not finished the snapshot."""
        if not self.has_snapshot:
            return 0
        rows = (row for _, row in self._state.items() if row is not None)
        return min((row.epoch if row.is_finished else row.epoch - 1 for row in rows), default=0)

    @property
    def needed_epoch(self) -> int:
        """The oldest epoch that must stay readable."""
        return max(self.snapshot_epoch, self.consumed_epoch)

    @property
    def has_snapshot(self) -> bool:
        """Whether every vnode has finished the snapshot."""
        return self._state.has_finished(self.snapshot_epoch)

    @property
    def snapshot_rows(self) -> int:
        """Rows of the snapshot that were taken by vnodes that are at it."""
        return self._state.rows_of(self.snapshot_epoch)

    # -- barriers --------------------------------------------------------------------------------------------------

    def plan(self, barrier: Barrier, now: float, *, upto: int | None = None) -> list[Part]:
        """What is read before *barrier*; nothing before an initial one. Then what it carries holds.

        :param upto: no epochs after this one.
        :raises BarrierOutOfOrder: it does not follow the one before.
        """
        self._follow(barrier)
        parts = [] if barrier.kind is BarrierKind.INITIAL else self._take(now, upto)
        self._apply(barrier, now)
        return parts

    def _follow(self, barrier: Barrier) -> None:
        if self._epochs is not None and not barrier.epoch.follows(self._epochs):
            raise BarrierOutOfOrder(
                f"Received a barrier that closes epoch {barrier.closes}; the one before opened {self._epochs.curr}.",
                next_step="Start the query again: it goes on from what is stored.",
            )
        self._epochs = barrier.epoch

    def _take(self, now: float, upto: int | None) -> list[Part]:
        if self._paused:
            return []
        left = min(self._rate.allowed(now), self.options.batch_rows)
        parts = self._stream.take(left, upto)
        left -= sum(part.rows for part in parts)
        epochs = 1
        while parts and left > 0 and epochs < self.options.batch_epochs and self._is_even(parts):
            # the changes of one more epoch, all of them: a vnode's parts stay in one
            more = self._stream.take(ALL_ROWS, upto)
            if not more:
                break
            parts = [
                replace(part, epoch=next_part.epoch, rows=part.rows + next_part.rows)
                for part, next_part in zip(parts, more, strict=True)
            ]
            left -= sum(part.rows for part in more)
            epochs += 1
        self._rate.take(sum(part.rows for part in parts), now)
        return parts

    def _is_even(self, parts: list[Part]) -> bool:
        """Whether *parts* are the changes of all vnodes, whole, so that those of the next epoch are the same parts."""
        return (
            all(part.kind is PartKind.CHANGES and part.is_whole for part in parts)
            and [part.vnodes for part in parts] == [(each.start, each.stop) for each in self.vnodes.ranges()]
            and len({part.epoch for part in parts}) == 1
        )

    def _apply(self, barrier: Barrier, now: float) -> None:
        match barrier.mutation:
            case Pause():
                self._paused = True
            case Resume():
                self._paused = False
            case Throttle(rows_per_second=rate, target=target) if target in (ALL_TARGETS, self.table.name):
                self._rate.change(rate, now)
            case _:
                pass

    # -- what is durable -------------------------------------------------------------------------------------------

    def save(self, batch: WriteBatch) -> int:
        """Write the rows that have changed; returns how many."""
        return self._state.save(batch)

    def stop(self, reason: RetentionMiss) -> None:
        """Read no more, as if the table had said *reason*."""
        self._stream.stop(reason)

    def restart(self, snapshot_epoch: int) -> None:
        """Begin anew with the snapshot at *snapshot_epoch*: whoever has rows of before must forget them."""
        self._state.clear()
        self.snapshot_epoch = snapshot_epoch
        self._stream = UpstreamStream(self.table, snapshot_epoch, self._state)
