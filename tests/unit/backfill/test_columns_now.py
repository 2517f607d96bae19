"""A planned table is read under the names that its log has by now, and given as it was planned."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.backfill.cdc.external import as_planned, check_columns, columns_now, names_now
from headwater.sources.errors import SnapshotExpired
from headwater.sources.table import SourceColumn, SourceTable

POSITION = pa.binary(16)


def column(name: str, number: int, kind: pa.DataType | None = None, *, dropped: bool = False) -> SourceColumn:
    return SourceColumn(name, kind or pa.string(), "text", number, dropped=dropped)


def table(*columns: SourceColumn, key: str = "id") -> SourceTable:
    return SourceTable("shop", "orders", columns, (key,))


PLANNED = table(column("id", 1, pa.int32()), column("a", 2), column("b", 3))


def logged(*columns: SourceColumn, key: str = "id") -> pa.Schema:
    return table(*columns, key=key).log_schema(POSITION)


def test_columns_that_were_swapped_and_widened_are_read_by_their_numbers() -> None:
    schema = logged(column("number", 1, pa.int64()), column("b", 2), column("a", 3), key="number")
    now = columns_now(PLANNED, schema)
    assert [one.name for one in now.columns] == ["number", "b", "a"]
    assert now.key_columns == ("number",)
    assert names_now(PLANNED, now, ["id", "b"]) == ["number", "a"]
    check_columns(now, schema)
    read = pa.RecordBatch.from_pydict({"number": pa.array([1], pa.int64()), "b": ["of a"], "a": ["of b"]})
    assert as_planned(read, PLANNED, None).to_pylist() == [{"id": 1, "a": "of a", "b": "of b"}]
    assert as_planned(read.select(["number", "a"]), PLANNED, ["id", "b"]).to_pylist() == [{"id": 1, "b": "of b"}]


def test_a_column_that_another_of_its_name_replaced_is_not_read() -> None:
    schema = logged(
        column("id", 1, pa.int32()), column("a__dropped_2", 2, dropped=True), column("b", 3), column("a", 4)
    )
    now = columns_now(PLANNED, schema)
    assert [one.name for one in now.columns if not one.dropped] == ["id", "b"]
    with pytest.raises(SnapshotExpired, match="Column 'a' of table"):
        check_columns(PLANNED, schema)


@pytest.mark.parametrize("changed", [column("other", 3), column("b", 3, pa.large_string()), column("b", 4)])
def test_a_change_that_the_log_comes_to_meanwhile_expires_the_read(changed: SourceColumn) -> None:
    before = logged(column("id", 1, pa.int32()), column("a", 2), column("b", 3))
    now = columns_now(PLANNED, before)
    assert now == PLANNED
    check_columns(now, before)
    with pytest.raises(SnapshotExpired, match="Column 'b'"):
        check_columns(now, logged(column("id", 1, pa.int32()), column("a", 2), changed))
