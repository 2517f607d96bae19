"""What is asked of a server for the documents of updates: their keys go over as they are."""

from __future__ import annotations

import struct
import uuid
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson import Binary, Decimal128, Int64, MaxKey, MinKey, ObjectId, Timestamp

from headwater.sources.mongodb import lookup

KEYS: list[Any] = [
    MinKey(),
    None,
    7,
    7.5,
    Int64(1 << 60),
    Decimal128("9.25"),
    "text",
    {"a": [1]},
    Binary(b"xy"),
    Binary(uuid.UUID(int=7).bytes, 4),
    ObjectId("64b64b64b64b64b64b64b64b"),
    True,
    datetime(2026, 1, 1, tzinfo=UTC),
    Timestamp(3, 4),
    MaxKey(),
]


def key_of(key: Any, before: dict[str, Any], after: dict[str, Any]) -> bytes:
    """The key of an event; the library would put ``_id`` first."""
    parts = b"".join(bson.encode({name: value})[4:-1] for name, value in (before | {"_id": key} | after).items())
    return struct.pack("<i", len(parts) + 5) + parts + b"\0"


@pytest.mark.parametrize(
    ("before", "after"), [({}, {}), ({"region": "north", "n": 5}, {}), ({"region": "north"}, {"n": 5}), ({}, {"n": 5})]
)
def test_the_filter_has_the_values_of_the_keys_also_of_sharded_collections(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    made = lookup._filter([key_of(key, before, after) for key in KEYS])
    expected = bson.decode(bson.encode({"_id": {"$in": KEYS}}))
    assert bson.decode(made.raw) == expected


def test_the_documents_of_an_answer_are_found_whatever_their_number() -> None:
    for count in (0, 1, 10, 11, 101, 1001):
        documents = [{"_id": number, "text": "x" * (number % 7)} for number in range(count)]
        array = memoryview(bson.encode({str(number): one for number, one in enumerate(documents)}))
        found = lookup.documents_of(array).to_pylist()
        assert [bson.decode(one) for one in found] == documents


def test_keys_are_asked_for_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_KEYS", 3)
    monkeypatch.setattr(lookup, "MOST_KEY_BYTES", 10)
    assert list(lookup._shares([b"1234", b"5678", b"9", b"0", b"123456789012"])) == [
        [b"1234", b"5678", b"9"],
        [b"0"],
        [b"123456789012"],
    ]
    assert list(lookup._shares([])) == []
