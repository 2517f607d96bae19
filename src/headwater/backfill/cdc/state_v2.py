"""State of a backfill, version 2: splits, and what each plan handed out of them.

Splits never change once they are planned, so they are stored once, many to a row, and go out in the order of their
numbers: which of them were handed out is one number and a cursor in the split that was handed out in part. A plan has a
row of its own until the log has passed its snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from headwater.backfill.cdc.errors import BackfillStateCorrupt
from headwater.backfill.cdc.segment import Segment
from headwater.backfill.cdc.state import BackfillTables
from headwater.sources.snapshots import SnapshotMark, mark_from_json
from headwater.sources.splits import Cut, KeyRange, Split
from headwater.state import Snapshot, WriteBatch

BLOCK: Final = 2_000
"""Splits in one stored row."""
UNKNOWN: Final = -1
"""The rows of a split that nobody has estimated: it is handed out in pages."""


@dataclass(slots=True)
class ParallelState:
    """Where the splits of a table are.

    :ivar splits: in key order; they touch.
    :ivar free: how many at the beginning and at the end had no row when they were planned: they need no reading.
    :ivar mark: of the snapshot that they were planned in; ``None`` once the log has passed it.
    :ivar next: the first split that was not handed out as a whole. :ivar cursor: … and how far it was.
    :ivar part_rows: about how many rows of it.
    :ivar row_count: about how many rows were handed out.
    :ivar settled: everything before this cut was handed out, and the log has passed its snapshots; empty: nothing.
    :ivar pending: what plans handed out whose snapshots the log has not passed.
    """

    splits: Sequence[Split]
    free: tuple[int, int] = (0, 0)
    mark: SnapshotMark | None = None
    next: int = 0
    cursor: Cut | None = None
    part_rows: int = 0
    row_count: int = 0
    settled: tuple[Cut | None, ...] = ()
    pending: list[Segment] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The number after the last split that is read."""
        return len(self.splits) - self.free[1]

    @classmethod
    def load(cls, tables: BackfillTables, view: Snapshot, table: str) -> ParallelState | None:
        """``None``: nothing is stored. :raises BackfillStateCorrupt: it cannot be read."""
        values = tables.parallel.get(view, 0, (table,))
        if values is None:
            return None
        count, free, mark, following, cursor, part_rows, row_count, settled = values
        try:
            blocks = tables.splits.scan_prefix(view, 0, (table,))
            splits = list(chain.from_iterable(_unpacked(first, packed) for (_, first), (packed,) in blocks))
            if len(splits) != count:
                raise BackfillStateCorrupt(f"A backfill of {count} splits has {len(splits)} stored.")
            return cls(
                splits,
                (free[0], free[1]),
                None if mark is None else mark_from_json(mark),
                following,
                None if cursor is None else Cut.from_json(cursor),
                part_rows,
                row_count,
                tuple(None if cut is None else Cut.from_json(cut) for cut in settled),
                [Segment.from_json(value[0]) for _, value in tables.plans.scan_prefix(view, 0, (table,))],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BackfillStateCorrupt("The stored splits of a backfill cannot be read.") from error

    def save(self, tables: BackfillTables, batch: WriteBatch, table: str) -> None:
        """Where they are; not the splits themselves nor the plans."""
        values = (
            len(self.splits),
            list(self.free),
            None if self.mark is None else self.mark.to_json(),
            self.next,
            None if self.cursor is None else self.cursor.to_json(),
            self.part_rows,
            self.row_count,
            [cut and cut.to_json() for cut in self.settled],
        )
        tables.parallel.put(batch, 0, (table,), values)

    def save_splits(self, tables: BackfillTables, batch: WriteBatch, table: str) -> None:
        """The splits, once."""
        for first in range(0, len(self.splits), BLOCK):
            tables.splits.put(batch, 0, (table, first), (_packed(self.splits[first : first + BLOCK]),))


def _packed(splits: Sequence[Split]) -> dict[str, Any]:
    """Splits that touch, each cut once."""
    cuts = [splits[0].range.start, *(split.range.end for split in splits)]
    return {
        "cuts": [cut and [*cut.values, cut.after] for cut in cuts],
        "rows": [split.rows for split in splits],
        "empty": [place for place, split in enumerate(splits) if split.empty],
    }


def _unpacked(first: int, packed: dict[str, Any]) -> list[Split]:
    cuts = [None if cut is None else Cut(tuple(cut[:-1]), cut[-1]) for cut in packed["cuts"]]
    empty = set(packed["empty"])
    return [
        Split(first + place, KeyRange(cuts[place], cuts[place + 1]), rows, place in empty)
        for place, rows in enumerate(packed["rows"])
    ]
