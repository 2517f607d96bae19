"""Which values of two columns are one and the same."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.sinks.keys import same_rows, same_values

NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "one", "other", "same"),
    [
        (pa.int64(), [1, None, None, 2], [1, None, 2, 3], "yynn"),
        (pa.float64(), [NAN, 0.0, NAN, None], [NAN, -0.0, 1.0, NAN], "yynn"),
        (pa.string(), ["", "a", None], ["", "b", ""], "ynn"),
        (pa.binary(), [b"\x00", b""], [b"\x00", None], "yn"),
        (pa.decimal128(10, 2), [Decimal("1.50"), None], [Decimal("1.50"), None], "yy"),
        (pa.list_(pa.float32()), [[NAN, None], [], None, [1], [1]], [[NAN, None], [], None, [1, 2], [2]], "yyynn"),
        (pa.list_(pa.list_(pa.string())), [[["a"], None], [[]], [["b"]]], [[["a"], None], [None], [["c"]]], "ynn"),
        (
            pa.struct([("a", pa.int32()), ("b", pa.list_(pa.int8()))]),
            [{"a": 1, "b": [1]}, {"a": None, "b": []}, None],
            [{"a": 1, "b": [2]}, {"a": None, "b": []}, None],
            "nyy",
        ),
        (pa.map_(pa.string(), pa.int32()), [[("a", 1)], [], None], [[("a", 2)], [], None], "nyy"),
        (pa.list_(pa.int8()), [], [], ""),
    ],
    ids=str,
)
def test_values_of_any_type(kind: pa.DataType, one: list[Any], other: list[Any], same: str) -> None:
    found = same_values(pa.array(one, kind), pa.array(other, kind))
    assert found.tolist() == [mark == "y" for mark in same]


def test_slices_and_chunks() -> None:
    one = pa.table({"a": pa.chunked_array([[1, 2], [3]]), "b": ["x", "y", "z"]})
    other = pa.table({"a": [9, 1, 2, 3], "b": ["w", "x", "-", "z"]}).slice(1)
    assert same_rows(one, other, ["a", "b"]).tolist() == [True, False, True]
    assert same_rows(one, other, []).tolist() == [True] * 3
