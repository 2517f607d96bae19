"""A mirror in a lake holds every type that it says it does, and follows the columns of its source."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.types import sink_schema
from headwater.sources.table import SourceColumn

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order, table_of, with_columns
from .lakes import Lake

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

EDGE_TABLE = table_of({"id": pa.int64(), **{name: kind for name, (kind, _, _) in EDGES.items()}})
TOLD = {name: value for name, (_, value, _) in EDGES.items()}
SHOWN = {name: value if shown is None else shown for name, (_, value, shown) in EDGES.items()}


def test_edge_values_of_every_type_and_nulls(lake: Lake) -> None:
    feed = Feed(lake.sink(), EDGE_TABLE)
    feed.history(1, [{"id": 1, **TOLD}, {"id": 2}])
    feed.changes(1, (INSERT, {"id": 3, **TOLD}), (UPDATE, {"id": 2, **TOLD}), (INSERT, {"id": 4}))
    feed.changes(2, (UPDATE, {"id": 1}), (DELETE, {"id": 4}))
    found = {row.pop("id"): row for row in lake.read().to_pylist()}
    assert found == {1: dict.fromkeys(EDGES), 2: SHOWN, 3: SHOWN}


def test_shown_gives_the_types_of_the_sink(lake: Lake) -> None:
    sink = lake.sink()
    Feed(sink, EDGE_TABLE).history(1, [{"id": 1, **TOLD}])
    [batch] = sink.shown(EDGE_TABLE, EDGE_TABLE.schema.names)
    assert batch.schema.equals(sink_schema(EDGE_TABLE))
    assert batch.to_pylist() == [{"id": 1, **SHOWN}]


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
def test_rows_are_found_again_by_keys_of_any_type(lake: Lake, kind: pa.DataType, values: list[Any]) -> None:
    feed = Feed(lake.sink(), table_of({"id": kind, "v": pa.int32()}))
    for epoch, value in enumerate(values, 1):
        feed.changes(epoch, (INSERT, {"id": value, "v": 0}))
    feed.changes(100, *((UPDATE, {"id": value, "v": 1}) for value in values))
    assert lake.read().column("v").to_pylist() == [1] * len(values)
    feed.changes(101, *((DELETE, {"id": value}) for value in values[:1]))
    assert lake.read().num_rows == len(values) - 1
    feed.changes(102, *((DELETE, {"id": value}) for value in values[1:]))
    assert lake.read().num_rows == 0


def test_a_new_column_is_added(lake: Lake) -> None:
    feed = Feed(lake.sink())
    feed.changes(1, (INSERT, order(1)))
    feed.table = with_columns(ORDERS, *ORDERS.columns, SourceColumn("note", pa.string(), "text", 9))
    feed.changes(2, (INSERT, {**order(2), "note": "x"}))
    feed.changes(3, (UPDATE, {**order(1, "paid"), "note": "y"}))
    rows = sorted(lake.read().to_pylist(), key=lambda row: int(row["id"]))
    assert rows == [{**order(1, "paid"), "note": "y"}, {**order(2), "note": "x"}]


def test_a_column_that_is_dropped_stays_and_is_null_for_new_rows(lake: Lake) -> None:
    feed = Feed(lake.sink())
    feed.changes(1, (INSERT, order(1)))
    feed.table = with_columns(ORDERS, *ORDERS.columns[:2])
    feed.changes(2, (INSERT, {"id": 2, "status": "new"}))
    rows = sorted(lake.read().to_pylist(), key=lambda row: int(row["id"]))
    assert rows == [order(1), order(2, total=None)]


def test_another_type_is_refused_and_nothing_is_changed(lake: Lake) -> None:
    feed = Feed(lake.sink())
    feed.changes(1, (INSERT, order(1)))
    feed.table = table_of({"id": pa.int64(), "status": pa.int64(), "total": pa.decimal128(10, 2)})
    with pytest.raises(SinkSchemaError, match=r"'status' is string there and became int64"):
        feed.changes(2, (INSERT, {"id": 2}))
    assert lake.read().num_rows == 1


@pytest.mark.parametrize("name", ["unit price", "a;b", "x=y", "t\tt"])
def test_a_name_that_no_column_can_have_is_refused(lake: Lake, name: str) -> None:
    feed = Feed(lake.sink(), table_of({"id": pa.int64(), name: pa.int64()}))
    with pytest.raises(SinkSchemaError, match="Rename the column"):
        feed.changes(1, (INSERT, {"id": 1}))


def test_names_that_differ_in_case_only_are_refused(lake: Lake) -> None:
    with pytest.raises(SinkSchemaError, match="upper and lower case"):
        Feed(lake.sink(), table_of({"id": pa.int64(), "Total": pa.int64(), "total": pa.int64()})).changes(1)
