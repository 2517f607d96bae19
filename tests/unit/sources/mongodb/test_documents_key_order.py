"""Keys of any type as bytes in the order of MongoDB."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import bson
import pytest
from tests.unit.sources.mongodb.documents_cases import document, text

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mongodb.documents.key_order import id_key

IN_ORDER: list[Any] = [
    bson.MinKey(),
    None,
    float("nan"),
    float("-inf"),
    bson.Decimal128("-1E+6144"),
    -1.7976931348623157e308,
    bson.Int64(-(2**63)),
    -(2.0**53),
    -101,
    -100.5,
    bson.Decimal128("-100"),
    -1,
    -0.1,
    bson.Decimal128("-0.1"),  # the double next to it is a little less
    bson.Decimal128("-1E-6176"),
    0,
    bson.Decimal128("1E-6176"),
    5e-324,
    bson.Decimal128("0.1"),
    0.1,
    1,
    1.5,
    2,
    9,
    10,
    11,
    99,
    100,
    101,
    2.0**53,
    bson.Int64(2**53 + 1),
    bson.Int64(2**63 - 1),
    2.0**63,
    1.7976931348623157e308,
    bson.Decimal128("9.999999999999999999999999999999999E+6144"),
    float("inf"),
    "",
    "\0",
    "\0a",
    "a",
    "a\0",
    "aa",
    "b",
    "é",
    {},
    {"a": 1},
    {"a": 1, "b": 1},
    {"a": 2},
    {"b": 1},
    {"a": "1"},
    {"a": {"b": 1}},
    [],
    [1],
    [1, 2],
    ["a"],
    b"",
    b"b",
    bson.Binary(b"a", 5),
    b"aa",
    bson.ObjectId("0" * 24),
    bson.ObjectId("f" * 24),
    False,
    True,
    bson.DatetimeMS(-(2**63)),
    bson.DatetimeMS(-1),
    bson.DatetimeMS(0),
    bson.DatetimeMS(2**63 - 1),
    bson.Timestamp(0, 0),
    bson.Timestamp(1, 2),
    bson.Timestamp(2**32 - 1, 0),
    bson.Regex("a", ""),
    bson.Regex("a", "i"),
    bson.Regex("b", ""),
    bson.Code("a"),
    bson.Code("a", {"x": 1}),
    bson.MaxKey(),
]


def key(value: Any) -> bytes:
    return id_key(bson.encode({"a": 1, "_id": value}))


def test_keys_sort_as_mongodb_sorts_the_values() -> None:
    for before, after in pairwise(IN_ORDER):
        assert key(before) < key(after), (before, after)


@pytest.mark.parametrize(
    "equal",
    [
        (1, bson.Int64(1), 1.0, bson.Decimal128("1"), bson.Decimal128("1.000"), bson.Decimal128("10E-1")),
        (0, 0.0, -0.0, bson.Decimal128("0"), bson.Decimal128("-0E+10")),
        (-100, -100.0, bson.Decimal128("-1E+2")),
        (0.5, bson.Decimal128("0.50")),
        (float("nan"), bson.Decimal128("NaN")),
        (float("inf"), bson.Decimal128("Infinity")),
        ({"a": 1}, {"a": 1.0}),
    ],
)
def test_values_that_mongodb_takes_as_equal_are_one_key(equal: tuple[Any, ...]) -> None:
    assert len({key(value) for value in equal}) == 1


def test_the_bytes_of_a_key_stay_what_they_are() -> None:
    assert key(1) == bytes.fromhex("0a0540010b00")
    assert key(-12.5) == bytes.fromhex("0a03bffdf2ccff")
    assert key("a\0b") == bytes.fromhex("0f6100ff620000")
    assert key({"a": [True]}) == bytes.fromhex("1419610028010000")
    assert key(bson.ObjectId("0123456789abcdef01234567")) == bytes.fromhex("230123456789abcdef01234567")
    assert key(bson.DatetimeMS(0)) == bytes.fromhex("2d8000000000000000")
    assert id_key(document((14, b"_id", text(b"a")))) == key("a")
    assert id_key(document((6, b"_id", b""))) == b"\x02"
    assert id_key(document((12, b"_id", text(b"a.b") + bytes(12)))) == b"\x37\0\0\0\x03a.b" + bytes(12)


def test_a_document_without_an_id_has_no_key() -> None:
    for broken in (bson.encode({"a": 1}), b"", b"\5\0\0\0"):
        with pytest.raises(SourceProtocolError):
            id_key(broken)
