"""CdcBackfillExecutor: version 1, one page after the other in key order."""

from __future__ import annotations

from typing import Final

from headwater.backfill.cdc.executor import BackfillExecutor, HandedOut, settled_prefix
from headwater.backfill.cdc.state import CdcBackfillState, Segment, SingleState
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import ExportedSnapshot, SnapshotMark
from headwater.sources.splits import Cut, KeyRange, SplitKind

_ONE_SPLIT: Final = 1 << 40


class CdcBackfillExecutor(BackfillExecutor):
    """Hands out one page with each plan; its state is one cursor."""

    state: CdcBackfillState[SingleState]

    def _plan(self, snapshot: ExportedSnapshot) -> None:
        planned = self.external.split(snapshot, split_rows=_ONE_SPLIT, kind=SplitKind.KEY)
        record = self.state.record
        record.kind, record.why = SplitKind.KEY, "read in pages by one reader"
        if record.renewal is None or record.renewal.range is None:
            record.total_rows, record.total_size = planned.rows, planned.size

    def _bounds(self) -> KeyRange:
        renewal = self.state.record.renewal
        return KeyRange() if renewal is None or renewal.range is None else renewal.range

    def _take(self, plan: int, snapshot: ExportedSnapshot, budget: int) -> list[HandedOut]:
        state, bounds = self.state.parts, self._bounds()
        if state.exhausted:
            return []
        rest = KeyRange(bounds.start if state.pos is None else state.pos, bounds.end)
        page = min(budget, self.options.split_rows)
        end = None if self.options.whole else snapshot.page_end(self.table, SplitKind.KEY, rest, page)
        left = None if self.state.record.total_rows is None else max(0, self.state.record.total_rows - state.row_count)
        if end is not None:
            rows = page
        elif self.options.whole:
            rows = left or 0
        else:
            rows = page if left is None else min(page, left)
        part = KeyRange(rest.start, rest.end if end is None else end)
        state.pending.append(Segment(plan, part, rows, snapshot.mark, snapshot.mark.high))
        state.pos, state.exhausted = part.end, end is None
        state.row_count += rows
        return [HandedOut(part, rows)]

    def _parts(self, segment: Segment) -> list[HandedOut]:
        return [HandedOut(segment.range, segment.rows)]

    def _undo(self, undone: list[Segment]) -> None:
        state = self.state.parts
        state.pending = state.pending[: -len(undone)]
        state.row_count -= sum(segment.rows for segment in undone)
        state.exhausted = False
        state.pos = undone[0].range.start if state.pending or state.settled else None

    def _pending(self) -> list[Segment]:
        return self.state.parts.pending

    def _changed_plan(self, segment: Segment) -> None:
        """The row has all segments."""

    def _settle(self, position: CdcOffset) -> bool:
        count = settled_prefix(self.state.parts.pending, position)
        self.state.parts.settled |= count > 0
        del self.state.parts.pending[:count]
        return count > 0

    def _has_settled(self) -> bool:
        return self.state.parts.settled

    def _settled_end(self) -> Cut | None:
        return self.state.parts.pending[0].range.start if self.state.parts.pending else self.state.parts.pos

    def _is_settled(self) -> bool:
        return not self.state.parts.pending

    def _is_exhausted(self) -> bool:
        return self.state.parts.exhausted

    def _free(self) -> tuple[KeyRange | None, KeyRange | None, SnapshotMark | None]:
        return None, None, None

    def _rows(self) -> int:
        return self.state.parts.row_count

    def _splits(self) -> tuple[int, int]:
        return int(self.state.parts.exhausted), 1
