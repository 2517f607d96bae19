"""Segment: what one plan handed out of a table, and the filter that all segments together make. Pure.

Segments touch: each begins where the one before it ends, in key order. What lies after the last one was not handed out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from headwater.backfill.units import ChangeFilter, Rule, Run
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import SnapshotMark, mark_from_json
from headwater.sources.splits import Cut, KeyRange, SplitKind

Piece: TypeAlias = tuple[int, Cut | None, int]
"""A part of a split that was handed out: the number of the split, the end of the part, its rows."""


@dataclass(frozen=True, slots=True)
class HandedOut:
    """A range that a plan reads, and about how many rows it has."""

    range: KeyRange
    rows: int


@dataclass(slots=True)
class Segment:
    """What one plan handed out.

    :ivar rows: about how many.
    :ivar mark: of the snapshot that its changes are filtered by.
    :ivar until: once the log has passed it, the log alone tells everything about these keys.
    :ivar first: the number of the first split. :ivar stop: the number of the split that it ends before or in.
    :ivar pieces: the parts of those splits that were not handed out as a whole.
    """

    plan: int
    range: KeyRange
    rows: int
    mark: SnapshotMark
    until: CdcOffset
    first: int = 0
    stop: int = 0
    pieces: tuple[Piece, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "range": self.range.to_json(),
            "rows": self.rows,
            "mark": self.mark.to_json(),
            "until": self.until.to_json(),
            "first": self.first,
            "stop": self.stop,
            "pieces": [[number, end and end.to_json(), rows] for number, end, rows in self.pieces],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Segment:
        pieces = tuple((number, None if end is None else Cut.from_json(end), n) for number, end, n in value["pieces"])
        return cls(
            value["plan"],
            KeyRange.from_json(value["range"]),
            value["rows"],
            mark_from_json(value["mark"]),
            CdcOffset.from_json(value["until"]),
            value["first"],
            value["stop"],
            pieces,
        )


@dataclass(slots=True)
class FilterBuilder:
    """Makes a filter of runs in key order; neighbours of one rule are one run."""

    kind: SplitKind
    runs: list[Run] = field(default_factory=list)
    marks: list[SnapshotMark] = field(default_factory=list)
    is_whole: bool = False

    def add(self, end: Cut | None, rule: Rule, mark: SnapshotMark | None = None) -> None:
        """The rule for the keys up to *end*; nothing comes after a run without an end."""
        if self.is_whole or (self.runs and end is not None and self.runs[-1].end == end):
            return
        self.is_whole = end is None
        run = Run(end, rule, None if mark is None else self._number(mark))
        if self.runs and (self.runs[-1].rule, self.runs[-1].mark) == (run.rule, run.mark):
            self.runs.pop()
        self.runs.append(run)

    def build(self) -> ChangeFilter:
        return ChangeFilter(self.kind, tuple(self.runs), tuple(self.marks))

    def _number(self, mark: SnapshotMark) -> int:
        if mark not in self.marks:
            self.marks.append(mark)
        return self.marks.index(mark)
