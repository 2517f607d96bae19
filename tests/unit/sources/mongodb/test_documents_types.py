"""The types that columns of a collection are declared with."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.sources.mongodb.documents.errors import InvalidType
from headwater.sources.mongodb.documents.types import DocumentType, column_type, source_column
from headwater.sources.table import SourceColumn, SpecialValues


@pytest.mark.parametrize(
    ("text", "arrow"),
    [
        ("int", pa.int32()),
        ("long", pa.int64()),
        ("double", pa.float64()),
        ("bool", pa.bool_()),
        ("string", pa.string()),
        ("objectId", pa.string()),
        ("date", pa.timestamp("ms", tz="UTC")),
        ("timestamp", pa.uint64()),
        ("decimal", pa.string()),
        ("decimal(38,10)", pa.decimal128(38, 10)),
        ("decimal(39,0)", pa.decimal256(39, 0)),
        ("binData", pa.binary()),
        ("binData(5)", pa.binary()),
        ("uuid", pa.string()),
        ("json", pa.string()),
        ("document", pa.string()),
        ("rest", pa.string()),
        ("key", pa.binary()),
        ("array<long>", pa.list_(pa.int64())),
        ("struct<a: int, `b c`: array<string>>", pa.struct({"a": pa.int32(), "b c": pa.list_(pa.string())})),
    ],
)
def test_a_type_has_an_arrow_type_and_its_own_text(text: str, arrow: pa.DataType) -> None:
    found = DocumentType.parse(text)
    assert found.arrow == arrow
    assert found.text == text
    column = source_column("c", text, 3)
    assert column.type == arrow
    assert column_type(SourceColumn.of_field(column.field)) == found


def test_spaces_do_not_matter() -> None:
    assert DocumentType.parse(" struct < a:int,b :array< decimal( 10 , 2 )> > ").text == (
        "struct<a: int, b: array<decimal(10,2)>>"
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "lnog", "int int", "decimal(10)", "decimal(0,0)", "decimal(77,0)", "decimal(5,6)", "decimal(a,b)"),
        *("binData(256)", "int(4)", "array", "array<", "array<int", "array<int>>", "array<>", "struct<>"),
        *("struct<a>", "struct<a: int, a: int>", "struct<a: int,>", "array<document>", "struct<a: rest>"),
        *("array<key>", "`int`", "array<" * 40 + "int" + ">" * 40),
    ],
)
def test_what_is_no_type_is_refused_with_what_can_stand_there(text: str) -> None:
    with pytest.raises(InvalidType, match=r"Column 'price' .* Write one of int, long") as raised:
        source_column("price", text, 1)
    assert raised.value.column == "price"


def test_with_the_policy_text_a_column_is_json_from_the_start() -> None:
    column = source_column("c", "long", 1, special_values=SpecialValues.TEXT)
    assert column.type == pa.string()
    assert column.source_type == "long"
    assert column_type(SourceColumn.of_field(column.field)).text == "json"


@pytest.mark.parametrize("text", ["json", "document", "rest", "key"])
def test_columns_that_take_all_values_have_no_policy_text(text: str) -> None:
    column = source_column("c", text, 1, special_values=SpecialValues.TEXT)
    assert column.special_values is SpecialValues.STOP
    assert column_type(column).text == text
