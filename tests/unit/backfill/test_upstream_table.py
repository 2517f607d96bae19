"""Reading the ranges of a unit in its snapshot."""

from __future__ import annotations

from tests.unit.backfill.fake_database import filled

from headwater.backfill.cdc.upstream_table.external import ExternalStorageTable
from headwater.backfill.cdc.upstream_table.snapshot import SnapshotReader
from headwater.backfill.units import SplitUnit
from headwater.sources.splits import Cut, KeyRange, SplitKind


def test_the_ranges_of_a_unit_are_read_in_its_snapshot_and_counted() -> None:
    database = filled([1, 2, 3, 4, 5])
    snapshot = database.export()
    database.run(((1,), None), ((9,), (9, 9)))
    ranges = (KeyRange(None, Cut(("2",), after=True)), KeyRange(Cut(("5",)), None))
    unit = SplitUnit(
        database.table, SplitKind.KEY, ranges, snapshot.name, plan=1, attempt=0, upto=1, position=b"", commit_time_us=0,
        rows=3, columns=("b",),
    )  # fmt: skip
    reader = SnapshotReader(ExternalStorageTable(database.table, database))
    rows = [row for batch in reader.read(unit) for row in batch.to_pylist()]
    assert rows == [{"k0": key, "b": 0} for key in (1, 2, 5)]
    assert reader.rows == 3


def test_the_order_of_the_keys_is_asked_for_once() -> None:
    database = filled([1])
    external = ExternalStorageTable(database.table, database)
    assert external.order is external.order
