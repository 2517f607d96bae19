"""ParallelizedCdcBackfillExecutor: version 2, splits of which a plan hands out as many as fit its budget."""

from __future__ import annotations

from headwater.backfill.cdc.executor import BackfillExecutor, BackfillOptions, HandedOut, settled_prefix
from headwater.backfill.cdc.external import ExternalStorageTable
from headwater.backfill.cdc.single import CdcBackfillExecutor
from headwater.backfill.cdc.state import UNKNOWN, BackfillTables, CdcBackfillState, ParallelState, Piece, Segment
from headwater.sources.errors import SourceProtocolError
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import ExportedSnapshot, SnapshotMark
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind
from headwater.state import Snapshot


class ParallelizedCdcBackfillExecutor(BackfillExecutor):
    """Hands out splits in the order of their keys.

    Splits without a row at both ends of the table need no reading: changes bring what comes there. Those between
    others are read with them; a table without any row is read as a whole. A split that is larger than the budget is
    handed out in pages.
    """

    state: CdcBackfillState[ParallelState]

    # -- planning --------------------------------------------------------------------------------------------------

    def _plan(self, snapshot: ExportedSnapshot) -> None:
        record = self.state.record
        part = None if record.renewal is None else record.renewal.range
        if part is not None:
            record.kind, record.why = SplitKind.KEY, "a range, split as it is handed out"
            self.state.parts = ParallelState([Split(0, part, UNKNOWN)])
        else:
            # rows that are replaced are found at the sink by their key
            kind = SplitKind.KEY if record.replacing is not None and not self.options.whole else self.options.kind
            planned = self.external.split(snapshot, split_rows=self.options.split_rows, kind=kind)
            splits = planned.splits
            record.kind, record.why = planned.kind, planned.why
            record.total_rows, record.total_size = planned.rows, planned.size
            self.state.parts = ParallelState(splits)
            full = [place for place, split in enumerate(splits) if not split.empty]
            # a table without a row is read all the same: its empty history makes the sink create its table
            if full and record.replacing is None and planned.kind is SplitKind.KEY:
                before, after = full[0], len(splits) - 1 - full[-1]
                self.state.parts.free, self.state.parts.next = (before, after), before
                self.state.parts.mark = snapshot.mark if before + after else None

    def _take(self, plan: int, snapshot: ExportedSnapshot, budget: int) -> list[HandedOut]:
        state = self.state.parts
        before = state.next, state.cursor, state.part_rows
        try:
            return self._taken(plan, snapshot, budget)
        except BaseException:  # the source did not answer in the middle: nothing was handed out
            state.next, state.cursor, state.part_rows = before
            raise

    def _taken(self, plan: int, snapshot: ExportedSnapshot, budget: int) -> list[HandedOut]:
        state = self.state.parts
        first, start, left = state.next, self._place(), budget
        made: list[HandedOut] = []
        pieces: list[Piece] = []
        while state.next < state.stop and (left > 0 or self.options.whole):
            split = state.splits[state.next]
            rest = KeyRange(self._place(), split.range.end)
            expected = max(split.rows - state.part_rows, 0)
            end: Cut | None = None
            if not self.options.whole and (split.rows == UNKNOWN or expected > min(left, 2 * self.options.split_rows)):
                page = min(left, self.options.split_rows)
                if made and page < self.options.split_rows:
                    break
                end = self._page_end(snapshot, rest, page)
                expected = page if end is not None or split.rows == UNKNOWN else min(expected, page)
            if end is None:
                if state.cursor is not None or split.rows != expected:
                    pieces.append((split.number, rest.end, expected))
                state.next, state.cursor, state.part_rows = state.next + 1, None, 0
            else:
                pieces.append((split.number, end, expected))
                state.cursor, state.part_rows = end, state.part_rows + expected
            made.append(HandedOut(KeyRange(rest.start, rest.end if end is None else end), expected))
            left -= expected
        if made:
            rows = sum(part.rows for part in made)
            whole = KeyRange(start, made[-1].range.end)
            mark = snapshot.mark
            state.pending.append(Segment(plan, whole, rows, mark, mark.high, first, state.next, tuple(pieces)))
            state.row_count += rows
            state.changed.add(plan)
            state.gone.discard(plan)
        return made

    def _page_end(self, snapshot: ExportedSnapshot, rest: KeyRange, page: int) -> Cut | None:
        end = snapshot.page_end(self.table, self.kind, rest, page)
        if end is not None and end in (rest.start, rest.end):
            raise SourceProtocolError(f"A page of table {self.table.full_name} has no row.")
        return end

    def _place(self) -> Cut | None:
        """Where the next hand-out begins."""
        state = self.state.parts
        if state.cursor is not None:
            return state.cursor
        return state.splits[state.next].range.start if state.next < len(state.splits) else None

    def _parts(self, segment: Segment) -> list[HandedOut]:
        pieces: dict[int, list[Piece]] = {}
        for piece in segment.pieces:
            pieces.setdefault(piece[0], []).append(piece)
        made: list[HandedOut] = []
        start = segment.range.start
        for number in range(segment.first, min(segment.stop + 1, len(self.state.parts.splits))):
            split = self.state.parts.splits[number]
            whole: list[Piece] = [(number, split.range.end, max(split.rows, 0))] if number < segment.stop else []
            for _, end, rows in pieces.get(number, whole):
                made.append(HandedOut(KeyRange(start, end), rows))
                start = end
        return made

    def _undo(self, undone: list[Segment]) -> None:
        state, oldest = self.state.parts, undone[0]
        state.pending = state.pending[: -len(undone)]
        state.row_count -= sum(segment.rows for segment in undone)
        state.next = oldest.first
        whole = state.splits[oldest.first].range.start
        state.cursor = None if oldest.range.start == whole else oldest.range.start
        state.part_rows = 0 if state.cursor is None else self._rows_of(oldest.first)
        state.gone.update(segment.plan for segment in undone)
        state.changed.difference_update(state.gone)

    def _rows_of(self, number: int) -> int:
        """How many rows of a split were handed out in parts that are pending still."""
        return sum(rows for segment in self.state.parts.pending for piece, _, rows in segment.pieces if piece == number)

    # -- what was handed out ---------------------------------------------------------------------------------------

    def _pending(self) -> list[Segment]:
        return self.state.parts.pending

    def _changed_plan(self, segment: Segment) -> None:
        self.state.parts.changed.add(segment.plan)

    def _settle(self, position: CdcOffset) -> bool:
        state = self.state.parts
        count = settled_prefix(state.pending, position)
        if count:
            state.settled = (state.pending[count - 1].range.end,)
            plans = {segment.plan for segment in state.pending[:count]}
            state.gone |= plans
            state.changed -= plans
            del state.pending[:count]
        if state.mark is not None and state.mark.high <= position:
            state.mark = None
            return True
        return count > 0

    def _has_settled(self) -> bool:
        return bool(self.state.parts.settled)

    def _settled_end(self) -> Cut | None:
        return self.state.parts.settled[0]

    def _is_settled(self) -> bool:
        return not self.state.parts.pending and self.state.parts.mark is None

    def _is_exhausted(self) -> bool:
        return self.state.parts.next >= self.state.parts.stop

    def _free(self) -> tuple[KeyRange | None, KeyRange | None, SnapshotMark | None]:
        splits, (before, after) = self.state.parts.splits, self.state.parts.free
        first = KeyRange(None, splits[before - 1].range.end) if before else None
        last = KeyRange(splits[len(splits) - after].range.start, None) if after else None
        return first, last, self.state.parts.mark

    # -- state and progress ----------------------------------------------------------------------------------------

    def _rows(self) -> int:
        return self.state.parts.row_count

    def _splits(self) -> tuple[int, int]:
        state = self.state.parts
        return state.next + (state.free[1] if state.next >= state.stop else 0), len(state.splits)


def open_backfill(
    external: ExternalStorageTable, tables: BackfillTables, view: Snapshot, options: BackfillOptions
) -> BackfillExecutor:
    """The backfill of a table as its state has it, or a new one: see :meth:`CdcBackfillState.open`.

    :raises BackfillStateCorrupt: what is stored cannot be read.
    """
    state = CdcBackfillState.open(tables, view, external.table, options.version)
    made = CdcBackfillExecutor if state.record.version == 1 else ParallelizedCdcBackfillExecutor
    return made(external, state, options)
