"""Columns as JSON text are what Python's own JSON makes of their values, row by row."""

from __future__ import annotations

import base64
import json
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.sinks.json_rows import base64_texts, json_objects, json_texts, plain

MOMENT = datetime(2024, 2, 29, 12, 30, 1, 5)  # noqa: DTZ001 - a wall clock
TEXTS = [
    "",
    "a",
    'q"uote',
    "back\\slash",
    "tab\tnew\nline",
    "\x00\x01\x1f\x7f",
    "ümläut 漢字 😀",
    "\u2028",
    '\\"',
    None,
]
NESTED = pa.struct([("a b", pa.list_(pa.int32())), ("t", pa.string())])
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (pa.bool_(), [True, False, None], [True, False, None]),
    (pa.int64(), [0, -(2**63), 2**63 - 1, None], [0, -(2**63), 2**63 - 1, None]),
    (pa.float64(), [0.1, 1e300, -5e-324, 3.0, None], [0.1, 1e300, -5e-324, 3.0, None]),
    (pa.float64(), [float("nan"), float("inf"), float("-inf"), 1.5, None], ["NaN", "Infinity", "-Infinity", 1.5, None]),
    (pa.decimal128(20, 4), [Decimal("1.5000"), Decimal("-0.0001"), None], ["1.5000", "-0.0001", None]),
    (pa.string(), TEXTS, TEXTS),
    (pa.date32(), [date(2024, 2, 29), date(1, 1, 1), None], ["2024-02-29", "0001-01-01", None]),
    (pa.timestamp("us"), [MOMENT, None], ["2024-02-29T12:30:01.000005", None]),
    (pa.timestamp("us", tz="UTC"), [MOMENT.replace(tzinfo=UTC), None], ["2024-02-29T12:30:01.000005Z", None]),
    (pa.list_(pa.string()), [["a", None, '"'], [], None], [["a", None, '"'], [], None]),
    (
        NESTED,
        [{"a b": [1, None], "t": "x\n"}, {"a b": None, "t": None}, None],
        [{"a b": [1, None], "t": "x\n"}, {"a b": None, "t": None}, None],
    ),
    (pa.map_(pa.string(), pa.int32()), [[('k"', 1), ("l", None)], [], None], [{'k"': 1, "l": None}, {}, None]),
    (pa.list_(pa.list_(pa.int8())), [[[1], [], None], None], [[[1], [], None], None]),
]


@pytest.mark.parametrize(("kind", "values", "expected"), CASES, ids=[str(case[0]) for case in CASES])
def test_values_of_each_type(kind: pa.DataType, values: list[Any], expected: list[Any]) -> None:
    array = pa.array(values, kind)
    assert [json.loads(text) for text in json_texts(array).to_pylist()] == expected
    sliced = pa.array([*values, *values], kind)[1 : len(values) + 1]
    assert [json.loads(text) for text in json_texts(sliced).to_pylist()] == [*expected[1:], expected[0]]
    assert json_texts(array[:0]).to_pylist() == []


def test_dates_and_wall_clocks_as_debezium_has_them() -> None:
    assert json_texts(pa.array([date(1970, 1, 11)]), of_debezium=True).to_pylist() == ["10"]
    assert json_texts(pa.array([1_000_001], pa.timestamp("us")), of_debezium=True).to_pylist() == ["1000001"]
    zoned = pa.array([1_000_001], pa.timestamp("us", tz="UTC"))
    assert json_texts(zoned, of_debezium=True).to_pylist() == ['"1970-01-01T00:00:01.000001Z"']


def test_bytes_of_any_length_are_base64() -> None:
    chance = random.Random(1)
    values = [None if chance.random() < 0.1 else chance.randbytes(chance.randrange(9)) for _ in range(500)]
    expected = [None if value is None else base64.b64encode(value).decode() for value in values]
    assert base64_texts(pa.array(values, pa.binary())).to_pylist() == expected
    assert base64_texts(pa.array(values, pa.binary())[7:90]).to_pylist() == expected[7:90]
    assert base64_texts(pa.array([], pa.binary())).to_pylist() == []
    assert base64_texts(pa.array([b"abcd"], pa.binary(4))).to_pylist() == ["YWJjZA=="]


def test_rows_are_objects_with_any_names() -> None:
    columns = {'a"b': pa.chunked_array([[1], [2]]), "ü": pa.array(["x", None]), "": pa.array([None, True])}
    rows = [json.loads(text) for text in json_objects(columns, 2).to_pylist()]
    assert rows == [{'a"b': 1, "ü": "x", "": None}, {'a"b': 2, "ü": None, "": True}]
    assert json_objects({}, 2).to_pylist() == ["{}", "{}"]


def test_plain_values_are_those_that_drivers_take() -> None:
    rows = pa.table({"n": [1], "d": [Decimal("1.50")], "l": [[1, None]], "b": [b"\x00"], "t": [MOMENT]})
    expected = {"n": 1, "d": "1.50", "l": "[1,null]", "b": b"\x00", "t": "2024-02-29 12:30:01.000005"}
    assert plain(rows).to_pylist() == [expected]
