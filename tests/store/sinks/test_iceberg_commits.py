"""Commits of an Iceberg sink against others: zombies, other writers, chores; and what they leave in the warehouse."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater import failpoints
from headwater.sinks import iceberg, iceberg_snapshot, iceberg_waste, rewrite
from headwater.sinks.errors import SinkBusy, SinkDriverMissing, SinkInputError, SinkUnwritable
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.sink import Committed, Mode, Token

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order, own_rows, table_of
from .iceberg_tables import open_table, scan, snapshot_id, statuses

_PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture
def sink(tmp_path: Path) -> IcebergSink:
    return IcebergSink(str(tmp_path / "lake"))


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], Any]], None]:
    """Do something when a failpoint is passed, once."""

    def arrange(name: str, action: Callable[[], Any]) -> None:
        left = [action]

        def hit(passed: str) -> None:
            if passed == name and left:
                left.pop()()

        monkeypatch.setattr(failpoints, "hit", hit)

    return arrange


def files_in(sink: IcebergSink, name: str) -> list[Path]:
    return sorted(path for path in Path(sink.warehouse, "public", "orders", name).glob("*") if path.is_file())


def append_by_others(sink: IcebergSink) -> None:
    with open_table(sink) as table:
        table.append(pa.Table.from_batches([own_rows(ORDERS, [order(100, "by others")])]))


def test_a_zombie_that_commits_the_same_batch_later_changes_nothing(sink: IcebergSink, at: Any) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = feed.token(2)
    of_zombie = feed.stage_changes(token, [(INSERT, order(2)), (UPDATE, order(1, "once"))])
    ours = feed.stage_changes(token, [(INSERT, order(2)), (UPDATE, order(1, "once"))])
    at("sink.iceberg.before_commit", lambda: sink.commit(ORDERS, token, [ours]))
    assert not sink.commit(ORDERS, token, [of_zombie])
    assert statuses(sink) == {1: "once", 2: "new"}
    with open_table(sink) as table:
        assert len(table.metadata.snapshots) == 2


def test_a_zombie_with_an_older_batch_is_refused_after_newer_ones(sink: IcebergSink, at: Any) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    token = feed.token(2)
    of_zombie = feed.stage_changes(token, [(UPDATE, order(1, "two"))])

    def go_on() -> None:
        sink.commit(ORDERS, token, [feed.stage_changes(token, [(UPDATE, order(1, "two"))])])
        feed.changes(3, (DELETE, order(1)))

    at("sink.iceberg.before_commit", go_on)
    assert not sink.commit(ORDERS, token, [of_zombie])
    assert statuses(sink) == {}
    assert sink.committed(ORDERS, "q", "b1") == Committed(3)


@pytest.mark.parametrize("mode", ["mirror", "changes", "history"])
def test_a_zombie_that_appends_history_is_refused(mode: str, tmp_path: Path, at: Any) -> None:
    sink = IcebergSink(str(tmp_path), mode=Mode(mode))
    feed = Feed(sink)
    token = feed.token(0, 1)
    staged = [feed.stage_history(token, [order(1), order(2)]) for _ in range(2)]
    at("sink.iceberg.before_commit", lambda: sink.commit(ORDERS, token, [staged[0]]))
    assert not sink.commit(ORDERS, token, [staged[1]])
    assert statuses(sink) == {1: "new", 2: "new"}


def test_a_commit_of_another_writer_in_between_is_taken_into_account(sink: IcebergSink, at: Any) -> None:
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
    monkeypatch.setattr(iceberg, "COMMIT_ATTEMPTS", 2)
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


def test_a_table_that_was_dropped_is_made_anew(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    with open_table(sink) as table:
        table.catalog.drop_table(("public", "orders"))
    assert sink.committed(ORDERS, "q", "b1") == Committed()
    feed.changes(1, (INSERT, order(2)))
    assert statuses(sink) == {2: "new"}


def test_metadata_and_files_of_many_commits_stay_few(sink: IcebergSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 4)
    monkeypatch.setattr(iceberg_waste, "KEPT_SNAPSHOTS", 5)
    monkeypatch.setattr(iceberg_waste, "EXPIRED_SNAPSHOTS", 5)
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
    monkeypatch.setattr(iceberg_waste, "KEPT_SNAPSHOTS", 2)
    monkeypatch.setattr(iceberg_waste, "EXPIRED_SNAPSHOTS", 1)
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    with open_table(sink) as reader:
        for epoch in range(2, 12):
            feed.changes(epoch, (UPDATE, order(1, f"at {epoch}")))
        assert reader.scan().to_arrow().to_pylist() == [order(1)]
    with open_table(sink) as table:
        assert len(table.metadata.snapshots) <= 4


def test_a_snapshot_with_a_name_is_kept(sink: IcebergSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg_waste, "KEPT_SNAPSHOTS", 2)
    monkeypatch.setattr(iceberg_waste, "EXPIRED_SNAPSHOTS", 1)
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


def test_staging_that_fails_leaves_nothing(sink: IcebergSink) -> None:
    def broken() -> Any:
        yield pa.RecordBatch.from_pylist([order(1)], schema=ORDERS.schema)
        raise ValueError("the source is gone")

    from .file_sinks import history_part

    with pytest.raises(ValueError, match="gone"):
        sink.stage_history(ORDERS, Feed(sink).token(0, 1), history_part(), broken())
    assert not list(Path(sink.warehouse).rglob("*.parquet"))


def test_a_table_without_rows_is_there_all_the_same(sink: IcebergSink) -> None:
    Feed(sink).history(1, [])
    assert scan(sink).schema.names == ["id", "status", "total"]
    assert sink.committed(ORDERS, "q", "b1").plan == 1


def test_files_without_a_changed_key_are_left_alone(tmp_path: Path) -> None:
    table = table_of({"id": pa.int64(), "v": pa.string()})
    sink = IcebergSink(str(tmp_path), file_bytes=1)
    feed = Feed(sink, table)
    token = feed.token(0, 1)
    parts = [feed.stage_history(token, [{"id": first + n, "v": "a"} for n in range(10)]) for first in (0, 100, 200)]
    sink.commit(table, token, parts)
    with open_table(sink) as found:
        before = set(found.inspect.files().column("file_path").to_pylist())
    feed.changes(1, (UPDATE, {"id": 105, "v": "b"}), (INSERT, {"id": 50, "v": "c"}), (DELETE, {"id": 300}))
    with open_table(sink) as found:
        after = set(found.inspect.files().column("file_path").to_pylist())
    assert len(before & after) == 2
    assert len(after - before) == 2


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
