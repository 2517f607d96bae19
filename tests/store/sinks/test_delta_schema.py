"""How a Delta mirror follows the columns of its source: by copies under new names, and by writing it anew."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.sinks.errors import SinkUnwritable

from .file_sinks import INSERT, ORDERS, UPDATE, Feed, order, table_of, with_columns
from .lakes import DeltaLake


@pytest.fixture
def lake(tmp_path: Path) -> DeltaLake:
    return DeltaLake(str(tmp_path / "lake"))


def test_columns_keep_their_metadata(lake: DeltaLake) -> None:
    Feed(lake.sink()).changes(1, (INSERT, order(1)))
    fields = {field["name"]: field for field in json.loads(lake.table().schema().to_json())["fields"]}
    assert fields["id"]["metadata"] == {"headwater.field_id": "1", "headwater.source_type": "int64"}


def test_a_column_that_is_renamed_has_its_values_under_the_new_name(lake: DeltaLake) -> None:
    feed = Feed(lake.sink())
    feed.changes(1, (INSERT, order(1, "a")), (INSERT, order(2, "b")))
    state = replace(ORDERS.columns[1], name="state")
    feed.table = with_columns(ORDERS, ORDERS.columns[0], state, ORDERS.columns[2])
    feed.changes(2, (INSERT, {"id": 3, "state": "c"}))
    rows = lake.read().to_pylist()
    assert {row["id"]: (row["state"], row["status"]) for row in rows} == {1: ("a", "a"), 2: ("b", "b"), 3: ("c", None)}
    version = lake.table().version()
    feed.changes(3, (UPDATE, {"id": 1, "state": None}, "state"))
    assert lake.table().version() == version + 1
    assert {row["id"]: row["state"] for row in lake.read().to_pylist()} == {
        1: "a",
        2: "b",
        3: "c",
    }


def test_a_wider_type_writes_the_table_anew(lake: DeltaLake) -> None:
    feed = Feed(lake.sink(), table_of({"id": pa.int32(), "n": pa.decimal128(5, 2)}))
    feed.changes(1, (INSERT, {"id": 1, "n": Decimal("1.25")}), (INSERT, {"id": 2, "n": None}))
    feed.table = table_of({"id": pa.int64(), "n": pa.decimal128(20, 4)})
    feed.changes(2, (INSERT, {"id": 2**40, "n": Decimal("0.0001")}))
    table = lake.read()
    assert table.schema.field("id").type == pa.int64()
    rows = {row["id"]: row["n"] for row in table.to_pylist()}
    assert rows == {1: Decimal("1.2500"), 2: None, 2**40: Decimal("0.0001")}
    assert not feed.changes(2, (INSERT, {"id": 3, "n": None}))


def test_a_table_that_others_write_in_their_own_way_is_refused(lake: DeltaLake) -> None:
    feed = Feed(lake.sink())
    feed.changes(1, (INSERT, order(1)))
    lake.table().alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    with pytest.raises(SinkUnwritable, match="deletionVectors"):
        feed.changes(2, (INSERT, order(2)))
