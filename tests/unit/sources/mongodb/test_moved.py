"""Which deletes of a sharded collection are those of documents that live on."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from bson import Decimal128

from headwater.sources.mongodb.moved import has_moved


@pytest.mark.parametrize(
    ("key", "document", "moved"),
    [
        ({"region": 1, "_id": 5}, {"_id": 5, "region": 2}, True),
        ({"region": 1, "_id": 5}, {"_id": 5, "region": 1, "n": 3}, False),
        ({"region": 1, "_id": 5}, {"_id": 5, "region": Decimal128("1.00")}, False),
        ({"region": 1, "_id": 5}, {"_id": 5}, True),
        ({"a.b": 1, "c": "x", "_id": 5}, {"_id": 5, "a": {"z": 0, "b": 1}, "c": "x"}, False),
        ({"a.b": 1, "c": "x", "_id": 5}, {"_id": 5, "a": {"b": 1}, "c": "y"}, True),
        ({"a.b": 1, "_id": 5}, {"_id": 5, "a": 1}, True),
        ({"_id": 5}, {"_id": 5}, True),
    ],
)
def test_a_document_under_another_shard_key_has_moved(
    key: dict[str, Any], document: dict[str, Any], moved: bool
) -> None:
    assert has_moved(bson.encode(key), bson.encode(document)) is moved
