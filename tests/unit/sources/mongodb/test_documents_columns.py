"""The columns of a collection: declared, found in a sample, or one for the whole document."""

from __future__ import annotations

from itertools import permutations
from typing import Any
from zlib import crc32

import bson
import pytest
from tests.unit.sources.mongodb.documents_cases import A_UUID, EVERY_TYPE, IN_2020, document

from headwater.capture.renewal import renewed_columns
from headwater.sources.errors import SourceProtocolError
from headwater.sources.mongodb.documents.columns import (
    ALL_COLUMNS,
    MOST_COLUMNS,
    CollectionColumns,
    declared_columns,
    document_columns,
    inferred_columns,
)
from headwater.sources.mongodb.documents.errors import InvalidType
from headwater.sources.table import SourceTable, SpecialValues

UUID_1 = bson.Binary(A_UUID.bytes, 4)
FAR = bson.DatetimeMS(2**62)


def types(found: CollectionColumns) -> dict[str, str]:
    SourceTable("shop", "orders", found.columns, found.key_columns)  # it makes a table
    return {column.name: column.source_type for column in found.columns}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1], "long"),
        ([1, bson.Int64(2)], "long"),
        ([1.5], "double"),
        ([1, 1.5], "double"),
        ([1, 1.5, bson.Int64(2**40)], "double"),
        ([1.5, bson.Int64(2**53 + 1)], "json"),
        ([bson.Decimal128("1")], "decimal"),
        ([bson.Decimal128("1"), 1, bson.Int64(2)], "decimal"),
        ([bson.Decimal128("1"), 1.5], "json"),
        (["a"], "string"),
        (["a", 1], "json"),
        ([bson.ObjectId()], "objectId"),
        ([bson.ObjectId(), "a"], "json"),
        ([True], "bool"),
        ([True, 1], "json"),
        ([IN_2020], "date"),
        ([IN_2020, FAR], "json"),
        ([bson.Timestamp(1, 1)], "timestamp"),
        ([bson.Timestamp(1, 1), IN_2020], "json"),
        ([b"x"], "binData"),
        ([bson.Binary(b"x", 5)], "binData(5)"),
        ([b"x", bson.Binary(b"x", 5)], "json"),
        ([UUID_1], "uuid"),
        ([UUID_1, bson.Binary(b"short", 4)], "binData(4)"),
        ([{"a": 1}], "json"),
        ([[1]], "json"),
        ([bson.Regex("a")], "json"),
        ([bson.MinKey()], "json"),
        ([], "json"),
    ],
)
def test_values_of_a_sample_make_a_type_whatever_their_order(values: list[Any], wanted: str) -> None:
    for ordered in permutations([*values, None]):
        sample = [bson.encode({"_id": number, "v": value}) for number, value in enumerate(ordered)]
        assert types(inferred_columns(sample)) == {"_id": "long", "v": wanted, "_rest": "rest"}


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([bson.ObjectId()], "objectId"),
        ([1], "long"),
        ([1, bson.Int64(2**40)], "long"),
        (["a", "b"], "string"),
        ([IN_2020], "date"),
        ([UUID_1], "uuid"),
        ([1, "a"], None),
        ([1, 1.5], None),
        ([bson.Decimal128("1")], None),
        ([b"bytes"], None),
        ([{"a": 1}], None),
        (["a", None], None),
        ([], None),
    ],
)
def test_ids_of_one_type_are_the_key_and_others_have_a_key_of_bytes_beside_them(
    ids: list[Any], wanted: str | None
) -> None:
    found = document_columns(bson.encode({"_id": one}) for one in ids)
    if wanted is None:
        assert types(found) == {"_id_key": "key", "_id": "json", "document": "document"}
        assert found.key_columns == ("_id_key",)
    else:
        assert types(found) == {"_id": wanted, "document": "document"}
        assert found.key_columns == ("_id",)


def test_declared_columns_come_after_the_key_whose_type_a_sample_tells() -> None:
    sample = [bson.encode({"_id": bson.ObjectId()})]
    assert types(declared_columns({"b": "array<int>", "a": "decimal(20,4)"}, sample)) == {
        "_id": "objectId",
        "b": "array<int>",
        "a": "decimal(20,4)",
    }
    assert types(declared_columns({"a": "int"})) == {"_id_key": "key", "_id": "json", "a": "int"}
    assert types(declared_columns({"a": "int", "_id": "uuid"}, sample)) == {"_id": "uuid", "a": "int"}
    assert types(declared_columns({"_id": "key"}, sample)) == {"_id_key": "key", "_id": "json"}


def test_policies_go_to_their_columns() -> None:
    policies = {"a": SpecialValues.NULL, "b": SpecialValues.TEXT}
    found = declared_columns({"_id": "long", "a": "int", "b": "int", "c": "int"}, special_values=policies)
    assert [column.special_values.value for column in found.columns] == ["stop", "null", "text", "stop"]
    found = declared_columns(
        {"_id": "long", "a": "int", "c": "int"}, special_values={**policies, ALL_COLUMNS: SpecialValues.TEXT}
    )
    assert [column.special_values.value for column in found.columns] == ["stop", "null", "text"]


@pytest.mark.parametrize("text", ["array<int>", "struct<a: int>", "document", "rest"])
def test_a_key_cannot_be_of_a_type_that_is_none(text: str) -> None:
    with pytest.raises(InvalidType, match='Declare _id = "key"'):
        declared_columns({"_id": text})


def test_a_key_has_no_policy_null() -> None:
    with pytest.raises(InvalidType, match="cannot be null"):
        declared_columns({"_id": "long"}, special_values={"_id": SpecialValues.NULL})


def test_names_that_no_column_can_have_are_left_to_the_rest() -> None:
    odd = {"ok": 1, "OK": 2, "": 3, "a b": 4, "a.b": 5, "_position": 6, "_rest": 7, "_id_key": 8, "_op": 9}
    assert types(inferred_columns([bson.encode({"_id": 1, **odd})])) == {"_id": "long", "ok": "long", "_rest": "rest"}


def test_fields_come_in_the_order_in_which_they_are_first_seen() -> None:
    sample = [bson.encode({"_id": 1, "b": 1, "a": 1}), bson.encode({"_id": 2, "c": 1, "a": 1})]
    assert list(types(inferred_columns(sample))) == ["_id", "b", "a", "c", "_rest"]


def test_of_too_many_fields_those_that_most_documents_have_become_columns() -> None:
    rare = {f"f{number}": 1 for number in range(MOST_COLUMNS + 50)}
    sample = [bson.encode({"_id": 1, **rare}), bson.encode({"_id": 2, f"f{MOST_COLUMNS + 49}": 1, "often": 1})]
    found = types(inferred_columns([*sample, bson.encode({"_id": 3, "often": 1})]))
    assert len(found) == MOST_COLUMNS + 2
    assert {"often", f"f{MOST_COLUMNS + 49}", "f0"} <= set(found)
    assert "f99" not in found


def test_a_field_has_the_same_id_and_type_whatever_the_order_of_a_sample_and_the_columns_beside_it() -> None:
    documents = [{"_id": 1, "city": "x", "name": "y"}, {"_id": 2, "NAME": 1, "name": "z", "phone": "1"}]
    tables = []
    for ordered in (documents, documents[::-1]):
        made = inferred_columns([bson.encode(one) for one in ordered])
        tables.append(SourceTable("shop", "people", made.columns, made.key_columns, 42))
    assert renewed_columns(*tables) is None
    assert {one.name for one in tables[0].columns} == {"_id", "city", "name", "phone", "_rest"}
    few = declared_columns({"_id": "long", "name": "string", "city": "string"})
    many = declared_columns({"_id": "long", "name": "string", "born": "date", "city": "string"})
    change = renewed_columns(*(SourceTable("shop", "people", one.columns, ("_id",), 42) for one in (few, many)))
    assert change is not None
    assert change.added == ("born",)
    assert (change.renamed, change.dropped, change.retyped) == ((), (), ())


def test_names_with_one_hash_have_ids_of_their_own() -> None:
    assert crc32(b"plumless") == crc32(b"buckeroo")
    found = declared_columns({"_id": "long", "plumless": "int", "buckeroo": "int"}).columns
    assert len({one.field_id for one in found}) == 3


def test_every_type_has_a_column_in_a_sample() -> None:
    found = types(inferred_columns([bson.encode({"_id": 1, **EVERY_TYPE})]))
    assert found["md5"] == "binData(5)"
    assert found["old"] == "binData(2)"
    assert found["regex"] == found["scoped"] == found["maxKey"] == found["null"] == "json"


def test_a_sample_that_is_no_document_is_refused() -> None:
    for broken in (b"", b"\5\0\0\0\0\0", document((16, b"a", b"\1"))):
        with pytest.raises(SourceProtocolError, match="sample"):
            inferred_columns([broken])
