"""Keeping: what a planner asks and tells a sink that keeps tables of our own, around each batch; one thread.

1. Before it plans: the tables whose history is there as a whole, up to what was delivered.
2. It chooses up to where the batch goes with the sink, which knows what is pinned.
3. The history of a table is read only while nobody has pinned it; until it is done nobody does.
4. Before a batch is given away: the tables whose history is not, or no longer, there as a whole. One that is to be
   read once more, and that a pin holds back, is there as a whole: whoever has pinned it must be able to read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headwater.backfill.query_table import QueryTable
from headwater.sinks.sink import KeepingSink, Sink

_PROGRESS_SECONDS: Final = 1.0


class Keeping:
    """Of one query. The time is given: seconds that only grow."""

    def __init__(self, sink: KeepingSink, query: str) -> None:
        self._sink, self._query = sink, query
        self._whole: dict[str, bool] = {}
        self._granted: dict[str, bool] = {}
        self._due = self._told = 0.0

    @classmethod
    def of(cls, sink: Sink, query: str) -> Keeping | None:
        """``None``: it is no such sink."""
        return cls(sink, query) if isinstance(sink, KeepingSink) else None

    def is_resting(self, tables: Iterable[QueryTable], now: float) -> bool:
        """Whether the next batch has time: what is not folded is read from the log."""
        return now < self._due and all(self._whole.get(table.name, False) for table in tables)

    def before(self, tables: Iterable[QueryTable], backfill: str, delivered: int) -> None:
        """Everything up to the epoch *delivered* is at the sink."""
        for table in tables:
            if table.is_complete and not self._whole.get(table.name, False):
                self._sink.complete(table.table, self._query, backfill, delivered)
                self._whole[table.name] = True

    def choose(self, tables: Iterable[QueryTable], after: int, upto: int) -> int:
        """Up to where the next batch goes."""
        if upto <= after:
            return upto
        return max(after, self._sink.choose([table.name for table in tables], upto))

    def hold(self, tables: Iterable[QueryTable]) -> None:
        """Let history be read where nobody has pinned the table."""
        for table in tables:
            wanted = not table.backfill.is_done
            if self._granted.get(table.name) != wanted:
                table.held_back = self._sink.may_read(table.name, wanted=wanted)
                if table.held_back is None:
                    self._granted[table.name] = wanted

    def after(self, tables: Iterable[QueryTable], backfill: str, now: float) -> None:
        """A batch is given away."""
        self._due = now + self._sink.interval_seconds
        is_time = now - self._told >= _PROGRESS_SECONDS
        for table in tables:
            if table.is_complete or (table.backfill.replaces and table.held_back is not None):
                continue
            if is_time or self._whole.get(table.name, True):
                self._sink.incomplete(table.table, self._query, backfill, table.status())
                self._whole[table.name] = False
                self._told = now
