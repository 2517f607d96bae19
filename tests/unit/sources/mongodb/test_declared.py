"""Columns that are declared for a collection: names and types as they are written, in a file or on a command line."""

from __future__ import annotations

import pytest

from headwater.pipeline.config import configure
from headwater.sources.mongodb.catalog import declared
from headwater.sources.mongodb.names import CollectionName


def test_names_and_types_are_taken_apart() -> None:
    nested = "array<struct<`a, b`: int, price: decimal(9,2)>>"
    assert declared(f"struct<_id: key, `first name`: string, lines: {nested}, more: rest>") == {
        "_id": "key",
        "first name": "string",
        "lines": nested,
        "more": "rest",
    }


@pytest.mark.parametrize("text", ["", "nonsense", "struct<>", "struct<a>", "struct<a: >", "struct<a: int, a: int>"])
def test_what_is_no_list_of_columns_is_none(text: str) -> None:
    assert declared(text) is None


def test_a_pipeline_declares_the_same() -> None:
    columns = {"_id": "key", "first name": "string", "lines": "array<int>", "more": "rest"}
    config = configure(
        {
            "source": {"dsn": "mongodb://127.0.0.1/shop", "tables": ["shop.*"]},
            "table": {"shop.a": {"columns": columns}, "shop.b": {"columns": "document"}, "shop.c": {}},
        }
    )
    assert set(config.columns) == {"shop.a", "shop.b"}
    assert declared(config.columns["shop.a"]) == columns
    assert config.columns["shop.b"] == "document"


def test_names_of_collections_are_read_and_shown() -> None:
    assert CollectionName.parse("shop.fs.files") == CollectionName("shop", "fs.files")
    assert str(CollectionName.parse("shop.fs.files")) == 'shop."fs.files"'
    assert CollectionName.parse("orders", "shop") == CollectionName("shop", "orders")
    assert CollectionName.parse(str(CollectionName("My shop", 'a"b.c'))) == CollectionName("My shop", 'a"b.c')
