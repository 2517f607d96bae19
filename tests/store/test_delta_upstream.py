"""A Delta table as an upstream table: versions, the change data feed, and what VACUUM takes."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.backfill.snapshot.consume_upstream.delta import DeltaUpstream, epoch_of, version_of
from headwater.backfill.snapshot.consume_upstream.errors import (
    ChangeLogGone,
    EpochMismatch,
    InvalidUpstream,
    KeyNotUnique,
    UpstreamDropped,
    VersionExpired,
)
from headwater.log_store.columns import EPOCH, OP, VNODE
from headwater.stream import Op

Rows = dict[int, str | None]
FEED = {"delta.enableChangeDataFeed": "true"}


class Lake:
    """A Delta table that is written by delta-rs."""

    def __init__(self, path: Path, rows: Rows, configuration: dict[str, str] | None = None) -> None:
        from deltalake import write_deltalake

        self.path = str(path)
        write_deltalake(self.path, _table(rows), configuration=FEED if configuration is None else configuration)

    @property
    def delta(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.path)

    def append(self, rows: Rows) -> None:
        from deltalake import write_deltalake

        write_deltalake(self.path, _table(rows), mode="append")

    def overwrite(self, rows: Rows) -> None:
        from deltalake import write_deltalake

        write_deltalake(self.path, _table(rows), mode="overwrite")

    def merge(self, rows: Rows) -> None:
        merging = self.delta.merge(_table(rows), "s.id = t.id", source_alias="s", target_alias="t")
        merging.when_matched_update_all().when_not_matched_insert_all().execute()

    def vacuum(self) -> None:
        self.delta.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def upstream(self, **options: Any) -> DeltaUpstream:
        return DeltaUpstream(self.path, ("id",), **options)


def _table(rows: Rows) -> pa.Table:
    return pa.table({"id": pa.array(list(rows), pa.int64()), "v": pa.array(list(rows.values()), pa.string())})


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "orders", {1: "a", 2: "b", 3: "c"})


def snapshot(upstream: DeltaUpstream, version: int, parts: int = 3) -> Rows:
    found: Rows = {}
    for low, high in _ranges(upstream, parts):
        for batch in upstream.snapshot(epoch_of(version), (low, high)):
            for row in batch.to_pylist():
                assert low <= row[VNODE] < high
                assert row["id"] not in found
                found[row["id"]] = row["v"]
    return found


def changes(upstream: DeltaUpstream, after: int, upto: int, parts: int = 3) -> list[tuple[int, str, int, str | None]]:
    """Version, op, key, value; by version, and as they come."""
    found = []
    for vnodes in _ranges(upstream, parts):
        for batch in upstream.change_log(epoch_of(after), epoch_of(upto), vnodes):
            for row in batch.to_pylist():
                found.append((version_of(row[EPOCH]), Op(row[OP]).change_type, row["id"], row["v"]))
    return sorted(found, key=lambda change: (change[0], change[2]))


def _ranges(upstream: DeltaUpstream, parts: int) -> list[tuple[int, int]]:
    count = upstream.vnode_count
    cuts = [count * part // parts for part in range(parts + 1)]
    return list(pairwise(cuts))


def test_a_version_is_an_epoch_and_back() -> None:
    for version in (0, 1, 7, 10**9):
        assert version_of(epoch_of(version)) == version
        assert version_of(epoch_of(version) - 1) == version - 1


def test_a_snapshot_of_any_version(lake: Lake) -> None:
    lake.append({4: "d"})
    lake.delta.delete("id = 1")
    upstream = lake.upstream()
    assert snapshot(upstream, 0) == {1: "a", 2: "b", 3: "c"}
    assert snapshot(upstream, 1) == {1: "a", 2: "b", 3: "c", 4: "d"}
    assert snapshot(upstream, 2) == {2: "b", 3: "c", 4: "d"}
    assert upstream.newest_epoch() == epoch_of(2)
    assert sum(cut.rows for cut in upstream.snapshot_cuts(epoch_of(0), (0, 256))) == 3


def test_changes_of_every_kind_are_net(lake: Lake) -> None:
    lake.append({4: "d"})
    lake.delta.update(predicate="id = 2", new_values={"v": "B"})
    lake.delta.delete("id = 1")
    lake.merge({2: "m", 10: "n"})
    assert changes(lake.upstream(), 0, 4) == [
        (1, "insert", 4, "d"),
        (2, "update_preimage", 2, "b"),
        (2, "update_postimage", 2, "B"),
        (3, "delete", 1, "a"),
        (4, "update_preimage", 2, "B"),
        (4, "update_postimage", 2, "m"),
        (4, "insert", 10, "n"),
    ]


def test_an_overwrite_is_what_differs(lake: Lake) -> None:
    """M8: gone and come again in one epoch."""
    lake.overwrite({1: "a", 2: "other", 9: None})
    assert changes(lake.upstream(), 0, 1) == [
        (1, "update_preimage", 2, "b"),
        (1, "update_postimage", 2, "other"),
        (1, "delete", 3, "c"),
        (1, "insert", 9, None),
    ]


def test_versions_without_changes_have_none(lake: Lake) -> None:
    for number in range(4, 8):
        lake.append({number: "x"})
    lake.delta.optimize.compact()
    upstream = lake.upstream()
    assert version_of(upstream.newest_epoch()) == 5
    assert changes(upstream, 4, 5) == []
    assert snapshot(upstream, 5) == {1: "a", 2: "b", 3: "c", 4: "x", 5: "x", 6: "x", 7: "x"}


def test_epochs_come_one_after_the_other_and_not_before_their_version(lake: Lake) -> None:
    upstream = lake.upstream()
    assert upstream.next_epoch(epoch_of(0)) is None
    lake.append({4: "d"})
    lake.append({5: "e"})
    assert upstream.next_epoch(epoch_of(0)) == epoch_of(1)
    assert upstream.next_epoch(epoch_of(0), upto=epoch_of(0)) is None
    assert upstream.next_epoch(epoch_of(1), upto=epoch_of(2)) == epoch_of(2)


def test_a_table_travels_to_tasks(lake: Lake) -> None:
    upstream = lake.upstream(storage={"secret": "word"})
    again = pickle.loads(pickle.dumps(upstream))
    assert again == upstream
    assert snapshot(pickle.loads(pickle.dumps(lake.upstream())), 0) == {1: "a", 2: "b", 3: "c"}
    assert "word" not in repr(upstream)


def test_the_time_of_a_version_and_the_version_of_a_time(lake: Lake) -> None:
    lake.append({4: "d"})
    upstream = lake.upstream()
    made = datetime.fromtimestamp(upstream.commit_time_us(epoch_of(1)) / 1e6, UTC)
    assert abs(datetime.now(UTC) - made) < timedelta(minutes=5)
    assert upstream.epoch_at(upstream.commit_time_us(epoch_of(1)) // 1000) == epoch_of(0)
    assert upstream.epoch_at(int(made.timestamp() * 1000) + 3_600_000) is None
    with pytest.raises(ChangeLogGone, match="no version from before"):
        upstream.epoch_at(0)
    lake.delta.create_checkpoint()
    (Path(lake.path) / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(ChangeLogGone, match="the log of version 0"):
        lake.upstream().epoch_at(upstream.commit_time_us(epoch_of(1)) // 1000)


def test_s8_files_that_vacuum_took_are_a_retention_miss(lake: Lake) -> None:
    lake.overwrite({1: "x"})
    lake.overwrite({1: "y"})
    lake.vacuum()
    upstream = lake.upstream()
    with pytest.raises(VersionExpired) as expired:
        upstream.check_snapshot(epoch_of(0))
    assert "resnapshot" in str(expired.value)
    with pytest.raises(VersionExpired):
        snapshot(upstream, 0)
    with pytest.raises(ChangeLogGone):
        upstream.change_cuts(epoch_of(0), epoch_of(1), (0, 256))
    with pytest.raises(ChangeLogGone):
        changes(upstream, 0, 1)
    upstream.check_snapshot(upstream.newest_epoch())


def test_s8_a_log_that_was_cleaned_up_is_a_retention_miss(lake: Lake) -> None:
    lake.append({4: "d"})
    lake.append({5: "e"})
    lake.delta.create_checkpoint()
    for version in (0, 1):
        (Path(lake.path) / "_delta_log" / f"{version:020}.json").unlink()
    upstream = lake.upstream()
    with pytest.raises(VersionExpired):
        upstream.check_snapshot(epoch_of(0))
    with pytest.raises(ChangeLogGone):
        upstream.change_cuts(epoch_of(0), epoch_of(1), (0, 256))
    assert snapshot(upstream, 2) == {1: "a", 2: "b", 3: "c", 4: "d", 5: "e"}


def test_s8_a_table_made_anew_is_a_mismatch_and_one_that_is_gone_an_error(lake: Lake, tmp_path: Path) -> None:
    import shutil

    lake.append({4: "d"})
    upstream = lake.upstream()
    before = upstream.identity
    assert upstream.next_epoch(epoch_of(1)) is None
    shutil.rmtree(lake.path)
    with pytest.raises(UpstreamDropped):
        lake.upstream().newest_epoch()
    anew = Lake(Path(lake.path), {1: "z"}).upstream()
    assert anew.identity != before
    with pytest.raises(EpochMismatch):
        anew.next_epoch(epoch_of(1))
    with pytest.raises(EpochMismatch):
        anew.check_snapshot(epoch_of(1))


def test_a_table_without_a_change_feed_is_refused_with_the_statement(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "plain", {1: "a"}, {})
    with pytest.raises(InvalidUpstream, match=r"delta\.enableChangeDataFeed = true"):
        lake.upstream().check_snapshot(epoch_of(0))


def test_a_key_that_is_none_is_refused(lake: Lake) -> None:
    with pytest.raises(InvalidUpstream, match="'key'"):
        DeltaUpstream(lake.path, ("nothing",)).table(epoch_of(0))
    with pytest.raises(InvalidUpstream, match="'key'"):
        DeltaUpstream(lake.path, ()).table(epoch_of(0))


def test_two_rows_with_one_key_and_a_null_in_a_key_are_refused(lake: Lake) -> None:
    lake.append({5: "e"})
    lake.merge({7: "g"})
    from deltalake import write_deltalake

    twice = pa.table({"id": pa.array([8, 8], pa.int64()), "v": ["x", "y"]})
    write_deltalake(lake.path, twice, mode="append")
    with pytest.raises(KeyNotUnique) as refused:
        changes(lake.upstream(), 2, 3)
    assert "x" not in str(refused.value).replace("next", "")
    lake.append({None: "n"})  # type: ignore[dict-item]
    with pytest.raises(InvalidUpstream):
        changes(lake.upstream(), 3, 4)


def test_a_column_that_comes_is_null_before(lake: Lake) -> None:
    from deltalake import write_deltalake

    wider = pa.table({"id": pa.array([4], pa.int64()), "v": ["d"], "w": pa.array([1], pa.int32())})
    write_deltalake(lake.path, wider, mode="append", schema_mode="merge")
    upstream = lake.upstream()
    assert upstream.table(epoch_of(0)).schema.names == ["id", "v"]
    assert upstream.table(epoch_of(1)).schema.names == ["id", "v", "w"]
    (batch,) = upstream.change_log(epoch_of(0), epoch_of(1), (0, 256))
    assert batch.select(["id", "w"]).to_pylist() == [{"id": 4, "w": 1}]
    assert snapshot(upstream, 1) == {1: "a", 2: "b", 3: "c", 4: "d"}


def test_partitions_whose_change_data_feed_cannot_be_read_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    place = str(tmp_path / "by_time")
    write_deltalake(place, _table({1: "10:30"}), partition_by=["v"], configuration=FEED)
    upstream = DeltaUpstream(place, ("id",))
    for refused in (
        lambda: upstream.check_snapshot(epoch_of(0)),
        lambda: upstream.change_cuts(epoch_of(-1), epoch_of(0), (0, 256)),
    ):
        with pytest.raises(InvalidUpstream, match=r"partitioned by values.*another column"):
            refused()
    plain = str(tmp_path / "by_day")
    write_deltalake(plain, _table({1: "2026-05-31"}), partition_by=["v"], configuration=FEED)
    assert snapshot(DeltaUpstream(plain, ("id",)), 0) == {1: "2026-05-31"}
    DeltaUpstream(plain, ("id",)).check_snapshot(epoch_of(0))
