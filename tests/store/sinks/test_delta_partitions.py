"""Delta tables whose rows are parted by columns: in every mode, and when a row moves to another partition."""

from __future__ import annotations

import datetime as dt
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater.sinks import rewrite
from headwater.sinks.data_files import DataFile
from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import SinkInputError, SinkSchemaError
from headwater.sinks.open import open_sink
from headwater.sinks.partitions import Partitioning
from headwater.sinks.sink import Mode, Sink

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, IntegerOrder, order, table_of

EVENTS = table_of({"id": pa.int64(), "at": pa.timestamp("us", tz="UTC"), "kind": pa.string()}, name="events")
UTC = dt.UTC


def table_at(sink: Sink | DeltaSink, name: str = "orders") -> DeltaTable:
    assert isinstance(sink, DeltaSink)
    return DeltaTable(f"{sink.path}/public.{name}")


def parts(table: DeltaTable) -> list[dict[str, str | None]]:
    """The values of the partitions as the log has them."""
    found: dict[str, dict[str, str | None]] = {}
    for entry in sorted(Path(table.table_uri.removeprefix("file://"), "_delta_log").glob("*.json")):
        for line in entry.read_text().splitlines():
            action = json.loads(line)
            if "add" in action:
                found[action["add"]["path"]] = action["add"]["partitionValues"]
            if "remove" in action:
                found.pop(action["remove"]["path"], None)
    return sorted(found.values(), key=str)


def statuses(sink: DeltaSink) -> dict[int, str]:
    rows = table_at(sink).to_pyarrow_table().to_pylist()
    found = {row["id"]: row["status"] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture
def mirror(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path), partition_by=("status",))


def test_a_row_of_a_mirror_moves_to_another_partition(mirror: DeltaSink) -> None:
    feed = Feed(mirror)
    feed.history(1, [order(1, "new"), order(2, "new"), order(3, "paid")])
    assert parts(table_at(mirror)) == [{"status": "new"}, {"status": "paid"}]
    feed.changes(1, (UPDATE, order(1, "paid")), (DELETE, order(3)), (INSERT, order(4, "sent")))
    assert statuses(mirror) == {1: "paid", 2: "new", 4: "sent"}
    assert [dict(one)["status"] for one in parts(table_at(mirror))] == ["new", "paid", "sent"]
    feed.changes(2, (UPDATE, order(2, None, "5.00"), "status"))
    assert statuses(mirror) == {1: "paid", 2: "new", 4: "sent"}


def test_files_do_not_have_the_column_and_keep_their_statistics(mirror: DeltaSink) -> None:
    Feed(mirror).history(1, [order(1, "new"), order(5, "new")])
    actions = pa.table(table_at(mirror).get_add_actions(flatten=True)).to_pylist()
    assert [(one["partition.status"], one["min.id"], one["max.id"], one["num_records"]) for one in actions] == [
        ("new", 1, 5, 2)
    ]
    [path] = Path(mirror.path, "public.orders").glob("*.parquet")
    assert pa.parquet.read_schema(path).names == ["id", "total"]


def test_files_of_other_partitions_without_a_changed_key_are_left_alone(mirror: DeltaSink) -> None:
    feed = Feed(mirror)
    feed.history(1, [order(key, f"s{key // 10}") for key in range(40)])
    before = set(table_at(mirror).file_uris())
    feed.changes(1, (UPDATE, order(15, "s3")))
    after = set(table_at(mirror).file_uris())
    assert len(before - after) == 1
    assert statuses(mirror)[15] == "s3"


def test_a_mirror_parted_by_its_key_reads_only_partitions_that_may_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of({"region": pa.string(), "id": pa.int64(), "v": pa.int32()}, key=("region", "id"))
    sink = DeltaSink(str(tmp_path), partition_by=("region",))
    feed = Feed(sink, table)
    feed.history(1, [{"region": region, "id": key, "v": 0} for region in "abc" for key in range(3)])
    feed.changes(1, (UPDATE, {"region": "a", "id": 1, "v": 1}))
    opened: list[str] = []
    original = rewrite.Rewrite.read_keys

    def read_keys(self: rewrite.Rewrite, file: DataFile) -> pa.Table:
        opened.append(str(file.parted["region"]))
        return original(self, file)

    monkeypatch.setattr(rewrite.Rewrite, "read_keys", read_keys)
    feed.changes(2, (UPDATE, {"region": "b", "id": 1, "v": 2}), (DELETE, {"region": "b", "id": 2}))
    assert set(opened) == {"b"}
    rows = table_at(sink).to_pyarrow_table().to_pylist()
    assert sorted((row["region"], row["id"]) for row in rows if row["v"]) == [("a", 1), ("b", 1)]
    assert len(rows) == 8


def test_a_replaced_range_and_another_backfill_of_a_parted_mirror(mirror: DeltaSink) -> None:
    feed = Feed(mirror)
    feed.history(1, [order(key, "abc"[key % 3]) for key in range(9)])
    feed.history(2, [order(3, "z")], ranges=[(3, 6)], replaces=True, order=IntegerOrder())
    assert statuses(mirror) == {0: "a", 1: "b", 2: "c", 3: "z", 6: "a", 7: "b", 8: "c"}
    Feed(mirror, backfill="b2").history(1, [order(0, "y"), order(9, "y")])
    assert statuses(mirror) == {0: "y", 1: "b", 2: "c", 3: "z", 6: "a", 7: "b", 8: "c", 9: "y"}
    feed.changes(5, truncated=(5, 0))
    assert statuses(mirror) == {}


@pytest.mark.parametrize("seed", range(2))
def test_any_batches_give_what_a_dictionary_gives(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 3)
    chance = random.Random(seed)
    sink = DeltaSink(str(tmp_path), file_bytes=chance.choice([1, 1 << 20]), partition_by=("status",))
    feed = Feed(sink)
    expected = dict.fromkeys(range(20), "old")
    feed.history(1, [order(key, "old") for key in range(20)])
    for epoch in range(1, 15):
        changes: list[tuple[Any, ...]] = []
        for _ in range(6):
            key, status = chance.randrange(30), chance.choice("abc")
            if chance.random() < 0.3:
                changes.append((DELETE, order(key)))
                expected.pop(key, None)
            elif key in expected and chance.random() < 0.4:
                changes.append((UPDATE, order(key, None), "status"))
            else:
                changes.append((INSERT, order(key, status)))
                expected[key] = status
        feed.changes(epoch, *changes)
    assert statuses(sink) == expected


@pytest.mark.parametrize("mode", ["mirror", "changes", "history"])
@pytest.mark.parametrize(
    ("by", "column", "values"),
    [
        ("day(at)", "at_day", ["1969-12-31", "2024-02-29", None]),
        ("month(at)", "at_month", ["1969-12", "2024-02", None]),
        ("year(at)", "at_year", ["1969", "2024", None]),
        ("at", "at", ["1969-12-31 23:59:59.999999", "2024-02-29 12:00:00.000000", None]),
    ],
)
def test_times_in_every_mode(tmp_path: Path, mode: str, by: str, column: str, values: list[Any]) -> None:
    sink = open_sink("delta", path=str(tmp_path), mode=mode, partition_by=[by])
    feed = Feed(sink, EVENTS)
    times = [
        dt.datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        dt.datetime(2024, 2, 29, 12, tzinfo=UTC),
        None,
    ]
    feed.history(1, [{"id": key, "at": at} for key, at in enumerate(times)])
    feed.changes(1, *((INSERT, {"id": 10 + key, "at": at}) for key, at in enumerate(times)))
    table = table_at(sink, "events")
    assert sorted({str(one[column]) for one in parts(table)}) == sorted({str(value) for value in values})
    rows = {row["id"]: row for row in table.to_pyarrow_table().to_pylist()}
    assert [rows[key]["at"] for key in (0, 1, 2, 10, 11, 12)] == times * 2
    shown = pa.Table.from_batches(list(sink.shown(EVENTS, ["id", "at"]))).to_pylist()
    assert {row["id"]: row["at"] for row in shown} == {key: row["at"] for key, row in rows.items()}


def test_an_added_column_follows_the_one_that_it_is_made_of(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), partition_by=("day(at)",))
    feed = Feed(sink, EVENTS)
    first, later = dt.datetime(2024, 1, 1, tzinfo=UTC), dt.datetime(2024, 1, 2, tzinfo=UTC)
    feed.changes(1, (INSERT, {"id": 1, "at": first}), (INSERT, {"id": 2, "at": first}))
    feed.changes(2, (UPDATE, {"id": 1, "at": later}), (UPDATE, {"id": 2, "kind": "x"}, "at"))
    rows = {row["id"]: row["at_day"] for row in table_at(sink, "events").to_pyarrow_table().to_pylist()}
    assert rows == {1: later.date(), 2: first.date()}


def test_values_of_many_types_are_read_back(tmp_path: Path) -> None:
    kinds: dict[str, tuple[pa.DataType, Any]] = {
        "flag": (pa.bool_(), True),
        "n": (pa.int16(), -5),
        "money": (pa.decimal128(10, 2), Decimal("1.50")),
        "day": (pa.date32(), dt.date(2024, 2, 29)),
        "wall": (pa.timestamp("us"), dt.datetime(2024, 1, 1, 1, 2, 3, 4)),  # noqa: DTZ001
        "text": (pa.string(), "a=b/c d%ü€\U0001f600"),
    }
    table = table_of({"id": pa.int64(), "v": pa.int32(), **{name: kind for name, (kind, _) in kinds.items()}})
    sink = DeltaSink(str(tmp_path), partition_by=tuple(kinds))
    feed = Feed(sink, table)
    values = {name: value for name, (_, value) in kinds.items()}
    feed.history(1, [{"id": 1, "v": 0, **values}, {"id": 2, "v": 0}, {"id": 3, "v": 0, "text": ""}])
    feed.changes(1, *((UPDATE, {"id": key, "v": 1}, ",".join(kinds)) for key in (1, 2, 3)))
    rows = sorted(table_at(sink).to_pyarrow_table().to_pylist(), key=lambda row: row["id"])
    nothing = dict.fromkeys(kinds)
    assert rows == [{"id": 1, "v": 1, **values}, {"id": 2, "v": 1, **nothing}, {"id": 3, "v": 1, **nothing}]


def test_times_that_no_partition_can_have(tmp_path: Path) -> None:
    table = table_of({"id": pa.int64(), "day": pa.date32()})
    far = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([-800_000], pa.date32())], schema=table.schema)
    with pytest.raises(SinkInputError, match=r"Partition by day\(day\)"):
        list(Partitioning.parse(["day"]).split(pa.Table.from_batches([far])))
    [(values, _)] = Partitioning.parse(["day(day)"]).split(pa.Table.from_batches([far]))
    assert values == {"day_day": None}


def test_history_is_parted_by_both_and_a_version_moves(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), mode=Mode.HISTORY, partition_by=("status",))
    feed = Feed(sink)
    feed.history(1, [order(1, "a"), order(2, "b")])
    feed.changes(2, (UPDATE, order(1, "b")))
    feed.history(2, [order(1, "b"), order(2, "b")], replaces=True)
    found = sorted((one["status"], one["_is_current"]) for one in parts(table_at(sink)))
    assert found == [("a", "false"), ("b", "true"), ("b", "true")]


def test_each_table_has_its_own_partitions(tmp_path: Path) -> None:
    sink = open_sink("delta", path=str(tmp_path), partition_by={"public.events": ["day(at)"]})
    Feed(sink).changes(1, (INSERT, order(1)))
    Feed(sink, EVENTS).changes(1, (INSERT, {"id": 1}))
    assert table_at(sink).metadata().partition_columns == []
    assert table_at(sink, "events").metadata().partition_columns == ["at_day"]


def test_what_cannot_be_a_partition_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkInputError, match=r"valid are a column, year\(column\)"):
        DeltaSink(str(tmp_path), partition_by=("hour(at)",))
    with pytest.raises(SinkInputError, match="twice"):
        DeltaSink(str(tmp_path), partition_by=("at", "at"))
    for by, told in (("nothing", "which it does not have"), ("day(kind)", "which is string")):
        with pytest.raises(SinkSchemaError, match=told):
            Feed(DeltaSink(str(tmp_path), partition_by=(by,)), EVENTS).history(1, [{"id": 1}])
    table = table_of({"id": pa.int64(), "x": pa.float64(), "at": pa.date32(), "at_day": pa.date32()})
    with pytest.raises(SinkSchemaError, match="which is double"):
        Feed(DeltaSink(str(tmp_path), partition_by=("x",)), table).history(1, [{"id": 1}])
    with pytest.raises(SinkSchemaError, match="which partition_by would add"):
        Feed(DeltaSink(str(tmp_path), partition_by=("day(at)",)), table).history(1, [{"id": 1}])
    Feed(DeltaSink(str(tmp_path / "x"))).changes(1, (INSERT, order(1)))
    with pytest.raises(SinkSchemaError, match="partitioned by nothing, and this sink by status"):
        Feed(DeltaSink(str(tmp_path / "x"), partition_by=("status",)), ORDERS).changes(2, (INSERT, order(1)))
