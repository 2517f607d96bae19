"""ExternalStorageTable: its splits, the ranges of a unit in its snapshot, the order of its keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.backfill.fake_database import FakeSnapshot, filled

from headwater.backfill.cdc.external import ExternalStorageTable
from headwater.backfill.units import SplitUnit
from headwater.sources.errors import SourceProtocolError
from headwater.sources.splits import Cut, KeyRange, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

NO_LOG: Any = None
"""Readers that enter a snapshot need no log."""


def test_the_ranges_of_a_unit_are_read_in_its_snapshot() -> None:
    database = filled([1, 2, 3, 4, 5])
    snapshot = database.export()
    database.run(((1,), None), ((9,), (9, 9)))
    ranges = (KeyRange(None, Cut(("2",), after=True)), KeyRange(Cut(("5",)), None))
    unit = SplitUnit(
        database.table, SplitKind.KEY, ranges, snapshot.name, plan=1, attempt=0, upto=1, position=b"", commit_time_us=0,
        rows=3, columns=("b",),
    )  # fmt: skip
    external = ExternalStorageTable(database.table, database)
    rows = [row for batch in external.read(unit, NO_LOG) for row in batch.to_pylist()]
    assert rows == [{"k0": key, "b": 0} for key in (1, 2, 5)]


def test_splits_that_do_not_cover_every_key_once_are_refused() -> None:
    database = filled([1, 2, 3, 4, 5])
    external, snapshot = ExternalStorageTable(database.table, database), database.export()
    plan = external.split(snapshot, split_rows=2, kind=SplitKind.KEY)
    assert plan == snapshot.plan(database.table, split_rows=2, kind=SplitKind.KEY)
    for splits in ((), plan.splits[1:], plan.splits[:-1], (plan.splits[0], *plan.splits[2:])):
        with pytest.raises(SourceProtocolError, match="do not touch"):
            external.split(_Fixed(replace(plan, splits=splits)), split_rows=2)


class _Fixed(FakeSnapshot):
    """A snapshot that splits as it is told to."""

    def __init__(self, plan: SplitPlan) -> None:
        self._plan = plan

    def plan(self, table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        return self._plan


def test_the_order_of_the_keys_is_asked_for_once() -> None:
    database = filled([1])
    external = ExternalStorageTable(database.table, database)
    assert external.order is external.order
