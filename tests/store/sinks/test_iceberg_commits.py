"""Commits of an Iceberg sink against other writers and chores, and what they leave in the warehouse."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater import failpoints
from headwater.sinks import iceberg_snapshot, rewrite
from headwater.sinks import lake as lake_module
from headwater.sinks.errors import SinkBusy, SinkDriverMissing, SinkInputError, SinkUnwritable
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.sink import Committed, Mode, Token

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order, own_rows
from .iceberg_tables import open_table, scan, snapshot_id, statuses
from .lakes import At

_PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture
def sink(tmp_path: Path) -> IcebergSink:
    return IcebergSink(str(tmp_path / "lake"))


def files_in(sink: IcebergSink, name: str) -> list[Path]:
    return sorted(path for path in Path(sink.warehouse, "public", "orders", name).glob("*") if path.is_file())


def append_by_others(sink: IcebergSink) -> None:
    with open_table(sink) as table:
        table.append(pa.Table.from_batches([own_rows(ORDERS, [order(100, "by others")])]))


def test_a_commit_of_another_writer_in_between_is_taken_into_account(sink: IcebergSink, at: At) -> None:
    feed = Feed(sink)
    feed.history(1, [order(key) for key in range(5)])
    at("sink.iceberg.before_commit", lambda: append_by_others(sink))
    assert feed.changes(2, (UPDATE, order(100, "paid")), (DELETE, order(0)))
    assert statuses(sink) == {**dict.fromkeys((1, 2, 3, 4), "new"), 100: "paid"}
    assert feed.changes(3, (DELETE, order(1)))
    assert 1 not in statuses(sink)


def test_a_table_that_others_commit_to_all_the_time_is_said_to_be_busy(
    sink: IcebergSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_module, "COMMIT_ATTEMPTS", 2)
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    data, before = files_in(sink, "data"), files_in(sink, "metadata")

    def hit(name: str) -> None:
        if name == "sink.iceberg.before_commit":
            append_by_others(sink)

    monkeypatch.setattr(failpoints, "hit", hit)
    with pytest.raises(SinkBusy):
        feed.changes(2, (INSERT, order(2)))
    with open_table(sink) as table:
        own = [file for file in files_in(sink, "data") if file.name.startswith("part-")]
        assert own == data
        ours = [file for file in files_in(sink, "metadata") if file.name.startswith("part-")]
        assert ours == [file for file in before if file.name.startswith("part-")]
        assert table.scan().to_arrow().num_rows == 3


def test_an_answer_that_was_lost_is_looked_up(sink: IcebergSink, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    catalog = sink._catalog.open()
    commit = catalog.commit_table

    def loses_the_answer(*arguments: Any) -> Any:
        commit(*arguments)
        raise ConnectionResetError

    monkeypatch.setattr(catalog, "commit_table", loses_the_answer)
    assert feed.changes(2, (INSERT, order(2)))
    monkeypatch.undo()
    assert feed.changes(3, (INSERT, order(3)))
    assert statuses(sink) == {1: "new", 2: "new", 3: "new"}


def _deliver(warehouse: str, first: int, barrier: Any) -> None:
    sink = IcebergSink(warehouse)
    feed = Feed(sink, query=f"q{first}")
    barrier.wait()
    for epoch in range(1, 16):
        feed.changes(epoch, (INSERT, order(first + epoch)), (UPDATE, order(first, f"{epoch}")))


def test_processes_that_race_lose_nothing(sink: IcebergSink) -> None:
    barrier = _PROCESSES.Barrier(3)
    racing = [_PROCESSES.Process(target=_deliver, args=(sink.warehouse, first, barrier)) for first in (0, 1000, 2000)]
    for process in racing:
        process.start()
    for process in racing:
        process.join(120)
        assert process.exitcode == 0
    found = statuses(sink)
    assert set(found) == {first + key for first in (0, 1000, 2000) for key in range(16)}
    assert all(found[first] == "15" for first in (0, 1000, 2000))


@pytest.mark.parametrize("mode", ["mirror", "changes", "history"])
def test_a_batch_that_comes_again_after_all_snapshots_expired_changes_nothing(mode: str, tmp_path: Path) -> None:
    sink = IcebergSink(str(tmp_path), mode=Mode(mode))
    feed = Feed(sink)
    feed.history(1, [order(1)])
    feed.changes(5, (INSERT, order(2)))
    append_by_others(sink) if mode == "mirror" else feed.changes(6, (INSERT, order(3)))
    rows = scan(sink).num_rows
    with open_table(sink) as table:
        table.maintenance.expire_snapshots().older_than(dt.datetime.now(dt.UTC)).commit()
        assert len(table.metadata.snapshots) == 1
    again = pickle.loads(pickle.dumps(sink))
    assert again.committed(ORDERS, "q", "b1").plan == 1
    assert not Feed(again).changes(5, (INSERT, order(2)))
    assert not Feed(again).history(1, [order(1)])
    assert scan(sink).num_rows == rows


def test_a_token_whose_property_was_taken_away_is_found_in_the_snapshots(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.changes(5, (INSERT, order(1)))
    append_by_others(sink)
    with open_table(sink) as table, table.transaction() as transaction:
        transaction.remove_properties("headwater.changes.q")
    assert sink.committed(ORDERS, "q", "b1") == Committed(5)


def test_metadata_and_files_of_many_commits_stay_few(sink: IcebergSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 4)
    monkeypatch.setattr(iceberg_snapshot, "KEPT_SNAPSHOTS", 5)
    monkeypatch.setattr(iceberg_snapshot, "EXPIRED_SNAPSHOTS", 5)
    monkeypatch.setattr(iceberg_snapshot, "SMALL_MANIFESTS", 2)
    feed = Feed(IcebergSink(sink.warehouse, retention_hours=0))
    for epoch in range(1, 80):
        feed.changes(epoch, (INSERT, order(epoch)), (UPDATE, order(1, f"at {epoch}")))
    assert statuses(sink) == {1: "at 79", **dict.fromkeys(range(2, 80), "new")}
    with open_table(sink) as table:
        assert len(table.metadata.snapshots) <= 11
        assert len(table.metadata.metadata_log) <= 51
        assert len(table.current_snapshot().manifests(table.io)) <= 4
        for snapshot in table.metadata.snapshots:  # whoever is there can be read
            assert table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows
    assert len(files_in(sink, "data")) < 60
    assert len([file for file in files_in(sink, "metadata") if file.suffix == ".avro"]) < 60
    assert len([file for file in files_in(sink, "metadata") if file.suffix == ".json"]) <= 52
    assert len(files_in(sink, "_headwater")) <= 2


def test_files_are_kept_for_readers_as_long_as_the_retention(
    sink: IcebergSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg_snapshot, "KEPT_SNAPSHOTS", 2)
    monkeypatch.setattr(iceberg_snapshot, "EXPIRED_SNAPSHOTS", 1)
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    with open_table(sink) as reader:
        for epoch in range(2, 12):
            feed.changes(epoch, (UPDATE, order(1, f"at {epoch}")))
        assert reader.scan().to_arrow().to_pylist() == [order(1)]
    with open_table(sink) as table:
        assert len(table.metadata.snapshots) <= 4


def test_a_snapshot_with_a_name_is_kept(sink: IcebergSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg_snapshot, "KEPT_SNAPSHOTS", 2)
    monkeypatch.setattr(iceberg_snapshot, "EXPIRED_SNAPSHOTS", 1)
    feed = Feed(IcebergSink(sink.warehouse, retention_hours=0))
    feed.changes(1, (INSERT, order(1)))
    with open_table(sink) as table:
        table.manage_snapshots().create_tag(table.metadata.current_snapshot_id, "before").commit()
    for epoch in range(2, 12):
        feed.changes(epoch, (UPDATE, order(1, f"at {epoch}")))
    with open_table(sink) as table:
        tagged = table.metadata.refs["before"].snapshot_id
        assert table.scan(snapshot_id=tagged).to_arrow().to_pylist() == [order(1)]
    assert statuses(sink) == {1: "at 11"}


def test_files_of_attempts_that_failed_are_removed_and_no_others(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.history(1, [order(1)])
    feed.changes(1, (UPDATE, order(1, "paid")))
    kept = files_in(sink, "data")
    lost = Path(sink.warehouse, "public", "orders", "metadata", "00001-lost.metadata.json")
    lost.write_text("{}")
    feed.stage_history(feed.token(0, 2), [order(2)])
    for _ in range(2):
        sink.abort(ORDERS, "other", 9)
        sink.abort(ORDERS, "q", 0)
        assert len(files_in(sink, "data")) == len(kept) + 1
    sink.abort(ORDERS, "q", 1)
    assert files_in(sink, "data") == kept
    assert not lost.exists()
    with open_table(sink) as table:
        for snapshot in table.metadata.snapshots:
            assert table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows == 1


def test_files_of_a_table_that_was_never_made_are_removed(sink: IcebergSink) -> None:
    Feed(sink).stage_history(Token("q", "b1", 0, 0, 1), [order(1)])
    assert len(files_in(sink, "data")) == 1
    sink.abort(ORDERS, "q", 1)
    assert not files_in(sink, "data")


def test_two_tables_of_one_name_in_one_namespace_are_refused(tmp_path: Path) -> None:
    sink = IcebergSink(str(tmp_path), namespace="lake.raw")
    Feed(sink).changes(1, (INSERT, order(1)))
    assert scan(sink, "lake.raw.orders").num_rows == 1
    from dataclasses import replace

    with pytest.raises(SinkUnwritable, match=r"rows of public\.orders, not of sales\.orders"):
        Feed(sink, replace(ORDERS, namespace="sales")).changes(1, (INSERT, order(1)))


def test_a_warehouse_in_an_object_store_needs_a_catalog() -> None:
    with pytest.raises(SinkInputError, match="catalog_uri"):
        IcebergSink("s3://lake/mirror").committed(ORDERS, "q", "b1")


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    sink = IcebergSink(str(tmp_path), catalog_uri="postgresql://u:geheim@h/d", catalog_options={"token": "geheim"})
    assert "geheim" not in repr(sink) + sink.name
    with pytest.raises(SinkUnwritable) as failed:
        sink.check()
    assert "geheim" not in str(failed.value)


def test_the_snapshot_tells_its_token(sink: IcebergSink) -> None:
    Feed(sink).changes(7, (INSERT, order(1)))
    with open_table(sink) as table:
        summary = table.current_snapshot().summary
        assert summary["headwater.changes.q"] == "7"
        assert (summary["added-records"], summary["total-records"]) == ("1", "1")
    assert snapshot_id(sink) is not None


def test_a_library_that_is_missing_is_told_with_the_command(sink: IcebergSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg_core", None)
    with pytest.raises(SinkDriverMissing, match=r"pip install 'headwater\[iceberg\]'"):
        sink.check()
