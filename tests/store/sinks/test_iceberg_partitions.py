"""Iceberg tables with partitions: in every mode, and when a row moves to another partition."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.sinks import rewrite
from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Mode

from .file_sinks import DELETE, INSERT, UPDATE, Feed, table_of
from .iceberg_tables import files, open_table, scan

EVENTS = table_of(
    {"id": pa.int64(), "at": pa.timestamp("us", tz="UTC"), "kind": pa.string(), "price": pa.decimal128(10, 2)},
    name="events",
)
BY = ("day(at)", "bucket(4, id)")


def event(key: int, day: int | None = 1, kind: str | None = "a") -> dict[str, Any]:
    at = None if day is None else dt.datetime(2024, 5, day, 12, tzinfo=dt.UTC)
    return {"id": key, "at": at, "kind": kind, "price": Decimal(key)}


def rows_of(sink: IcebergSink) -> dict[int, dict[str, Any]]:
    rows = scan(sink, "public.events").to_pylist()
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def days_of(sink: IcebergSink) -> list[dt.date | None]:
    with open_table(sink, "public.events") as table:
        found = table.inspect.files().column("partition").to_pylist()
    return sorted({one["at_day"] for one in found}, key=str)


def test_a_row_of_a_mirror_moves_to_another_partition(tmp_path: Path) -> None:
    sink = IcebergSink(str(tmp_path), partition_by=BY)
    feed = Feed(sink, EVENTS)
    feed.history(1, [event(key, 1 + key % 3) for key in range(20)])
    assert days_of(sink) == [dt.date(2024, 5, day) for day in (1, 2, 3)]
    feed.changes(1, (UPDATE, event(0, 9)), (DELETE, event(1)), (INSERT, event(50, None)))
    assert rows_of(sink) == {
        0: event(0, 9),
        **{key: event(key, 1 + key % 3) for key in range(2, 20)},
        50: event(50, None),
    }
    assert None in days_of(sink)
    feed.changes(2, (UPDATE, {"id": 50, "at": event(1, 4)["at"], "price": Decimal(1)}, "kind"))
    assert rows_of(sink)[50] == {**event(50, 4), "price": Decimal(1)}
    assert None not in days_of(sink)


def test_a_reader_that_asks_for_a_day_reads_its_files_only(tmp_path: Path) -> None:
    sink = IcebergSink(str(tmp_path), partition_by=("day(at)",))
    Feed(sink, EVENTS).history(1, [event(key, 1 + key % 5) for key in range(20)])
    with open_table(sink, "public.events") as table:
        found = table.scan(row_filter="at >= '2024-05-03T00:00:00+00:00' and at < '2024-05-04T00:00:00+00:00'")
        assert len(list(found.plan_files())) == 1
        assert found.to_arrow().num_rows == 4


@pytest.mark.parametrize(
    "by",
    ["kind", "price", "truncate(1, kind)", "truncate(10, id)", "bucket(3, kind)", "year(at)", "month(at)", "hour(at)"],
)
@pytest.mark.parametrize("mode", Mode)
def test_each_transform_in_each_mode(by: str, mode: Mode, tmp_path: Path) -> None:
    sink = IcebergSink(str(tmp_path), mode, partition_by={"public.events": (by,), "public.other": ("nothing",)})
    feed = Feed(sink, EVENTS)
    feed.history(1, [event(key, 1 + key % 5, None if key == 3 else f"k{key % 3}") for key in range(20)])
    feed.changes(1, (UPDATE, event(0, 9, "moved")), (INSERT, event(50, None, "")))
    feed.changes(2, (DELETE, event(1)))
    with open_table(sink, "public.events") as table:
        assert table.spec().fields[0].name.startswith(by.strip(")").split(" ")[-1].split("(")[-1])
    found = scan(sink, "public.events").to_pylist()
    if mode is Mode.MIRROR:
        assert len(rows_of(sink)) == 20
    current = [row for row in found if row["id"] == 0 and row.get("_is_current", True)]
    assert "moved" in [row["kind"] for row in current]
    assert len(found) == {Mode.MIRROR: 20, Mode.CHANGES: 23, Mode.HISTORY: 22}[mode]


@pytest.mark.parametrize(
    "by", ["nothing", "bucket(id)", "bucket(0, id)", "day(id)", "day(3, at)", "truncate(2, at)", "week(at)", ""]
)
def test_what_cannot_be_a_partition_is_refused(by: str, tmp_path: Path) -> None:
    with pytest.raises(SinkSchemaError, match="cannot be partitioned"):
        Feed(IcebergSink(str(tmp_path), partition_by=(by,)), EVENTS).changes(1, (INSERT, event(1)))


def test_a_table_that_is_there_keeps_its_partitions(tmp_path: Path) -> None:
    Feed(IcebergSink(str(tmp_path), partition_by=("day(at)",)), EVENTS).history(1, [event(1), event(2, 2)])
    sink = open_sink("headwater.sinks.iceberg:IcebergSink", warehouse=str(tmp_path), partition_by=["kind"])
    assert isinstance(sink, IcebergSink)
    Feed(sink, EVENTS).changes(1, (UPDATE, event(1, 3)))
    assert days_of(sink) == [dt.date(2024, 5, 2), dt.date(2024, 5, 3)]


def test_small_files_are_joined_within_their_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 3)
    sink = IcebergSink(str(tmp_path), partition_by=("day(at)",))
    feed = Feed(sink, EVENTS)
    for epoch in range(1, 13):
        feed.changes(epoch, (INSERT, event(epoch, 1 + epoch % 2)))
    assert len(files(sink, "public.events")) <= 5
    assert rows_of(sink) == {key: event(key, 1 + key % 2) for key in range(1, 13)}


@pytest.mark.parametrize("seed", range(2))
def test_any_batches_give_what_a_dictionary_gives(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "SMALL_FILES", 3)
    chance = random.Random(seed)
    sink = IcebergSink(str(tmp_path), partition_by=BY, file_bytes=chance.choice([1, 1 << 20]))
    feed = Feed(sink, EVENTS)
    expected = {key: event(key, chance.randrange(1, 6)) for key in chance.sample(range(40), 20)}
    feed.history(1, list(expected.values()))
    for epoch in range(1, 15):
        changes: list[tuple[Any, ...]] = []
        for _ in range(chance.randrange(1, 10)):
            key = chance.randrange(40)
            if chance.random() < 0.3:
                changes.append((DELETE, event(key)))
                expected.pop(key, None)
            else:
                expected[key] = event(key, chance.choice([None, 1, 2, 3, 4]), f"{epoch}")
                changes.append((UPDATE, expected[key]))
        feed.changes(epoch, *changes)
    assert rows_of(sink) == expected
