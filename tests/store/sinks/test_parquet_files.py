"""The files of a Parquet sink: small ones are joined, and whoever reads sees each row once at any time."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from headwater import failpoints
from headwater.sinks import manifests as manifests_module
from headwater.sinks import parquet
from headwater.sinks.errors import SinkInputError, SinkSchemaError
from headwater.sinks.manifests import ManifestDamaged, Manifests
from headwater.sinks.open import open_sink
from headwater.sinks.parquet import ParquetSink, committed_files, read
from headwater.sinks.sink import Committed

from .file_sinks import DELETE, INSERT, ORDERS, Feed, order, table_of

FIXTURE = Path(__file__).parents[2] / "fixtures" / "sinks" / "manifests_v1"
EVENTS = table_of({"id": pa.int64(), "at": pa.timestamp("us", tz="UTC")}, name="orders")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "LOOK_EVERY", 1)
    monkeypatch.setattr(manifests_module, "CHECKPOINT_MANIFESTS", 5)


@pytest.fixture
def sink(tmp_path: Path) -> ParquetSink:
    return ParquetSink(str(tmp_path), join_files=4)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "public.orders"


def by_manifest(table: Path) -> list[int]:
    rows = read(table)
    return sorted(rows.column("id").to_pylist()) if rows.num_columns else []


def by_directory(table: Path) -> list[int]:
    """As those see it who list the directory."""
    seen = ds.dataset(table, format="parquet", partitioning="hive", ignore_prefixes=["_", "."])
    return sorted(seen.to_table().column("id").to_pylist()) if seen.files else []


def visible(table: Path) -> list[Path]:
    return [path for path in table.rglob("*.parquet") if not any(part.startswith("_") for part in path.parts)]


def test_small_files_are_joined_and_each_row_is_there_once(sink: ParquetSink, table: Path) -> None:
    feed = Feed(sink)
    for epoch in range(1, 31):
        feed.changes(epoch, (INSERT, order(epoch)))
        assert by_manifest(table) == by_directory(table) == list(range(1, epoch + 1))
    assert len(visible(table)) < 12
    assert len(committed_files(table)) == len(visible(table))
    assert sorted(visible(table)) == sorted(committed_files(table))
    assert sink.committed(ORDERS, "q", "b1") == Committed(30)
    assert not feed.changes(30, (INSERT, order(99)))
    shown = pa.Table.from_batches(list(sink.shown(ORDERS, ["id"])))
    assert sorted(shown.column("id").to_pylist()) == list(range(1, 31))


def test_the_default_joins_sixteen(tmp_path: Path, table: Path) -> None:
    feed = Feed(ParquetSink(str(tmp_path)))
    for epoch in range(1, 16):
        feed.changes(epoch, (INSERT, order(epoch)))
    assert len(visible(table)) == 15
    feed.changes(16, (INSERT, order(16)))
    assert len(visible(table)) == 1
    assert by_manifest(table) == list(range(1, 17))


def test_zero_joins_none(tmp_path: Path, table: Path) -> None:
    feed = Feed(ParquetSink(str(tmp_path), join_files=0))
    for epoch in range(1, 20):
        feed.changes(epoch, (INSERT, order(epoch)))
    assert len(visible(table)) == 19


def test_large_files_are_left_alone(tmp_path: Path, table: Path) -> None:
    feed = Feed(ParquetSink(str(tmp_path), join_files=2, file_bytes=8000))
    for epoch in range(1, 8):
        feed.changes(epoch, (INSERT, order(epoch)))
    assert len(visible(table)) == 7


def test_at_every_step_manifests_show_each_row_once_and_the_directory_none_twice(
    sink: ParquetSink, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(sink)
    missing: Counter[str] = Counter()

    def hit(name: str) -> None:
        rows = by_manifest(table)
        assert rows in (list(range(1, epoch)), list(range(1, epoch + 1))), name
        seen = by_directory(table) if visible(table) else []
        assert len(seen) == len(set(seen)), name
        missing[name] += len(set(range(1, epoch)) - set(seen))

    monkeypatch.setattr(failpoints, "hit", hit)
    for epoch in range(1, 14):
        feed.changes(epoch, (INSERT, order(epoch)))
    hits = {name for name in failpoints.registered() if name.startswith("sink.parquet.")}
    assert hits <= set(missing)
    of_joining = {"sink.parquet.before_hide", "sink.parquet.after_hide", "sink.parquet.before_move"}
    assert {name for name, rows in missing.items() if rows} == of_joining


def test_a_reader_that_began_before_files_were_joined_reads_on(sink: ParquetSink, table: Path) -> None:
    feed = Feed(sink)
    for epoch in range(1, 4):
        feed.changes(epoch, (INSERT, order(epoch)))
    reader = sink.shown(ORDERS, ["id"])
    seen = next(reader).column("id").to_pylist()
    feed.changes(4, (INSERT, order(4)))
    assert len(visible(table)) == 1
    seen += [key for batch in reader for key in batch.column("id").to_pylist()]
    assert seen == [1, 2, 3]


def test_what_nobody_needs_is_removed_after_its_time(tmp_path: Path, table: Path) -> None:
    feed = Feed(ParquetSink(str(tmp_path), join_files=4))
    for epoch in range(1, 5):
        feed.changes(epoch, (INSERT, order(epoch)))
    assert len(list((table / "_replaced").iterdir())) == 4
    feed.sink = ParquetSink(str(tmp_path), join_files=4, retention_hours=0)
    for epoch in range(5, 31):
        feed.changes(epoch, (INSERT, order(epoch)))
    assert not list((table / "_replaced").iterdir())
    assert len(list((table / "_headwater").glob("*.json"))) <= 5
    assert by_manifest(table) == by_directory(table) == list(range(1, 31))


def test_the_newest_manifest_with_all_files_is_enough(tmp_path: Path, table: Path) -> None:
    feed = Feed(ParquetSink(str(tmp_path), join_files=0))
    for epoch in range(1, 13):
        feed.changes(epoch, (INSERT, order(epoch)))
    assert [manifest.number for manifest in Manifests(table).all()] == [10, 11, 12]
    for path in (table / "_headwater").glob("*.json"):
        if int(path.stem) < 10:
            path.unlink()
    assert by_manifest(table) == list(range(1, 13))
    (table / "_headwater" / f"{10:020}.json").unlink()
    with pytest.raises(ManifestDamaged, match="are gone"):
        read(table)


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_process_whose_number_was_forgotten_commits_nothing(tmp_path: Path, table: Path, steps: int) -> None:
    feed = Feed(ParquetSink(str(tmp_path), join_files=0, retention_hours=0))
    for epoch in range(1, 4):
        feed.changes(epoch, (INSERT, order(epoch)))
    stale = Manifests(table).newest().following([])
    for epoch in range(4, 4 + steps):
        feed.changes(epoch, (INSERT, order(epoch)))
    before = sorted(path.name for path in (table / "_headwater").iterdir())
    assert not Manifests(table).put(stale)
    assert sorted(path.name for path in (table / "_headwater").iterdir()) == before


def test_a_batch_that_comes_while_files_are_joined_is_not_lost(
    sink: ParquetSink, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, other = Feed(sink), Feed(sink, query="other")
    for epoch in range(1, 4):
        feed.changes(epoch, (INSERT, order(epoch)))
    left = [2]

    def hit(name: str) -> None:
        if name == "sink.parquet.before_manifest" and left[0]:
            left[0] -= 1
            if not left[0]:  # the batch is committed, its files are joined
                other.changes(1, (INSERT, order(100)))

    monkeypatch.setattr(failpoints, "hit", hit)
    feed.changes(4, (INSERT, order(4)))
    assert by_manifest(table) == by_directory(table) == [1, 2, 3, 4, 100]
    assert not [path for path in (table / "_staging").rglob("*") if path.is_file()]


def test_files_of_other_columns_are_not_joined_with_them(sink: ParquetSink, table: Path) -> None:
    feed = Feed(sink)
    for epoch in range(1, 4):
        feed.changes(epoch, (INSERT, order(epoch)))
    feed.table = table_of({"id": pa.int64(), "status": pa.string(), "total": pa.decimal128(10, 2), "n": pa.int32()})
    for epoch in range(4, 7):
        feed.changes(epoch, (INSERT, {**order(epoch), "n": epoch}))
    assert len(visible(table)) == 6
    feed.changes(7, (INSERT, {**order(7), "n": 7}))
    assert len(visible(table)) == 4
    rows = sorted(read(table).to_pylist(), key=lambda row: row["id"])
    assert [row["n"] for row in rows] == [None, None, None, 4, 5, 6, 7]
    assert [row["_commit_version"] for row in rows] == [epoch * 100 for epoch in range(1, 8)]


def test_a_file_that_is_gone_is_told(sink: ParquetSink, table: Path) -> None:
    Feed(sink).changes(1, (INSERT, order(1)))
    visible(table)[0].unlink()
    with pytest.raises(ManifestDamaged, match="is gone"):
        read(table)
    with pytest.raises(ManifestDamaged, match="is gone"):
        sink.committed(ORDERS, "q", "b1")


# -- version 1 -----------------------------------------------------------------------------------------------------


def test_files_of_version_1_are_read_and_gone_on_with(tmp_path: Path, table: Path) -> None:
    shutil.copytree(FIXTURE, table)
    sink = ParquetSink(str(tmp_path), join_files=4)
    rows = read(table).to_pylist()
    told = sorted((row["_commit_version"], row["_change_type"], row["id"], row["_unavailable"]) for row in rows)
    assert told == [
        (7, "insert", 1, None),
        (7, "insert", 2, None),
        (100, "insert", 3, None),
        (101, "update_preimage", 3, None),
        (102, "update_postimage", 3, None),
        (200, "delete", 1, None),
        (300, "update_postimage", 2, "status"),
    ]
    assert sink.committed(ORDERS, "q", "b1") == Committed(3, 1, 0)
    feed = Feed(sink)
    assert not feed.changes(3, (INSERT, order(9)))
    assert feed.changes(4, (DELETE, order(2)))
    newest = json.loads(max((table / "_headwater").glob("*.json")).read_text())
    assert (newest["version"], newest["number"], len(newest["removed"])) == (2, 5, 4)
    assert len(read(table)) == 8
    assert len(visible(table)) == 1


def test_a_later_version_is_refused(sink: ParquetSink, table: Path) -> None:
    Feed(sink).changes(1, (INSERT, order(1)))
    path = next((table / "_headwater").glob("*.json"))
    path.write_text(path.read_text().replace('"version": 2', '"version": 3'))
    with pytest.raises(ManifestDamaged, match="update Headwater"):
        read(table)


# -- partitions ----------------------------------------------------------------------------------------------------


def test_files_are_in_directories_of_their_days(tmp_path: Path, table: Path) -> None:
    sink = open_sink("parquet", path=str(tmp_path), join_files=3, partition_by=["day(at)"])
    feed = Feed(sink, EVENTS)
    days = [dt.datetime(2024, 1, day, 12, tzinfo=dt.UTC) for day in (1, 2)]
    feed.history(1, [{"id": key, "at": (*days, None)[key % 3]} for key in range(6)])
    for epoch in range(1, 5):
        feed.changes(epoch, *((INSERT, {"id": 10 * epoch + key, "at": at}) for key, at in enumerate(days)))
    directories = Counter(path.parent.name for path in visible(table))
    assert set(directories) == {"at_day=2024-01-01", "at_day=2024-01-02", "at_day=__HIVE_DEFAULT_PARTITION__"}
    assert max(directories.values()) <= 3
    keys = sorted([*range(6), *(10 * epoch + key for epoch in range(1, 5) for key in (0, 1))])
    assert by_manifest(table) == by_directory(table) == keys
    assert read(table).schema.names[:2] == ["id", "at"]
    rows = {row["id"]: row["at"] for row in read(table).to_pylist()}
    assert (rows[10], rows[11], rows[2]) == (*days, None)
    assert all("at_day" not in pq.read_schema(path).names for path in visible(table))


def test_a_plain_column_or_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkInputError, match=r"Use day\(at\)"):
        ParquetSink(str(tmp_path), partition_by=("at",))
    with pytest.raises(SinkSchemaError, match="does not have"):
        Feed(ParquetSink(str(tmp_path), partition_by=("day(no)",)), EVENTS).changes(1, (INSERT, {"id": 1}))


def test_a_sink_with_all_options_can_be_replaced_and_compared(tmp_path: Path) -> None:
    make: Callable[..., Any] = open_sink
    sink = make("parquet", path=str(tmp_path), partition_by={"public.orders": ["day(at)"]}, retention_hours=2)
    assert replace(sink) == sink
