"""The files of a kept table: damage is found, what nobody needs goes, what an earlier release wrote is read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from tests.store.sinks.file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order, table_of
from tests.store.versioned.written import WrittenTable, rows_at

from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.kept_tables import KeptTables
from headwater.versioned import TableNotKept, UnsupportedKey, VersionedTable, compaction
from headwater.versioned.compaction import compact, to_merge
from headwater.versioned.errors import RunCorrupt, TableBusy
from headwater.versioned.folder import TableFolder
from headwater.versioned.manifest import Manifest
from headwater.versioned.run_file import RunInfo

FIXTURE = Path(__file__).parents[2] / "fixtures" / "versioned" / "v1"


def shown(sink: KeptTables) -> dict[int, tuple[str | None, str]]:
    rows = [row for batch in sink.shown(ORDERS, ["id", "status", "total"]) for row in batch.to_pylist()]
    return {row["id"]: (row["status"], str(row["total"])) for row in rows}


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    """Made by ``make_fixture`` below: two runs, one with a delete and a value that is kept, and their manifest."""
    shutil.copytree(FIXTURE, tmp_path / "tables")
    sink = KeptTables(str(tmp_path / "tables"))
    expected = dict.fromkeys(range(5), ("new", "1.00")) | {1: ("new", "9.00")}
    del expected[2]
    assert shown(sink) == expected
    newest = sink.folder(ORDERS).newest()
    assert newest.changes == {"q": 1}
    assert newest.history == {"q/b1": [1, 0]}
    assert newest.table == ORDERS
    assert compact(sink.folder(ORDERS), everything=True) == 1
    assert shown(sink) == expected


def make_fixture(folder: Path) -> None:
    """What the test above reads."""
    feed = Feed(KeptTables(str(folder)))
    feed.history(1, [order(key) for key in range(5)])
    feed.changes(1, (DELETE, order(2)), (UPDATE, order(1, None, "9.00"), "status"))


def _only_run(sink: KeptTables) -> Path:
    (path,) = sink.folder(ORDERS).runs.iterdir()
    return path


@pytest.mark.parametrize("place", [200, -20, -60])
def test_a_byte_that_changed_is_found(tmp_path: Path, place: int) -> None:
    sink = KeptTables(str(tmp_path))
    Feed(sink).changes(1, *((INSERT, order(key)) for key in range(50)))
    path = _only_run(sink)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(RunCorrupt, match="headwater resnapshot"):
        shown(sink)


def test_a_run_that_is_gone_is_found(tmp_path: Path) -> None:
    sink = KeptTables(str(tmp_path))
    Feed(sink).changes(1, (INSERT, order(1)))
    _only_run(sink).unlink()
    with pytest.raises(TableBusy, match="headwater resnapshot"):
        shown(sink)


def test_a_manifest_that_changed_is_found(tmp_path: Path) -> None:
    sink = KeptTables(str(tmp_path))
    Feed(sink).changes(1, (INSERT, order(1)))
    (path,) = (sink.folder(ORDERS).path / "manifests").iterdir()
    path.write_text(path.read_text().replace('"epoch"', '"epocb"').replace('"q":1', '"q":2'))
    with pytest.raises(RunCorrupt):
        sink.folder(ORDERS).newest()


def test_a_table_that_is_not_kept_says_what_to_do(tmp_path: Path) -> None:
    kept = WrittenTable(tmp_path)
    with pytest.raises(TableNotKept, match='kind = "table"'):
        VersionedTable.open(kept.location, "public.others", kept.root)
    kept.close()


def test_a_key_that_has_no_order_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    listed = table_of({"id": pa.list_(pa.int32()), "n": pa.int32()})
    feed = Feed(KeptTables(str(tmp_path)), listed)
    with pytest.raises(UnsupportedKey, match="Leave the table out"):
        feed.changes(1, (INSERT, {"id": [1], "n": 1}))
    assert not list(tmp_path.rglob("*.run"))


def test_a_column_whose_values_do_not_fit_its_new_type_is_refused(tmp_path: Path) -> None:
    sink = KeptTables(str(tmp_path))
    Feed(sink).changes(1, (INSERT, order(1)))
    other = table_of({"id": pa.int64(), "status": pa.int32(), "total": pa.decimal128(10, 2)})
    with pytest.raises(SinkSchemaError):
        Feed(sink, other).changes(2, (INSERT, {"id": 2, "status": 1, "total": None}))
    assert shown(sink) == {1: ("new", "1.00")}


def test_values_that_a_run_does_not_tell_are_kept_when_their_column_is_renamed(tmp_path: Path) -> None:
    sink = KeptTables(str(tmp_path))
    feed = Feed(sink)
    feed.history(1, [order(1), order(2), order(3)])
    feed.history(2, [order(1, "x", "9.00"), order(2, "x", "9.00")], columns=("total",))
    feed.changes(3, (UPDATE, order(3, None, "5.00"), "status"))
    columns = (ORDERS.columns[0], replace(ORDERS.columns[1], name="state"), replace(ORDERS.columns[2], name="status"))
    feed.table = replace(ORDERS, columns=columns)
    feed.changes(4, (INSERT, {"id": 4, "state": "new", "status": None}))
    for _ in range(2):
        rows = [row for batch in sink.shown(feed.table, ["id", "state", "status"]) for row in batch.to_pylist()]
        assert {row["id"]: (row["state"], str(row["status"])) for row in rows} == {
            1: ("new", "9.00"),
            2: ("new", "9.00"),
            3: ("new", "5.00"),
            4: ("new", "None"),
        }
        compact(sink.folder(ORDERS), everything=True)


def test_a_query_that_begins_anew_leaves_no_row_of_before(tmp_path: Path) -> None:
    sink = KeptTables(str(tmp_path))
    Feed(sink).history(1, [order(1), order(2)])
    sink.complete(ORDERS, "q", "b1", 1)
    sink.incomplete(ORDERS, "q", "b2", {})
    anew = Feed(sink, backfill="b2")
    anew.history(1, [order(2, "read again")])
    anew.history(2, [order(3)])
    assert shown(sink) == {2: ("read again", "1.00"), 3: ("new", "1.00")}


def test_what_was_replaced_goes_after_a_while_and_not_before(tmp_path: Path) -> None:
    sink = KeptTables(str(tmp_path), merge_runs=2)
    feed = Feed(sink)
    for epoch in range(1, 6):
        feed.changes(epoch, *((UPDATE, order(key, f"s{epoch}")) for key in range(epoch, 20)))
    folder = sink.folder(ORDERS)
    assert len(folder.newest().runs) <= 2
    kept = {path.name for path in folder.runs.iterdir()}
    assert len(kept) > 4
    folder.forget(kept_seconds=0)
    assert {path.name for path in folder.runs.iterdir()} == {run.name for run in folder.newest().runs}
    assert len(list((folder.path / "manifests").iterdir())) == 1
    assert shown(sink)[19] == ("s5", "1.00")


@pytest.mark.parametrize("what", ["forget", "remove_unnamed"])
def test_who_was_slow_to_look_removes_no_run_that_a_later_version_has(tmp_path: Path, what: str) -> None:
    sink = KeptTables(str(tmp_path))
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    feed.changes(2, (INSERT, order(2)))
    waiting = [True]

    class Slow(TableFolder):
        """Somebody else commits and forgets when it is about to read the newest version."""

        def _read(self, number: int) -> Manifest:
            if number == 2 and waiting:
                waiting.clear()
                feed.changes(3, (INSERT, order(3)))
                sink.folder(ORDERS).forget(kept_seconds=0)
            return super()._read(number)

    slow = Slow(tmp_path, ORDERS.full_name)
    if what == "forget":
        slow.forget(kept_seconds=0)
    else:
        slow.remove_unnamed(lambda name: True)
    assert not waiting
    assert {run.name for run in slow.newest().runs} <= {path.name for path in slow.runs.iterdir()}
    assert shown(sink).keys() == {1, 2, 3}


def test_a_merge_that_takes_long_goes_on_beside_the_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "INLINE_BYTES", 0)
    sink = KeptTables(str(tmp_path), merge_runs=2)
    feed = Feed(sink)
    for epoch in range(1, 12):
        feed.changes(epoch, *((UPDATE, order(key, f"s{epoch}")) for key in range(500)), (INSERT, order(1000 + epoch)))
    for thread in compaction._under_way.values():
        thread.join(60)
    found = shown(sink)
    assert len(found) == 511
    assert found[7] == ("s11", "1.00")
    assert len(sink.folder(ORDERS).newest().runs) < 11


def test_a_reader_goes_on_when_its_files_are_replaced(tmp_path: Path) -> None:
    kept = WrittenTable(tmp_path)
    kept.history([order(key) for key in range(60_000)])
    table = kept.open()
    epoch = kept.newest
    batches = table.snapshot(epoch, (0, 256))
    first = next(batches)
    kept.fold()
    compact(kept.sink.folder(ORDERS), everything=True, kept_seconds=0)
    assert first.num_rows + sum(batch.num_rows for batch in batches) == 60_000
    kept.close()


def test_a_read_may_begin_and_end_at_any_position(tmp_path: Path) -> None:
    kept = WrittenTable(tmp_path)
    kept.history([order(key) for key in range(40_000)])
    epoch = kept.write((INSERT, order(100_000)), (DELETE, order(7)))
    table = kept.open()
    blocks = table.blocks(epoch, (0, 256))
    assert sum(block.rows for block in blocks) >= 40_000 - 16_384
    assert [(block.vnode, block.first) for block in blocks] == sorted((block.vnode, block.first) for block in blocks)
    whole = pa.Table.from_batches(table.snapshot(epoch, (3, 5)))
    places = table.positions(whole.slice(0, 400).combine_chunks().to_batches()[0], epoch)
    vnodes = table.vnodes(whole.slice(0, 400).combine_chunks().to_batches()[0], epoch).to_pylist()
    cut = 77
    assert vnodes[cut] == 3
    rest = pa.Table.from_batches(table.snapshot(epoch, (3, 5), start=places[cut].as_py()))
    head = pa.Table.from_batches(table.snapshot(epoch, (3, 4), end=places[cut].as_py()))
    assert pa.concat_tables([head, rest]).to_pylist() == whole.to_pylist()
    named = pa.Table.from_batches(table.snapshot(epoch, (3, 5), columns=["total"]))
    assert named.column_names == ["total"]
    assert named.num_rows == whole.num_rows
    assert len(rows_at(table, epoch)) == 40_000
    kept.close()


def test_many_keys_are_looked_up_in_their_order(tmp_path: Path) -> None:
    kept = WrittenTable(tmp_path)
    kept.history([order(key) for key in range(5000)])
    kept.write((UPDATE, order(4, "later")), (DELETE, order(2)))
    asked = [*range(4999, -1, -3), 4, 2, 77_777]
    found = kept.open().lookup(pa.table({"id": asked}), columns=["id", "status"]).to_pylist()
    assert [row["id"] for row in found] == [key for key in asked if key not in (2, 77_777)]
    assert {row["status"] for row in found if row["id"] == 4} == {"later"}
    kept.close()


def test_runs_of_about_one_size_are_merged() -> None:
    def runs(*sizes: int) -> list[RunInfo]:
        return [RunInfo(str(place), 1, size << 20, b"", b"", True) for place, size in enumerate(sizes)]

    assert not to_merge(runs(100, 1, 1), 3)
    assert [run.size >> 20 for run in to_merge(runs(100, 2, 1, 1), 3)] == [2, 1, 1]
    assert len(to_merge(runs(4, 2, 1, 1), 3)) == 4
    assert not to_merge(runs(100, 50, 20), 2)
    assert len(to_merge(runs(*(1 << place for place in range(40, 0, -1))), 8)) == 20


def test_the_folder_of_a_table_is_its_name(tmp_path: Path) -> None:
    assert TableFolder(tmp_path, "public.orders").path == tmp_path / "public.orders"
    assert TableFolder(tmp_path, 'public."a/b"').path.parent == tmp_path
