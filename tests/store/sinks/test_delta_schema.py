"""A Delta mirror holds every type that it says it does, and follows the columns of its source."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import SinkSchemaError, SinkUnwritable
from headwater.sources.table import SourceColumn, SourceTable

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order, table_of


@pytest.fixture
def sink(tmp_path: Path) -> DeltaSink:
    return DeltaSink(str(tmp_path / "lake"))


def open_table(sink: DeltaSink, name: str = "public.orders") -> DeltaTable:
    return DeltaTable(f"{sink.path}/{name}")


WALL = dt.datetime(1969, 12, 31, 23, 59)  # noqa: DTZ001

EDGES: dict[str, tuple[pa.DataType, Any, Any]] = {
    "small": (pa.int16(), -(2**15), -(2**15)),
    "big": (pa.int64(), 2**63 - 1, 2**63 - 1),
    "unsigned": (pa.uint64(), 2**64 - 1, Decimal(2**64 - 1)),
    "byte": (pa.uint8(), 255, 255),
    "money": (pa.decimal128(38, 10), Decimal("-9999999999999999999999999999.9999999999"), None),
    "huge": (pa.decimal256(60, 2), Decimal("1" * 58 + ".25"), "1" * 58 + ".25"),
    "real": (pa.float32(), float("inf"), float("inf")),
    "text": (pa.string(), "ü€\U0001f600" * 40, None),
    "empty": (pa.string(), "", ""),
    "bytes": (pa.binary(), b"\x00\xff", b"\x00\xff"),
    "day": (pa.date32(), dt.date(1, 1, 1), dt.date(1, 1, 1)),
    "clock": (pa.time64("us"), dt.time(23, 59, 59, 999999), "23:59:59.999999"),
    "moment": (
        pa.timestamp("us", tz="UTC"),
        dt.datetime(2024, 2, 29, 1, 2, 3, 456789, tzinfo=dt.UTC),
        dt.datetime(2024, 2, 29, 1, 2, 3, 456789, tzinfo=dt.UTC),
    ),
    "wall": (pa.timestamp("us"), WALL, WALL),
    "flags": (pa.list_(pa.bool_()), [True, None, False], [True, None, False]),
    "times": (pa.list_(pa.time64("us")), [dt.time(1), None], ["01:00:00.000000", None]),
    "nested": (pa.list_(pa.list_(pa.int32())), [[1], [], None], [[1], [], None]),
    "yes": (pa.bool_(), True, True),
}


def test_edge_values_of_every_type_and_nulls(sink: DeltaSink) -> None:
    table = table_of({"id": pa.int64(), **{name: kind for name, (kind, _, _) in EDGES.items()}})
    feed = Feed(sink, table)
    values = {name: value for name, (_, value, _) in EDGES.items()}
    feed.history(1, [{"id": 1, **values}, {"id": 2}])
    feed.changes(1, (INSERT, {"id": 3, **values}), (UPDATE, {"id": 2, **values}), (INSERT, {"id": 4}))
    feed.changes(2, (UPDATE, {"id": 1}), (DELETE, {"id": 4}))
    expected = {name: value if shown is None else shown for name, (_, value, shown) in EDGES.items()}
    found = {row.pop("id"): row for row in open_table(sink).to_pyarrow_table().to_pylist()}
    assert found == {1: dict.fromkeys(EDGES), 2: expected, 3: expected}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), ["a" * 40 + "1", "a" * 40 + "2", "", "\U0010ffff"]),
        (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(2000, 1, 1), dt.date(1970, 1, 1)]),
        (pa.timestamp("us"), [WALL.replace(microsecond=us) for us in (1, 2, 999, 1001)]),
        (pa.decimal128(30, 5), [Decimal(n) for n in ("1.00001", "-1.00001", "1234567890123456789.5", "0")]),
        (pa.decimal128(9, 3), [Decimal(n) for n in ("1.001", "-1.001", "999999.999", "0")]),
        (pa.uint64(), [0, 2**64 - 1, 2**63, 1]),
        (pa.time64("us"), [dt.time(0), dt.time(23, 59, 59, 999999), dt.time(1), dt.time(2)]),
        (pa.float64(), [0.5, float("nan"), float("-inf"), -0.0]),
        (pa.binary(), [b"", b"\x00", b"\xff", b"a"]),
        (pa.bool_(), [True, False]),
    ],
    ids=str,
)
def test_rows_are_found_again_by_keys_of_any_type(sink: DeltaSink, kind: pa.DataType, values: list[Any]) -> None:
    feed = Feed(sink, table_of({"id": kind, "v": pa.int32()}))
    for epoch, value in enumerate(values, 1):
        feed.changes(epoch, (INSERT, {"id": value, "v": 0}))
    feed.changes(100, *((UPDATE, {"id": value, "v": 1}) for value in values))
    assert open_table(sink).to_pyarrow_table().column("v").to_pylist() == [1] * len(values)
    feed.changes(101, *((DELETE, {"id": value}) for value in values[:1]))
    assert open_table(sink).to_pyarrow_table().num_rows == len(values) - 1
    feed.changes(102, *((DELETE, {"id": value}) for value in values[1:]))
    assert open_table(sink).to_pyarrow_table().num_rows == 0


def test_columns_keep_their_metadata(sink: DeltaSink) -> None:
    Feed(sink).changes(1, (INSERT, order(1)))
    fields = {field["name"]: field for field in json.loads(open_table(sink).schema().to_json())["fields"]}
    assert fields["id"]["metadata"] == {"headwater.field_id": "1", "headwater.source_type": "int64"}


def with_columns(table: SourceTable, *columns: SourceColumn) -> SourceTable:
    return replace(table, columns=columns)


def test_a_new_column_is_added(sink: DeltaSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    feed.table = with_columns(ORDERS, *ORDERS.columns, SourceColumn("note", pa.string(), "text", 9))
    feed.changes(2, (INSERT, {**order(2), "note": "x"}))
    feed.changes(3, (UPDATE, {**order(1, "paid"), "note": "y"}))
    rows = sorted(open_table(sink).to_pyarrow_table().to_pylist(), key=lambda row: int(row["id"]))
    assert rows == [{**order(1, "paid"), "note": "y"}, {**order(2), "note": "x"}]


def test_a_column_that_is_dropped_stays_and_is_null_for_new_rows(sink: DeltaSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    feed.table = with_columns(ORDERS, *ORDERS.columns[:2])
    feed.changes(2, (INSERT, {"id": 2, "status": "new"}))
    rows = sorted(open_table(sink).to_pyarrow_table().to_pylist(), key=lambda row: int(row["id"]))
    assert rows == [order(1), order(2, total=None)]


def test_a_column_that_is_renamed_has_its_values_under_the_new_name(sink: DeltaSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1, "a")), (INSERT, order(2, "b")))
    state = replace(ORDERS.columns[1], name="state")
    feed.table = with_columns(ORDERS, ORDERS.columns[0], state, ORDERS.columns[2])
    feed.changes(2, (INSERT, {"id": 3, "state": "c"}))
    rows = open_table(sink).to_pyarrow_table().to_pylist()
    assert {row["id"]: (row["state"], row["status"]) for row in rows} == {1: ("a", "a"), 2: ("b", "b"), 3: ("c", None)}
    version = open_table(sink).version()
    feed.changes(3, (UPDATE, {"id": 1, "state": None}, "state"))
    assert open_table(sink).version() == version + 1
    assert {row["id"]: row["state"] for row in open_table(sink).to_pyarrow_table().to_pylist()} == {
        1: "a",
        2: "b",
        3: "c",
    }


def test_a_wider_type_writes_the_table_anew(sink: DeltaSink) -> None:
    feed = Feed(sink, table_of({"id": pa.int32(), "n": pa.decimal128(5, 2)}))
    feed.changes(1, (INSERT, {"id": 1, "n": Decimal("1.25")}), (INSERT, {"id": 2, "n": None}))
    feed.table = table_of({"id": pa.int64(), "n": pa.decimal128(20, 4)})
    feed.changes(2, (INSERT, {"id": 2**40, "n": Decimal("0.0001")}))
    table = open_table(sink).to_pyarrow_table()
    assert table.schema.field("id").type == pa.int64()
    rows = {row["id"]: row["n"] for row in table.to_pylist()}
    assert rows == {1: Decimal("1.2500"), 2: None, 2**40: Decimal("0.0001")}
    assert not feed.changes(2, (INSERT, {"id": 3, "n": None}))


def test_another_type_is_refused_and_nothing_is_changed(sink: DeltaSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    feed.table = table_of({"id": pa.int64(), "status": pa.int64(), "total": pa.decimal128(10, 2)})
    with pytest.raises(SinkSchemaError, match=r"'status' is string there and became int64"):
        feed.changes(2, (INSERT, {"id": 2}))
    assert open_table(sink).to_pyarrow_table().num_rows == 1


@pytest.mark.parametrize("name", ["unit price", "a;b", "x=y", "t\tt"])
def test_a_name_that_no_column_can_have_is_refused(sink: DeltaSink, name: str) -> None:
    feed = Feed(sink, table_of({"id": pa.int64(), name: pa.int64()}))
    with pytest.raises(SinkSchemaError, match="Rename the column"):
        feed.changes(1, (INSERT, {"id": 1}))


def test_names_that_differ_in_case_only_are_refused(sink: DeltaSink) -> None:
    with pytest.raises(SinkSchemaError, match="upper and lower case"):
        Feed(sink, table_of({"id": pa.int64(), "Total": pa.int64(), "total": pa.int64()})).changes(1)


def test_a_table_that_others_write_in_their_own_way_is_refused(sink: DeltaSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    open_table(sink).alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    with pytest.raises(SinkUnwritable, match="deletionVectors"):
        feed.changes(2, (INSERT, order(2)))
