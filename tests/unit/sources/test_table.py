"""The description of a table, and what it refuses."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from headwater.sources.errors import UnsupportedTable
from headwater.sources.table import FIELD_ID, RESERVED_COLUMNS, SOURCE_TYPE, SourceColumn, SourceTable


def columns(*names: str) -> tuple[SourceColumn, ...]:
    return tuple(SourceColumn(name, pa.int64(), "bigint", place) for place, name in enumerate(names, 1))


def test_the_schema_carries_field_ids_and_source_types() -> None:
    table = SourceTable("public", "orders", columns("a", "b"), ("b", "a"))
    field = table.schema.field("b")
    assert field.metadata == {FIELD_ID: b"2", SOURCE_TYPE: b"bigint"}
    assert field.nullable
    assert table.key_places == (1, 0)
    assert table.column("b") is table.columns[1]


def test_the_log_has_three_columns_more() -> None:
    schema = SourceTable("public", "orders", columns("a"), ("a",)).log_schema(pa.binary(16))
    assert schema.names == ["a", "_position", "_commit_timestamp", "_unavailable"]
    assert schema.field("_position").type == pa.binary(16)


@pytest.mark.parametrize(
    ("namespace", "name", "full"),
    [
        ("public", "orders", "public.orders"),
        ("Sales", "my table", '"Sales"."my table"'),
        ("public", 'a"b', 'public."a""b"'),
        ("public", "1st", 'public."1st"'),
        ("", "orders", "orders"),
    ],
)
def test_names_are_quoted_where_they_must_be(namespace: str, name: str, full: str) -> None:
    assert SourceTable(namespace, name, columns("a"), ("a",)).full_name == full


@pytest.mark.parametrize(
    ("names", "key"),
    [(("a", "a"), ("a",)), (("a",), ()), (("a",), ("b",)), (("a",), ("a", "a")), ((), ("a",))],
)
def test_a_table_without_a_proper_key_is_refused(names: tuple[str, ...], key: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedTable, match=r"public\.t"):
        SourceTable("public", "t", columns(*names), key)


@pytest.mark.parametrize("name", sorted(RESERVED_COLUMNS))
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedTable, match=name):
        SourceTable("public", "t", columns("a", name), ("a",))


def test_tables_are_equal_by_what_they_say_and_travel_between_processes() -> None:
    table = SourceTable("public", "t", columns("a", "b"), ("a",), 16384)
    assert pickle.loads(pickle.dumps(table)) == table
    assert pickle.loads(pickle.dumps(table)).key_places == (0,)
    assert table != SourceTable("public", "t", columns("a", "b"), ("b",), 16384)
