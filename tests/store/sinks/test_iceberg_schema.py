"""How an Iceberg mirror follows the columns of its source: by their ids, and by time travel."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.sinks.errors import SinkUnwritable
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.sink import Mode
from headwater.sources.table import SourceColumn

from .file_sinks import INSERT, ORDERS, UPDATE, Feed, order, table_of, with_columns
from .iceberg_tables import files, open_table, scan, snapshot_id


@pytest.fixture
def sink(tmp_path: Path) -> IcebergSink:
    return IcebergSink(str(tmp_path / "lake"))


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
