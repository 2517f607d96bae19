"""An Iceberg mirror holds every type that it says it does, and follows the columns of its source."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.sinks.errors import SinkSchemaError, SinkUnwritable
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.sink import Mode
from headwater.sources.table import SourceColumn, SourceTable

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order, table_of
from .iceberg_tables import files, open_table, scan, snapshot_id


@pytest.fixture
def sink(tmp_path: Path) -> IcebergSink:
    return IcebergSink(str(tmp_path / "lake"))


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


def test_edge_values_of_every_type_and_nulls(sink: IcebergSink) -> None:
    table = table_of({"id": pa.int64(), **{name: kind for name, (kind, _, _) in EDGES.items()}})
    feed = Feed(sink, table)
    values = {name: value for name, (_, value, _) in EDGES.items()}
    feed.history(1, [{"id": 1, **values}, {"id": 2}])
    feed.changes(1, (INSERT, {"id": 3, **values}), (UPDATE, {"id": 2, **values}), (INSERT, {"id": 4}))
    feed.changes(2, (UPDATE, {"id": 1}), (DELETE, {"id": 4}))
    expected = {name: value if shown is None else shown for name, (_, value, shown) in EDGES.items()}
    found = {row.pop("id"): row for row in scan(sink).to_pylist()}
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
def test_rows_are_found_again_by_keys_of_any_type(sink: IcebergSink, kind: pa.DataType, values: list[Any]) -> None:
    feed = Feed(sink, table_of({"id": kind, "v": pa.int32()}))
    for epoch, value in enumerate(values, 1):
        feed.changes(epoch, (INSERT, {"id": value, "v": 0}))
    feed.changes(100, *((UPDATE, {"id": value, "v": 1}) for value in values))
    assert scan(sink).column("v").to_pylist() == [1] * len(values)
    feed.changes(101, *((DELETE, {"id": value}) for value in values[:1]))
    assert scan(sink).num_rows == len(values) - 1
    feed.changes(102, *((DELETE, {"id": value}) for value in values[1:]))
    assert scan(sink).num_rows == 0


def with_columns(table: SourceTable, *columns: SourceColumn) -> SourceTable:
    return replace(table, columns=columns)


def test_a_new_column_is_added(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    feed.table = with_columns(ORDERS, *ORDERS.columns, SourceColumn("note", pa.string(), "text", 9))
    feed.changes(2, (INSERT, {**order(2), "note": "x"}))
    feed.changes(3, (UPDATE, {**order(1, "paid"), "note": "y"}))
    rows = sorted(scan(sink).to_pylist(), key=lambda row: int(row["id"]))
    assert rows == [{**order(1, "paid"), "note": "y"}, {**order(2), "note": "x"}]


def test_a_column_that_is_dropped_stays_and_is_null_for_new_rows(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    feed.table = with_columns(ORDERS, *ORDERS.columns[:2])
    feed.changes(2, (INSERT, {"id": 2, "status": "new"}))
    rows = sorted(scan(sink).to_pylist(), key=lambda row: int(row["id"]))
    assert rows == [order(1), order(2, total=None)]


def test_another_type_is_refused_and_nothing_is_changed(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    feed.table = table_of({"id": pa.int64(), "status": pa.int64(), "total": pa.decimal128(10, 2)})
    with pytest.raises(SinkSchemaError, match=r"'status' is string there and became int64"):
        feed.changes(2, (INSERT, {"id": 2}))
    assert scan(sink).num_rows == 1


@pytest.mark.parametrize("name", ["unit price", "a;b", "x=y", "t\tt"])
def test_a_name_that_no_column_can_have_is_refused(sink: IcebergSink, name: str) -> None:
    feed = Feed(sink, table_of({"id": pa.int64(), name: pa.int64()}))
    with pytest.raises(SinkSchemaError, match="Rename the column"):
        feed.changes(1, (INSERT, {"id": 1}))


def test_names_that_differ_in_case_only_are_refused(sink: IcebergSink) -> None:
    with pytest.raises(SinkSchemaError, match="upper and lower case"):
        Feed(sink, table_of({"id": pa.int64(), "Total": pa.int64(), "total": pa.int64()})).changes(1)


def test_a_column_that_is_renamed_keeps_its_id_and_no_file_is_written_anew(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1, "a")), (INSERT, order(2, "b")))
    before = files(sink)
    state = replace(ORDERS.columns[1], name="state")
    feed.table = with_columns(ORDERS, ORDERS.columns[0], state, ORDERS.columns[2])
    feed.changes(2, (INSERT, {"id": 3, "state": "c"}))
    assert before < files(sink)
    rows = scan(sink)
    assert rows.schema.names == ["id", "state", "total"]
    assert {row["id"]: row["state"] for row in rows.to_pylist()} == {1: "a", 2: "b", 3: "c"}
    feed.changes(3, (UPDATE, {"id": 1, "state": None}, "state"), (UPDATE, {"id": 2, "state": "d"}))
    assert {row["id"]: row["state"] for row in scan(sink).to_pylist()} == {1: "a", 2: "d", 3: "c"}
    shown = [row for batch in sink.shown(feed.table, ["id", "state"]) for row in batch.to_pylist()]
    assert {row["id"]: row["state"] for row in shown} == {1: "a", 2: "d", 3: "c"}


def test_a_name_that_moves_to_another_column_takes_no_values_along(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1, "a")))
    columns = ORDERS.columns
    feed.table = with_columns(ORDERS, columns[0], replace(columns[1], name="state"), columns[2])
    feed.changes(2, (INSERT, {"id": 2, "state": "b"}))
    added = SourceColumn("status", pa.string(), "text", 9)
    feed.table = with_columns(ORDERS, columns[0], replace(columns[1], name="state"), columns[2], added)
    feed.changes(3, (INSERT, {"id": 3, "state": "c", "status": "new"}))
    found = {row["id"]: (row["state"], row["status"]) for row in scan(sink).to_pylist()}
    assert found == {1: ("a", None), 2: ("b", None), 3: ("c", "new")}


def test_a_type_that_iceberg_widens_writes_no_file_anew(sink: IcebergSink) -> None:
    feed = Feed(sink, table_of({"id": pa.int32(), "n": pa.decimal128(5, 2), "x": pa.float32()}))
    feed.changes(1, (INSERT, {"id": 1, "n": Decimal("1.25"), "x": 0.5}), (INSERT, {"id": 2}))
    before = files(sink)
    feed.table = table_of({"id": pa.int64(), "n": pa.decimal128(20, 2), "x": pa.float64()})
    feed.changes(2, (INSERT, {"id": 2**40, "n": Decimal("1e15"), "x": 1e300}))
    assert before < files(sink)
    rows = scan(sink)
    assert [rows.schema.field(name).type for name in rows.schema.names] == [
        pa.int64(),
        pa.decimal128(20, 2),
        pa.float64(),
    ]
    feed.changes(3, (UPDATE, {"id": 1, "n": Decimal("1e16"), "x": 1.5}))
    found = {row["id"]: (row["n"], row["x"]) for row in scan(sink).to_pylist()}
    assert found == {1: (Decimal("1e16"), 1.5), 2: (None, None), 2**40: (Decimal("1e15"), 1e300)}
    assert not feed.changes(2, (INSERT, {"id": 3}))


@pytest.mark.parametrize("mode", Mode)
def test_any_other_wider_type_writes_the_table_anew(mode: Mode, tmp_path: Path) -> None:
    sink = IcebergSink(str(tmp_path), mode=mode)
    feed = Feed(sink, table_of({"id": pa.int32(), "n": pa.decimal128(5, 2), "v": pa.list_(pa.int32())}))
    feed.changes(1, (INSERT, {"id": 1, "n": Decimal("1.25"), "v": [1]}), (INSERT, {"id": 2, "n": None}))
    feed.table = table_of({"id": pa.int64(), "n": pa.decimal128(20, 4), "v": pa.list_(pa.int64())})
    feed.changes(2, (INSERT, {"id": 2**40, "n": Decimal("0.0001"), "v": [2**40]}))
    rows = {row["id"]: (row["n"], row["v"]) for row in scan(sink).to_pylist()}
    assert rows == {1: (Decimal("1.2500"), [1]), 2: (None, None), 2**40: (Decimal("0.0001"), [2**40])}
    assert not feed.changes(2, (INSERT, {"id": 3, "n": None}))


def test_the_rows_of_before_can_be_read_by_time_travel_after_all_that(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    before = snapshot_id(sink)
    feed.table = with_columns(
        ORDERS,
        ORDERS.columns[0],
        replace(ORDERS.columns[1], name="state"),
        replace(ORDERS.columns[2], type=pa.decimal128(20, 4)),
    )
    feed.changes(2, (UPDATE, {"id": 1, "state": "paid", "total": Decimal("0.0001")}))
    with open_table(sink) as table:
        assert table.scan(snapshot_id=before).to_arrow().to_pylist() == [order(1)]


def test_files_that_were_staged_before_the_columns_changed_get_their_ids(sink: IcebergSink) -> None:
    feed = Feed(sink)
    note = SourceColumn("note", pa.string(), "text", 9)
    tag = SourceColumn("tag", pa.string(), "text", 10)
    feed.table = with_columns(ORDERS, *ORDERS.columns, note)
    token = feed.token(0, 1)
    staged = feed.stage_history(token, [{**order(1), "note": "n"}])
    other = Feed(sink, with_columns(ORDERS, tag, *ORDERS.columns), query="other")
    other.changes(1, (INSERT, {**order(2), "tag": "t"}))
    assert sink.commit(feed.table, token, [staged])
    found = {row["id"]: (row["status"], row["note"], row["tag"]) for row in scan(sink).to_pylist()}
    assert found == {1: ("new", "n", None), 2: ("new", None, "t")}
    assert len(list(Path(sink.warehouse).rglob("*.parquet"))) == 2


def test_shown_gives_the_types_of_the_sink(sink: IcebergSink) -> None:
    from headwater.sinks.types import sink_schema

    table = table_of({"id": pa.int64(), **{name: kind for name, (kind, _, _) in EDGES.items()}})
    values = {name: value for name, (_, value, _) in EDGES.items()}
    Feed(sink, table).history(1, [{"id": 1, **values}])
    [batch] = sink.shown(table, table.schema.names)
    assert batch.schema.equals(sink_schema(table))
    expected = {name: value if shown is None else shown for name, (_, value, shown) in EDGES.items()}
    assert batch.to_pylist() == [{"id": 1, **expected}]


@pytest.mark.parametrize("name", ["größe", "a-b", "1st", "a.b", "%20"])
def test_names_that_avro_does_not_have(sink: IcebergSink, name: str) -> None:
    feed = Feed(sink, table_of({"id": pa.int64(), name: pa.int64()}))
    feed.changes(1, (INSERT, {"id": 1, name: 5}))
    feed.changes(2, (UPDATE, {"id": 1, name: 6}))
    assert scan(sink).to_pylist() == [{"id": 1, name: 6}]


def test_structs_and_maps(sink: IcebergSink) -> None:
    kind = pa.struct([("a", pa.int16()), ("b", pa.list_(pa.string()))])
    feed = Feed(sink, table_of({"id": pa.int64(), "s": kind, "m": pa.map_(pa.string(), pa.int64())}))
    feed.history(1, [{"id": 1, "s": {"a": 1, "b": ["x", None]}, "m": [("k", 5)]}])
    feed.changes(1, (INSERT, {"id": 2, "s": None, "m": []}), (UPDATE, {"id": 1, "s": None, "m": None}, "s"))
    found = {row["id"]: (row["s"], row["m"]) for row in scan(sink).to_pylist()}
    assert found == {1: ({"a": 1, "b": ["x", None]}, None), 2: (None, [])}


def test_a_table_with_delete_files_is_refused() -> None:
    from pyiceberg.manifest import ManifestContent, ManifestFile

    from headwater.sinks.iceberg_snapshot import Manifests

    deletes = ManifestFile.from_args(manifest_path="d", content=ManifestContent.DELETES, added_files_count=1)
    with pytest.raises(SinkUnwritable, match="delete files"):
        Manifests(1, {}, {"d": deletes}).live("public.orders")
