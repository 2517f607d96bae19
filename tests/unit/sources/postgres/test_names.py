"""Table names as people write them (C26)."""

from __future__ import annotations

import pytest

from headwater.errors import InputError
from headwater.sources.postgres.names import TableName, literal


@pytest.mark.parametrize(
    ("text", "namespace", "name"),
    [
        ("orders", "public", "orders"),
        ("public.orders", "public", "orders"),
        ("Public.Orders", "public", "orders"),
        (" public . orders ", "public", "orders"),
        ('"Sales"."Order Lines"', "Sales", "Order Lines"),
        ('sales."Order.Lines"', "sales", "Order.Lines"),
        ('"say ""hi""".t', 'say "hi"', "t"),
        ("größe", "public", "größe"),
        ("ÄRGER", "public", "Ärger"),
        ("t$1", "public", "t$1"),
        ('"1st"', "public", "1st"),
    ],
)
def test_names_are_folded_and_quoted_as_postgres_does(text: str, namespace: str, name: str) -> None:
    assert TableName.parse(text) == TableName(namespace, name)


@pytest.mark.parametrize("name", [TableName("public", "orders"), TableName("Sales", 'a "b".c'), TableName("x", "ü 1")])
def test_a_shown_name_reads_back_as_the_same(name: TableName) -> None:
    assert TableName.parse(str(name)) == name
    assert TableName.parse(name.sql) == name


@pytest.mark.parametrize(
    "text", ["", ".", "a.b.c", "a..b", 'a."b', "1a", "a b", "a-b", '""', "a.", "drop table x;", "x" * 64]
)
def test_what_is_no_table_name_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        TableName.parse(text)


def test_plain_names_are_shown_without_quotes_and_statements_always_quote() -> None:
    name = TableName.parse("Public.Orders")
    assert str(name) == "public.orders"
    assert name.sql == '"public"."orders"'
    assert literal("it's") == "'it''s'"
