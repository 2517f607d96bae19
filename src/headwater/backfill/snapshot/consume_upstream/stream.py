"""UpstreamStream: which part of an upstream table comes next. What it knows is the progress of the vnodes alone.

========================  =================================================  =======================================
phase                     meaning                                            goes to
========================  =================================================  =======================================
``creating snapshot``     a vnode has not finished the snapshot              consuming snapshot
``consuming snapshot``    parts of the snapshot were taken                   creating snapshot, resolving next epoch
``resolving next epoch``  all that lag behind have finished their epoch      creating change log
``creating change log``   the next epoch is known, or one is half consumed   consuming change log
``consuming change log``  parts of its change log were taken                 creating change log, resolving …
========================  =================================================  =======================================

From each of them ``stopped`` (a :class:`RetentionMiss`: nothing more is taken, the reason is kept) and ``failed``.
A vnode that was taken over from another owner may bring a stream back to any phase.

Vnodes may stand at different epochs, after another number of readers has taken over. Those at the least epoch advance
alone, epoch by epoch, until they meet the others: there are never two epochs in flight, and no epoch is left out. A
vnode that stands in the middle of an epoch goes on at its next key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from headwater.backfill.snapshot.consume_upstream.errors import EpochGap, RetentionMiss
from headwater.backfill.snapshot.consume_upstream.upstream_table import Cut, Part, PartKind, UpstreamTable
from headwater.backfill.snapshot.parts import Layout, hand_out
from headwater.backfill.snapshot.state import BackfillState, VnodeProgress
from headwater.stream import VnodeBitmap


class StreamPhase(StrEnum):
    CREATING_SNAPSHOT = "creating snapshot"
    CONSUMING_SNAPSHOT = "consuming snapshot"
    RESOLVING_NEXT_EPOCH = "resolving next epoch"
    CREATING_CHANGE_LOG = "creating change log"
    CONSUMING_CHANGE_LOG = "consuming change log"
    STOPPED = "stopped"
    FAILED = "failed"


class UpstreamStream:
    """The parts of *table*, one after the other; *state* moves with what is taken.

    :param snapshot_epoch: of the snapshot; vnodes beyond it read the change log.
    :ivar stopped: why nothing is taken any more.
    :raises EpochGap: a vnode stands before the snapshot.
    """

    def __init__(self, table: UpstreamTable, snapshot_epoch: int, state: BackfillState) -> None:
        self._table, self._snapshot_epoch, self._state = table, snapshot_epoch, state
        self.stopped: RetentionMiss | None = None
        for vnode, row in state.items():
            if row is not None and row.epoch < snapshot_epoch:
                raise EpochGap(
                    f"Vnode {vnode} stands at epoch {row.epoch}, before the snapshot at {snapshot_epoch}.",
                    next_step="Read the table once more: headwater resnapshot --store STORE --query NAME",
                )
        self.phase = self._look()

    def _look(self) -> StreamPhase:
        """Where the vnodes stand."""
        if self._unread():
            return StreamPhase.CREATING_SNAPSHOT
        group = self._group()
        if any(not row.is_finished for row in group.values()):
            return StreamPhase.CREATING_CHANGE_LOG
        return StreamPhase.RESOLVING_NEXT_EPOCH

    # -- taking ----------------------------------------------------------------------------------------------------

    def take(self, most_rows: int, upto: int | None = None) -> list[Part]:
        """Parts of one epoch, of about *most_rows* rows, one at least; none when there is nothing yet, or no more.

        What is taken counts as read: the progress of its vnodes moves.

        :param upto: no epochs after this one.
        """
        if self.phase in (StreamPhase.STOPPED, StreamPhase.FAILED) or most_rows < 1 or not self._state.vnodes:
            return []
        self.phase = self._look()
        try:
            if self.phase is StreamPhase.CREATING_SNAPSHOT:
                return self._take_snapshot(most_rows)
            return self._take_changes(most_rows, upto)
        except RetentionMiss as miss:
            self.stop(miss)
            return []
        except BaseException:
            self.phase = StreamPhase.FAILED
            raise

    def stop(self, reason: RetentionMiss) -> None:
        """Nothing more is taken."""
        self.phase, self.stopped = StreamPhase.STOPPED, reason

    def _take_snapshot(self, most_rows: int) -> list[Part]:
        epoch = self._snapshot_epoch
        self._table.check_snapshot(epoch)
        unread = self._unread()
        cuts = {part: self._table.snapshot_cuts(epoch, (part.start, part.stop)) for part in _ranges(unread)}
        made = self._cut(PartKind.SNAPSHOT, epoch, epoch, unread, cuts, most_rows)
        self.phase = StreamPhase.CONSUMING_SNAPSHOT
        return made

    def _take_changes(self, most_rows: int, upto: int | None) -> list[Part]:
        group = self._group()
        least = next(iter(group.values())).epoch
        begun: dict[int, VnodeProgress | None] = {vnode: row for vnode, row in group.items() if not row.is_finished}
        if begun:
            return self._take_epoch(least - 1, least, begun, most_rows)
        self.phase = StreamPhase.RESOLVING_NEXT_EPOCH
        others = min((row.epoch for _, row in self._state.items() if row and row.epoch > least), default=None)
        limits = [limit for limit in (others, upto) if limit is not None]
        epoch = self._table.next_epoch(least, min(limits, default=None))
        if epoch is None:
            if others is not None and (upto is None or others <= upto):
                raise _gap(least, others)
            return []
        if others is not None and epoch > others:
            raise _gap(least, others)
        self.phase = StreamPhase.CREATING_CHANGE_LOG
        return self._take_epoch(least, epoch, dict.fromkeys(group), most_rows)

    def _take_epoch(
        self, after: int, epoch: int, vnodes: dict[int, VnodeProgress | None], most_rows: int
    ) -> list[Part]:
        cuts = {part: self._table.change_cuts(after, epoch, (part.start, part.stop)) for part in _ranges(vnodes)}
        made = self._cut(PartKind.CHANGES, after, epoch, vnodes, cuts, most_rows)
        self.phase = StreamPhase.CONSUMING_CHANGE_LOG
        return made

    def _cut(
        self,
        kind: PartKind,
        after: int,
        epoch: int,
        vnodes: dict[int, VnodeProgress | None],
        cuts: dict[range, Sequence[Cut]],
        most_rows: int,
    ) -> list[Part]:
        """Parts from where each of *vnodes* stands, as many as fit."""
        layout = Layout(cut for found in cuts.values() for cut in found)
        parts = hand_out(self._state, vnodes, layout, epoch, most_rows)
        return [Part(kind, after, epoch, part.first, part.end, part.start, part.stop, part.rows) for part in parts]

    # -- looking ---------------------------------------------------------------------------------------------------

    def _unread(self) -> dict[int, VnodeProgress | None]:
        """Vnodes that have not finished the snapshot."""
        return {
            vnode: row
            for vnode, row in self._state.items()
            if row is None or (row.epoch == self._snapshot_epoch and not row.is_finished)
        }

    def _group(self) -> dict[int, VnodeProgress]:
        """The vnodes at the least epoch, all of which have finished the snapshot."""
        rows = {vnode: row for vnode, row in self._state.items() if row is not None}
        least = min((row.epoch for row in rows.values()), default=0)
        return {vnode: row for vnode, row in rows.items() if row.epoch == least}


def _ranges(vnodes: dict[int, VnodeProgress | None]) -> Iterator[range]:
    bitmap = VnodeBitmap.of(vnodes, max(vnodes) + 1)
    yield from bitmap.ranges()


def _gap(least: int, others: int) -> EpochGap:
    return EpochGap(
        f"Vnodes at epoch {least} cannot come to epoch {others}, where others are: the table has no such epoch.",
        next_step="Read the table once more: headwater resnapshot --store STORE --query NAME",
    )
