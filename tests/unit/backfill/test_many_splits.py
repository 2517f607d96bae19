"""Scenario M30: a table of 100 000 splits is planned, saved, loaded and filtered quickly, and its filter is small."""

from __future__ import annotations

import json
import pickle
import time
from itertools import pairwise

from tests.unit.backfill.fake_database import FakeMark, FakeOffset, table_of
from tests.unit.backfill.harness import Stored

from headwater.backfill.cdc.executor import BackfillOptions
from headwater.backfill.progress import Phase
from headwater.backfill.units import covered
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

SPLITS = 100_000


class Wide:
    """A snapshot of a table of very many splits, all of 100 rows but those at the ends."""

    def __init__(self, lsn: int) -> None:
        self.name = f"s{lsn}"
        self.mark = FakeMark(lsn, (), lsn)

    def is_open(self) -> bool:
        return True

    def table(self, table: SourceTable) -> SourceTable:
        return table

    def has_key(self, table: SourceTable) -> bool:
        return True

    def files(self, table: SourceTable) -> str:
        return ""

    def plan(self, table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        cuts = [None, *(Cut((str(100 * n),)) for n in range(1, SPLITS)), None]
        ranges = [KeyRange(start, end) for start, end in pairwise(cuts)]
        ends = (0, SPLITS - 1)
        splits = tuple(Split(n, part, 0 if n in ends else 100, n in ends) for n, part in enumerate(ranges))
        return SplitPlan(SplitKind.KEY, splits, 100 * SPLITS, 1 << 30, "wide")

    def page_end(self, table: SourceTable, kind: SplitKind, part: KeyRange, rows: int) -> Cut | None:
        return None

    def close(self) -> None: ...


def test_m30_100_000_splits() -> None:
    stored, options = Stored(), BackfillOptions(split_rows=100)
    executor = stored.open(table_of(), options)
    began = time.process_time()
    executor.hand_out(1, Wide(10), 1_000_000)
    saved = stored.save(executor)
    assert saved < 100, "many splits to a row"
    executor = stored.open(table_of(), options)
    handed = executor.handed_out(1)
    assert len(handed) == 10_000
    assert len(covered([part.range for part in handed])) == 1
    for plan in range(2, 200):
        executor.hand_out(plan, Wide(10 * plan), 10_000)
        stored.save(executor)
        if plan % 2:
            executor.settle(FakeOffset(10 * plan - 15))
        kept = executor.filter()
        assert kept is not None
        assert len(kept.runs) <= 7, "neighbours of one rule are one run"
        assert len(json.dumps(kept.to_json())) < 2_000
        assert len(pickle.dumps(kept)) < 4_000
    assert stored.save(executor) < 20
    assert executor.phase is Phase.READING
    assert executor.progress().splits == 1 + 10_000 + 198 * 100
    assert time.process_time() - began < 20.0
