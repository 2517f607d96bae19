"""History beside live changes over a double of a Citus cluster: plain Postgres servers, not Citus itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.citus.running import running
from tests.db.citus.writing import Writer, fill
from tests.servers.citus_double import CitusDouble

from headwater.sources.open import open_source
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import Cut, KeyRange, SplitKind

COLUMNS = "id bigint, v text, amount numeric(12,2)"


@pytest.mark.parametrize("kind", [SplitKind.KEY, pytest.param(SplitKind.HEAP, marks=pytest.mark.soak)])
def test_history_is_read_once_from_all_nodes_while_they_are_written_to(
    double: CitusDouble, tmp_path: Path, kind: SplitKind
) -> None:
    double.distribute("acc", COLUMNS)
    double.reference("ref", COLUMNS)
    double.execute(0, "CREATE TABLE own (id bigint PRIMARY KEY, v text, amount numeric(12,2))")
    fill(double, "acc", 2000)
    for name in ("ref", "own"):
        double.execute(0, f"INSERT INTO {name} SELECT i, 'v' || i, i FROM generate_series(1, 100) i")
    with running(double, tmp_path, "acc", "ref", "own") as capture, Writer(double, "acc"):
        names = ("public.acc", "public.ref", "public.own")
        delivering = Delivering(capture, *names, split_rows=300, parallelism=2, keyed=True, split_kind=kind)
        delivering.run_until(delivering.planner.is_history_done)
    with running(double, tmp_path) as capture:
        delivering.capture = capture
        delivering.finish()
        delivering.assert_equal()
        delivering.close()
        assert set(delivering.sink.history["public.ref"].values()) == {1}
        assert len(delivering.sink.history["public.ref"]) == 100


def test_a_snapshot_has_parts_on_every_node_and_reads_each_row_once(double: CitusDouble) -> None:
    double.distribute("acc", COLUMNS)
    fill(double, "acc", 500)
    snapshots = open_snapshots(double.dsn)
    source = open_source(double.dsn, spill=Path("unused"))
    (table,) = source.tables(["acc"])
    source.close()
    snapshot = snapshots.export()
    try:
        for kind in SplitKind:
            plan = snapshot.plan(table, split_rows=100, kind=kind)
            assert len(plan.splits) > 1
            found = [
                row["id"]
                for split in plan.splits
                for batch in snapshots.read(table, plan.kind, split.range, snapshot.name)
                for row in batch.to_pylist()
            ]
            assert sorted(found) == list(range(500))
        first = KeyRange(None, Cut(("1",)))
        cut = snapshot.page_end(table, SplitKind.HEAP, first, 10)
        assert cut is None  # all its rows are in one block
        parts = [KeyRange(None, Cut(("0", "1"))), KeyRange(Cut(("0", "1")), Cut(("2", "1"))), KeyRange(Cut(("2", "1")))]
        found = [
            key
            for part in parts
            for batch in snapshots.read(table, SplitKind.HEAP, part, snapshot.name, columns=["id"])
            for key in batch.column(0).to_pylist()
        ]
        assert sorted(found) == list(range(500))
        fill(double, "acc", 10, first=500)
        whole = snapshots.read(table, SplitKind.KEY, KeyRange(), snapshot.name, columns=["id"])
        assert sum(batch.num_rows for batch in whole) == 500
    finally:
        snapshot.close()
