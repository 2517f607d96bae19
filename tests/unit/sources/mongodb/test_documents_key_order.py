"""Keys of any type as bytes in the order of MongoDB."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import bson
import pytest
from tests.unit.sources.mongodb.documents_cases import IN_ORDER, document, text

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mongodb.documents.key_order import id_key


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
