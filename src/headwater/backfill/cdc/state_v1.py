"""State of a backfill, version 1: one row, the cursor of one reader.

``pos`` is the cut after the last row that was handed out, ``None`` as long as nothing was: null loads as ``None``, not
as a key of nulls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.backfill.cdc.errors import BackfillStateCorrupt
from headwater.backfill.cdc.segment import Segment
from headwater.backfill.cdc.state import BackfillTables
from headwater.sources.splits import Cut
from headwater.state import Snapshot, WriteBatch


@dataclass(slots=True)
class SingleState:
    """Where one reader is.

    :ivar pos: everything before this cut was handed out. :ivar exhausted: … and everything after it.
    :ivar row_count: about how many rows that were.
    :ivar settled: the log has passed the snapshots of what was handed out before *pending*.
    :ivar pending: what plans handed out whose snapshots the log has not passed.
    """

    pos: Cut | None = None
    exhausted: bool = False
    row_count: int = 0
    settled: bool = False
    pending: list[Segment] = field(default_factory=list)

    @classmethod
    def load(cls, tables: BackfillTables, view: Snapshot, table: str) -> SingleState | None:
        """``None``: nothing is stored. :raises BackfillStateCorrupt: it cannot be read."""
        values = tables.single.get(view, 0, (table,))
        if values is None:
            return None
        pos, exhausted, row_count, settled, pending = values
        try:
            cut = None if pos is None else Cut.from_json(pos)
            return cls(cut, exhausted, row_count, settled, [Segment.from_json(value) for value in pending])
        except (KeyError, TypeError, ValueError) as error:
            raise BackfillStateCorrupt("The stored cursor of a backfill cannot be read.") from error

    def save(self, tables: BackfillTables, batch: WriteBatch, table: str) -> None:
        pos = None if self.pos is None else self.pos.to_json()
        pending = [segment.to_json() for segment in self.pending]
        tables.single.put(batch, 0, (table,), (pos, self.exhausted, self.row_count, self.settled, pending))
