"""The keys that changes touch, and the rows that have them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.derive.affected import AffectedKeys, KeyFilter, key_types
from headwater.derive.errors import InvalidDerivation


def rows(**columns: list[object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def test_keys_of_several_tables_are_one_set_and_null_is_a_key() -> None:
    affected = AffectedKeys([pa.int64(), pa.string()])
    affected.add([rows(a=[1, 1, None], b=["x", "x", None]), rows(a=[2], b=[None])], ["a", "b"])
    affected.add([rows(id=pa.array([1, 3], pa.int32()), kind=["x", "y"])], ["id", "kind"])
    found = sorted(affected.keys.to_pylist(), key=str)
    expected = [{"0": 1, "1": "x"}, {"0": None, "1": None}, {"0": 2, "1": None}, {"0": 3, "1": "y"}]
    assert found == sorted(expected, key=str)


def test_a_filter_leaves_the_rows_of_the_keys_only() -> None:
    affected = AffectedKeys([pa.int64(), pa.string()])
    affected.add([rows(a=[1, None], b=["x", "y"])], ["a", "b"])
    table = rows(id=pa.array([1, 1, None, None, 2], pa.int32()), kind=["x", "y", "y", None, "x"], v=[1, 2, 3, 4, 5])
    assert KeyFilter(affected.keys, ["id", "kind"]).rows(table).column("v").to_pylist() == [1, 3]


def test_no_key_leaves_no_row() -> None:
    assert KeyFilter(AffectedKeys([pa.int64()]).keys, ["a"]).rows(rows(a=[1, None])).num_rows == 0


def test_more_keys_than_wanted_are_not_collected() -> None:
    affected = AffectedKeys([pa.int64()])
    affected.add((rows(a=list(range(start, start + 10))) for start in range(0, 1000, 10)), ["a"], most=25)
    assert 25 < affected.count <= 35


def test_columns_of_two_widths_are_compared_in_the_wider() -> None:
    assert key_types("d", [("a", [("x", pa.int32())]), ("b", [("y", pa.int64())])]) == [pa.int64()]


@pytest.mark.parametrize("other", [pa.list_(pa.int32()), pa.string()])
def test_columns_that_cannot_be_compared_are_refused(other: pa.DataType) -> None:
    with pytest.raises(InvalidDerivation, match="by"):
        key_types("d", [("a", [("x", pa.int32())]), ("b", [("y", other)])])
